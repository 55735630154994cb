package runner

import (
	"context"
	"math"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/dormouse-run/dormouse/agentd/internal/checkpoint"
	"github.com/dormouse-run/dormouse/agentd/internal/runtime"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
)

// Image is a read-only layer that is present on the node.
type Image struct {
	Reference   string
	Digest      string // of the manifest or index
	ErofsDigest string
	Path        string // canonical: the same on every node
	Config      ImageConfig
}

// ImageConfig is what the image says about running it.
type ImageConfig struct {
	Entrypoint []string
	Cmd        []string
	Env        []string
	User       string
	WorkingDir string
}

// Images are the read-only layers. Holding is durable, by holder, and idempotent.
type Images interface {
	// Ensure makes the image present and held by the holder. Nothing is held after an error.
	Ensure(ctx context.Context, reference, holder string) (Image, error)
	// EnsureExact is Ensure for the image with exactly these digests.
	EnsureExact(ctx context.Context, want Image, holder string) (Image, error)
	// Hold holds a present image by the digest of its file.
	Hold(ctx context.Context, erofsDigest, holder string) error
	// Release ends a hold. An empty digest lets go of whatever the holder holds.
	Release(ctx context.Context, erofsDigest, holder string) error
}

// Volumes are the folders that outlive sandboxes. Attaching is durable, by holder, and idempotent.
type Volumes interface {
	// Attach gives the volume's folder to the holder. ALREADY_ATTACHED names another holder.
	Attach(ctx context.Context, volumeUID, holder string, readOnly bool) (dir string, err error)
	// Detach takes volumes back from the holder. Nil means whatever it has.
	Detach(ctx context.Context, volumeUIDs []string, holder string) error
}

// Lease is a network namespace that is kept until the sandbox has entered it.
type Lease interface {
	Path() string
	// Nameservers are those that the sandbox is to ask; nil leaves it what it has.
	Nameservers() []string
	Release() error
}

// Networks hands out network namespaces, addresses and what may pass. An address is a lease: it is reserved in memory,
// made durable in the sandbox's record by the runner before it is used, and freed once no record has it.
type Networks interface {
	// Reserve gives the uid the address that it has until Free; "" for a mode without. Idempotent.
	Reserve(ctx context.Context, uid, mode string) (address string, err error)
	// Acquire puts the policy in force and gives the namespace. Remove takes it back, also after an error.
	Acquire(ctx context.Context, uid, mode string, egress *sandbox.Egress) (Lease, error)
	// SetEgress puts another policy in force, in one step, and ends the connections that it forbids. What has no network at the
	// moment gets it by Acquire. Idempotent.
	SetEgress(uid string, egress *sandbox.Egress) error
	// Remove takes back all but the address, and observes that it is gone. Idempotent.
	Remove(uid string) error
	// Free gives the address back. Idempotent; only after Remove, and once no record has it.
	Free(uid string)
}

// Bundle is a runtime bundle on this node.
type Bundle struct {
	runtime.Bundle
	// Version is the runtime's own, Init the file system of guest init.
	Version string
	Init    string
}

// Bundles are the runtime bundles that live side by side.
type Bundles interface {
	// Current is for new sandboxes.
	Current() Bundle
	// ByDigest is for sandboxes and snapshots that were made by it; INCOMPATIBLE_RUNTIME with both
	// versions when the node does not have it.
	ByDigest(digest string) (Bundle, error)
}

// Groups knows the control groups; the driver makes and removes them.
type Groups interface {
	Path(uid string) string
	Exists(uid string) bool
}

// Room is the node's memory. What it says is kept in memory only, and follows from the records.
type Room interface {
	// Enter gives the sandbox what it may use: request at any time, and expect on its way in. It may wait, and refuses with
	// RESOURCE_EXHAUSTED what does not fit. Idempotent, as the others.
	Enter(ctx context.Context, uid string, request, expect int64) error
	// Settle tells that the sandbox runs, Leave that its memory is free again.
	Settle(uid string)
	Leave(uid string)
	// Spare is how much memory nobody uses, above what the node keeps for itself.
	Spare() int64
}

