package app

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/dormouse-run/dormouse/coordinator/internal/api"
	"github.com/dormouse-run/dormouse/coordinator/internal/journal"
	"github.com/dormouse-run/dormouse/coordinator/internal/repair"
	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/fault"
	"github.com/dormouse-run/dormouse/pkg/fence"
	"github.com/dormouse-run/dormouse/pkg/mutant"
)

// reign is the term in force, for what runs beside it.
type reign struct {
	epoch     fence.Epoch
	suspended bool
	began     time.Time
	// deceived: a node has shown that the catalog had lost something before this term began to serve it.
	deceived atomic.Bool
	end      context.CancelCauseFunc
}

// heal serves a term in which the catalog is suspended: nodes may open sessions, so that their journals can be read, and
// nothing is written but the repair. It ends when the catalog is in service again.
func (a *App) heal(ctx context.Context, epoch fence.Epoch, why catalog.Suspension) error {
	if err := a.registry.Lead(ctx); err != nil {
		return fmt.Errorf("read the nodes: %w", err)
	}
	a.suspended.Store(&why)
	a.metrics.suspended.Set(1)
	defer func() {
		a.suspended.Store(nil)
		a.metrics.suspended.Set(0)
	}()
	a.registry.Accept(ctx, epoch, nothing{}, nil)
	said := ""
	for ctx.Err() == nil {
		changed := a.registry.Changed()
		_, err := a.repair(ctx, false, nil)
		if err == nil {
			a.registry.Resign(errs.New(errs.NoLeader, "the catalog is in service again; dial again"))
			return errs.New(errs.NoLeader, "the catalog was repaired; leading anew")
		}
		if text := err.Error(); text != said && ctx.Err() == nil {
			said = text
			a.log.Error("the catalog stays suspended", "reason", err)
		}
		timer := time.NewTimer(a.cfg.Lease.TTL / 6)
		select {
		case <-timer.C:
		case <-changed:
		case <-ctx.Done():
		}
		timer.Stop()
	}
	a.registry.Resign(context.Cause(ctx))
	return context.Cause(ctx)
}

// repair rebuilds a suspended catalog from the nodes' journals and takes it into service, if that loses nothing, or nothing but
// what the caller accepts: what nobody knows, and what nodes know that the caller names. Found is given in any case.
func (a *App) repair(ctx context.Context, acceptLoss bool, without []string) (found []repair.Finding, err error) {
	a.repairing.Lock()
	defer a.repairing.Unlock()
	t := a.inForce.Load()
	if t == nil {
		return nil, notLeading()
	}
	st, err := a.store.Status(ctx)
	if err != nil {
		return nil, err
	}
	if st.Suspended == nil {
		return nil, nil // repaired already
	}
	if id := st.Suspended.Restoring; id != "" {
		return nil, catalog.Unfinished(id)
	}
	if !t.suspended {
		return nil, errs.New(errs.NoLeader, "the coordinator is about to lead anew, to repair the catalog; ask again")
	}
	generation, _ := a.store.Generation()
	survey, err := a.repairer().Survey(ctx, a.knownNodes())
	if err != nil {
		return nil, err
	}
	var away []string
	for _, name := range slices.Sorted(maps.Keys(survey.Away)) {
		if !slices.Contains(without, name) {
			away = append(away, fmt.Sprintf("node %s: %s", name, survey.Away[name]))
		}
	}
	if len(away) > 0 {
		return survey.Findings, errs.New(errs.CatalogRewound, "what the catalog lost is not all known (%s); bring these nodes back, or go on without what they know with \"dormouse admin catalog repair --without NODE\"",
			strings.Join(away[:min(len(away), 10)], "; "))
	}
	if doubts := a.doubts(*st.Suspended, survey); len(doubts) > 0 && !acceptLoss {
		return survey.Findings, errs.New(errs.CatalogRewound, "what the catalog lost is not all known: %s; go on without with \"dormouse admin catalog repair --accept-loss\"", strings.Join(doubts, "; "))
	}
	if left := a.cfg.Nodes.ReturnTime - time.Since(t.began); left > 0 && !a.knows(st.Suspended.Witness) {
		return survey.Findings, errs.New(errs.CatalogRewound, "this coordinator has just begun to lead, and nodes that it does not know may be on their way (%s); ask again in %s",
			a.spoken(), left.Round(time.Second))
	}
	spoil(survey, acceptLoss)
	if err := a.repairer().Repair(ctx, t.epoch, survey); err != nil {
		return survey.Findings, err
	}
	left := slices.ContainsFunc(survey.Findings, func(f repair.Finding) bool { return !f.Repaired && f.Difference != repair.Unknown })
	if left && !acceptLoss {
		return survey.Findings, errs.New(errs.CatalogRewound, "some of what the catalog lost could not be put back; look at it with \"dormouse admin catalog verify\", then go on without with \"dormouse admin catalog repair --accept-loss\"")
	}
	if now, _ := a.store.Generation(); now != generation {
		return survey.Findings, errs.New(errs.StoreUnavailable, "the catalog's server was replaced during the repair, which begins again; ask again")
	}
	fault.At("catalog.resume.before")
	if err := a.store.Resume(ctx, t.epoch); err != nil {
		return survey.Findings, err // CATALOG_REWOUND: it came back older once more, and the repair begins again
	}
	fault.At("catalog.resume.after")
	a.metrics.repairs.Inc()
	a.log.Warn("the catalog is in service again", "differences", len(survey.Findings), "journal_entries", survey.Entries)
	return survey.Findings, nil
}

