package runner

import (
	"context"
	"errors"

	"github.com/dormouse-run/dormouse/agentd/internal/checkpoint"
	"github.com/dormouse-run/dormouse/agentd/internal/nodestate"
	"github.com/dormouse-run/dormouse/agentd/internal/runtime"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
)

// Hibernate captures a running or paused sandbox into an artefact under its own uid (so there is never more than one), and lets go of
// everything but that, its volumes and its image. It returns when both are done. A hibernated one succeeds. After an error the sandbox
// is as it was, unless its artefact was in place already: then it is Hibernated, and what was not let go is let go later.
func (n *Node) Hibernate(ctx context.Context, uid string) (nodestate.Sandbox, error) {
	return n.turn(ctx, uid, func(ctx context.Context, o *owner) error {
		if o.rec.Phase == sandbox.Hibernated {
			return o.letGo(ctx)
		}
		if err := o.mustLive(); err != nil {
			return err
		}
		return because(ctx, o.hibernate(ctx))
	})
}

func (o *owner) hibernate(ctx context.Context) error {
	if err := o.dropArtefact(); err != nil { // of the last time
		return err
	}
	m, err := o.manifest(ctx, &nodestate.Snapshot{UID: o.uid, Tenant: o.rec.Tenant})
	if err != nil {
		return err
	}
	stats, err := o.n.Driver.Stats(ctx, o.uid)
	if err != nil {
		return err
	}
	rec := o.rec
	rec.Hibernation = &nodestate.Hibernation{Began: o.n.Now().UTC(), From: rec.Phase}
	rec.Phase = sandbox.Hibernating
	if err := o.observe(rec); err != nil {
		return err
	}
	if err := o.n.fault("hibernate.intent.after"); err != nil {
		return err
	}
	err = o.lieDown(ctx, m, int64(stats.MemoryBytes))
	if crashed(err) {
		return err
	}
	var lost *checkpoint.NotResumedError
	if errors.As(err, &lost) {
		return o.loseFrozen(ctx, err)
	}
	if err != nil {
		return errors.Join(err, o.getUp(ctx))
	}
	return o.letGo(ctx)
}

// lieDown makes the sandbox stand still, if it does not, and captures it as it stands.
func (o *owner) lieDown(ctx context.Context, m *checkpoint.Manifest, estimate int64) error {
	if !o.stands() {
		g := o.openGuest()
		if g == nil {
			return o.silent()
		}
		o.stand(true)
		if err := checkpoint.Halt(ctx, checkpoint.Subject{ID: o.uid, Machine: o.n.Driver, Channel: g}); err != nil {
			return err
		}
	}
	if err := o.n.fault("hibernate.frozen.after"); err != nil {
		return err
	}
	if err := o.captured(ctx, o.still(), m, estimate, 0); err != nil {
		return err
	}
	return o.n.fault("hibernate.saved.after")
}

// getUp undoes a hibernation that failed: the artefact goes first, so that whoever finds one may rely on it.
func (o *owner) getUp(ctx context.Context) error {
	after, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	rec := o.rec
	from := rec.Hibernation.From
	rec.Hibernation = spent(rec.Hibernation)
	rec.Phase = sandbox.Paused
	if from != sandbox.Paused {
		rec.Phase = sandbox.Resuming
	}
	if err := o.put(rec); err != nil {
		return err
	}
	err := o.dropArtefact()
	if crashed(err) {
		return err
	}
	if from == sandbox.Paused {
		return errors.Join(err, o.observe(o.rec))
	}
	return errors.Join(err, o.resume(after))
}

func spent(h *nodestate.Hibernation) *nodestate.Hibernation {
	if h == nil {
		return nil
	}
	now := *h
	now.Spent = true
	return &now
}

// letGo records that the artefact is the sandbox, ends what runs of it, and records that too.
func (o *owner) letGo(ctx context.Context) error {
	if o.rec.Phase == sandbox.Hibernated && o.rec.Hibernation.Released {
		return nil
	}
	rec := o.rec
	rec.Phase, rec.Capture = sandbox.Hibernated, nil
	if err := o.put(rec); err != nil {
		return err
	}
	o.stand(true)
	if err := o.n.fault("hibernate.record.after"); err != nil {
		return err
	}
	after, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	if err := o.unplug(after); err != nil {
		if !crashed(err) {
			o.again(o.letGo)
		}
		return err
	}
	o.n.Room.Leave(o.uid)
	rec = o.rec
	released := *rec.Hibernation
	released.Released = true
	rec.Hibernation = &released
	if err := o.observe(rec); err != nil {
		return err
	}
	return o.n.fault("hibernate.released.after")
}

