package catalogtest

import (
	"strings"
	"testing"

	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/errs"
)

func (f *Fixture) delta(after uint64, limit int) catalog.Delta {
	f.T.Helper()
	d, err := f.Delta(f.Ctx, after, limit)
	if err != nil {
		f.T.Fatal(err)
	}
	return d
}

func testDelta(t *testing.T, f *Fixture) {
	if d := f.delta(0, 10); d.Upto != 0 || d.Head.Seq != 0 || len(d.Records) != 0 {
		t.Errorf("of an empty catalog: %+v", d)
	}
	f.Must(Create(Volume("v")))
	f.Must(Create(Sandbox("a"), To(Volume("v"), catalog.Exclusive)), Create(Sandbox("b")))
	change := Create(Sandbox("a"))
	change.ExpectRevision = 1
	f.Must(change)
	if r := f.One(catalog.Commit{Deletes: []catalog.Delete{{Key: Sandbox("b"), ExpectRevision: 1}}}); r.Err != nil {
		t.Fatal(r.Err)
	}
	head := f.history().Head

	// All of it, as it is now, each record once.
	d := f.delta(0, 10)
	if d.Head != head || d.Upto != head.Seq {
		t.Errorf("up to %d at %+v, want %+v", d.Upto, d.Head, head)
	}
	same(t, "records", d.Records, []catalog.Record{f.Read(Volume("v")), f.Read(Sandbox("a"))})
	same(t, "gone", d.Gone, []catalog.Key{Sandbox("b")})

	// A part of it.
	if d := f.delta(0, 1); d.Upto != 1 || len(d.Records) != 1 || d.Head != head {
		t.Errorf("the first commit: %+v", d)
	}
	if d := f.delta(head.Seq-1, 10); len(d.Records) != 0 || len(d.Gone) != 1 {
		t.Errorf("the last commit: %+v", d)
	}
	if d := f.delta(head.Seq, 10); d.Upto != head.Seq || len(d.Records)+len(d.Gone) != 0 {
		t.Errorf("nothing: %+v", d)
	}
	if _, err := f.Delta(f.Ctx, head.Seq+1, 10); !errs.Has(err, errs.ResumeTooOld) {
		t.Errorf("the future: %v", err)
	}
	if _, err := f.Delta(f.Ctx, 0, catalog.MaxPage+1); !errs.Has(err, errs.InvalidField) {
		t.Errorf("too large a limit: %v", err)
	}

	// It ends with the commit that has filled it.
	large := make([]byte, catalog.MaxBody)
	for i := range large {
		large[i] = 'x'
	}
	for i := range 2*catalog.DeltaBytes/catalog.MaxBody + 1 {
		put := Create(Sandbox(uidN("large", i)))
		put.Record.Body = large
		f.Must(put)
	}
	if d := f.delta(head.Seq, 100); len(d.Records) != catalog.DeltaBytes/catalog.MaxBody || d.Upto == d.Head.Seq {
		t.Errorf("%d large records, up to %d of %d", len(d.Records), d.Upto, d.Head.Seq)
	}
}

