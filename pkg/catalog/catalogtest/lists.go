package catalogtest

import (
	"bytes"
	"context"
	"slices"
	"testing"
	"time"

	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/fence"
)

func (f *Fixture) all(q catalog.Query) []string {
	f.T.Helper()
	var found []string
	for {
		page, err := f.List(f.Ctx, q)
		if err != nil {
			f.T.Fatal(err)
		}
		if q.PageSize > 0 && len(page.Records) > q.PageSize {
			f.T.Fatalf("a page of %d, asked for %d", len(page.Records), q.PageSize)
		}
		found = append(found, uids(page.Records)...)
		if q.After = page.Next; q.After == "" {
			return found
		}
	}
}

func testLists(t *testing.T, f *Fixture) {
	var want, onOne, running, runningOnOne []string
	var puts []catalog.Put
	for i := range 450 {
		p := Create(Sandbox(uidN("s", (i*7)%450)))
		n := (i * 7) % 450
		p.Record.Node = []string{"n1", "n2", ""}[n%3]
		p.Record.Phase = []string{"Running", "Stopped", "Deleting", "Failed"}[n%4]
		puts = append(puts, p)
	}
	f.Must(puts...)
	other := Create(catalog.Key{Tenant: "other", Kind: catalog.KindSandbox, UID: "s-0000"})
	other.Record.Node = "n1"
	f.Must(other, Create(Volume("v")))
	for i := range 450 {
		uid := uidN("s", i)
		want = append(want, uid)
		if i%3 == 0 {
			onOne = append(onOne, uid)
		}
		if i%4 == 0 {
			running = append(running, uid)
		}
		if i%12 == 0 {
			runningOnOne = append(runningOnOne, uid)
		}
	}
	for _, size := range []int{0, 1, 7, 450, 500} {
		if size == 1 && testing.Short() {
			continue
		}
		q := catalog.Query{Kind: catalog.KindSandbox, Tenant: "acme", PageSize: size}
		same(t, "all of a tenant", f.all(q), want)
		q.Node = "n1"
		same(t, "of a node", f.all(q), onOne)
		q.Phases = []string{"Running"}
		same(t, "of a node and phase", f.all(q), runningOnOne)
		q.Node = ""
		same(t, "of a phase", f.all(q), running)
	}
	same(t, "all tenants", f.all(catalog.Query{Kind: catalog.KindSandbox}), append([]string{"s-0000"}, want...))
	same(t, "none", f.all(catalog.Query{Kind: catalog.KindSnapshot}), []string(nil))

	// Moves between nodes and deletions show at once; what is listed stays in place under changes.
	q := catalog.Query{Kind: catalog.KindSandbox, Tenant: "acme", PageSize: 100}
	page, err := f.List(f.Ctx, q)
	if err != nil {
		t.Fatal(err)
	}
	moved := Create(Sandbox("s-0003"))
	moved.ExpectRevision, moved.Record.Node = 1, "n2"
	f.Must(moved, Create(Sandbox("s-0003a")), Create(Sandbox("s-0449a")))
	if r := f.One(catalog.Commit{Deletes: []catalog.Delete{{Key: Sandbox("s-0000"), ExpectRevision: 1}}}); r.Err != nil {
		t.Fatal(r.Err)
	}
	q.After = page.Next
	same(t, "the rest", append(uids(page.Records), f.all(q)...), append(slices.Clone(want), "s-0449a"))
	same(t, "of the node", f.all(catalog.Query{Kind: catalog.KindSandbox, Tenant: "acme", Node: "n1"}), onOne[2:])

	for _, bad := range []catalog.Query{{}, {Kind: "sandbox", PageSize: 501}, {Kind: "sandbox", PageSize: -1}, {Kind: "sandbox", Tenant: "a b"}} {
		if _, err := f.List(f.Ctx, bad); !errs.Has(err, errs.InvalidField) {
			t.Errorf("%+v: %v", bad, err)
		}
	}
	for i := range 30 { // a page ends before it is too large for a frame
		p := Create(Snapshot(uidN("p", i)))
		p.Record.Body = bytes.Repeat([]byte("x"), 200<<10)
		f.Must(p)
	}
	size := 0
	page, err = f.List(f.Ctx, catalog.Query{Kind: catalog.KindSnapshot, PageSize: 500})
	for _, r := range page.Records {
		size += len(r.Body)
	}
	if err != nil || page.Next == "" && size > catalog.MaxPageBytes {
		t.Errorf("a page of %d bytes, %v", size, err)
	}
	if n := len(f.all(catalog.Query{Kind: catalog.KindSnapshot})); n != 30 {
		t.Errorf("%d large records listed", n)
	}
}

