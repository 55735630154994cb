package simulated

import (
	"context"
	goruntime "runtime"
	"time"

	"github.com/dormouse-run/dormouse/agentd/internal/api"
	"github.com/dormouse-run/dormouse/agentd/internal/journal"
	"github.com/dormouse-run/dormouse/agentd/internal/nodestate"
	"github.com/dormouse-run/dormouse/agentd/internal/runner"
	"github.com/dormouse-run/dormouse/agentd/internal/volumes"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
	"github.com/dormouse-run/dormouse/pkg/snapshot"
	"github.com/dormouse-run/dormouse/pkg/volume"
	"github.com/dormouse-run/dormouse/pkg/wire"
	nodev1 "github.com/dormouse-run/dormouse/proto/dormouse/node/v1"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// node is the runner and the stores as API and session see them.
type node struct {
	name, address string
	run           *runner.Node
	state         *nodestate.Store
	journal       *journal.Journal
	volumes       *nodeVolumes
}

func observed(rec nodestate.Sandbox) api.Observed {
	return api.Observed{UID: rec.UID, Tenant: rec.Tenant, Status: sandbox.Status{
		Phase: rec.Phase, ObservedGeneration: rec.Generation, ImageDigest: rec.ImageDigest, ErofsDigest: rec.ErofsDigest,
		RuntimeBundle: rec.Bundle, RestoredFrom: rec.RestoredFrom, StartTime: rec.StartTime, ExitCode: rec.ExitCode,
		Reason: rec.Reason, Message: rec.Message, LastFreeze: rec.LastFreeze, Observation: rec.Observation,
		StartQueued: rec.StartQueued, StartService: rec.StartService,
	}}
}

func taken(rec nodestate.Snapshot) snapshot.Snapshot {
	return snapshot.Snapshot{UID: rec.UID, Tenant: rec.Tenant, Created: rec.Created, SourceSandboxUID: rec.SourceSandboxUID, Status: rec.Status}
}

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
	return taken(rec), err
}

func (n *node) DeleteSnapshot(ctx context.Context, uid string) error {
	return n.run.DeleteSnapshot(ctx, uid)
}

func (n *node) PauseSandbox(ctx context.Context, uid string, _ time.Duration) (api.Observed, error) {
	rec, err := n.run.Pause(ctx, uid)
	return observed(rec), err
}

func (n *node) ResumeSandbox(ctx context.Context, uid string) (api.Observed, error) {
	rec, err := n.run.Resume(ctx, uid)
	return observed(rec), err
}

func (n *node) ClaimSandbox(ctx context.Context, req runner.ClaimRequest) (api.Observed, error) {
	rec, err := n.run.Claim(ctx, req)
	return observed(rec), err
}

func (n *node) HibernateSandbox(ctx context.Context, uid string, _ time.Duration) (api.Observed, error) {
	rec, err := n.run.Hibernate(ctx, uid)
	return observed(rec), err
}

func notHere(feature string) error {
	return errs.New(errs.NotSupported, "a simulated node has no %s", feature).With("feature", feature)
}

func (n *node) SetEgress(context.Context, string, int64, *sandbox.Egress) (api.Observed, error) {
	return api.Observed{}, notHere("network")
}

func (n *node) SandboxNetwork(context.Context, string, string) (*dormousev1.SandboxNetwork, error) {
	return nil, notHere("network")
}

func (n *node) PullImage(context.Context, string, func(*dormousev1.PullProgress)) (*dormousev1.Image, error) {
	return nil, notHere("registry")
}

func (n *node) RemoveImage(context.Context, string) error { return notHere("images") }

// Inventory is all that the node holds, from its records. It has one page: there is little.
func (n *node) Inventory(ctx context.Context, after string, _ int) (*nodev1.GetInventoryResponse, error) {
	if after != "" {
		return &nodev1.GetInventoryResponse{}, nil
	}
	boxes, err := n.state.Sandboxes()
	if err != nil {
		return nil, err
	}
	snaps, err := n.state.Snapshots()
	if err != nil {
		return nil, err
	}
	vols, err := n.volumes.list(ctx)
	if err != nil {
		return nil, err
	}
	inv := &nodev1.GetInventoryResponse{}
	for _, rec := range boxes {
		inv.Sandboxes = append(inv.Sandboxes, observed(rec).Proto())
	}
	for _, rec := range snaps {
		if rec.State != nodestate.SnapshotSaving {
			inv.Snapshots = append(inv.Snapshots, wire.SnapshotObservationToProto(taken(rec)))
		}
	}
	for _, v := range vols {
		inv.Volumes = append(inv.Volumes, wire.VolumeObservationToProto(v))
	}
	return inv, nil
}