func testRestore(t *testing.T, f *Fixture) {
	own := f.history().Head.Incarnation
	point := catalog.Point{Incarnation: "of the backup", Seq: 100, Digest: "d"}
	r := catalog.Restore{ID: strings.Repeat("a", 64), By: "c1", Point: point, Ancestors: map[string]uint64{"older": 40, own: 5}}
	begin := func(r catalog.Restore) error { return f.BeginRestore(f.Ctx, f.Owner.Coordinator, r) }

	f.Must(Create(Sandbox("a")))
	if err := begin(r); !errs.Has(err, errs.CatalogNotEmpty) || errs.From(err).Details["kind"] != "sandbox" {
		t.Errorf("into a catalog that is not empty: %v", err)
	}
	if r := f.One(catalog.Commit{Deletes: []catalog.Delete{{Key: Sandbox("a"), ExpectRevision: 1}}}); r.Err != nil {
		t.Fatal(r.Err)
	}
	node := catalog.Key{Tenant: catalog.SystemTenant, Kind: catalog.KindNode, UID: "n1"}
	f.Must(Create(node)) // comes by itself
	if err := f.BeginRestore(f.Ctx, f.Owner.Coordinator+1, r); !errs.Has(err, errs.Fenced) {
		t.Errorf("by another than the leader: %v", err)
	}
	if err := begin(catalog.Restore{ID: r.ID}); !errs.Has(err, errs.InvalidField) {
		t.Errorf("without a point: %v", err)
	}
	if err := f.EndRestore(f.Ctx, f.Owner.Coordinator, r.ID); !errs.Has(err, errs.WrongPhase) {
		t.Errorf("ended before it began: %v", err)
	}
	for range 2 {
		if err := begin(r); err != nil {
			t.Fatal(err)
		}
	}
	other := r
	other.ID = strings.Repeat("b", 64)
	if err := begin(other); !errs.Has(err, errs.RestoreUnfinished) {
		t.Errorf("another backup: %v", err)
	}
	restoring(t, f, r)

	put := Create(Sandbox("b"))
	put.Revision = 7
	if r := f.One(catalog.Commit{Repair: true, Puts: []catalog.Put{put}}); r.Err != nil {
		t.Fatal(r.Err)
	}
	for range 2 {
		if err := f.EndRestore(f.Ctx, f.Owner.Coordinator, r.ID); err != nil {
			t.Fatal(err)
		}
	}
	if err := begin(r); err != nil {
		t.Errorf("the beginning, told again after the end: %v", err)
	}
	st, err := f.Status(f.Ctx)
	if err != nil || st.Restored != r.ID || st.Suspended == nil || st.Suspended.Restoring != "" || st.Suspended.At != point.Seq {
		t.Errorf("after its end: %+v, %v", st.Suspended, err)
	}
	servedAgain(t, f, r, own)
}

// servedAgain takes the restored catalog into service: the backup's history is its past.
func servedAgain(t *testing.T, f *Fixture, r catalog.Restore, own string) {
	t.Helper()
	if err := f.Resume(f.Ctx, f.Owner.Coordinator); err != nil {
		t.Fatal(err)
	}
	f.related(r.Point, catalog.Part)
	f.related(catalog.Point{Incarnation: "older", Seq: 40}, catalog.Part)
	if now := f.history().Head; now.Incarnation == own || now.Incarnation == r.Point.Incarnation || now.Seq <= r.Point.Seq {
		t.Errorf("it goes on at %+v", now)
	}
	f.Must(Create(Sandbox("c")))
	other := r
	other.ID = strings.Repeat("c", 64)
	if err := f.BeginRestore(f.Ctx, f.Owner.Coordinator, other); !errs.Has(err, errs.CatalogNotEmpty) {
		t.Errorf("again, into what is there: %v", err)
	}
	if err := f.EndRestore(f.Ctx, f.Owner.Coordinator, r.ID); err != nil {
		t.Errorf("the end, told again: %v", err)
	}
}

// restoring is what holds between the beginning and the end.
func restoring(t *testing.T, f *Fixture, r catalog.Restore) {
	t.Helper()
	st, err := f.Status(f.Ctx)
	if err != nil || st.Suspended == nil || st.Suspended.Restoring != r.ID || st.Suspended.Witness != r.Point || st.Seq <= r.Point.Seq {
		t.Fatalf("status %+v %+v, %v", st, st.Suspended, err)
	}
	if got, err := f.Ancestors(f.Ctx); err != nil || len(got) != 2 || got["older"] != 40 || got[r.Point.Incarnation] != r.Point.Seq {
		t.Errorf("ancestors %v, %v", got, err)
	}
	later := r.Point
	later.Seq++
	f.related(r.Point, catalog.Part)
	f.related(later, catalog.Lost)
	f.Refused(errs.CatalogRewound, catalog.Commit{Puts: []catalog.Put{Create(Sandbox("x"))}})
	if err := f.Resume(f.Ctx, f.Owner.Coordinator); !errs.Has(err, errs.RestoreUnfinished) {
		t.Errorf("taken into service with half of the records: %v", err)
	}
	// A node that knows more is noted, and changes nothing of that.
	if err := f.Suspend(f.Ctx, f.Owner.Coordinator, catalog.Suspension{By: "n1", Witness: later}); err != nil {
		t.Fatal(err)
	}
	if st, err := f.Status(f.Ctx); err != nil || st.Suspended.Restoring != r.ID || st.Suspended.Witness != later {
		t.Errorf("with a witness: %+v, %v", st.Suspended, err)
	}
}
