package catalogtest

import (
	"bytes"
	"context"
	"strings"
	"testing"
	"time"

	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/fence"
)

func testRecords(t *testing.T, f *Fixture) {
	f.Must(Create(Volume("v")))
	want := catalog.Record{
		Key: Sandbox("s"), Name: "größe x", Phase: "Running", Node: "n1", Identity: "sha256:1",
		Refs: []catalog.Ref{To(Volume("v"), catalog.Shared)}, Body: []byte("\x00\xff\n body \r\n"),
	}
	r := f.Must(catalog.Put{Record: want})
	if r.Seq != 2 || r.Revisions[want.Key] != 1 || len(r.Revisions) != 1 {
		t.Errorf("result %+v", r)
	}
	got := f.Read(want.Key)
	if got.Created.IsZero() || !got.Created.Equal(got.Updated) || got.Created.Location() != time.UTC {
		t.Errorf("created %v, updated %v", got.Created, got.Updated)
	}
	want.Revision, want.Seq, want.Created, want.Updated = 1, 2, got.Created, got.Updated
	same(t, "record", got, want)
	byName, err := f.GetByName(f.Ctx, "acme", catalog.KindSandbox, want.Name)
	if err != nil {
		t.Fatal(err)
	}
	same(t, "record by name", byName, want)
	many, err := f.GetMany(f.Ctx, []catalog.Key{want.Key, Sandbox("absent"), Volume("v")})
	if err != nil || len(many) != 2 {
		t.Fatalf("GetMany: %v, %v", many, err)
	}
	same(t, "one of many", many[want.Key], want)
	f.Gone(catalog.Key{Tenant: "other", Kind: catalog.KindSandbox, UID: "s"})

	got.Phase, got.Node, got.Name, got.Refs, got.Body = "Stopped", "", "", nil, nil
	f.Must(catalog.Put{Record: got, ExpectRevision: 1})
	after := f.Read(want.Key)
	if after.Revision != 2 || after.Seq != 3 || !after.Created.Equal(got.Created) || after.Updated.Before(got.Updated) {
		t.Errorf("after an update: %+v", after)
	}
	got.Revision, got.Seq, got.Updated = 2, 3, after.Updated
	same(t, "updated record", after, got)
}

func testRevisions(t *testing.T, f *Fixture) {
	key := Sandbox("s")
	f.Must(Create(key))
	again := f.Refused(errs.StaleRevision, catalog.Commit{Puts: []catalog.Put{Create(key)}})
	Details(t, again, map[string]string{"uid": "s", "revision": "0", "current_revision": "1"})
	update := Create(key)
	update.ExpectRevision = 2
	f.Refused(errs.StaleRevision, catalog.Commit{Puts: []catalog.Put{update}})
	f.Refused(errs.StaleRevision, catalog.Commit{Deletes: []catalog.Delete{{Key: key, ExpectRevision: 2}}})
	absent := f.Refused(errs.StaleRevision, catalog.Commit{Deletes: []catalog.Delete{{Key: Sandbox("never"), ExpectRevision: 1}}})
	Details(t, absent, map[string]string{"uid": "never", "revision": "1", "current_revision": "0"})
	if r := f.Read(key); r.Revision != 1 {
		t.Errorf("revision %d after refusals", r.Revision)
	}
	if r := f.One(catalog.Commit{Deletes: []catalog.Delete{{Key: key, ExpectRevision: 1}}}); r.Err != nil {
		t.Fatal(r.Err)
	}
	f.Gone(key)
}

func testChecks(t *testing.T, f *Fixture) {
	key := Volume("v")
	put := Create(key)
	put.Record.Name, put.Record.Identity = "data", "sha256:1"
	f.Must(put)
	put.Record.Identity, put.ExpectRevision = "sha256:2", 1
	f.Refused(errs.IdentityMismatch, catalog.Commit{Puts: []catalog.Put{put}})

	for _, ok := range []catalog.Check{
		catalog.AtRevision(key, 1), catalog.Absent(Volume("w")), catalog.InPhase(key, "Gone", "Ready"),
		catalog.HasIdentity(key, "sha256:1"), catalog.Named(key, "data"), catalog.Unreferenced(key),
	} {
		if r := f.One(catalog.Commit{Checks: []catalog.Check{ok}}); r.Err != nil {
			t.Errorf("%s: %v", ok.Cond, r.Err)
		}
	}
	for _, c := range []struct {
		check  catalog.Check
		reason errs.Reason
	}{
		{catalog.AtRevision(key, 2), errs.StaleRevision},
		{catalog.Absent(key), errs.StaleRevision},
		{catalog.InPhase(key, "Read", "eady", "Readyish"), errs.WrongPhase},
		{catalog.InPhase(Volume("w"), "Ready"), errs.StaleUID},
		{catalog.HasIdentity(key, "sha256:9"), errs.IdentityMismatch},
		{catalog.HasIdentity(Volume("w"), ""), errs.StaleUID},
		{catalog.Named(Volume("w"), "data"), errs.StaleUID},
	} {
		// The failing check stands last and the write would be fine: nothing of it may happen.
		f.Refused(c.reason, catalog.Commit{
			ID: "op-" + string(c.reason), Tenant: "acme", Puts: []catalog.Put{Create(Sandbox("s"))},
			Checks: []catalog.Check{catalog.AtRevision(key, 1), c.check},
		})
		if _, found, err := f.Receipt(f.Ctx, "acme", "op-"+string(c.reason)); found || err != nil {
			t.Errorf("a refused commit left a receipt (%v)", err)
		}
	}
}

