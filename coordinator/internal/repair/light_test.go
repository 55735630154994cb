package repair_test

import (
	"testing"

	"github.com/dormouse-run/dormouse/coordinator/internal/repair"
	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/errs"
	nodev1 "github.com/dormouse-run/dormouse/proto/dormouse/node/v1"
)

// A light survey finds the same, and nothing can be repaired from it: it has no bodies.
func TestLightSurveyIsForLooking(t *testing.T) {
	w := newWorld(t)
	w.nodes.journals["n1"] = []*nodev1.JournalEntry{entry(catalog.KindSnapshot, "s", 3, w.lost(), "v"), entry(catalog.KindVolume, "v", 2, w.lost())}
	want := texts(w.survey().Findings)
	w.Light = true
	light := w.survey()
	w.want(light.Findings, want...)
	if err := w.Repair(t.Context(), w.epoch, light); !errs.Has(err, errs.InternalError) {
		t.Errorf("repaired from nothing: %v", err)
	}
	if _, err := w.store.Get(t.Context(), key(catalog.KindVolume, "v")); !errs.Has(err, errs.ObjectNotFound) {
		t.Errorf("put back: %v", err)
	}
}

// What a node has without a record of its own is named by verification, on whichever page of its inventory it is.
func TestVerifyNamesWhatIsNobodys(t *testing.T) {
	w := newWorld(t)
	w.nodes.inventories["n1"] = &nodev1.GetInventoryResponse{UnownedArtefacts: []string{"stray"}}
	var found []repair.Finding
	if _, err := w.Verify(t.Context(), "n1", func(f repair.Finding) error { found = append(found, f); return nil }); err != nil {
		t.Fatal(err)
	}
	w.want(found, "unrecorded stray 0/0 false")
}