func testChanges(t *testing.T, f *Fixture) {
	put := Create(Sandbox("s"))
	put.Record.Node = "n1"
	f.Must(put, Create(Volume("v")))
	f.One(catalog.Commit{}) // applied, changes nothing, takes a sequence
	if r := f.One(catalog.Commit{Deletes: []catalog.Delete{{Key: Sandbox("s"), ExpectRevision: 1}}}); r.Err != nil {
		t.Fatal(r.Err)
	}
	want := []catalog.Change{
		{Seq: 1, Items: []catalog.ChangedRecord{{Key: Sandbox("s"), Revision: 1, Phase: "Ready", Node: "n1"}, {Key: Volume("v"), Revision: 1, Phase: "Ready"}}},
		{Seq: 2},
		{Seq: 3, Items: []catalog.ChangedRecord{{Key: Sandbox("s"), Revision: 1, Node: "n1", Deleted: true}}},
	}
	for after, limit := 0, 2; after <= 3; after++ {
		got, err := f.Changes(f.Ctx, uint64(after), limit, 0)
		if err != nil {
			t.Fatal(err)
		}
		for i := range got {
			if got[i].Digest == "" {
				t.Errorf("change %d has no digest", got[i].Seq)
			}
			got[i].Digest = ""
		}
		same(t, "changes", got, want[after:min(after+limit, 3)])
	}
	if _, err := f.Changes(f.Ctx, 4, 0, time.Hour); !errs.Has(err, errs.ResumeTooOld) {
		t.Errorf("from the future: %v", err)
	}
	if got, err := f.Changes(f.Ctx, 3, 0, time.Millisecond); err != nil || len(got) != 0 {
		t.Errorf("nothing new: %v, %v", got, err)
	}
	type answer struct {
		changes []catalog.Change
		err     error
	}
	waiting := make(chan answer, 1)
	go func() {
		c, err := f.Changes(f.Ctx, 3, 0, time.Minute)
		waiting <- answer{c, err}
	}()
	f.Must(Create(Sandbox("late")))
	if a := <-waiting; a.err != nil || len(a.changes) != 1 || a.changes[0].Seq != 4 {
		t.Errorf("a waiting reader got %+v", a)
	}
	ctx, cancel := context.WithCancel(f.Ctx)
	go func() {
		_, err := f.Changes(ctx, 4, 0, time.Hour)
		waiting <- answer{nil, err}
	}()
	cancel()
	if a := <-waiting; a.err == nil {
		t.Error("a cancelled reader got no error")
	}
}