// spoil is for the variants that the robustness suite has to catch, and empty in a release.
func spoil(s *repair.Survey, acceptLoss bool) {
	if !mutant.Enabled || !acceptLoss {
		return
	}
	s.Findings = slices.DeleteFunc(s.Findings, func(f repair.Finding) bool {
		return mutant.On(mutant.UnreportedLoss) && (f.Difference == repair.Lost || f.Difference == repair.Older) ||
			mutant.On(mutant.Resurrection) && f.Difference == repair.Undeleted
	})
}

// doubts are the reasons why more may be lost than the journals tell. The witness is the highest point that is known to
// be lost: each node must have all that concerned it up to there.
func (a *App) doubts(why catalog.Suspension, s *repair.Survey) []string {
	var all []string
	witness := why.Witness
	if witness.Seq > why.At+journal.TraceSpan {
		all = append(all, fmt.Sprintf("commits %d to %d are lost, more than the nodes keep the deletions of", why.At+1, witness.Seq))
	}
	if !a.knows(witness) {
		all = append(all, "this coordinator has not led while the catalog was whole and does not know which nodes there were, nor what concerned none")
	} else if u := a.served.Load().unplaced; u.To.Incarnation != witness.Incarnation || u.To.Seq < witness.Seq || u.After > why.At {
		all = append(all, fmt.Sprintf("of what concerned no node commits %d to %d are known, not %d to %d", u.After+1, u.To.Seq, why.At+1, witness.Seq))
	}
	for _, v := range a.registry.Views() {
		if _, away := s.Away[v.Name]; !away && (v.Journal.Incarnation != witness.Incarnation || v.Journal.Seq < witness.Seq) {
			all = append(all, fmt.Sprintf("the journal of node %s reaches to commit %d, not %d", v.Name, v.Journal.Seq, witness.Seq))
		}
	}
	if witness.IsZero() {
		all = append(all, "nobody knows how far it was")
	}
	if len(all) > 10 {
		all = append(all[:10], fmt.Sprintf("and %d more", len(all)-10))
	}
	return all
}

// spoken says which nodes have come in this term.
func (a *App) spoken() string {
	var names []string
	for _, v := range a.registry.Views() {
		if v.Online {
			names = append(names, v.Name)
		}
	}
	switch n := len(names); {
	case n == 0:
		return "none has come yet"
	case n > 10:
		return fmt.Sprintf("%s and %d more have come", strings.Join(names[:10], ", "), n-10)
	}
	return strings.Join(names, ", ") + " came, and no other yet"
}

func (a *App) repairer() *repair.Repairer {
	r := &repair.Repairer{Store: a.store, Nodes: a.pool, Log: a.log}
	if served := a.served.Load(); served != nil {
		r.Unplaced = served.unplaced.Entries
	}
	return r
}

// knownNodes are those of the catalog, those that came by themselves, and those that this process knew before: a catalog that
// came back older may have forgotten some.
func (a *App) knownNodes() []repair.Node {
	online := make(map[string]bool)
	if served := a.served.Load(); served != nil {
		for name := range served.nodes {
			online[name] = false
		}
	}
	for _, v := range a.registry.Views() {
		online[v.Name] = v.Online
	}
	var all []repair.Node
	for _, name := range slices.Sorted(maps.Keys(online)) {
		all = append(all, repair.Node{Name: name, Online: online[name]})
	}
	return all
}

// keeper answers what operators ask of the catalog.
type keeper struct{ *App }

var _ api.Catalog = keeper{}

// Status implements api.Catalog.
func (k keeper) Status(ctx context.Context) (api.CatalogStatus, error) {
	st, err := k.store.Status(ctx)
	if err != nil {
		return api.CatalogStatus{}, err
	}
	h, err := k.store.History(ctx)
	if err != nil {
		return api.CatalogStatus{}, err
	}
	if k.inForce.Load() == nil {
		return api.CatalogStatus{}, notLeading()
	}
	q := k.queue.Load()
	out := api.CatalogStatus{Status: st, Head: h.Head, Waiting: q.Waiting, Queued: q.Queued, Unknown: q.Unknown, Nodes: k.registry.Views()}
	if e := k.engine.Load(); e != nil {
		out.Deletions = e.Deletions()
	}
	out.Removed, out.Held, out.Unread = k.registry.Orphans()
	return out, nil
}

// Repair implements api.Catalog.
func (k keeper) Repair(ctx context.Context, acceptLoss bool, without []string) ([]repair.Finding, error) {
	return k.repair(ctx, acceptLoss, without)
}

// maxCompact bounds what one call of an operator forgets.
const maxCompact = 20 * catalog.MaxPage

// Compact implements api.Catalog.
func (k keeper) Compact(ctx context.Context) (forgotten int, more bool, err error) {
	if k.inForce.Load() == nil {
		return 0, false, notLeading()
	}
	for forgotten < maxCompact {
		n, err := k.store.Compact(ctx, catalog.MaxPage)
		if forgotten += n; err != nil || n < catalog.MaxPage {
			return forgotten, false, err
		}
	}
	return forgotten, true, nil
}

// Verify implements api.Catalog.
func (k keeper) Verify(ctx context.Context, found func(repair.Finding) error) (records int, err error) {
	if k.inForce.Load() == nil {
		return 0, notLeading()
	}
	look := k.repairer()
	look.Light = true
	survey, err := look.Survey(ctx, k.knownNodes())
	if err != nil {
		return 0, err
	}
	for _, f := range survey.Findings {
		if err := found(f); err != nil {
			return 0, err
		}
	}
	for _, n := range k.knownNodes() {
		if _, away := survey.Away[n.Name]; away {
			continue
		}
		seen, err := look.Verify(ctx, n.Name, found)
		if err != nil {
			return records, err
		}
		records += seen
	}
	return records, nil
}
