package runner

import (
	"context"
	"errors"
	"strconv"
	"sync"
	"time"

	"github.com/dormouse-run/dormouse/agentd/internal/checkpoint"
	"github.com/dormouse-run/dormouse/agentd/internal/nodestate"
	"github.com/dormouse-run/dormouse/agentd/internal/runtime"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
	"github.com/dormouse-run/dormouse/pkg/snapshot"
	"github.com/dormouse-run/dormouse/pkg/uid"
)

// CaptureRequest asks for a snapshot of a sandbox.
type CaptureRequest struct {
	UID, SnapshotUID, Tenant, CommandID string
}

// Checkpoint captures a running or paused sandbox and returns when the artefact is synced and in place. After any
// error a sandbox that ran runs on and nothing of the artefact is left. The same command id again gives
// the same snapshot.
func (n *Node) Checkpoint(ctx context.Context, req CaptureRequest) (nodestate.Snapshot, error) {
	if err := uid.Check(req.SnapshotUID); err != nil {
		return nodestate.Snapshot{}, errs.New(errs.InvalidField, "snapshot_uid: %v", err).With("field", "snapshot_uid")
	}
	return doFor(ctx, n, req.UID, true, func(ctx context.Context, o *owner) (snap nodestate.Snapshot, err error) {
		has, err := n.Store.Snapshot(req.SnapshotUID)
		switch {
		case err == nil && has.CommandID == req.CommandID && has.State == nodestate.SnapshotReady:
			return has, nil
		case err == nil:
			return snap, errs.New(errs.NameTaken, "the snapshot %s exists already", req.SnapshotUID).With("uid", req.SnapshotUID)
		case !errs.Has(err, errs.ObjectNotFound):
			return snap, err
		}
		if err := o.mustLive(); err != nil {
			return snap, err
		}
		snap = nodestate.Snapshot{UID: req.SnapshotUID, Tenant: req.Tenant, SourceSandboxUID: req.UID, State: nodestate.SnapshotSaving,
			Created: n.Now().UTC(), CommandID: req.CommandID}
		err = because(ctx, o.capture(ctx, &snap))
		return snap, err
	})
}

// because gives why work was ended in place of what its end looked like from inside: a guest that did not
// answer, say, to a call that a deletion cut short. A sandbox that does not run any more is said in any case.
func because(ctx context.Context, err error) error {
	cause := context.Cause(ctx)
	var lost *checkpoint.NotResumedError
	if err == nil || cause == nil || crashed(err) || !errors.Is(err, ctx.Err()) || errors.As(err, &lost) {
		return err
	}
	return cause
}

func (o *owner) capture(ctx context.Context, snap *nodestate.Snapshot) (err error) {
	if err := o.n.Store.PutSnapshot(*snap); err != nil {
		return err
	}
	if err := o.n.fault("checkpoint.intent.after"); err != nil {
		return err
	}
	defer func() {
		if err != nil && !crashed(err) {
			after, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
			defer cancel()
			err = errors.Join(err, o.n.dropSnapshot(after, *snap, o.rec.ErofsDigest))
		}
	}()
	leave, waited := o.n.enterTimed(ctx, o.n.captures)
	defer leave()
	if err := context.Cause(ctx); err != nil {
		return errs.From(err).WithOutcome(errs.NotStarted, errs.SameOperation)
	}
	if err := o.n.Images.Hold(ctx, o.rec.ErofsDigest, snap.UID); err != nil {
		return err
	}
	if err := o.n.fault("checkpoint.hold.after"); err != nil {
		return err
	}
	m, err := o.manifest(ctx, snap)
	if err != nil {
		return err
	}
	stats, err := o.n.Driver.Stats(ctx, o.uid)
	if err != nil {
		return err
	}
	defer o.n.trims.add(o.uid)
	err = o.frozen(ctx, snap.UID, func(ctx context.Context, s checkpoint.Subject) (checkpoint.Frozen, error) {
		err := o.captured(ctx, s, m, int64(stats.MemoryBytes), waited)
		return checkpoint.Frozen{At: m.FrozenAt, For: m.Freeze}, err
	})
	if err != nil {
		return err
	}
	if err := o.n.fault("checkpoint.record.before"); err != nil {
		return err
	}
	snap.State, snap.Status = nodestate.SnapshotReady, m.Status()
	if err := o.n.Store.PutSnapshot(*snap); err != nil {
		return err
	}
	return o.n.fault("checkpoint.record.after")
}