// Journal gives a page of what the node keeps of the catalog.
func (n *node) Journal(after string, limit int) ([]*nodev1.JournalEntry, string, error) {
	return n.journal.Read(after, limit)
}

// JournalEntry gives one of them.
func (n *node) JournalEntry(key string) (*nodev1.JournalEntry, error) { return n.journal.Get(key) }

// Hello is everything that the node says of itself.
func (n *node) Hello(context.Context) (*nodev1.Hello, error) {
	epochs, err := n.state.Epochs()
	if err != nil {
		return nil, err
	}
	kept, err := n.journal.Points()
	if err != nil {
		return nil, err
	}
	return &nodev1.Hello{
		Node: n.name, Address: n.address, Version: "simulated", Architecture: goruntime.GOARCH, Capacity: plenty(), Allocatable: plenty(), Inventory: &nodev1.GetInventoryResponse{},
		RuntimeBundles: []string{bundles{}.Current().Digest}, HighestCoordinatorEpoch: uint64(epochs.Coordinator), HighestSessionEpoch: uint64(epochs.Session),
		Witness: kept.Witness, WitnessMark: kept.Mark, Journal: kept.Complete,
	}, nil
}

// Heartbeat says that nothing has changed.
func (n *node) Heartbeat(context.Context) (*nodev1.Heartbeat, error) {
	return &nodev1.Heartbeat{Allocatable: plenty()}, nil
}

func plenty() *dormousev1.NodeResources {
	return &dormousev1.NodeResources{CpuMillis: 1 << 30, MemoryBytes: 1 << 50, DiskBytes: 1 << 50, Sandboxes: 1 << 20}
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

// nodeVolumes are folders and the records of whose they are.
type nodeVolumes struct {
	store *volumes.Store
	state *nodestate.Store
}

func (v *nodeVolumes) Attach(ctx context.Context, volumeUID, holder string, readOnly bool) (string, error) {
	vol, err := v.store.Attach(ctx, volumeUID, holder, readOnly)
	return vol.Path, err
}

func (v *nodeVolumes) Detach(ctx context.Context, uids []string, holder string) error {
	if uids == nil {
		attached, err := v.store.Attachments(ctx)
		if err != nil {
			return err
		}
		for uid, holders := range attached {
			for _, h := range holders {
				if h.Name == holder {
					uids = append(uids, uid)
				}
			}
		}
	}
	for _, uid := range uids {
		if err := v.store.Detach(ctx, uid, holder); err != nil {
			return err
		}
	}
	return nil
}

func (v *nodeVolumes) CreateVolume(ctx context.Context, req api.VolumeRequest) (volume.Volume, error) {
	if req.SourceUID != "" {
		return volume.Volume{}, notHere("copies of volumes")
	}
	rec, err := v.state.Volume(req.UID)
	if errs.Has(err, errs.ObjectNotFound) {
		rec = nodestate.Volume{UID: req.UID, Tenant: req.Tenant, Created: time.Now().UTC()}
		err = v.state.PutVolume(rec)
	}
	if err != nil {
		return volume.Volume{}, err
	}
	made, err := v.store.Create(ctx, req.UID, volumes.Options{})
	if err != nil {
		return volume.Volume{}, err
	}
	return domain(rec, made), nil
}

func (v *nodeVolumes) DeleteVolume(ctx context.Context, uid string) error {
	if err := v.store.Delete(ctx, uid); err != nil {
		return err
	}
	return v.state.RemoveVolume(uid)
}

func domain(rec nodestate.Volume, has volumes.Volume) volume.Volume {
	return volume.Volume{UID: has.UID, Tenant: rec.Tenant, Created: has.Created, Status: volume.Status{Phase: volume.Ready}}
}

func (v *nodeVolumes) list(ctx context.Context) ([]volume.Volume, error) {
	there, err := v.store.List(ctx)
	if err != nil {
		return nil, err
	}
	var all []volume.Volume
	for _, has := range there {
		rec, err := v.state.Volume(has.UID)
		if err != nil {
			return nil, err
		}
		all = append(all, domain(rec, has))
	}
	return all, nil
}
