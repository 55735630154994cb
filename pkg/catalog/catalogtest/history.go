package catalogtest

import (
	"testing"

	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/errs"
)

func (f *Fixture) history() catalog.History {
	f.T.Helper()
	h, err := f.History(f.Ctx)
	if err != nil {
		f.T.Fatal(err)
	}
	return h
}

func (f *Fixture) related(p catalog.Point, want catalog.Relation) {
	f.T.Helper()
	if got, err := f.Compare(f.Ctx, p); err != nil || got != want {
		f.T.Errorf("%+v is %q (%v), want %q", p, got, err, want)
	}
}

func testHistory(t *testing.T, f *Fixture) {
	f.related(catalog.Point{}, catalog.Part)
	start := f.history()
	if start.Head.Incarnation == "" || start.Head.Seq != 0 {
		t.Errorf("an empty catalog's head is %+v", start.Head)
	}
	f.related(start.Head, catalog.Part)
	var points []catalog.Point
	for i := range 2 * catalog.MarkEvery {
		f.Must(Create(Sandbox(uidN("s", i))))
		if i%50 == 0 {
			points = append(points, f.history().Head)
		}
	}
	h := f.history()
	if h.Head.Seq != 2*catalog.MarkEvery || h.Mark.Seq != 2*catalog.MarkEvery || h.Mark.Digest != h.Head.Digest {
		t.Errorf("history %+v", h)
	}
	if seen := f.Seen(); seen != h.Head {
		t.Errorf("seen %+v, head %+v", seen, h.Head)
	}
	digests := make(map[string]bool)
	for _, p := range points {
		f.related(p, catalog.Part)
		digests[p.Digest] = true
		p.Digest = h.Head.Digest
		f.related(p, catalog.Lost)
	}
	if len(digests) != len(points) {
		t.Errorf("%d digests at %d points", len(digests), len(points))
	}
	f.Refused(errs.StaleRevision, catalog.Commit{Puts: []catalog.Put{Create(Sandbox(uidN("s", 0)))}})
	if after := f.history(); after != h {
		t.Errorf("a refused commit made history %+v of %+v", after, h)
	}
	f.related(catalog.Point{Incarnation: h.Head.Incarnation, Seq: h.Head.Seq + 1, Digest: "x"}, catalog.Lost)
	f.related(catalog.Point{Incarnation: "another", Seq: 1, Digest: "x"}, catalog.Foreign)
}

func testSuspension(t *testing.T, f *Fixture) {
	f.Must(Create(Sandbox("a")))
	head := f.history().Head
	ahead := catalog.Point{Incarnation: head.Incarnation, Seq: head.Seq + 5, Digest: "of-what-was-lost"}
	why := catalog.Suspension{By: "n1", Witness: ahead}
	if err := f.Suspend(f.Ctx, f.Owner.Coordinator+1, why); !errs.Has(err, errs.Fenced) {
		t.Errorf("suspended by another than the leader: %v", err)
	}
	for range 2 {
		if err := f.Suspend(f.Ctx, f.Owner.Coordinator, why); err != nil {
			t.Fatal(err)
		}
	}
	if err := f.Suspend(f.Ctx, f.Owner.Coordinator, catalog.Suspension{By: "n2", Witness: head}); err != nil {
		t.Fatal(err)
	}
	st, err := f.Status(f.Ctx)
	if err != nil || st.Suspended == nil || st.Suspended.By != "n1" || st.Suspended.Witness != ahead || st.Suspended.Since.IsZero() {
		t.Errorf("status %+v (%v)", st.Suspended, err)
	}
	if st.Seq <= ahead.Seq {
		t.Errorf("the sequence %d would be given out twice", st.Seq)
	}
	f.Refused(errs.CatalogRewound, catalog.Commit{Puts: []catalog.Put{Create(Sandbox("b"))}})
	f.related(ahead, catalog.Lost)
	f.related(f.history().Head, catalog.Part)
	f.related(f.Seen(), catalog.Part)
	f.Read(Sandbox("a")) // reads go on
	resumed(t, f, head, ahead)
}

// resumed takes the catalog into service again: what was known to be lost counts as its past.
func resumed(t *testing.T, f *Fixture, head, ahead catalog.Point) {
	t.Helper()
	if err := f.Resume(f.Ctx, f.Owner.Coordinator+1); !errs.Has(err, errs.Fenced) {
		t.Errorf("resumed by another than the leader: %v", err)
	}
	for range 2 {
		if err := f.Resume(f.Ctx, f.Owner.Coordinator); err != nil {
			t.Fatal(err)
		}
	}
	f.Must(Create(Sandbox("b")))
	now := f.history().Head
	if now.Incarnation == head.Incarnation || now.Seq != ahead.Seq+3 {
		t.Errorf("it goes on at %+v", now)
	}
	for _, known := range []catalog.Point{head, ahead, now} {
		f.related(known, catalog.Part)
	}
	late := ahead
	late.Seq = now.Seq // nobody knew of that when it was repaired
	f.related(late, catalog.Lost)
	if _, err := f.Changes(f.Ctx, head.Seq, 10, 0); !errs.Has(err, errs.ResumeTooOld) {
		t.Errorf("a watch over the gap: %v", err)
	}
	if st, err := f.Status(f.Ctx); err != nil || st.Suspended != nil || st.Incarnation != now.Incarnation {
		t.Errorf("status %+v (%v)", st, err)
	}
}

func testRepair(t *testing.T, f *Fixture) {
	f.Must(Create(Volume("v")))
	restore := Create(Snapshot("s"), To(Volume("v"), catalog.Reference))
	restore.Revision = 7
	repair := catalog.Commit{Repair: true, Puts: []catalog.Put{restore}}
	f.Refused(errs.WrongPhase, repair)
	if err := f.Suspend(f.Ctx, f.Owner.Coordinator, catalog.Suspension{By: "test"}); err != nil {
		t.Fatal(err)
	}
	notOne := restore
	notOne.ExpectRevision, notOne.Revision = 7, 7
	f.Refused(errs.InvalidField, catalog.Commit{Repair: true, Puts: []catalog.Put{notOne}})
	plain := restore
	f.Refused(errs.InvalidField, catalog.Commit{Puts: []catalog.Put{plain}})
	if r := f.One(repair); r.Err != nil || r.Revisions[Snapshot("s")] != 7 {
		t.Fatalf("%v %v", r.Err, r.Revisions)
	}
	if got := f.Read(Snapshot("s")); got.Revision != 7 {
		t.Errorf("revision %d", got.Revision)
	}
	// What a repair puts is checked like anything else.
	f.Refused(errs.StaleRevision, repair)
	dangling := Create(Snapshot("d"), To(Volume("none"), catalog.Reference))
	f.Refused(errs.StaleUID, catalog.Commit{Repair: true, Puts: []catalog.Put{dangling}})
	if err := f.Resume(f.Ctx, f.Owner.Coordinator); err != nil {
		t.Fatal(err)
	}
	f.Refused(errs.StillReferenced, catalog.Commit{Deletes: []catalog.Delete{{Key: Volume("v"), ExpectRevision: 1}}})
}
