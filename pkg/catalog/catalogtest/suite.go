// Package catalogtest is the one conformance suite of all catalog stores.
package catalogtest

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/fence"
)

// Factory opens an empty catalog of the given retention; the test's cleanup closes it.
type Factory func(t *testing.T, r catalog.Retention) catalog.Store

// Run runs every test of the suite, each on an empty catalog.
func Run(t *testing.T, open Factory) {
	for _, c := range []struct {
		name string
		test func(*testing.T, *Fixture)
	}{
		{"Records", testRecords},
		{"Revisions", testRevisions},
		{"C02_Checks", testChecks},
		{"C02_Fences", testFences},
		{"C02_BatchHasAResultForEach", testBatch},
		{"C09_ReferencesDoNotConflict", testManyReferences},
		{"C20_StaleSessionChangesNothing", testStaleSession},
		{"C24_ReplayGivesTheSameResult", testReplay},
		{"C25_OtherBodyIsRefused", testBodyMismatch},
		{"C26_ReferencedIsNotDeleted", testReferenced},
		{"C27_StaleUID", testStaleUID},
		{"Names", testNames},
		{"Attachments", testAttachments},
		{"Sealed", testSealed},
		{"SameCommit", testSameCommit},
		{"Settle", testSettle},
		{"OldOperation", testOldOperation},
		{"Malformed", testMalformed},
		{"Lists", testLists},
		{"Changes", testChanges},
		{"ChangesTrimmed", testChangesTrimmed},
		{"History", testHistory},
		{"C21_Suspension", testSuspension},
		{"C21_RepairGivesRevisions", testRepair},
		{"Delta", testDelta},
		{"Restore", testRestore},
		{"Lead", testLead},
		{"Sessions", testSessions},
		{"Closed", testClosed},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := catalog.Retention{}
			if c.name == "ChangesTrimmed" {
				r.Changes = 10
			}
			c.test(t, NewFixture(t, open(t, r)))
		})
	}
	t.Run("C28_Tombstones", func(t *testing.T) { testTombstones(t, open) })
	t.Run("FutureOperation", func(t *testing.T) {
		testFutureOperation(t, NewFixture(t, open(t, catalog.Retention{Receipts: 100 * time.Millisecond})))
	})
	t.Run("ReceiptsExpire", func(t *testing.T) {
		testReceiptsExpire(t, NewFixture(t, open(t, catalog.Retention{Receipts: 100 * time.Millisecond})))
	})
}

// Fixture is a store with a leader.
type Fixture struct {
	catalog.Store
	T     *testing.T
	Ctx   context.Context
	Owner fence.Owner
}

// NewFixture takes the lead in the store.
func NewFixture(t *testing.T, s catalog.Store) *Fixture {
	t.Helper()
	f := &Fixture{Store: s, T: t, Ctx: t.Context()}
	lease, mine, err := s.Lead(f.Ctx, catalog.Claim{Holder: "tester", TTL: time.Minute})
	if err != nil || !mine {
		t.Fatalf("Lead: %v, mine %v", err, mine)
	}
	f.Owner = fence.Owner{Coordinator: lease.Epoch}
	return f
}

// Sandbox makes a key in tenant acme.
func Sandbox(uid string) catalog.Key {
	return catalog.Key{Tenant: "acme", Kind: catalog.KindSandbox, UID: uid}
}

// Snapshot makes a key in tenant acme.
func Snapshot(uid string) catalog.Key {
	return catalog.Key{Tenant: "acme", Kind: catalog.KindSnapshot, UID: uid}
}

// Volume makes a key in tenant acme.
func Volume(uid string) catalog.Key {
	return catalog.Key{Tenant: "acme", Kind: catalog.KindVolume, UID: uid}
}

// Create makes a put of a new record.
func Create(key catalog.Key, refs ...catalog.Ref) catalog.Put {
	return catalog.Put{Record: catalog.Record{Key: key, Phase: "Ready", Refs: refs, Body: []byte(`{"of":"` + key.UID + `"}`)}}
}

// To makes a reference.
func To(target catalog.Key, mode catalog.RefMode) catalog.Ref {
	return catalog.Ref{Target: target, Mode: mode}
}

// One commits one commit as the leader.
func (f *Fixture) One(c catalog.Commit) catalog.Result {
	f.T.Helper()
	if c.Owner == (fence.Owner{}) {
		c.Owner = f.Owner
	}
	results, err := f.Commit(f.Ctx, []catalog.Commit{c})
	if err != nil {
		f.T.Fatalf("Commit: %v", err)
	}
	return results[0]
}

// Must commits puts that must be accepted.
func (f *Fixture) Must(puts ...catalog.Put) catalog.Result {
	f.T.Helper()
	r := f.One(catalog.Commit{Puts: puts})
	if r.Err != nil {
		f.T.Fatalf("commit refused: %v %v", r.Err, r.Err.Details)
	}
	return r
}

// Refused commits what must be refused, checks that nothing changed, and returns the
// result, whose Err is the refusal.
func (f *Fixture) Refused(reason errs.Reason, c catalog.Commit) catalog.Result {
	f.T.Helper()
	before, err := f.Seq(f.Ctx)
	if err != nil {
		f.T.Fatal(err)
	}
	r := f.One(c)
	if r.Err == nil || r.Err.Reason != reason {
		f.T.Fatalf("got %v, want %s", r.Err, reason)
	}
	if r.Err.Outcome != errs.NotStarted {
		f.T.Errorf("%s has outcome %s", reason, r.Err.Outcome)
	}
	if after, err := f.Seq(f.Ctx); err != nil || after != before {
		f.T.Errorf("a refused commit moved the sequence from %d to %d (%v)", before, after, err)
	}
	for _, p := range c.Puts {
		if p.ExpectRevision == 0 && reason != errs.StaleRevision {
			f.Gone(p.Record.Key)
		}
	}
	return r
}

// Read gets a record that must be there.
func (f *Fixture) Read(key catalog.Key) catalog.Record {
	f.T.Helper()
	r, err := f.Get(f.Ctx, key)
	if err != nil {
		f.T.Fatalf("Get %s: %v", key, err)
	}
	return r
}

// Gone checks that there is no such record.
func (f *Fixture) Gone(key catalog.Key) {
	f.T.Helper()
	if _, err := f.Get(f.Ctx, key); !errs.Has(err, errs.ObjectNotFound) {
		f.T.Errorf("Get %s: %v, want OBJECT_NOT_FOUND", key, err)
	}
}

// Details checks the details of a refusal.
func Details(t *testing.T, r catalog.Result, want map[string]string) {
	t.Helper()
	if !maps.Equal(r.Err.Details, want) {
		t.Errorf("details %v, want %v", r.Err.Details, want)
	}
}

func same(t *testing.T, what string, got, want any) {
	t.Helper()
	if d := cmp.Diff(want, got, cmpopts.EquateEmpty()); d != "" {
		t.Errorf("%s (-want +got):\n%s", what, d)
	}
}

// Eventually polls until the condition holds, or a minute has passed: a bound for what hangs, not for what is slow.
func Eventually(t *testing.T, what string, holds func() bool) {
	t.Helper()
	ctx, cancel := context.WithTimeoutCause(t.Context(), time.Minute, errors.New("not within a minute"))
	defer cancel()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !holds() {
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatalf("%s: %v", what, context.Cause(ctx))
		}
	}
}

func uids(records []catalog.Record) []string {
	var all []string
	for _, r := range records {
		all = append(all, r.UID)
	}
	return all
}

func uidN(prefix string, n int) string { return fmt.Sprintf("%s-%04d", prefix, n) }
