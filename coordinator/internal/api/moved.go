package api

import (
	"context"

	"github.com/dormouse-run/dormouse/coordinator/internal/auth"
	"github.com/dormouse-run/dormouse/coordinator/internal/records"
	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
)

// maxSearched bounds how many records of a tenant are looked through for where a sandbox went.
const maxSearched = 2000

// moved makes "there is no such sandbox", or that it is being deleted, of a stream's beginning SANDBOX_MOVED, where exactly one
// living sandbox was restored from a snapshot of it: the processes that the caller was at go on there. Who
// asks for what never was pays one read; anything that is not certain leaves the error as it is.
func (s *Server) moved(ctx context.Context, u string, err error) error {
	e := errs.From(err)
	deleting := errs.Has(err, errs.WrongPhase) && e.Details["phase"] == string(sandbox.Deleting)
	if e == nil || e.Details["uid"] != u || e.Reason != errs.ObjectNotFound && !deleting {
		return err
	}
	id, aerr := auth.From(ctx)
	if aerr != nil {
		return err
	}
	if _, terr := s.cfg.Store.Tombstone(ctx, records.SandboxKey(id.Tenant, u)); terr != nil && !deleting {
		return err
	}
	snapshots := map[string]bool{}
	if s.search(ctx, id.Tenant, catalog.KindSnapshot, func(r catalog.Record) error {
		snap, err := records.SnapshotOf(r)
		if err == nil && snap.SourceSandboxUID == u {
			snapshots[snap.UID] = true
		}
		return err
	}) != nil || len(snapshots) == 0 {
		return err
	}
	var found []string
	if s.search(ctx, id.Tenant, catalog.KindSandbox, func(r catalog.Record) error {
		sb, err := records.SandboxOf(r)
		if err == nil && snapshots[sb.Status.RestoredFrom] {
			found = append(found, sb.UID)
		}
		return err
	}) != nil || len(found) != 1 {
		return err
	}
	return errs.New(errs.SandboxMoved, "sandbox %s is gone; %s was restored from it, and its processes go on there", u, found[0]).
		With("uid", u).With("new_uid", found[0])
}

// search looks through the tenant's records of a kind. That there are more than are looked through is an error.
func (s *Server) search(ctx context.Context, tenant string, kind catalog.Kind, see func(catalog.Record) error) error {
	q := catalog.Query{Tenant: tenant, Kind: kind, PageSize: catalog.MaxPage}
	for seen := 0; ; {
		page, err := s.cfg.Store.List(ctx, q)
		if err != nil {
			return err
		}
		for _, r := range page.Records {
			if err := see(r); err != nil {
				return err
			}
		}
		if seen += max(len(page.Records), 1); page.Next == "" {
			return nil
		} else if seen >= maxSearched {
			return errs.New(errs.TooMany, "more than %d records", maxSearched)
		}
		q.After = page.Next
	}
}
