package operations

import (
	"context"
	"time"

	"github.com/dormouse-run/dormouse/coordinator/internal/placement"
	"github.com/dormouse-run/dormouse/coordinator/internal/records"
	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/fence"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
	"github.com/dormouse-run/dormouse/pkg/snapshot"
)

// Publisher is the commit queue. The build function runs once the commit is admitted, reads what it
// needs and decides; it may run again when a revision has moved. Its error is returned as it is.
type Publisher interface {
	Publish(ctx context.Context, build func(context.Context, catalog.Reader) (catalog.Commit, error)) (catalog.Result, error)
}

// Catalog is what is read outside the queue.
type Catalog interface {
	catalog.Reader
	Tombstone(ctx context.Context, key catalog.Key) (catalog.Tombstone, error)
	Compact(ctx context.Context, limit int) (int, error)
	Status(ctx context.Context) (catalog.Status, error)
	Compare(ctx context.Context, p catalog.Point) (catalog.Relation, error)
}

// Command says in whose name a node is asked. The client of nodes adds the epochs.
type Command struct {
	ID          string
	Tenant      string
	OperationID string
	RequestID   string
}

// Observation is what a node knows of a sandbox, under one of its sessions.
type Observation struct {
	UID                string
	Tenant             string
	Phase              sandbox.Phase
	ObservedGeneration int64
	ImageDigest        string
	ErofsDigest        string
	RuntimeBundle      string
	RestoredFrom       string
	StartTime          time.Time
	ExitCode           *int32
	Reason             string
	Message            string
	StartQueued        time.Duration // the last start, restore or wake waited for its turn
	StartService       time.Duration // and the node worked at it
	// Number counts the node's observations of the sandbox; higher is newer.
	Number  uint64
	Session fence.Epoch
}

// Process is a command to run in a sandbox.
type Process struct {
	ID         string
	Argv       []string
	Env        map[string]string
	User       string
	WorkingDir string
	Timeout    time.Duration
}

// ProcessEnd is how a process ended.
type ProcessEnd struct {
	Code     int
	TimedOut bool
	// Tail is the end of its output and errors, where it failed.
	Tail string
}

// Agents are the nodes. A call fails with NODE_AWAY where the node has no session, with the node's
// own envelope where it answered, and with an outcome of unknown otherwise. The returned epoch is
// of the session that the call was made under.
type Agents interface {
	StartSandbox(ctx context.Context, node string, c Command, sb *records.Sandbox, secretEnv map[string]string) (Observation, error)
	RestoreSandbox(ctx context.Context, node string, c Command, sb *records.Sandbox) (Observation, error)
	UpdateSandbox(ctx context.Context, node string, c Command, sb *records.Sandbox) (Observation, error)
	DeleteSandbox(ctx context.Context, node string, c Command, uid string) (fence.Epoch, error)
	CheckpointSandbox(ctx context.Context, node string, c Command, uid, snapshotUID string) (snapshot.Status, fence.Epoch, error)
	PauseSandbox(ctx context.Context, node string, c Command, uid string, ifUnusedFor time.Duration) (Observation, error)
	HibernateSandbox(ctx context.Context, node string, c Command, uid string, ifUnusedFor time.Duration) (Observation, error)
	ResumeSandbox(ctx context.Context, node string, c Command, uid string) (Observation, error)
	// ClaimSandbox resumes a paused sandbox with the identity that its record has now, and more environment.
	ClaimSandbox(ctx context.Context, node string, c Command, sb *records.Sandbox, env map[string]string) (Observation, error)
	// RunProcess starts a process in a sandbox, at most once for its id, and gives its end.
	RunProcess(ctx context.Context, node string, c Command, sandboxUID string, p Process) (ProcessEnd, error)
	DeleteSnapshot(ctx context.Context, node string, c Command, uid string) (fence.Epoch, error)
	CreateVolume(ctx context.Context, node string, c Command, uid string, sizeLimit int64, sourceUID, freezeSandboxUID string) (usage int64, session fence.Epoch, err error)
	DeleteVolume(ctx context.Context, node string, c Command, uid string) (fence.Epoch, error)
}

// Use is when a sandbox was last used, as time gone since.
type Use struct {
	UID       string
	UnusedFor time.Duration
}

// Nodes are what placement chooses from.
type Nodes interface {
	// Nodes tells all known nodes; Placed is filled by the engine.
	Nodes() []placement.Node
	// Changed is closed when the next node comes back, or is let in again.
	Changed() <-chan struct{}
	// Cordon tells of a committed intent.
	Cordon(name string, cordoned bool)
}
