package reconcile

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/dormouse-run/dormouse/agentd/internal/checkpoint"
	"github.com/dormouse-run/dormouse/agentd/internal/network"
	"github.com/dormouse-run/dormouse/agentd/internal/nodestate"
	"github.com/dormouse-run/dormouse/agentd/internal/runtime"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
	"github.com/dormouse-run/dormouse/pkg/uid"
)

func box(id string, intent nodestate.Intent, phase sandbox.Phase) nodestate.Sandbox {
	return nodestate.Sandbox{UID: id, Intent: intent, Phase: phase}
}

func TestPlan(t *testing.T) {
	got := Plan(Records{
		Sandboxes: []nodestate.Sandbox{box("a", nodestate.IntentStart, sandbox.Starting), box("b", nodestate.IntentRestore, sandbox.Starting),
			box("c", nodestate.IntentKeep, sandbox.Running), box("d", nodestate.IntentKeep, sandbox.Failed), box("e", nodestate.IntentDelete, sandbox.Deleting)},
		Snapshots: []nodestate.Snapshot{{UID: "x", State: nodestate.SnapshotReady}, {UID: "y", State: nodestate.SnapshotSaving}, {UID: "z", State: nodestate.SnapshotDeleting}},
	})
	var text []string
	for _, c := range got {
		text = append(text, string(c.Action)+" "+c.UID)
	}
	want := "finish-snapshot y, finish-snapshot z, remove a, remove b, reattach c, reattach d, remove e"
	if strings.Join(text, ", ") != want {
		t.Fatalf("got %v, want %s", text, want)
	}
}

type recorder struct {
	mu   sync.Mutex
	done []string
	fail string
}

func (r *recorder) note(what, id string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.done = append(r.done, what+" "+id)
	if id == r.fail {
		return errors.New("no")
	}
	return nil
}

func (r *recorder) Reattach(_ context.Context, id string) error       { return r.note("reattach", id) }
func (r *recorder) Remove(_ context.Context, id string) error         { return r.note("remove", id) }
func (r *recorder) FinishSnapshot(_ context.Context, id string) error { return r.note("finish", id) }
func (r *recorder) Purge(_ context.Context, id string) error          { return r.note("purge", id) }

func TestApplyDoesTheOthersWhenOneFails(t *testing.T) {
	r := &recorder{fail: "b"}
	err := Apply(context.Background(), r, []Command{{Reattach, "a", ""}, {Remove, "b", ""}, {FinishSnapshot, "x", ""}, {Reattach, "c", ""}}, slog.New(slog.DiscardHandler))
	if err == nil || !strings.Contains(err.Error(), "remove b") || len(r.done) != 4 || r.done[0] != "finish x" {
		t.Fatalf("%v %v", err, r.done)
	}
}

// TestDiff has one of each difference, and of each thing that is right.
func TestDiff(t *testing.T) {
	rec := Records{
		Sandboxes: []nodestate.Sandbox{box("good", nodestate.IntentKeep, sandbox.Running), box("ended", nodestate.IntentKeep, sandbox.Stopped),
			box("lost", nodestate.IntentKeep, sandbox.Running), box("stuck", nodestate.IntentDelete, sandbox.Deleting), box("new", nodestate.IntentStart, sandbox.Starting)},
		Snapshots: []nodestate.Snapshot{{UID: "snap", State: nodestate.SnapshotReady}, {UID: "torn", State: nodestate.SnapshotReady}, {UID: "saving", State: nodestate.SnapshotSaving}, {UID: "going", State: nodestate.SnapshotDeleting}},
	}
	seen := Observed{
		Runtime: []runtime.Status{{ID: "good", Phase: runtime.Running}, {ID: "ended", Phase: runtime.Stopped}, {ID: "lost", Phase: runtime.Stopped},
			{ID: "new", Phase: runtime.Creating}, {ID: "alien", Phase: runtime.Running, Pid: 7}},
		Groups: []string{"good", "alien", "group"}, Folders: []string{"good", "new", "folder"}, Mounts: []string{"/s/good/m"},
		Artefacts:   checkpoint.Observed{Published: []string{"snap", "stray"}, Staging: []string{"saving", "half"}, Trash: []string{"old"}},
		ImageHolds:  map[string][]string{"good": {"i"}, "snap": {"i"}, "nobody": {"i"}},
		VolumeHolds: map[string][]string{"good": {"v"}, "snap": {"v"}},
		Network:     network.Inventory{Holders: map[string][]string{"good": {"10.0.0.2"}, "gone": {"10.0.0.3"}}, Leftovers: []network.Leftover{{Address: "10.0.0.4", What: "a device"}}},
		Aside:       []string{"/d/journal.db.damaged-1"},
	}
	var got []string
	for _, f := range Diff(rec, seen, "/s", "/a") {
		got = append(got, fmt.Sprintf("%s %s %t", f.Kind, f.Name, f.Fixable))
		if f.Remedy == "" || f.Observed == "" || f.Recorded == "" {
			t.Errorf("not all said: %+v", f)
		}
	}
	want := []string{
		"lost-artefact torn false", "lost-sandbox lost false",
		"orphan-artefact stray false", "orphan-cgroup alien true", "orphan-cgroup group true", "orphan-folder folder true",
		"orphan-image-hold nobody true", "orphan-lease gone true", "orphan-mount /s/good/m false", "orphan-network 10.0.0.4 true", "orphan-sandbox alien true",
		"orphan-staging half true", "orphan-staging old true", "orphan-volume-hold snap true", "put-aside journal.db.damaged-1 false", "stuck-delete stuck true", "stuck-snapshot going true",
	}
	if !slices.Equal(got, want) {
		t.Fatalf("got  %s\nwant %s", strings.Join(got, "\n     "), strings.Join(want, "\n     "))
	}
}

