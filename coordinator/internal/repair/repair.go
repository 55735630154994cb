package repair

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/google/uuid"

	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/fault"
	"github.com/dormouse-run/dormouse/pkg/fence"
)

// Repair puts back what the survey found, in the coordinator's name, and leaves the catalog suspended.
// What it did, or why it could not, is in the findings.
func (r *Repairer) Repair(ctx context.Context, epoch fence.Epoch, s *Survey) error {
	if r.Light {
		return errs.New(errs.InternalError, "a light survey has nothing to repair from")
	}
	left := make([]*Finding, 0, len(s.Findings))
	slices.SortFunc(s.Findings, order)
	for i := range s.Findings {
		if s.Findings[i].Difference != Unknown {
			left = append(left, &s.Findings[i])
		}
	}
	// What refers to something waits for it, what is referred to waits to be deleted, and what has a name waits until who has it is deleted: each
	// round does what can be done. A name is given up only when nothing else can be done, one at a time.
	for progress, nameless := true, false; (progress || nameless) && len(left) > 0; nameless = !progress && !nameless {
		progress = false
		var again []*Finding
		for _, f := range left {
			refused, err := r.one(ctx, epoch, f, nameless && !progress)
			switch {
			case err != nil:
				return err
			case refused != nil:
				f.Message = fmt.Sprintf("not repaired: %s: %v", refused.Reason, refused)
				again = append(again, f)
			default:
				progress, f.Repaired = true, true
				r.Log.Warn("put back into the catalog", "difference", f.Difference, "kind", f.Key.Kind, "tenant", f.Key.Tenant, "uid", f.Key.UID,
					"node", f.Node, "revision", f.Journal, "had", f.Catalog, "seen", f.entry.Point.Seq, "of", f.entry.Point.Incarnation)
			}
		}
		left = again
	}
	for _, f := range left {
		r.Log.Error("not put back into the catalog", "difference", f.Difference, "kind", f.Key.Kind, "tenant", f.Key.Tenant, "uid", f.Key.UID, "reason", f.Message)
	}
	return nil
}

// one repairs one record. If nameless, a name that another has is given up rather than the record.
func (r *Repairer) one(ctx context.Context, epoch fence.Epoch, f *Finding, nameless bool) (*errs.Error, error) {
	rec := f.entry.Record
	if f.entry.Bare {
		return errs.New(errs.ObjectNotFound, "%s", f.Message), nil
	}
	c := catalog.Commit{Repair: true, Owner: fence.Owner{Coordinator: epoch}, Attempt: uuid.NewString()}
	if f.Difference == Undeleted {
		c.Deletes = []catalog.Delete{{Key: f.Key, ExpectRevision: f.Catalog, Tombstone: true}}
		f.Message = "deleted, as it was"
	} else {
		c.Puts = []catalog.Put{{Record: rec, ExpectRevision: f.Catalog, Revision: rec.Revision}}
		f.Message = fmt.Sprintf("put back at revision %d", rec.Revision)
	}
	refused, err := r.commit(ctx, c)
	if nameless && refused != nil && refused.Reason == errs.NameTaken {
		c.Puts[0].Record.Name = ""
		holder := refused.Details["uid"]
		if refused, err = r.commit(ctx, c); refused == nil && err == nil {
			f.Message = fmt.Sprintf("put back at revision %d without its name %q, which %s has by now", rec.Revision, rec.Name, holder)
		}
	}
	return refused, err
}

// commit applies one commit; a lost reply is an error, after which the survey is made anew.
func (r *Repairer) commit(ctx context.Context, c catalog.Commit) (*errs.Error, error) {
	fault.At("repair.commit.before")
	results, err := r.Store.Commit(ctx, []catalog.Commit{c})
	fault.At("repair.commit.after")
	if err != nil {
		return nil, err
	}
	refused := results[0].Err
	if refused != nil && (refused.Reason == errs.Fenced || refused.Reason == errs.CatalogRewound) {
		return nil, refused
	}
	return refused, nil
}

