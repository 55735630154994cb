package api

import (
	"context"
	"testing"
	"time"

	"github.com/dormouse-run/dormouse/coordinator/internal/auth"
	"github.com/dormouse-run/dormouse/coordinator/internal/records"
	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/catalog/memory"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/fence"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
	"github.com/dormouse-run/dormouse/pkg/snapshot"
	"github.com/dormouse-run/dormouse/pkg/uid"
)

// Only what is certain is said to be where a sandbox went: the one that lives and was restored from it.
func TestMoved(t *testing.T) {
	store := memory.New(memory.Options{})
	defer func() { _ = store.Close() }()
	ctx := auth.With(context.Background(), auth.Identity{Tenant: "acme"})
	lease, _, err := store.Lead(ctx, catalog.Claim{Holder: "test", TTL: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	commit := func(c catalog.Commit) {
		t.Helper()
		c.Tenant, c.Owner = "acme", fence.Owner{Coordinator: lease.Epoch}
		results, err := store.Commit(ctx, []catalog.Commit{c})
		if err != nil || results[0].Err != nil {
			t.Fatalf("%v %v", err, results)
		}
	}
	put := func(p catalog.Put, err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		commit(catalog.Commit{Puts: []catalog.Put{p}})
	}
	make1 := func(from string) string {
		t.Helper()
		s := records.Sandbox{Sandbox: sandbox.Sandbox{UID: uid.New(), Tenant: "acme", Status: sandbox.Status{Phase: sandbox.Running, RestoredFrom: from}}}
		put(s.Put())
		return s.UID
	}
	remove := func(u string) {
		t.Helper()
		commit(catalog.Commit{Deletes: []catalog.Delete{{Key: records.SandboxKey("acme", u), ExpectRevision: 1, Tombstone: true, Body: []byte("{}")}}})
	}
	s := &Server{cfg: Config{Store: store}}
	where := func(u string, err error) string {
		t.Helper()
		e := errs.From(s.moved(ctx, u, err))
		if (e.Reason == errs.SandboxMoved) != (e.Details["new_uid"] != "") {
			t.Errorf("%v %v", e, e.Details)
		}
		return e.Details["new_uid"]
	}

	source := make1("")
	snap := records.Snapshot{Snapshot: snapshot.Snapshot{UID: uid.New(), Tenant: "acme", SourceSandboxUID: source, Status: snapshot.Status{Phase: snapshot.Ready}}}
	put(snap.Put())
	remove(source)
	gone := notFound(catalog.KindSandbox, source)
	if got := where(source, gone); got != "" {
		t.Errorf("nothing was restored, and it moved to %s", got)
	}
	first := make1(snap.UID)
	if got := where(source, gone); got != first {
		t.Errorf("it moved to %q, want %s", got, first)
	}
	deleting := errs.New(errs.WrongPhase, "no").With("uid", source).With("phase", string(sandbox.Deleting))
	if got := where(source, deleting); got != first {
		t.Errorf("while it is deleted it moved to %q, want %s", got, first)
	}
	for name, err := range map[string]error{
		"another's error": notFound(catalog.KindSandbox, uid.New()), "another phase": errs.New(errs.WrongPhase, "no").With("uid", source).With("phase", "Starting"),
		"another reason": errs.New(errs.NodeAway, "away"),
	} {
		if got := where(source, err); got != "" {
			t.Errorf("%s: it moved to %s", name, got)
		}
	}
	if never := uid.New(); where(never, notFound(catalog.KindSandbox, never)) != "" {
		t.Error("what never was has moved")
	}
	second := make1(snap.UID)
	if got := where(source, gone); got != "" {
		t.Errorf("two were restored, and it moved to %s", got)
	}
	remove(second)
	if got := where(source, gone); got != first {
		t.Errorf("it moved to %q, want %s", got, first)
	}
}