func testFences(t *testing.T, f *Fixture) {
	put := []catalog.Put{Create(Sandbox("s"))}
	for _, epoch := range []fence.Epoch{0, f.Owner.Coordinator - 1, f.Owner.Coordinator + 1} {
		o := fence.Owner{Coordinator: epoch, Node: "x"} // a node, so that the fixture does not fill it in
		f.Refused(errs.Fenced, catalog.Commit{Owner: o, Puts: put})
	}
	lease, mine, err := f.Lead(f.Ctx, catalog.Claim{Holder: "tester", TTL: time.Minute, Above: f.Owner.Coordinator + 5})
	if err != nil || !mine || lease.Epoch != f.Owner.Coordinator+6 {
		t.Fatalf("Lead above: %+v %v %v", lease, mine, err)
	}
	e := f.Refused(errs.Fenced, catalog.Commit{Puts: put})
	if e.Err.Details["epoch"] != "1" || e.Err.Details["current_epoch"] != "7" {
		t.Errorf("details %v", e.Err.Details)
	}
	f.Owner.Coordinator = lease.Epoch
	f.Must(put...)
}

func testStaleSession(t *testing.T, f *Fixture) {
	key := Sandbox("s")
	f.Must(Create(key))
	first, err := f.OpenSession(f.Ctx, f.Owner.Coordinator, "n1", 0)
	if err != nil {
		t.Fatal(err)
	}
	second, err := f.OpenSession(f.Ctx, f.Owner.Coordinator, "n1", 0)
	if err != nil || second <= first {
		t.Fatalf("sessions %d, %d: %v", first, second, err)
	}
	before := f.Read(key)
	update := Create(key)
	update.ExpectRevision, update.Record.Phase = 1, "Forged"
	for _, session := range []fence.Epoch{0, first, second + 1} {
		o := f.Owner
		o.Node, o.Session = "n1", session
		e := f.Refused(errs.Fenced, catalog.Commit{Owner: o, Puts: []catalog.Put{update}})
		if e.Err.Details["node"] != "n1" {
			t.Errorf("details %v", e.Err.Details)
		}
	}
	o := f.Owner
	o.Node = "never-seen"
	f.Refused(errs.Fenced, catalog.Commit{Owner: o, Puts: []catalog.Put{update}})
	same(t, "record after forged calls", f.Read(key), before)
	o.Node, o.Session = "n1", second
	if r := f.One(catalog.Commit{Owner: o, Puts: []catalog.Put{update}}); r.Err != nil {
		t.Fatal(r.Err)
	}
}

func testBatch(t *testing.T, f *Fixture) {
	stale := f.Owner
	stale.Coordinator = 99
	second := Create(Sandbox("a"))
	second.ExpectRevision, second.Record.Phase = 1, "Stopped"
	batch := []catalog.Commit{
		{Owner: f.Owner, Puts: []catalog.Put{Create(Sandbox("a"))}},
		{Owner: stale, Puts: []catalog.Put{Create(Sandbox("b"))}},
		{Owner: f.Owner, Puts: []catalog.Put{Create(Sandbox("a"))}},
		{Owner: f.Owner, Puts: []catalog.Put{second}},
		{Owner: f.Owner, Puts: []catalog.Put{Create(catalog.Key{Tenant: "a/b", Kind: "x", UID: "c"})}},
		{Owner: f.Owner, Puts: []catalog.Put{Create(Sandbox("d"))}},
	}
	results, err := f.Commit(f.Ctx, batch)
	if err != nil || len(results) != len(batch) {
		t.Fatalf("%d results, %v", len(results), err)
	}
	var got []errs.Reason
	for _, r := range results {
		if r.Err == nil {
			got = append(got, "")
		} else {
			got = append(got, r.Err.Reason)
		}
	}
	same(t, "reasons", got, []errs.Reason{"", errs.Fenced, errs.StaleRevision, "", errs.InvalidField, ""})
	same(t, "sequences", []uint64{results[0].Seq, results[3].Seq, results[5].Seq}, []uint64{1, 2, 3})
	if r := f.Read(Sandbox("a")); r.Phase != "Stopped" || r.Revision != 2 {
		t.Errorf("a is %+v", r)
	}
	if results, err := f.Commit(f.Ctx, nil); err != nil || len(results) != 0 {
		t.Errorf("an empty batch: %v, %v", results, err)
	}
	cancelled, cancel := context.WithCancel(f.Ctx)
	cancel()
	if _, err := f.Commit(cancelled, []catalog.Commit{{Owner: f.Owner, Puts: []catalog.Put{Create(Sandbox("e"))}}}); !errs.NotStartedFor(err) {
		t.Errorf("a cancelled call: %v, want outcome not_started", err)
	}
	f.Gone(Sandbox("e"))
}