// captured has the artefact made, and measures it. waited is how long it waited for a turn already.
func (o *owner) captured(ctx context.Context, s checkpoint.Subject, m *checkpoint.Manifest, estimate int64, waited time.Duration) error {
	err := o.n.Capturer.Capture(ctx, s, m, estimate)
	m.Queued += waited
	o.n.measure("checkpoint", queueStep, m.Queued, nil)
	o.n.measure("checkpoint", captureStep, m.Service, err)
	return err
}

// manifest says all about the capture that is known before it.
func (o *owner) manifest(ctx context.Context, snap *nodestate.Snapshot) (*checkpoint.Manifest, error) {
	spec, err := o.readSpec()
	if err != nil {
		return nil, err
	}
	bundle, err := o.n.Bundles.ByDigest(o.rec.Bundle)
	if err != nil {
		return nil, err
	}
	processes, err := o.processTable(ctx)
	if err != nil {
		return nil, err
	}
	m := &checkpoint.Manifest{
		UID: snap.UID, Tenant: snap.Tenant, SourceSandboxUID: o.uid, SourceName: o.rec.Name, Generation: o.rec.Generation,
		Runtime:      checkpoint.RuntimeIdentity{Driver: o.n.Driver.Name(), Bundle: bundle.Digest, Version: bundle.Version, Flags: o.rec.Flags},
		Image:        checkpoint.ImageIdentity{Reference: o.rec.Spec.Image, Digest: o.rec.ImageDigest, ErofsDigest: o.rec.ErofsDigest, Path: o.rec.ImagePath},
		Spec:         spec,
		Sandbox:      o.rec.Spec,
		Architecture: o.n.Host.Architecture, CPUFeatures: o.n.Host.CPUFeatures,
		GuestGeneration: o.rec.GuestGeneration, HasMain: o.rec.HasMain, Defaults: checkpoint.ProcessDefaults(o.rec.Defaults),
		Processes: processes,
	}
	for _, v := range o.rec.Spec.Volumes {
		m.Volumes = append(m.Volumes, snapshot.VolumeReference{VolumeUID: v.VolumeUID, Path: v.Path, ReadOnly: v.ReadOnly})
	}
	return m, nil
}

// processTable asks the guest. A paused one cannot be asked, and its manifest does without.
func (o *owner) processTable(ctx context.Context) ([]checkpoint.ProcessEntry, error) {
	if o.stands() {
		return nil, nil
	}
	g := o.openGuest()
	if g == nil {
		return nil, o.silent()
	}
	look, cancel := context.WithTimeout(ctx, recordTimeout)
	defer cancel()
	processes, err := g.ProcessTable(look)
	if err != nil && ctx.Err() == nil && look.Err() != nil {
		// The time was ours, not the caller's: a guest that does not answer is no reason to ask for ever.
		err = errs.Wrap(err, errs.GuestSilent, "guest init of sandbox %s did not list its processes within %s", o.uid, recordTimeout).With("uid", o.uid)
	}
	return processes, err
}

// frozen records that the sandbox is about to be frozen, freezes it by fn, and takes the record back. A
// sandbox that could not be resumed is ended: it is not to be relied on.
func (o *owner) frozen(ctx context.Context, snapshotUID string, fn func(context.Context, checkpoint.Subject) (checkpoint.Frozen, error)) error {
	subject := o.still()
	if !o.stands() {
		g := o.openGuest()
		if g == nil {
			return o.silent()
		}
		subject.Still, subject.Channel = false, g
	}
	rec := o.rec
	rec.Capture = &nodestate.Capture{SnapshotUID: snapshotUID, Began: o.n.Now().UTC()}
	if err := o.put(rec); err != nil {
		return err
	}
	if err := o.n.fault("checkpoint.freezing.after"); err != nil {
		return err
	}
	frozen, err := fn(ctx, subject)
	if crashed(err) {
		return err
	}
	var lost *checkpoint.NotResumedError
	if errors.As(err, &lost) {
		return o.loseFrozen(ctx, err)
	}
	rec = o.rec
	rec.Capture = nil
	if frozen.For > 0 && !subject.Still {
		rec.LastFreeze = frozen.For
	}
	return errors.Join(err, o.put(rec))
}

