package runner

import (
	"context"
	"errors"

	"github.com/dormouse-run/dormouse/agentd/internal/nodestate"
	"github.com/dormouse-run/dormouse/agentd/internal/runtime"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
)

// This file is what reconcile asks of the runner when agentd starts. Each is idempotent.

// Reattach takes a sandbox that is kept into this process's hands: its end is watched, a capture that
// a crash interrupted ends in resume, a pause or resume is finished, and its channel is opened; a paused one stays paused. A channel that does not open is
// tried again later; the sandbox counts as running meanwhile. One that is not there is Lost or OOMKilled.
func (n *Node) Reattach(ctx context.Context, uid string) error {
	return n.do(ctx, uid, true, func(ctx context.Context, o *owner) error {
		if !o.exists || o.rec.Intent != nodestate.IntentKeep {
			return nil
		}
		if o.hibernating() {
			return o.settleHibernation(ctx)
		}
		if err := o.dropArtefact(); err != nil {
			return err
		}
		st, err := n.Driver.Recover(ctx, o.rec.Handle)
		switch {
		case errs.Has(err, errs.ObjectNotFound):
			return o.lost(ctx)
		case err != nil:
			return err
		case st.Phase == runtime.Stopped:
			return o.lost(ctx)
		case o.rec.Phase == sandbox.Paused || o.rec.Phase == sandbox.Resuming:
			return o.settle(ctx, st.Phase)
		case o.rec.Phase != sandbox.Running:
			// Its end is recorded; the kill was not reached.
			o.kill()
			return nil
		}
		if o.rec.Capture != nil || st.Phase == runtime.Paused {
			if err := n.Driver.Resume(ctx, o.uid); err != nil {
				return errors.Join(err, o.endLost(ctx, "the sandbox could not be resumed after an interrupted checkpoint and was ended"))
			}
			if err := n.fault("recover.resume.after"); err != nil {
				return err
			}
		}
		if o.rec.Capture != nil {
			rec := o.rec
			rec.Capture = nil
			if err := o.put(rec); err != nil {
				return err
			}
		}
		if err := o.reopen(ctx); err != nil {
			o.log.Warn("guest init does not answer after a restart of agentd; trying again later", "error", err)
			o.again(o.reopen)
		}
		return nil
	})
}

// reopen opens the channel and watches.
func (o *owner) reopen(ctx context.Context) error {
	if !o.exists || o.rec.Phase != sandbox.Running {
		return nil
	}
	err := o.openChannel(ctx)
	o.watch()
	return err
}

// lost records that a kept sandbox is not there any more.
func (o *owner) lost(ctx context.Context) error {
	if !live(o.rec.Phase) {
		return nil
	}
	reason, message := sandbox.ReasonLost, "the sandbox was gone when agentd came back"
	look, cancel := context.WithTimeout(ctx, recordTimeout)
	defer cancel()
	if exit, err := o.n.Driver.Wait(look, o.uid); err == nil && (exit.Known || exit.OOM) {
		reason, message = endReason(exit)
	}
	return o.failed(reason, message)
}

// Remove finishes a deletion, or undoes a start or restore that a crash interrupted.
func (n *Node) Remove(ctx context.Context, uid string) error {
	return n.do(ctx, uid, false, func(ctx context.Context, o *owner) error {
		if !o.exists || o.rec.Intent == nodestate.IntentKeep {
			return nil
		}
		return o.remove(ctx)
	})
}

// FinishSnapshot brings a snapshot's record and artefact together: one that was being saved is Ready
// if its artefact is whole and in place, and is removed otherwise; one that was being deleted is removed.
func (n *Node) FinishSnapshot(ctx context.Context, uid string) error {
	release, err := n.claimSnapshot(uid, -1, func(users int) error {
		if users != 0 {
			return errs.New(errs.WrongPhase, "the snapshot %s is in use", uid).With("uid", uid)
		}
		return nil
	})
	if err != nil {
		return err
	}
	defer release()
	rec, err := n.Store.Snapshot(uid)
	if errs.Has(err, errs.ObjectNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	switch rec.State {
	case nodestate.SnapshotReady:
		return nil
	case nodestate.SnapshotSaving:
		m, err := n.Snapshots.Load(uid)
		if err == nil {
			rec.State, rec.Status = nodestate.SnapshotReady, m.Status()
			return n.Store.PutSnapshot(rec)
		}
		if !errs.Has(err, errs.ObjectNotFound) && !errs.Has(err, errs.ArtefactDamaged) {
			return err
		}
	}
	return n.dropSnapshot(ctx, rec, rec.Status.ErofsDigest)
}

// Purge removes whatever there is of a sandbox that no record names: what doctor found. It goes by the
// uid alone. WRONG_PHASE when there is a record.
func (n *Node) Purge(ctx context.Context, uid string) error {
	if _, err := n.Store.Snapshot(uid); !errs.Has(err, errs.ObjectNotFound) {
		return errors.Join(err, errs.New(errs.WrongPhase, "%s is a snapshot that is recorded; delete it by its name", uid).With("uid", uid))
	}
	return n.do(ctx, uid, false, func(ctx context.Context, o *owner) error {
		if o.exists {
			return wrongPhase(o.rec, "it is recorded; delete it by its name")
		}
		if err := o.unmake(ctx); err != nil {
			return err
		}
		n.Networks.Free(uid)
		return nil
	})
}