// site is a node for Examine, as lists.
type site struct {
	sources Sources
	status  []runtime.Status
	err     error
	order   []string
}

func (s *site) List(context.Context) ([]runtime.Status, error) {
	s.order = append(s.order, "observe")
	return s.status, s.err
}
func (s *site) Sandboxes() ([]nodestate.Sandbox, error) {
	s.order = append(s.order, "records")
	return nil, nil
}
func (s *site) Snapshots() ([]nodestate.Snapshot, error) { return nil, nil }

type noGroups struct{}

func (noGroups) List() ([]string, error) { return nil, nil }

type noArtefacts struct{}

func (noArtefacts) Observe() (checkpoint.Observed, error) { return checkpoint.Observed{}, nil }
func (a noArtefacts) Delete(string) error                 { return nil }

func newSite(t *testing.T) *site {
	s := &site{}
	none := func(context.Context) (map[string][]string, error) { return nil, nil }
	mounts := filepath.Join(t.TempDir(), "mountinfo")
	if err := os.WriteFile(mounts, []byte("1 2 0:3 / /proc rw - proc proc rw\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	s.sources = Sources{Store: s, Driver: s, Groups: noGroups{}, Artefacts: noArtefacts{}, ImageHolds: none, VolumeHolds: none, Networks: noNetworks{}, Aside: func() ([]string, error) { return nil, nil },
		SandboxRoot: t.TempDir(), SnapshotRoot: t.TempDir(), Mountinfo: mounts}
	return s
}

func TestExamineLooksBeforeItReads(t *testing.T) {
	s := newSite(t)
	if _, _, _, err := Examine(context.Background(), s.sources, &recorder{}, Request{Fix: false}); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(s.order, []string{"observe", "records"}) {
		t.Fatalf("order %v", s.order)
	}
	s.err = errors.New("unreadable")
	if _, _, _, err := Examine(context.Background(), s.sources, &recorder{}, Request{Fix: true}); err == nil {
		t.Fatal("an inventory that cannot be read was taken for empty")
	}
}

func TestFixIsBelievedOnlyWhenSeen(t *testing.T) {
	s := newSite(t)
	id := uid.New()
	s.status = []runtime.Status{{ID: id, Phase: runtime.Running}, {ID: "not-a-uid", Phase: runtime.Running}}
	r := &recorder{}
	got, counts, _, err := Examine(context.Background(), s.sources, r, Request{Fix: true})
	if err != nil || len(got) != 2 || counts["runtime"] != 2 {
		t.Fatalf("%v %v %v", got, counts, err)
	}
	if !slices.Equal(r.done, []string{"purge " + id}) {
		t.Fatalf("done %v", r.done)
	}
	for _, f := range got {
		if f.Fixed || f.Err == nil {
			t.Errorf("%+v: nothing went away", f)
		}
	}
}

type noNetworks struct{}

func (noNetworks) Observe() (network.Inventory, error) { return network.Inventory{}, nil }
func (noNetworks) Purge(string) error                  { return nil }

// Findings come in pages, all of them once; what has one name is not torn apart.
func TestFindingsComeInPages(t *testing.T) {
	var all []Finding
	for _, name := range []string{"a", "b", "b", "c", "d"} {
		all = append(all, Finding{Kind: OrphanStaging, Name: name})
	}
	for limit, want := range map[int]string{0: "abbcd", 1: "a bb c d", 2: "abb cd", 3: "abb cd", 5: "abbcd"} {
		var pages []string
		for req := (Request{Limit: limit}); ; {
			page, next := req.page(all)
			var names string
			for _, f := range page {
				names += f.Name
			}
			pages = append(pages, names)
			if req.After = next; next == "" {
				break
			}
		}
		if got := strings.Join(pages, " "); got != want {
			t.Errorf("pages of %d: %q, want %q", limit, got, want)
		}
	}
}