// roomy is a node without bounds.
type roomy struct{}

func (roomy) Enter(context.Context, string, int64, int64) error { return nil }
func (roomy) Settle(string)                                     {}
func (roomy) Leave(string)                                      {}
func (roomy) Spare() int64                                      { return math.MaxInt64 }

// SpecInput is what the OCI spec is made from.
type SpecInput struct {
	Hostname string
	Image    string
	Init     string
	NetNS    string
	Volumes  []Bind

	MemoryBytes, MemoryRequestBytes, LayerBytes, CPUMillis, CPURequestMillis int64
}

// Bind is a folder of the host at a path inside.
type Bind struct {
	Source, Path string
	ReadOnly     bool
}

// Specs makes OCI specs. Pure.
type Specs interface {
	New(in SpecInput) (*specs.Spec, error)
	// ForRestore changes of a saved spec what a new identity needs, and nothing else.
	ForRestore(saved *specs.Spec, in SpecInput) (*specs.Spec, error)
}

// Identity is what guest init is told about the sandbox it is in.
type Identity struct {
	Hostname string
	// Nameservers go to /etc/resolv.conf. Nil leaves what is there.
	Nameservers []string
	// SecretEnv goes to the main command. Nil leaves what guest init has.
	SecretEnv map[string]string
	// Hook says when the image's hook is started.
	Hook Hook
}

// Hook is a time for the image's hook.
type Hook string

// The times: when the uid is another than before; not yet, for a sandbox that is to be claimed; and now, once for the channel's generation.
const (
	HookAfterRestore Hook = ""
	HookAtClaim      Hook = "at-claim"
	HookNow          Hook = "now"
)

// MainID is the process id of the main command.
const MainID = "main"

// Main is the sandbox's own command.
type Main struct {
	Argv []string
	Env  []string
	User string
	Dir  string
}

// MainExit is how the main command ended.
type MainExit struct {
	Code     int32
	Signal   int32
	TimedOut bool
	At       time.Time
}

// Final is what is kept of a main command that ended, with the last of its output, after its sandbox
// is gone. It is written into the sandbox's folder.
type Final struct {
	Argv      []string  `json:"argv"`
	Pid       int32     `json:"pid"`
	StartTime time.Time `json:"start_time"`
	Exit      MainExit  `json:"exit"`
	Stdout    Tail      `json:"stdout"`
	Stderr    Tail      `json:"stderr"`
}

// Tail is the end of an output. Offset is of its first byte.
type Tail struct {
	Offset uint64 `json:"offset"`
	Data   []byte `json:"data"`
}

// Guest is the channel to one guest init. Its methods return when ctx ends.
type Guest interface {
	Configure(ctx context.Context, id Identity) error
	// StartMain starts the main command; the same again gives the same process.
	StartMain(ctx context.Context, m Main) error
	// WaitMain returns when the main command has ended; PROCESS_NOT_FOUND when there is none.
	WaitMain(ctx context.Context) (MainExit, error)
	// FinalOf reads what is to be kept of an ended main command.
	FinalOf(ctx context.Context) (Final, error)
	// ProcessTable lists what runs, for a snapshot's manifest.
	ProcessTable(ctx context.Context) ([]checkpoint.ProcessEntry, error)
	// Quiesce: neither side sends until Resume. Drain takes what is still in the out-FIFO of a paused
	// sandbox, to the last byte. Resume ends Quiesce; safe without one.
	Quiesce(ctx context.Context) error
	Drain(ctx context.Context) error
	Resume(ctx context.Context) error
	// Done is closed when the channel has ended, by Close or because it broke.
	Done() <-chan struct{}
	// Close lets go; the guest goes on.
	Close() error
}

// Guests opens channels.
type Guests interface {
	// Open says hello and returns once guest init answered. GUEST_SILENT when it does not in time.
	Open(ctx context.Context, uid string, generation uint64, stdio runtime.Stdio) (Guest, error)
}
