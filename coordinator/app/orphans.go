package app

import (
	"context"

	"github.com/dormouse-run/dormouse/coordinator/internal/journal"
	"github.com/dormouse-run/dormouse/coordinator/internal/operations"
	"github.com/dormouse-run/dormouse/coordinator/internal/records"
	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/errs"
	nodev1 "github.com/dormouse-run/dormouse/proto/dormouse/node/v1"
)

// What a node holds and no record names, at an operator's word: docs/adr/0055-what-a-repair-gave-up.md.

// orphan is what an operator asks for: where it is, and what is known of it.
type orphan struct {
	engine  *operations.Engine
	node    string
	key     catalog.Key
	absent  bool // the node does not have it
	verdict operations.Verdict
	// entry is what the node's journal has of it, where the verdict is Unproven; nil is nothing.
	entry *nodev1.JournalEntry
}

// orphan looks for what a node holds. The inventory is read before the records, as ever.
func (k keeper) orphan(ctx context.Context, node, uid string) (o orphan, err error) {
	o.node = node
	if o.engine, err = k.Engine(); err != nil {
		return o, err
	}
	moment, err := o.engine.Moment(ctx)
	if err != nil {
		return o, err
	}
	if o.key, err = k.held(ctx, node, uid); err != nil || o.key == (catalog.Key{}) {
		o.absent = true
		return o, err
	}
	verdicts, err := o.engine.Judge(ctx, moment, []catalog.Key{o.key})
	if err != nil {
		return o, err
	}
	if o.verdict = verdicts[o.key]; o.verdict == operations.Unproven {
		o.entry, err = k.pool.Trace(ctx, node, o.key.String())
	}
	return o, err
}

// alone waits until no other is dropped or adopted: else what was just adopted might be dropped.
func (k keeper) alone(ctx context.Context) (leave func(), err error) {
	select {
	case k.orphans <- struct{}{}:
		return func() { <-k.orphans }, nil
	case <-ctx.Done():
		return nil, errs.From(ctx.Err())
	}
}

// held finds the key under which a node holds something; the zero key: it does not.
func (k keeper) held(ctx context.Context, node, uid string) (catalog.Key, error) {
	for after := ""; ; {
		inv, _, err := k.pool.Inventory(ctx, node, after)
		if err != nil {
			return catalog.Key{}, err
		}
		key := keyIn(inv, uid)
		if key.Kind != "" {
			if key.Validate() != nil {
				return key, errs.New(errs.NotSupported, "node %s has files of %s and no record of its own: look at them there with \"agentctl doctor\"", node, uid).With("feature", "what a node does not know itself")
			}
			return key, nil
		}
		if after = inv.GetNext(); after == "" {
			return catalog.Key{}, nil
		}
	}
}

// keyIn gives the key of what a page of an inventory has. One that the node itself knows no owner of has no tenant.
func keyIn(inv *nodev1.GetInventoryResponse, uid string) catalog.Key {
	for _, o := range inv.GetSandboxes() {
		if o.GetUid() == uid {
			return records.SandboxKey(o.GetTenant(), uid)
		}
	}
	for _, o := range inv.GetSnapshots() {
		if o.GetUid() == uid {
			return records.SnapshotKey(o.GetTenant(), uid)
		}
	}
	for _, o := range inv.GetVolumes() {
		if o.GetUid() == uid {
			return records.VolumeKey(o.GetTenant(), uid)
		}
	}
	for _, id := range inv.GetUnownedArtefacts() {
		if id == uid {
			return records.SnapshotKey("", uid)
		}
	}
	return catalog.Key{}
}

// givenUp tells whether the node's journal says that a repair went on without it, in a history that this one goes on from.
func (k keeper) givenUp(ctx context.Context, o orphan) (bool, error) {
	if !o.entry.GetGivenUp() {
		return false, nil
	}
	relation, err := k.store.Compare(ctx, journal.PointOf(o.entry.GetPoint()))
	return relation == catalog.Part, err
}