func testReplay(t *testing.T, f *Fixture) {
	c := catalog.Commit{
		ID: "op/1 é", Tenant: "acme", Digest: "d1", Result: []byte("uid=\x00s\n"), Minted: time.Now(),
		Puts: []catalog.Put{Create(Sandbox("s")), Create(Snapshot("p"))},
	}
	first := f.One(c)
	if first.Err != nil || first.Replayed {
		t.Fatalf("first: %+v", first)
	}
	before, _ := f.Seq(f.Ctx)
	c.Result, c.Puts = []byte("another"), []catalog.Put{Create(Sandbox("t"))} // what a second build might make
	again := f.One(c)
	if !again.Replayed {
		t.Errorf("not replayed: %+v", again)
	}
	again.Replayed = false
	same(t, "replayed result", again, first)
	f.Gone(Sandbox("t"))
	if after, _ := f.Seq(f.Ctx); after != before {
		t.Errorf("a replay moved the sequence from %d to %d", before, after)
	}
	receipt, found, err := f.Receipt(f.Ctx, "acme", "op/1 é")
	if err != nil || !found {
		t.Fatalf("Receipt: %v %v", found, err)
	}
	same(t, "receipt", receipt, catalog.Receipt{
		Tenant: "acme", ID: "op/1 é", Digest: "d1", Seq: first.Seq, Revisions: first.Revisions, Result: first.Result, At: receipt.At,
	})
	c.Tenant = "other"
	if r := f.One(c); r.Err != nil || r.Replayed {
		t.Errorf("another tenant's operation of the same id: %+v", r)
	}
}

func testBodyMismatch(t *testing.T, f *Fixture) {
	c := catalog.Commit{ID: "op", Tenant: "acme", Digest: "d1", Puts: []catalog.Put{Create(Sandbox("s"))}}
	if r := f.One(c); r.Err != nil {
		t.Fatal(r.Err)
	}
	c.Digest, c.Puts = "d2", []catalog.Put{Create(Sandbox("t"))}
	e := f.Refused(errs.OperationBodyMismatch, c)
	if e.Err.Code != errs.Conflict || e.Err.Retry != errs.Never {
		t.Errorf("code %s, retry %s", e.Err.Code, e.Err.Retry)
	}
}

func testSettle(t *testing.T, f *Fixture) {
	c := catalog.Commit{ID: "op", Tenant: "acme", Digest: "d", Attempt: "a1", Puts: []catalog.Put{Create(Sandbox("s"))}}
	if _, found, err := f.Settle(f.Ctx, "acme", "op", "a1"); found || err != nil {
		t.Fatalf("Settle before: %v %v", found, err)
	}
	f.Refused(errs.AttemptVoid, c) // the late arrival of what was settled as never applied
	c.Attempt = "a2"
	applied := f.One(c)
	if applied.Err != nil {
		t.Fatal(applied.Err)
	}
	for _, attempt := range []string{"a2", "a1"} {
		receipt, found, err := f.Settle(f.Ctx, "acme", "op", attempt)
		if err != nil || !found || receipt.Seq != applied.Seq {
			t.Errorf("Settle %s after: %+v %v %v", attempt, receipt, found, err)
		}
	}
	c.Attempt = "a1"
	if r := f.One(c); !r.Replayed {
		t.Errorf("a void attempt of an applied operation: %+v", r)
	}
	if _, _, err := f.Settle(f.Ctx, "acme", "", "a"); !errs.Has(err, errs.InvalidField) {
		t.Errorf("Settle without an id: %v", err)
	}
}

func testOldOperation(t *testing.T, f *Fixture) {
	c := catalog.Commit{ID: "op", Tenant: "acme", Minted: time.Now().Add(-25 * time.Hour), Puts: []catalog.Put{Create(Sandbox("s"))}}
	f.Refused(errs.OperationExpired, c)
	c.Minted = time.Now().Add(-23 * time.Hour)
	if r := f.One(c); r.Err != nil {
		t.Error(r.Err)
	}
}

