package app

import (
	"context"
	"fmt"
	goruntime "runtime"
	"slices"
	"time"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/dormouse-run/dormouse/agentd/internal/activity"
	"github.com/dormouse-run/dormouse/agentd/internal/api"
	"github.com/dormouse-run/dormouse/agentd/internal/bulk"
	"github.com/dormouse-run/dormouse/agentd/internal/bulkwire"
	"github.com/dormouse-run/dormouse/agentd/internal/guest"
	"github.com/dormouse-run/dormouse/agentd/internal/journal"
	"github.com/dormouse-run/dormouse/agentd/internal/layers"
	"github.com/dormouse-run/dormouse/agentd/internal/nodestate"
	"github.com/dormouse-run/dormouse/agentd/internal/room"
	"github.com/dormouse-run/dormouse/agentd/internal/runner"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
	"github.com/dormouse-run/dormouse/pkg/snapshot"
	"github.com/dormouse-run/dormouse/pkg/version"
	nodev1 "github.com/dormouse-run/dormouse/proto/dormouse/node/v1"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// node is the runner and the stores as API and session see them.
type node struct {
	cfg      Config
	run      *runner.Node
	state    *nodestate.Store
	journal  *journal.Journal
	bulk     *bulk.Manager
	uses     *activity.Tracker
	images   *layers.Store
	volumes  *volumeParts
	networks networks
	bundles  *bundles
	room     *room.Room
	// sandboxes is how many the node takes, notice what bounds them besides its configuration.
	sandboxes int64
	notice    string
	cpu       []string
	bootID    string
}

func observed(rec nodestate.Sandbox) api.Observed {
	if rec.Phase == sandbox.Resuming && (rec.Hibernation == nil || rec.Hibernation.Spent) {
		rec.Phase = sandbox.Paused // it holds all that a paused one does; Resuming is told of what is being restored
	}
	return api.Observed{UID: rec.UID, Tenant: rec.Tenant, Status: sandbox.Status{
		Phase: rec.Phase, ObservedGeneration: rec.Generation, ImageDigest: rec.ImageDigest, ErofsDigest: rec.ErofsDigest,
		RuntimeBundle: rec.Bundle, RestoredFrom: rec.RestoredFrom, StartTime: rec.StartTime, ExitCode: rec.ExitCode,
		Reason: rec.Reason, Message: rec.Message, LastFreeze: rec.LastFreeze, Observation: rec.Observation,
		StartQueued: rec.StartQueued, StartService: rec.StartService,
	}}
}

func snapshotOf(rec nodestate.Snapshot) snapshot.Snapshot {
	return snapshot.Snapshot{UID: rec.UID, Tenant: rec.Tenant, Created: rec.Created, SourceSandboxUID: rec.SourceSandboxUID, Status: rec.Status}
}

// The runner, for the API.

func (n *node) StartSandbox(ctx context.Context, req runner.StartRequest) (api.Observed, error) {
	rec, err := n.run.Start(ctx, req)
	return observed(rec), err
}

func (n *node) RestoreSandbox(ctx context.Context, req runner.RestoreRequest) (api.Observed, error) {
	rec, err := n.run.Restore(ctx, req)
	return observed(rec), err
}

func (n *node) DeleteSandbox(ctx context.Context, uid string) error { return n.run.Delete(ctx, uid) }

func (n *node) CheckpointSandbox(ctx context.Context, req runner.CaptureRequest) (snapshot.Snapshot, error) {
	rec, err := n.run.Checkpoint(ctx, req)
	return snapshotOf(rec), err
}

func (n *node) mustBeUnused(ctx context.Context, uid string, long time.Duration) error {
	if long <= 0 || n.uses.Unused(ctx, uid, long) {
		return nil
	}
	return errs.New(errs.WrongPhase, "sandbox %s was used within the last %s", uid, long).With("uid", uid)
}

func (n *node) PauseSandbox(ctx context.Context, uid string, ifUnusedFor time.Duration) (api.Observed, error) {
	if err := n.mustBeUnused(ctx, uid, ifUnusedFor); err != nil {
		return api.Observed{}, err
	}
	rec, err := n.run.Pause(ctx, uid)
	return observed(rec), err
}

func (n *node) HibernateSandbox(ctx context.Context, uid string, ifUnusedFor time.Duration) (api.Observed, error) {
	if err := n.mustBeUnused(ctx, uid, ifUnusedFor); err != nil {
		return api.Observed{}, err
	}
	rec, err := n.run.Hibernate(ctx, uid)
	return observed(rec), err
}

func (n *node) SetEgress(ctx context.Context, uid string, generation int64, egress *sandbox.Egress) (api.Observed, error) {
	rec, err := n.run.SetEgress(ctx, uid, generation, egress)
	return observed(rec), err
}

func (n *node) ResumeSandbox(ctx context.Context, uid string) (api.Observed, error) {
	rec, err := n.run.Resume(ctx, uid)
	return observed(rec), err
}

func (n *node) ClaimSandbox(ctx context.Context, req runner.ClaimRequest) (api.Observed, error) {
	// It is in use from now on, however long it stood ready.
	defer n.uses.Use(req.UID)()
	rec, err := n.run.Claim(ctx, req)
	return observed(rec), err
}

func (n *node) DeleteSnapshot(ctx context.Context, uid string) error {
	return n.run.DeleteSnapshot(ctx, uid)
}

// What runs, for the process service.

func (n *node) Channel(uid string) (*guest.Conn, error) {
	g, err := n.run.Guest(uid)
	if err != nil {
		return nil, err
	}
	c, ok := g.(*channel)
	if !ok {
		return nil, errs.New(errs.NotSupported, "the sandbox's channel runs no processes").With("feature", "processes")
	}
	return c.Conn, nil
}

func (n *node) Defaults(uid string) (api.Defaults, error) {
	rec, err := n.state.Sandbox(uid)
	return api.Defaults(rec.Defaults), err
}

// Transfer begins to move bytes of a running sandbox.
func (n *node) Transfer(ctx context.Context, uid string, order bulkwire.Order) (*bulk.Transfer, error) {
	if _, err := n.run.Guest(uid); err != nil {
		return nil, err
	}
	return n.bulk.Start(ctx, uid, order)
}

// DialPort connects to a port inside a running sandbox.
func (n *node) DialPort(ctx context.Context, uid string, port int) (api.PortConn, error) {
	if _, err := n.run.Guest(uid); err != nil {
		return nil, err
	}
	return n.bulk.Dial(ctx, uid, port)
}

// Owner gives the tenant of a sandbox, for the doors.
func (n *node) Owner(uid string) (string, error) {
	rec, err := n.state.Sandbox(uid)
	return rec.Tenant, err
}

// Awake tells the door for clients whether the sandbox can be used as it is.
func (n *node) Awake(uid string) error {
	rec, err := n.state.Sandbox(uid)
	if err != nil {
		return err
	}
	switch rec.Phase {
	case sandbox.Paused, sandbox.Hibernating, sandbox.Hibernated, sandbox.Resuming:
		return errs.New(errs.SandboxPaused, "sandbox %s is %s: resume it, or ask a coordinator, which wakes it where its spec says so", uid, rec.Phase).
			With("uid", uid).With("phase", string(rec.Phase))
	}
	return nil
}

func (n *node) Final(uid string) (runner.Final, error) { return n.run.Final(uid) }

// Images, for the API.

func (n *node) PullImage(ctx context.Context, reference string, progress func(*dormousev1.PullProgress)) (*dormousev1.Image, error) {
	img, err := n.images.Ensure(ctx, reference, layers.EnsureOptions{Progress: func(p layers.Progress) {
		progress(&dormousev1.PullProgress{Node: n.cfg.Node, Step: string(p.Phase), BytesDone: p.Done, BytesTotal: p.Total})
	}})
	if err != nil {
		return nil, err
	}
	return n.imageProto(img), nil
}

func (n *node) RemoveImage(ctx context.Context, dgst string) error {
	d, err := digest.Parse(dgst)
	if err != nil {
		return errs.New(errs.InvalidField, "digest: %q is no digest", dgst).With("field", "digest")
	}
	err = n.images.Remove(ctx, d)
	if errs.Has(err, errs.ImageNotFound) {
		return nil // removing what is not there succeeds
	}
	return err
}

func (n *node) imageProto(img layers.Image) *dormousev1.Image {
	return &dormousev1.Image{Reference: img.Reference, Digest: img.Digest.String(), ErofsDigest: img.ErofsDigest.String(), SizeBytes: img.Size,
		Layers: int32(img.Layers), Architecture: img.Architecture, Nodes: []string{n.cfg.Node}, PullTime: timestamppb.New(img.PulledAt)}
}

func (n *node) imageProtos(ctx context.Context) ([]*dormousev1.Image, error) {
	all, err := n.images.List(ctx)
	if err != nil {
		return nil, err
	}
	var out []*dormousev1.Image
	for _, img := range all {
		out = append(out, n.imageProto(img))
	}
	return out, nil
}

// SandboxNetwork tells what a sandbox's network has seen.
func (n *node) SandboxNetwork(_ context.Context, tenant, uid string) (*dormousev1.SandboxNetwork, error) {
	rec, err := n.state.Sandbox(uid)
	if err != nil {
		return nil, err
	}
	if rec.Tenant != tenant {
		return nil, errs.New(errs.ObjectNotFound, "this node has no sandbox %s", uid).With("kind", "sandbox").With("uid", uid)
	}
	return n.networks.usage(rec)
}

// The session's view.

// Journal gives a page of what the node keeps of the catalog.
func (n *node) Journal(after string, limit int) ([]*nodev1.JournalEntry, string, error) {
	return n.journal.Read(after, limit)
}

// JournalEntry gives what the node keeps of one record of the catalog: nil is nothing.
func (n *node) JournalEntry(key string) (*nodev1.JournalEntry, error) { return n.journal.Get(key) }

// Hello is everything that the node says of itself.
func (n *node) Hello(ctx context.Context) (*nodev1.Hello, error) {
	images, err := n.imageProtos(ctx)
	if err != nil {
		return nil, err
	}
	epochs, err := n.state.Epochs()
	if err != nil {
		return nil, err
	}
	kept, err := n.journal.Points()
	if err != nil {
		return nil, err
	}
	capacity, allocatable, err := n.resources()
	if err != nil {
		return nil, err
	}
	digests := n.bundles.digests()
	slices.Sort(digests)
	return &nodev1.Hello{
		Node: n.cfg.Node, Address: n.cfg.Advertise, Version: version.Get().Version, Labels: n.cfg.Labels, Capacity: capacity, Allocatable: allocatable,
		RuntimeBundles: digests, CpuFeatures: n.cpu, HighestCoordinatorEpoch: uint64(epochs.Coordinator), Architecture: goruntime.GOARCH,
		Inventory: &nodev1.GetInventoryResponse{Images: images}, BootId: n.bootID, DirectAddress: n.cfg.Direct.Advertise, NetworkModes: n.cfg.Network.modes(), Uses: usesToProto(n.uses.News(true)),
		HighestSessionEpoch: uint64(epochs.Session), Witness: kept.Witness, WitnessMark: kept.Mark, Journal: kept.Complete,
	}, nil
}

func usesToProto(all []activity.Use) []*nodev1.SandboxUse {
	var out []*nodev1.SandboxUse
	for _, u := range all {
		out = append(out, &nodev1.SandboxUse{Uid: u.UID, UnusedFor: durationpb.New(u.UnusedFor)})
	}
	return out
}

// Heartbeat says how the node is now.
func (n *node) Heartbeat(ctx context.Context) (*nodev1.Heartbeat, error) {
	_, allocatable, err := n.resources()
	if err != nil {
		return nil, err
	}
	images, err := n.imageProtos(ctx)
	if err != nil {
		return nil, err
	}
	beat := &nodev1.Heartbeat{Allocatable: allocatable, Images: images, Problems: map[string]string{}, Uses: usesToProto(n.uses.News(false))}
	free, _, err := diskOf(n.cfg.StateDir)
	if err != nil {
		beat.Problems["StateDir"] = "the state folder cannot be looked at"
	} else if free < int64(n.cfg.Reserve.Disk) {
		beat.Problems["DiskPressure"] = fmt.Sprintf("%d bytes are free, %d are to be left", free, int64(n.cfg.Reserve.Disk))
	}
	if n.notice != "" {
		beat.Notices = map[string]string{"HostLimits": n.notice}
	}
	memory, err := n.room.Figures()
	if err != nil {
		beat.Problems["Memory"] = "the machine's memory cannot be looked at"
		return beat, nil
	}
	beat.Memory = memoryProto(memory)
	if why := memory.Problem(); why != "" {
		beat.Problems["MemoryPressure"] = why
	}
	return beat, nil
}

// Due gives what the coordinator has not acknowledged.
func (n *node) Due(context.Context) ([]*nodev1.SandboxObservation, error) {
	all, err := n.state.Unreported()
	if err != nil {
		return nil, err
	}
	var due []*nodev1.SandboxObservation
	for _, rec := range all {
		due = append(due, observed(rec).Proto())
	}
	return due, nil
}

func (n *node) Changed() <-chan struct{} { return n.run.Changed() }

// resources are what the node has and what it offers.
func (n *node) resources() (capacity, allocatable *dormousev1.NodeResources, err error) {
	machine, err := room.ReadMachine("/proc")
	if err != nil {
		return nil, nil, err
	}
	memory := machine.Total
	_, disk, err := diskOf(n.cfg.StateDir)
	if err != nil {
		return nil, nil, err
	}
	cpu := int64(goruntime.NumCPU()) * 1000
	if l := n.cfg.Limits.CPUMillis; l > 0 {
		cpu = l
	}
	if l := int64(n.cfg.Limits.Memory); l > 0 {
		memory = l
	}
	capacity = &dormousev1.NodeResources{CpuMillis: cpu, MemoryBytes: memory, DiskBytes: disk, Sandboxes: n.cfg.Limits.Sandboxes}
	allocatable = &dormousev1.NodeResources{
		CpuMillis: max(cpu-n.cfg.Reserve.CPUMillis, 0), MemoryBytes: max(memory-int64(n.cfg.Reserve.Memory), 0),
		DiskBytes: max(disk-int64(n.cfg.Reserve.Disk), 0), Sandboxes: n.sandboxes,
	}
	return capacity, allocatable, nil
}

func diskOf(dir string) (free, total int64, err error) {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return 0, 0, errs.Wrap(err, errs.InternalError, "look at the disk of the state folder: %v", err)
	}
	return int64(st.Bavail) * st.Bsize, int64(st.Blocks) * st.Bsize, nil
}