// Verify compares the records that say what a node holds with what the node says that it holds, and calls found
// with each difference. It changes nothing.
func (r *Repairer) Verify(ctx context.Context, node string, found func(Finding) error) (records int, err error) {
	there, unowned, err := r.holdings(ctx, node)
	if err != nil {
		return 0, found(Finding{Difference: Unknown, Node: node, Message: "what it holds is not known: " + err.Error()})
	}
	for _, id := range unowned {
		err := found(Finding{Difference: Unrecorded, Key: catalog.Key{Kind: catalog.KindSnapshot, UID: id}, Node: node,
			Message: "the node has files of it without a record of its own, and nobody is told to remove them: look with \"agentctl doctor\" there"})
		if err != nil {
			return 0, err
		}
	}
	for kind, wanted := range holds {
		q := catalog.Query{Kind: kind, Node: node, PageSize: catalog.MaxPage}
		for {
			page, err := r.Store.List(ctx, q)
			if err != nil {
				return records, err
			}
			for _, rec := range page.Records {
				records++
				if slices.Contains(wanted, rec.Phase) && !there[rec.Key] {
					if err := r.missing(ctx, rec, found); err != nil {
						return records, err
					}
				}
				delete(there, rec.Key)
			}
			if q.After = page.Next; page.Next == "" {
				break
			}
		}
	}
	return records, r.unrecorded(ctx, node, there, found)
}

// holdings reads all pages of a node's inventory: the keys of what it holds, and the names of folders that are nobody's.
// They are of one session of the node, or the inventory is not known.
func (r *Repairer) holdings(ctx context.Context, node string) (there map[catalog.Key]bool, unowned []string, err error) {
	there = make(map[catalog.Key]bool)
	add := func(tenant string, kind catalog.Kind, uid string) {
		there[catalog.Key{Tenant: tenant, Kind: kind, UID: uid}] = true
	}
	var began fence.Epoch
	for after := ""; ; {
		inv, session, err := r.Nodes.Inventory(ctx, node, after)
		switch {
		case err != nil:
			return nil, nil, err
		case began == 0:
			began = session
		case began != session:
			return nil, nil, errs.New(errs.Fenced, "another session of node %s began while it was asked; ask again", node).With("node", node)
		}
		for _, o := range inv.GetSandboxes() {
			add(o.GetTenant(), catalog.KindSandbox, o.GetUid())
		}
		for _, o := range inv.GetSnapshots() {
			add(o.GetTenant(), catalog.KindSnapshot, o.GetUid())
		}
		for _, o := range inv.GetVolumes() {
			add(o.GetTenant(), catalog.KindVolume, o.GetUid())
		}
		unowned = append(unowned, inv.GetUnownedArtefacts()...)
		if after = inv.GetNext(); after == "" {
			return there, unowned, nil
		}
	}
}

// holds are the phases in which a record says that its node holds something.
var holds = map[catalog.Kind][]string{
	catalog.KindSandbox:  {"Running", "Paused", "Hibernating", "Hibernated", "Resuming"},
	catalog.KindSnapshot: {"Ready"},
	catalog.KindVolume:   {"Ready"},
}

// missing looks again: what was read may have changed while the node was asked.
func (r *Repairer) missing(ctx context.Context, rec catalog.Record, found func(Finding) error) error {
	now, err := r.Store.Get(ctx, rec.Key)
	if errs.Has(err, errs.ObjectNotFound) || err == nil && now.Revision != rec.Revision {
		return nil
	}
	if err != nil {
		return err
	}
	return found(Finding{Difference: Missing, Key: rec.Key, Name: rec.Name, Node: rec.Node, Catalog: rec.Revision, Message: "its record says " + rec.Phase})
}

// unrecorded reports what no record names. One that has a record by now was made meanwhile.
func (r *Repairer) unrecorded(ctx context.Context, node string, there map[catalog.Key]bool, found func(Finding) error) error {
	keys := make([]catalog.Key, 0, len(there))
	for k := range there {
		if err := k.Validate(); err == nil {
			keys = append(keys, k)
		}
	}
	slices.SortFunc(keys, func(a, b catalog.Key) int { return strings.Compare(a.String(), b.String()) })
	for chunk := range slices.Chunk(keys, catalog.MaxPage) {
		have, err := r.Store.GetMany(ctx, chunk)
		if err != nil {
			return err
		}
		for _, k := range chunk {
			if _, ok := have[k]; ok {
				continue
			}
			message := fmt.Sprintf("no record names it and nothing proves that it was deleted: it is left alone; \"dormouse admin catalog drop --node %s --accept-loss %s\" drops it all the same", node, k.UID)
			if r.givenUp[k] {
				message = fmt.Sprintf("a repair went on without it: take it back with \"dormouse admin catalog adopt --node %s %s\", or drop it with \"dormouse admin catalog drop --node %s %s\"", node, k.UID, node, k.UID)
			}
			if _, err := r.Store.Tombstone(ctx, k); err == nil {
				message = "it was deleted; the node is told to remove it by the coordinator's next look at what it holds"
			}
			if err := found(Finding{Difference: Unrecorded, Key: k, Node: node, Message: message}); err != nil {
				return err
			}
		}
	}
	return nil
}