// testFutureOperation: the receipt of an id that was made by a clock ahead of the store's lives until the id is too
// old to run again, and one of any future is kept no longer than MaxAhead more.
func testFutureOperation(t *testing.T, f *Fixture) {
	c := catalog.Commit{ID: "ahead", Tenant: "acme", Minted: time.Now().Add(time.Hour), Puts: []catalog.Put{Create(Sandbox("s"))}}
	if r := f.One(c); r.Err != nil {
		t.Fatal(r.Err)
	}
	far := catalog.Commit{ID: "far", Tenant: "acme", Minted: time.Now().AddDate(200, 0, 0), Puts: []catalog.Put{Create(Sandbox("t"))}}
	if r := f.One(far); r.Err != nil {
		t.Fatal(r.Err)
	}
	if r := f.One(catalog.Commit{ID: "now", Tenant: "acme"}); r.Err != nil {
		t.Fatal(r.Err)
	}
	Eventually(t, "the receipt of the present expires", func() bool {
		_, found, err := f.Receipt(f.Ctx, "acme", "now")
		return err == nil && !found
	})
	if r := f.One(c); r.Err != nil || !r.Replayed {
		t.Errorf("an id of the future, asked again after the receipts' life: %+v", r)
	}
}

func testReceiptsExpire(t *testing.T, f *Fixture) {
	if r := f.One(catalog.Commit{ID: "op", Tenant: "acme"}); r.Err != nil {
		t.Fatal(r.Err)
	}
	Eventually(t, "the receipt expires", func() bool {
		_, found, err := f.Receipt(f.Ctx, "acme", "op")
		return err == nil && !found
	})
}

func testMalformed(t *testing.T, f *Fixture) {
	self := Sandbox("s")
	named := func(name string) catalog.Put {
		p := Create(self)
		p.Record.Name = name
		return p
	}
	big := Create(self)
	big.Record.Body = bytes.Repeat([]byte("x"), catalog.MaxBody+1)
	for name, c := range map[string]struct {
		commit catalog.Commit
		reason errs.Reason
	}{
		"twice":         {catalog.Commit{Puts: []catalog.Put{Create(self), Create(self)}}, errs.InvalidField},
		"control":       {catalog.Commit{Puts: []catalog.Put{named("a\nb")}}, errs.InvalidField},
		"not UTF-8":     {catalog.Commit{Puts: []catalog.Put{named("a\xff")}}, errs.InvalidField},
		"long name":     {catalog.Commit{Puts: []catalog.Put{named(strings.Repeat("x", catalog.MaxName+1))}}, errs.LimitExceeded},
		"big body":      {catalog.Commit{Puts: []catalog.Put{big}}, errs.LimitExceeded},
		"empty uid":     {catalog.Commit{Puts: []catalog.Put{Create(Sandbox(""))}}, errs.InvalidField},
		"uid":           {catalog.Commit{Puts: []catalog.Put{Create(Sandbox("a b"))}}, errs.InvalidField},
		"self":          {catalog.Commit{Puts: []catalog.Put{Create(self, To(self, catalog.Reference))}}, errs.InvalidField},
		"mode":          {catalog.Commit{Puts: []catalog.Put{Create(self, To(Volume("v"), "odd"))}}, errs.InvalidField},
		"to a deleted":  {catalog.Commit{Puts: []catalog.Put{Create(self, To(Volume("v"), catalog.Shared))}, Deletes: []catalog.Delete{{Key: Volume("v"), ExpectRevision: 1}}}, errs.InvalidField},
		"no revision":   {catalog.Commit{Deletes: []catalog.Delete{{Key: self}}}, errs.InvalidField},
		"no tenant":     {catalog.Commit{ID: "op"}, errs.InvalidField},
		"unknown check": {catalog.Commit{Checks: []catalog.Check{{Cond: "odd", Key: self}}}, errs.InvalidField},
	} {
		t.Run(name, func(t *testing.T) {
			if r := f.One(c.commit); r.Err == nil || r.Err.Reason != c.reason {
				t.Errorf("got %v, want %s", r.Err, c.reason)
			}
		})
	}
	if seq, err := f.Seq(f.Ctx); seq != 0 || err != nil {
		t.Errorf("sequence %d, %v", seq, err)
	}
	if _, err := f.Commit(f.Ctx, make([]catalog.Commit, catalog.MaxBatch+1)); !errs.Has(err, errs.LimitExceeded) {
		t.Errorf("a batch over the limit: %v", err)
	}
}