// DropOrphan implements api.Catalog.
func (k keeper) DropOrphan(ctx context.Context, node, uid string, acceptLoss bool) (key catalog.Key, absent bool, err error) {
	leave, err := k.alone(ctx)
	if err != nil {
		return key, false, err
	}
	defer leave()
	o, err := k.orphan(ctx, node, uid)
	if err != nil || o.absent {
		return o.key, o.absent, err
	}
	why, err := k.proof(ctx, o, acceptLoss)
	if err != nil {
		return o.key, false, err
	}
	k.log.Warn("an operator drops what no record names", "node", node, "kind", o.key.Kind, "tenant", o.key.Tenant, "uid", uid, "because", why)
	if _, err := o.engine.DropOrphan(ctx, node, o.key, why); err != nil {
		return o.key, false, err
	}
	k.registry.LookAgain(node)
	return o.key, false, nil
}

// proof says why it may be dropped, or refuses.
func (k keeper) proof(ctx context.Context, o orphan, acceptLoss bool) (why string, err error) {
	switch o.verdict {
	case operations.Owned:
		return "", errs.New(errs.WrongPhase, "a record names %s %s: delete it as any other", o.key.Kind, o.key.UID).With("uid", o.key.UID).With("phase", "recorded")
	case operations.Deleted:
		return operations.WasDeleted, nil
	}
	gone, err := k.givenUp(ctx, o)
	if err != nil || gone {
		return operations.WasGivenUp, err
	}
	if o.entry.GetDeleted() && !o.entry.GetGivenUp() {
		if proven, err := o.engine.Confirms(ctx, o.key, journal.PointOf(o.entry.GetPoint())); err != nil || proven {
			return operations.WasDeleted, err
		}
	}
	if acceptLoss {
		return operations.WasAccepted, nil
	}
	return "", errs.New(errs.OrphanUnproven, "nothing proves that %s %s on node %s was deleted or given up: it may be the last copy of what the catalog lost; ask again with --accept-loss to drop it all the same",
		o.key.Kind, o.key.UID, o.node).With("uid", o.key.UID).With("node", o.node)
}

// AdoptOrphan implements api.Catalog.
func (k keeper) AdoptOrphan(ctx context.Context, node, uid string) (key catalog.Key, name string, err error) {
	leave, err := k.alone(ctx)
	if err != nil {
		return key, "", err
	}
	defer leave()
	t := k.inForce.Load()
	if t == nil {
		return key, "", notLeading()
	}
	o, err := k.orphan(ctx, node, uid)
	switch {
	case err != nil:
		return o.key, "", err
	case o.absent:
		return o.key, "", errs.New(errs.ObjectNotFound, "node %s has no %s", node, uid).With("kind", "orphan").With("uid", uid)
	case o.verdict == operations.Deleted:
		return o.key, "", errs.New(errs.StaleUID, "%s %s was deleted, and is removed by itself", o.key.Kind, uid).With("uid", uid)
	case o.verdict == operations.Owned: // it was adopted already
		rec, err := k.store.Get(ctx, o.key)
		return o.key, rec.Name, err
	}
	gone, err := k.givenUp(ctx, o)
	if err != nil {
		return o.key, "", err
	}
	if !gone {
		return o.key, "", errs.New(errs.OrphanUnproven, "the journal of node %s does not have what %s %s was when a repair went on without it: it can be dropped, not adopted", node, o.key.Kind, uid).
			With("uid", uid).With("node", node)
	}
	entry, err := journal.EntryOf(node, o.entry)
	if err != nil {
		return o.key, "", errs.Wrap(err, errs.OrphanUnproven, "read the journal of node %s", node).With("uid", uid).With("node", node)
	}
	if name, err = o.engine.Adopt(ctx, entry.Record); err != nil {
		return o.key, "", err
	}
	k.log.Warn("an operator took back what a repair gave up; leading anew, to read it", "node", node, "kind", o.key.Kind, "tenant", o.key.Tenant, "uid", uid)
	t.end(errs.New(errs.NoLeader, "%s %s was adopted; leading anew", o.key.Kind, uid))
	return o.key, name, nil
}
