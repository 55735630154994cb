package catalogtest

import (
	"fmt"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/errs"
)

func testManyReferences(t *testing.T, f *Fixture) {
	f.Must(Create(Volume("v")))
	const writers, each = 16, 64
	var wg sync.WaitGroup
	for w := range writers {
		wg.Go(func() {
			for i := range each {
				c := catalog.Commit{Owner: f.Owner, Puts: []catalog.Put{Create(Snapshot(uidN("p", w*each+i)), To(Volume("v"), catalog.Reference))}}
				results, err := f.Commit(f.Ctx, []catalog.Commit{c})
				if err != nil || results[0].Err != nil {
					t.Errorf("commit: %v, %v", err, results)
					return
				}
			}
		})
	}
	wg.Wait()
	seen, after := 0, ""
	for {
		page, err := f.Referrers(f.Ctx, Volume("v"), after, 100)
		if err != nil {
			t.Fatal(err)
		}
		if page.Count != writers*each {
			t.Fatalf("count %d", page.Count)
		}
		for _, h := range page.Holders {
			if want := uidN("p", seen); h.Key.UID != want || h.Mode != catalog.Reference {
				t.Fatalf("holder %d is %+v", seen, h)
			}
			seen++
		}
		if after = page.Next; after == "" {
			break
		}
	}
	if seen != writers*each {
		t.Errorf("%d referrers listed", seen)
	}
	if r := f.Read(Volume("v")); r.Revision != 1 {
		t.Errorf("being referred to moved the revision to %d", r.Revision)
	}
}

func testReferenced(t *testing.T, f *Fixture) {
	f.Must(Create(Volume("v")))
	for i := range 12 {
		f.Must(Create(Snapshot(uidN("p", i)), To(Volume("v"), catalog.Reference)))
	}
	remove := catalog.Commit{Deletes: []catalog.Delete{{Key: Volume("v"), ExpectRevision: 1}}}
	e := f.Refused(errs.StillReferenced, remove)
	Details(t, e, map[string]string{
		"uid": "v", "count": "12",
		"references": "p-0000,p-0001,p-0002,p-0003,p-0004,p-0005,p-0006,p-0007,p-0008,p-0009",
	})
	f.Refused(errs.StillReferenced, catalog.Commit{Checks: []catalog.Check{catalog.Unreferenced(Volume("v"))}})
	f.Read(Volume("v"))
	for i := range 12 {
		key := Snapshot(uidN("p", i))
		if i%2 == 0 { // deleted, or kept without the reference
			if r := f.One(catalog.Commit{Deletes: []catalog.Delete{{Key: key, ExpectRevision: 1, Tombstone: true}}}); r.Err != nil {
				t.Fatal(r.Err)
			}
			continue
		}
		update := Create(key)
		update.ExpectRevision = 1
		f.Must(update)
	}
	if r := f.One(remove); r.Err != nil {
		t.Fatalf("unreferenced, yet: %v", r.Err)
	}
	f.Gone(Volume("v"))
}

func testStaleUID(t *testing.T, f *Fixture) {
	old := Create(Volume("v-1"))
	old.Record.Name = "data"
	f.Must(old)
	if r := f.One(catalog.Commit{Deletes: []catalog.Delete{{Key: Volume("v-1"), ExpectRevision: 1, Tombstone: true}}}); r.Err != nil {
		t.Fatal(r.Err)
	}
	renewed := Create(Volume("v-2"))
	renewed.Record.Name = "data"
	f.Must(renewed)
	before := f.Read(Volume("v-2"))

	e := f.Refused(errs.StaleUID, catalog.Commit{
		Checks: []catalog.Check{catalog.Named(Volume("v-1"), "data")},
		Puts:   []catalog.Put{Create(Sandbox("s"), To(Volume("v-1"), catalog.Exclusive))},
	})
	Details(t, e, map[string]string{"uid": "v-1", "current_uid": "v-2"})
	if e.Err.Code != errs.Conflict || e.Err.Retry != errs.Never {
		t.Errorf("code %s, retry %s", e.Err.Code, e.Err.Retry)
	}
	e = f.Refused(errs.StaleUID, catalog.Commit{Puts: []catalog.Put{Create(Sandbox("s"), To(Volume("v-1"), catalog.Exclusive))}})
	Details(t, e, map[string]string{"uid": "v-1", "current_uid": ""})

	same(t, "the new volume", f.Read(Volume("v-2")), before)
	for _, uid := range []string{"v-1", "v-2"} {
		if h, err := f.Referrers(f.Ctx, Volume(uid), "", 0); err != nil || h.Count != 0 {
			t.Errorf("%s has referrers %+v, %v", uid, h, err)
		}
	}
	f.Must(Create(Sandbox("s"), To(Volume("v-2"), catalog.Exclusive)))
}

