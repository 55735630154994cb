package journal_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/dormouse-run/dormouse/coordinator/internal/journal"
	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/errs"
)

// What concerns no node is kept by who follows the log: a copy of what lives, a trace of what was deleted, and nothing of what
// got a place. Another who begins later has the same of what the log has.
func TestC21WhatConcernsNoNodeIsKept(t *testing.T) {
	for _, retention := range []int64{0, 7} { // with 7 the log is too short, and it is known what is not known
		t.Run(fmt.Sprint("log of ", retention), func(t *testing.T) {
			seed := rand.Uint64()
			t.Logf("seed %d", seed)
			r := rand.New(rand.NewPCG(seed, 1))
			w := newWorld(t, catalog.Retention{Changes: retention})
			for range 60 {
				w.change(r)
			}
			first := w.mirror()
			w.keeps(first)
			for range 3 {
				for range 60 {
					w.change(r)
				}
				w.keeps(first)
				w.keeps(w.mirror())
			}
		})
	}
}

// keeps waits until the mirror has followed the log to its end, and compares.
func (w *world) keeps(m *journal.Mirror) {
	w.Helper()
	deadline := time.After(time.Minute)
	var u journal.Unplaced
	for u = m.Unplaced(); u.To.Seq < w.head; u = m.Unplaced() {
		select {
		case <-deadline:
			w.Fatalf("the log was followed to %v, not %d", u.To, w.head)
		case <-time.After(time.Millisecond):
		}
	}
	has := make(map[catalog.Key]journal.Entry)
	for _, e := range u.Entries {
		has[e.Record.Key] = e
		rec, err := w.store.Get(context.Background(), e.Record.Key)
		switch {
		case e.Bare:
			w.Errorf("there is no copy of %s", e.Record.Key)
		case e.Deleted && err == nil || !e.Deleted && (err != nil || rec.Node != "" || rec.Revision != e.Record.Revision || string(rec.Body) != string(e.Record.Body)):
			w.Errorf("kept is %+v, the catalog has %+v, %v", e, rec, err)
		case e.Record.Seq > e.Point.Seq:
			w.Errorf("%s is of commit %d, its point is %d", e.Record.Key, e.Record.Seq, e.Point.Seq)
		}
	}
	page, err := w.store.List(context.Background(), catalog.Query{Kind: catalog.KindSandbox, PageSize: catalog.MaxPage})
	if err != nil || page.Next != "" {
		w.Fatal(err, page.Next)
	}
	for _, rec := range page.Records {
		if _, ok := has[rec.Key]; !ok && rec.Node == "" && rec.Seq > u.After {
			w.Errorf("%+v is not kept, after %d", rec, u.After)
		}
	}
}

// A catalog that was rebuilt has a log that begins where the sequence was taken further: what it has of before, and concerns no node, is kept all the same,
// and nothing is said to be missing. Else it could not be rebuilt by itself once more.
func TestC21NothingIsMissingBeforeTheLogOfARebuiltCatalog(t *testing.T) {
	w := newWorld(t, catalog.Retention{})
	r := rand.New(rand.NewPCG(1, 1))
	for range 60 {
		w.change(r)
	}
	h, err := w.store.History(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	lost := h.Head
	lost.Seq, lost.Digest = lost.Seq+100, "of what was lost"
	if err := w.store.Suspend(t.Context(), w.epoch, catalog.Suspension{By: "the test", Witness: lost}); err != nil {
		t.Fatal(err)
	}
	if err := w.store.Resume(t.Context(), w.epoch); err != nil {
		t.Fatal(err)
	}
	if _, err := w.store.Changes(t.Context(), 0, 1, 0); !errs.Has(err, errs.ResumeTooOld) {
		t.Fatalf("its log reaches back: %v", err)
	}
	w.change(r)
	m := w.mirror()
	w.keeps(m)
	u := m.Unplaced()
	before := 0
	for _, e := range u.Entries {
		if e.Record.Seq < lost.Seq {
			before++
		}
	}
	if u.After != 0 || before == 0 {
		t.Errorf("what was committed up to %d is missing; %d entries are from before the log", u.After, before)
	}
}