// unplug undoes the steps that make a sandbox, but for what a hibernated one keeps.
func (o *owner) unplug(ctx context.Context) error {
	list := o.steps(&build{})
	for i := len(list) - 1; i >= 0; i-- {
		if list[i].stays {
			continue
		}
		if err := list[i].undo(ctx); err != nil {
			return err
		}
	}
	return nil
}

// dropArtefact removes the artefact of a hibernation that is over.
func (o *owner) dropArtefact() error {
	if o.rec.Hibernation == nil {
		return nil
	}
	if err := o.n.Snapshots.Delete(o.uid); err != nil {
		return err
	}
	if err := o.n.fault("wake.dropped.after"); err != nil {
		return err
	}
	rec := o.rec
	rec.Hibernation = nil
	return o.put(rec)
}

// wake restores a hibernated sandbox: the same one, with its uid, name, volumes and processes; its channel, control group and network
// are made anew. After an error it is Hibernated.
func (o *owner) wake(ctx context.Context) error {
	if err := o.letGo(ctx); err != nil { // what was left of the last time
		return err
	}
	m, err := o.n.Snapshots.Load(o.uid)
	if err != nil {
		return err
	}
	if err := m.CheckHost(o.n.Host); err != nil {
		return err
	}
	bundle, err := o.n.Bundles.ByDigest(m.Runtime.Bundle)
	if err != nil {
		return errs.From(err).With("want", m.Runtime.Version).With("has", o.n.Bundles.Current().Version)
	}
	b := &build{verb: "restore", bundle: bundle, from: m, fromDir: o.n.Snapshots.Path(o.uid), identity: Identity{Hostname: o.rec.Hostname}}
	if err := o.enter(ctx, b); err != nil {
		return err
	}
	rec := o.rec
	rec.Phase, rec.GuestGeneration = sandbox.Resuming, m.GuestGeneration+1
	if err := o.observe(rec); err != nil {
		o.n.Room.Leave(o.uid)
		return err
	}
	if err := o.n.fault("wake.intent.after"); err != nil {
		return err
	}
	err = o.make(ctx, b)
	if crashed(err) {
		return err
	}
	if err != nil {
		after, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
		defer cancel()
		return errors.Join(err, o.sleepOn(after))
	}
	o.stand(false)
	if err := o.n.fault("wake.running.after"); err != nil {
		return err
	}
	// Whoever waits for the sandbox does not wait for its disk: the record says that the artefact is spent.
	o.after = o.dropArtefact
	return nil
}

// sleepOn goes back from a wake that did not succeed.
func (o *owner) sleepOn(ctx context.Context) error {
	rec := o.rec
	rec.Phase, rec.Handle = sandbox.Hibernated, nil
	held := *rec.Hibernation
	held.Released = false
	rec.Hibernation = &held
	if err := o.put(rec); err != nil {
		return err
	}
	return o.letGo(ctx)
}

// hibernating tells whether the sandbox is in its artefact, on the way there, or on the way back; settleHibernation then brings what a
// crash left to an end.
func (o *owner) hibernating() bool {
	h := o.rec.Hibernation
	return h != nil && !h.Spent && (o.rec.Phase == sandbox.Hibernating || o.rec.Phase == sandbox.Hibernated || o.rec.Phase == sandbox.Resuming)
}

func (o *owner) settleHibernation(ctx context.Context) error {
	switch o.rec.Phase {
	case sandbox.Hibernated:
		o.stand(true)
		return o.letGo(ctx)
	case sandbox.Resuming:
		return o.sleepOn(ctx)
	}
	st, err := o.n.Driver.Recover(ctx, o.rec.Handle)
	gone := errs.Has(err, errs.ObjectNotFound) || err == nil && st.Phase == runtime.Stopped
	if err != nil && !gone {
		return err
	}
	_, err = o.n.Snapshots.Load(o.uid)
	switch {
	case err == nil && (gone || st.Phase == runtime.Paused):
		return o.letGo(ctx) // it is whole, and nothing was done since
	case err != nil && !errs.Has(err, errs.ObjectNotFound) && !errs.Has(err, errs.ArtefactDamaged):
		return err
	case gone:
		return errors.Join(o.dropArtefact(), o.lost(ctx))
	}
	if o.rec.Hibernation.From == sandbox.Paused {
		rec := o.rec
		rec.Phase, rec.Hibernation, rec.Capture = sandbox.Paused, spent(rec.Hibernation), &nodestate.Capture{Began: o.n.Now().UTC()}
		if err := o.put(rec); err != nil {
			return err
		}
		return errors.Join(o.dropArtefact(), o.settle(ctx, st.Phase))
	}
	return o.getUp(ctx)
}