func testNames(t *testing.T, f *Fixture) {
	named := func(key catalog.Key, name string, revision uint64) catalog.Put {
		p := Create(key)
		p.Record.Name, p.ExpectRevision = name, revision
		return p
	}
	f.Must(named(Sandbox("a"), "x", 0))
	e := f.Refused(errs.NameTaken, catalog.Commit{Puts: []catalog.Put{named(Sandbox("b"), "x", 0)}})
	Details(t, e, map[string]string{"name": "x", "uid": "a"})
	f.Must(named(Volume("b"), "x", 0)) // another kind
	f.Must(named(catalog.Key{Tenant: "other", Kind: catalog.KindSandbox, UID: "a"}, "x", 0))
	f.Refused(errs.NameTaken, catalog.Commit{Puts: []catalog.Put{named(Sandbox("c"), "y", 0), named(Sandbox("d"), "y", 0)}})
	f.Must(named(Sandbox("a"), "x", 1)) // keeps its own
	f.Must(named(Sandbox("a"), "z", 2))
	f.Must(named(Sandbox("b"), "x", 0)) // which is free again
	for name, uid := range map[string]string{"x": "b", "z": "a"} {
		if r, err := f.GetByName(f.Ctx, "acme", catalog.KindSandbox, name); err != nil || r.UID != uid {
			t.Errorf("%s is %s, %v", name, r.UID, err)
		}
	}
	if r := f.One(catalog.Commit{Deletes: []catalog.Delete{{Key: Sandbox("b"), ExpectRevision: 1}}}); r.Err != nil {
		t.Fatal(r.Err)
	}
	if _, err := f.GetByName(f.Ctx, "acme", catalog.KindSandbox, "x"); !errs.Has(err, errs.ObjectNotFound) {
		t.Errorf("the name of a deleted record: %v", err)
	}
	f.Must(Create(Sandbox("n1")), Create(Sandbox("n2"))) // no name is no name to share
}

func testAttachments(t *testing.T, f *Fixture) {
	v := Volume("v")
	f.Must(Create(v))
	f.Must(Create(Snapshot("p"), To(v, catalog.Reference))) // does not attach
	f.Must(Create(Sandbox("a"), To(v, catalog.Exclusive)))
	for _, mode := range []catalog.RefMode{catalog.Shared, catalog.Exclusive} {
		e := f.Refused(errs.AlreadyAttached, catalog.Commit{Puts: []catalog.Put{Create(Sandbox("b"), To(v, mode))}})
		Details(t, e, map[string]string{"volume": "v", "holder": "a"})
	}
	f.Must(Create(Snapshot("q"), To(v, catalog.Reference)))
	set := func(uid string, revision uint64, refs ...catalog.Ref) catalog.Put {
		p := Create(Sandbox(uid), refs...)
		p.ExpectRevision = revision
		return p
	}
	f.Must(set("a", 1, To(v, catalog.Exclusive))) // still its own
	f.Must(set("a", 2, To(v, catalog.Shared)))    // gives way
	f.Must(Create(Sandbox("b"), To(v, catalog.Shared)))
	e := f.Refused(errs.AlreadyAttached, catalog.Commit{Puts: []catalog.Put{set("a", 3, To(v, catalog.Exclusive))}})
	Details(t, e, map[string]string{"volume": "v", "holder": "b"})
	f.Must(set("b", 1, To(v, catalog.Reference))) // detached, still referring
	f.Must(set("a", 3, To(v, catalog.Exclusive)))
	f.Must(set("a", 4))
	f.Must(set("b", 2, To(v, catalog.Exclusive)))
	h, err := f.Referrers(f.Ctx, v, "", 0)
	if err != nil {
		t.Fatal(err)
	}
	same(t, "referrers", h, catalog.Holders{Count: 3, Holders: []catalog.Holder{
		{Key: Sandbox("b"), Mode: catalog.Exclusive}, {Key: Snapshot("p"), Mode: catalog.Reference}, {Key: Snapshot("q"), Mode: catalog.Reference},
	}})
}

func testSealed(t *testing.T, f *Fixture) {
	v := Volume("v")
	f.Must(Create(v))
	f.Must(Create(Sandbox("a"), To(v, catalog.Shared)))
	seal := Create(v)
	seal.ExpectRevision, seal.Record.Sealed, seal.Record.Phase = 1, true, "Deleting"
	f.Must(seal)
	e := f.Refused(errs.WrongPhase, catalog.Commit{Puts: []catalog.Put{Create(Sandbox("b"), To(v, catalog.Shared))}})
	Details(t, e, map[string]string{"uid": "v", "phase": "Deleting"})
	keep := Create(Sandbox("a"), To(v, catalog.Shared))
	keep.ExpectRevision = 1
	f.Must(keep) // what it had stays
	if !f.Read(v).Sealed {
		t.Error("the seal is gone")
	}
}

