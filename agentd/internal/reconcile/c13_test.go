package reconcile

import (
	"context"
	"errors"
	"path/filepath"
	"testing"

	"github.com/dormouse-run/dormouse/agentd/internal/checkpoint"
	"github.com/dormouse-run/dormouse/agentd/internal/nodestate"
	"github.com/dormouse-run/dormouse/agentd/internal/runtime"
	"github.com/dormouse-run/dormouse/pkg/uid"
)

var errUnread = errors.New("the test made it unreadable")

// brokenSource gives nothing and an error, for each inventory that it stands for.
type brokenSource struct{}

func (brokenSource) List(context.Context) ([]runtime.Status, error)     { return nil, errUnread }
func (brokenSource) Sandboxes() ([]nodestate.Sandbox, error)            { return nil, errUnread }
func (brokenSource) Snapshots() ([]nodestate.Snapshot, error)           { return nil, errUnread }
func (brokenSource) holds(context.Context) (map[string][]string, error) { return nil, errUnread }

type brokenGroups struct{}

func (brokenGroups) List() ([]string, error) { return nil, errUnread }

// halfBroken can read its sandboxes only.
type halfBroken struct{ *site }

func (halfBroken) Snapshots() ([]nodestate.Snapshot, error) { return nil, errUnread }

// staged has what a capture left, and an artefact that nobody knows.
type staged struct {
	id      string
	err     error
	deleted []string
}

func (a *staged) Observe() (checkpoint.Observed, error) {
	return checkpoint.Observed{Staging: []string{a.id}, Published: []string{uid.New()}}, a.err
}

func (a *staged) Delete(id string) error {
	a.deleted = append(a.deleted, id)
	return nil
}

// With any one of its inventories unreadable, the doctor finds nothing, says so, and removes nothing,
// however much of the rest seems to be unowned.
func TestC13UnreadableInventoryFixesNothing(t *testing.T) {
	for name, damage := range map[string]func(*site, *staged){
		"the runtime":         func(s *site, _ *staged) { s.sources.Driver = brokenSource{} },
		"control groups":      func(s *site, _ *staged) { s.sources.Groups = brokenGroups{} },
		"folders":             func(s *site, _ *staged) { s.sources.SandboxRoot = filepath.Join(s.sources.SandboxRoot, "none") },
		"mounts":              func(s *site, _ *staged) { s.sources.Mountinfo = filepath.Join(s.sources.SandboxRoot, "none") },
		"artefacts":           func(_ *site, a *staged) { a.err = errUnread },
		"holds of images":     func(s *site, _ *staged) { s.sources.ImageHolds = brokenSource{}.holds },
		"holds of volumes":    func(s *site, _ *staged) { s.sources.VolumeHolds = brokenSource{}.holds },
		"records":             func(s *site, _ *staged) { s.sources.Store = brokenSource{} },
		"records of captures": func(s *site, _ *staged) { s.sources.Store = halfBroken{s} },
	} {
		t.Run(name, func(t *testing.T) {
			s, stray := newSite(t), uid.New()
			s.status = []runtime.Status{{ID: stray, Phase: runtime.Running}}
			held := func(context.Context) (map[string][]string, error) { return map[string][]string{stray: {"x"}}, nil }
			s.sources.ImageHolds, s.sources.VolumeHolds = held, held
			artefacts := &staged{id: uid.New()}
			s.sources.Artefacts = artefacts
			if found, _, _, err := Examine(t.Context(), s.sources, &recorder{}, Request{Fix: false}); err != nil || len(found) != 5 {
				t.Fatalf("undamaged: %v, %v", found, err)
			}

			damage(s, artefacts)
			r := &recorder{}
			found, counts, _, err := Examine(t.Context(), s.sources, r, Request{Fix: true})
			if err == nil || len(found)+len(counts) > 0 {
				t.Errorf("found %v in %v, %v", found, counts, err)
			}
			if len(r.done)+len(artefacts.deleted) > 0 {
				t.Errorf("removed %v and %v", r.done, artefacts.deleted)
			}
		})
	}
}