// endLost ends a sandbox that could not be resumed, and records why: it had ended by itself, of its memory
// perhaps, which a save needs some of; or it does not obey, which message says. Its end is looked at only
// once it is over: a sandbox that the kernel is just ending still looks alive.
func (o *owner) endLost(ctx context.Context, message string) error {
	look, cancel := context.WithTimeout(context.WithoutCancel(ctx), recordTimeout)
	defer cancel()
	st, err := o.n.Driver.State(look, o.uid)
	ended := err == nil && st.Phase == runtime.Stopped
	o.kill()
	if exit, err := o.n.Driver.Wait(look, o.uid); err == nil && (ended || exit.OOM) {
		reason, message := endReason(exit)
		return o.failed(reason, message)
	}
	return o.failed(sandbox.ReasonKilled, message)
}

// useSnapshot keeps an artefact from being deleted while it is read. WRONG_PHASE while it is being deleted.
func (n *Node) useSnapshot(uid string) (release func(), err error) {
	return n.claimSnapshot(uid, 1, func(users int) error {
		if users >= 0 {
			return nil
		}
		return errs.New(errs.WrongPhase, "the snapshot %s is being deleted", uid).With("uid", uid).With("phase", string(snapshot.Deleting))
	})
}

// claimSnapshot adds to the users of a snapshot if check allows it: readers count up, a deletion down.
func (n *Node) claimSnapshot(uid string, users int, check func(users int) error) (release func(), err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if err := check(n.inUse[uid]); err != nil {
		return nil, err
	}
	n.inUse[uid] += users
	return sync.OnceFunc(func() {
		n.mu.Lock()
		defer n.mu.Unlock()
		if n.inUse[uid] -= users; n.inUse[uid] == 0 {
			delete(n.inUse, uid)
		}
	}), nil
}

// DeleteSnapshot removes an artefact and returns once its absence was observed. Deleting what is not there
// succeeds. STILL_REFERENCED while a restore reads it, WRONG_PHASE while it is being made or deleted.
func (n *Node) DeleteSnapshot(ctx context.Context, id string) error {
	release, err := n.claimSnapshot(id, -1, func(users int) error {
		switch {
		case users > 0:
			return errs.New(errs.StillReferenced, "the snapshot %s is being restored; delete it afterwards", id).With("uid", id).With("count", strconv.Itoa(users))
		case users < 0:
			return errs.New(errs.WrongPhase, "the snapshot %s is being deleted", id).With("uid", id).With("phase", string(snapshot.Deleting))
		}
		return nil
	})
	if err != nil {
		return err
	}
	defer release()
	rec, err := n.Store.Snapshot(id)
	switch {
	case errs.Has(err, errs.ObjectNotFound):
		return n.Snapshots.Delete(id)
	case err != nil:
		return err
	case rec.State == nodestate.SnapshotSaving:
		return errs.New(errs.WrongPhase, "the snapshot %s is being made; delete it afterwards", id).With("uid", id).With("phase", string(snapshot.Preparing))
	}
	return n.dropSnapshot(ctx, rec, rec.Status.ErofsDigest)
}

// dropSnapshot is the teardown of a snapshot, from any state: intent, artefact, image, record.
func (n *Node) dropSnapshot(ctx context.Context, rec nodestate.Snapshot, erofsDigest string) error {
	rec.State = nodestate.SnapshotDeleting
	if err := n.Store.PutSnapshot(rec); err != nil {
		return err
	}
	if err := n.fault("snapshot.intent.after"); err != nil {
		return err
	}
	if err := n.Snapshots.Delete(rec.UID); err != nil {
		return err
	}
	if err := n.fault("snapshot.artefact.after"); err != nil {
		return err
	}
	if err := n.Images.Release(ctx, erofsDigest, rec.UID); err != nil {
		return err
	}
	if err := n.fault("snapshot.image.after"); err != nil {
		return err
	}
	if err := n.Store.RemoveSnapshot(rec.UID); err != nil {
		return err
	}
	return n.fault("snapshot.record.after")
}