func testSameCommit(t *testing.T, f *Fixture) {
	// A fork: a clone and its attachment, made together.
	f.Must(Create(Sandbox("a"), To(Volume("v"), catalog.Exclusive)), Create(Volume("v")))
	if h, err := f.Referrers(f.Ctx, Volume("v"), "", 0); err != nil || h.Count != 1 {
		t.Errorf("referrers %+v, %v", h, err)
	}
	e := f.Refused(errs.AlreadyAttached, catalog.Commit{Puts: []catalog.Put{
		Create(Volume("w")), Create(Sandbox("b"), To(Volume("w"), catalog.Exclusive)), Create(Sandbox("c"), To(Volume("w"), catalog.Shared)),
	}})
	Details(t, e, map[string]string{"volume": "w", "holder": "b"})
	sealed := Create(Volume("w"))
	sealed.Record.Sealed = true
	f.Refused(errs.WrongPhase, catalog.Commit{Puts: []catalog.Put{sealed, Create(Sandbox("b"), To(Volume("w"), catalog.Shared))}})
	// What the commit frees is free for the next one only.
	detach := Create(Sandbox("a"))
	detach.ExpectRevision = 1
	f.Refused(errs.AlreadyAttached, catalog.Commit{Puts: []catalog.Put{detach, Create(Sandbox("b"), To(Volume("v"), catalog.Exclusive))}})
	results, err := f.Commit(f.Ctx, []catalog.Commit{
		{Owner: f.Owner, Puts: []catalog.Put{detach}},
		{Owner: f.Owner, Puts: []catalog.Put{Create(Sandbox("b"), To(Volume("v"), catalog.Exclusive))}},
	})
	if err != nil || results[0].Err != nil || results[1].Err != nil {
		t.Errorf("a batch that detaches, then attaches: %+v, %v", results, err)
	}
}

func testTombstones(t *testing.T, open Factory) {
	for life := 500 * time.Millisecond; ; life *= 2 { // until there was the time to read them
		f := NewFixture(t, open(t, catalog.Retention{Tombstones: life}))
		began := time.Now()
		n := f.bury()
		err := f.checkTombstones()
		if err != nil && time.Since(began) >= life && life < time.Minute {
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		f.compactAll(n)
		return
	}
}

// bury deletes p-0000 without a tombstone and others with one, and gives how many these are.
func (f *Fixture) bury() int {
	t := f.T
	t.Helper()
	f.Must(Create(Volume("v")))
	const n = 5
	for i := range n {
		key := Snapshot(uidN("p", i))
		f.Must(Create(key, To(Volume("v"), catalog.Reference)))
		d := catalog.Delete{Key: key, ExpectRevision: 1, Tombstone: i > 0, Body: []byte("why " + strconv.Itoa(i))}
		if r := f.One(catalog.Commit{Deletes: []catalog.Delete{d}}); r.Err != nil {
			t.Fatal(r.Err)
		}
	}
	return n - 1
}

// checkTombstones reads those of p-0001 to p-0004; p-0000 left none.
func (f *Fixture) checkTombstones() error {
	one, err := f.Tombstone(f.Ctx, Snapshot("p-0001"))
	if err != nil || string(one.Body) != "why 1" || one.Revision != 1 || one.Seq != 5 || !one.Expires.After(one.At) {
		return fmt.Errorf("tombstone %+v, %w", one, err)
	}
	page, err := f.ListTombstones(f.Ctx, "acme", catalog.KindSnapshot, "", 3)
	if err != nil || len(page.Tombstones) != 3 || page.Tombstones[0].Key.UID != "p-0001" || page.Next == "" {
		return fmt.Errorf("first page %+v, %w", page, err)
	}
	if rest, err := f.ListTombstones(f.Ctx, "acme", catalog.KindSnapshot, page.Next, 3); err != nil || len(rest.Tombstones) != 1 || rest.Next != "" {
		return fmt.Errorf("second page %+v, %w", rest, err)
	}
	if _, err := f.Tombstone(f.Ctx, Snapshot("p-0000")); !errs.Has(err, errs.ObjectNotFound) {
		return fmt.Errorf("a delete without a tombstone: %w", err)
	}
	if h, err := f.Referrers(f.Ctx, Volume("v"), "", 0); err != nil || h.Count != 0 {
		return fmt.Errorf("tombstones refer: %+v, %w", h, err)
	}
	if live, err := f.List(f.Ctx, catalog.Query{Kind: catalog.KindSnapshot}); err != nil || len(live.Records) != 0 {
		return fmt.Errorf("tombstones are listed: %+v, %w", live, err)
	}
	return nil
}

func (f *Fixture) compactAll(n int) {
	f.T.Helper()
	forgotten := 0
	Eventually(f.T, "tombstones are compacted", func() bool {
		k, err := f.Compact(f.Ctx, 3)
		if err != nil || k > 3 {
			f.T.Fatalf("Compact: %d, %v", k, err)
		}
		forgotten += k
		return forgotten == n
	})
	if st, err := f.Status(f.Ctx); err != nil || st.Tombstones != 0 {
		f.T.Errorf("status %+v, %v", st, err)
	}
}