func testChangesTrimmed(t *testing.T, f *Fixture) {
	const n = 1000 // a log may be kept longer than asked, by some hundred entries
	for range n / 100 {
		batch := make([]catalog.Commit, 100)
		for i := range batch {
			batch[i].Owner = f.Owner
		}
		if _, err := f.Commit(f.Ctx, batch); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := f.Changes(f.Ctx, 1, 0, 0); !errs.Has(err, errs.ResumeTooOld) {
		t.Errorf("a trimmed log: %v", err)
	}
	if got, err := f.Changes(f.Ctx, n-10, 0, 0); err != nil || len(got) != 10 || got[0].Seq != n-9 {
		t.Errorf("the last ten: %v, %v", got, err)
	}
}

func testLead(t *testing.T, f *Fixture) {
	mine := f.Owner.Coordinator
	if _, granted, err := f.Lead(f.Ctx, catalog.Claim{Holder: "rival", TTL: time.Minute}); granted || err != nil {
		t.Fatalf("a rival under a living lease: %v %v", granted, err)
	}
	// Shorter than before, and long enough to be looked at; then so short that it ends by itself.
	for _, ttl := range []time.Duration{50 * time.Second, 50 * time.Millisecond} {
		again, granted, err := f.Lead(f.Ctx, catalog.Claim{Holder: "tester", TTL: ttl})
		if err != nil || !granted || again.Epoch != mine {
			t.Fatalf("renewal: %+v %v %v", again, granted, err)
		}
		if ttl < time.Second {
			continue
		}
		seen, err := f.Leader(f.Ctx)
		if err != nil || seen.Holder != "tester" || seen.Epoch != mine || seen.Left > ttl {
			t.Errorf("Leader: %+v %v", seen, err)
		}
	}
	var won catalog.Lease
	Eventually(t, "a rival takes over", func() bool {
		lease, granted, err := f.Lead(f.Ctx, catalog.Claim{Holder: "rival", TTL: time.Minute})
		won = lease
		return err == nil && granted
	})
	if won.Epoch <= mine {
		t.Fatalf("epoch %d after %d", won.Epoch, mine)
	}
	f.Refused(errs.Fenced, catalog.Commit{Puts: []catalog.Put{Create(Sandbox("s"))}})
	if err := f.Release(f.Ctx, "tester", mine); !errs.Has(err, errs.Fenced) {
		t.Errorf("release of a lost lease: %v", err)
	}
	f.Owner.Coordinator = won.Epoch
	f.Must(Create(Sandbox("s")))
	if err := f.Release(f.Ctx, "rival", won.Epoch); err != nil {
		t.Fatal(err)
	}
	f.Refused(errs.Fenced, catalog.Commit{Puts: []catalog.Put{Create(Sandbox("t"))}})
	next, granted, err := f.Lead(f.Ctx, catalog.Claim{Holder: "tester", TTL: time.Minute})
	if err != nil || !granted || next.Epoch <= won.Epoch {
		t.Errorf("after a release: %+v %v %v", next, granted, err)
	}
	f.refusesBadClaims()
}

func (f *Fixture) refusesBadClaims() {
	f.T.Helper()
	for _, bad := range []catalog.Claim{{TTL: time.Second}, {Holder: "x"}, {Holder: "x", TTL: time.Second, Above: catalog.MaxCounter + 1}} {
		if _, _, err := f.Lead(f.Ctx, bad); !errs.Has(err, errs.InvalidField) {
			f.T.Errorf("%+v: %v", bad, err)
		}
	}
}

func testSessions(t *testing.T, f *Fixture) {
	if e, err := f.SessionEpoch(f.Ctx, "n1"); e != 0 || err != nil {
		t.Errorf("before any: %d, %v", e, err)
	}
	last := fence.Epoch(0)
	for _, above := range []fence.Epoch{0, 0, 10, 3} {
		e, err := f.OpenSession(f.Ctx, f.Owner.Coordinator, "n1", above)
		if err != nil || e <= last || e <= above {
			t.Fatalf("session %d after %d, above %d: %v", e, last, above, err)
		}
		if last, err = f.SessionEpoch(f.Ctx, "n1"); err != nil || last != e {
			t.Errorf("in force %d, %v", last, err)
		}
	}
	if _, err := f.OpenSession(f.Ctx, f.Owner.Coordinator+1, "n1", 0); !errs.Has(err, errs.Fenced) {
		t.Errorf("a session under another epoch: %v", err)
	}
}

func testClosed(t *testing.T, f *Fixture) {
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Errorf("a second Close: %v", err)
	}
	if _, err := f.Get(f.Ctx, Sandbox("s")); !errs.Has(err, errs.ShuttingDown) {
		t.Errorf("Get: %v", err)
	}
	if _, err := f.Commit(f.Ctx, []catalog.Commit{{Owner: f.Owner}}); !errs.Has(err, errs.ShuttingDown) || !errs.NotStartedFor(err) {
		t.Errorf("Commit: %v", err)
	}
}
