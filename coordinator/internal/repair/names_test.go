package repair_test

import (
	"testing"

	"github.com/dormouse-run/dormouse/pkg/catalog"
	nodev1 "github.com/dormouse-run/dormouse/proto/dormouse/node/v1"
)

// A name whose owner was deleted, and that was given again, is the second one's after a repair, though the first cannot go before what refers to it has.
func TestC21RepairGivesANameToWhoHasItNow(t *testing.T) {
	w := newWorld(t)
	w.put(catalog.KindVolume, "data", "Ready")
	w.put(catalog.KindSnapshot, "s", "Ready", catalog.Ref{Target: key(catalog.KindVolume, "data"), Mode: catalog.Reference})
	lost := w.lost()
	next := entry(catalog.KindVolume, "next", 2, lost)
	next.Name = "data"
	w.nodes.journals["n1"] = []*nodev1.JournalEntry{deleted(catalog.KindSnapshot, "s", 1, lost), deleted(catalog.KindVolume, "data", 1, lost), next}
	s := w.survey()
	if err := w.store.Suspend(t.Context(), w.epoch, catalog.Suspension{By: "n1"}); err != nil {
		t.Fatal(err)
	}
	if err := w.Repair(t.Context(), w.epoch, s); err != nil {
		t.Fatal(err)
	}
	w.want(s.Findings, "lost next 0/2 true", "undeleted data 1/1 true", "undeleted s 1/1 true")
	if got, err := w.store.Get(t.Context(), key(catalog.KindVolume, "next")); err != nil || got.Name != "data" {
		t.Errorf("it is called %q: %v", got.Name, err)
	}
}
