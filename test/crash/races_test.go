package crash

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"sync"
	"testing"

	"github.com/dormouse-run/dormouse/pkg/client"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/uid"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// both runs two calls at once.
func both[T any](a, b func() (T, error)) (values [2]T, failures [2]error) {
	var wg sync.WaitGroup
	for i, f := range []func() (T, error){a, b} {
		wg.Go(func() { values[i], failures[i] = f() })
	}
	wg.Wait()
	return values, failures
}

// oneWins checks that exactly one of two succeeded, and that the other says why with the reason.
func (w *world) oneWins(failures [2]error, reason errs.Reason) (winner int) {
	w.Helper()
	for i, err := range failures {
		if err == nil && errs.Has(failures[1-i], reason) {
			return i
		}
	}
	w.Fatalf("one is to win and one to be refused with %s: %v", reason, failures)
	return 0
}

// TestTwoOfEverythingAtOnce runs each mutation twice at once on one object.
func TestTwoOfEverythingAtOnce(t *testing.T) {
	w := enter(t)
	keep := map[string]bool{w.survivor.UID: true, w.snapshot.UID: true, w.volume.UID: true, w.loose.UID: true}
	for name, test := range map[string]func(w *world){
		"creates of one name": func(w *world) {
			one := func() (*client.Sandbox, error) {
				return w.api.CreateSandbox(w.ctx, &dormousev1.CreateSandboxRequest{Name: "only", Spec: w.spec()})
			}
			made, failures := both(one, one)
			w.answers(made[w.oneWins(failures, errs.NameTaken)])
		},
		"attachments of one volume": func(w *world) {
			v := w.newVolume("")
			one := func() (*client.Sandbox, error) {
				return w.api.CreateSandbox(w.ctx, &dormousev1.CreateSandboxRequest{Spec: w.spec(v)})
			}
			made, failures := both(one, one)
			w.answers(made[w.oneWins(failures, errs.AlreadyAttached)])
		},
		"deletes of one sandbox": func(w *world) {
			s := w.newSandbox()
			one := func() (int, error) { return 0, gone(s.Delete(w.ctx, "")) }
			_, failures := both(one, one)
			w.ok(errors.Join(failures[:]...))
		},
		"deletes of one snapshot": func(w *world) {
			snap, err := w.survivor.Checkpoint(w.ctx, &dormousev1.CheckpointSandboxRequest{})
			w.ok(err)
			one := func() (int, error) { return 0, gone(snap.Delete(w.ctx, "")) }
			_, failures := both(one, one)
			w.ok(errors.Join(failures[:]...))
		},
		"deletes of one volume": func(w *world) {
			v := w.newVolume("")
			one := func() (int, error) { return 0, gone(v.Delete(w.ctx, "")) }
			_, failures := both(one, one)
			w.ok(errors.Join(failures[:]...))
		},
		"checkpoints of one sandbox": func(w *world) {
			one := func() (*client.Snapshot, error) {
				return w.survivor.Checkpoint(w.ctx, &dormousev1.CheckpointSandboxRequest{})
			}
			made, failures := both(one, one)
			w.ok(errors.Join(failures[:]...))
			if made[0].UID == made[1].UID {
				w.Fatalf("two checkpoints are one snapshot, %s", made[0].UID)
			}
		},
		"forks of one sandbox": func(w *world) {
			one := func() ([]*client.Sandbox, error) {
				copies, _, err := w.api.Fork(w.ctx, &dormousev1.ForkSandboxRequest{SandboxUid: w.survivor.UID, Count: 2})
				return copies, err
			}
			made, failures := both(one, one)
			w.ok(errors.Join(failures[:]...))
			for _, s := range slices.Concat(made[0], made[1]) {
				if me, _ := w.talk(s); me != w.me {
					w.Fatalf("a copy is %s, not %s", me, w.me)
				}
			}
		},
		"pulls of one image": func(w *world) {
			ref := w.newImage()
			one := func() (*client.Image, error) { return w.Client.PullImage(w.ctx, ref, "", nil) }
			made, failures := both(one, one)
			w.ok(errors.Join(failures[:]...))
			if made[0].Last.GetErofsDigest() != made[1].Last.GetErofsDigest() {
				w.Fatalf("two pulls gave %v and %v", made[0].Last, made[1].Last)
			}
			w.ok(made[0].Delete(w.ctx))
		},
		"a delete and a restore of one snapshot": func(w *world) {
			snap, err := w.survivor.Checkpoint(w.ctx, &dormousev1.CheckpointSandboxRequest{})
			w.ok(err)
			clone := &dormousev1.VolumeBinding{Path: "/data0", Policy: dormousev1.VolumePolicy_VOLUME_POLICY_CLONE}
			made, failures := both(
				func() (*client.Sandbox, error) {
					return snap.Restore(w.ctx, &dormousev1.RestoreSandboxRequest{Volumes: []*dormousev1.VolumeBinding{clone}})
				},
				func() (*client.Sandbox, error) { return nil, snap.Delete(w.ctx, "") },
			)
			switch {
			case failures[0] == nil:
				w.answers(made[0])
				if failures[1] != nil && !errs.Has(failures[1], errs.StillReferenced) {
					w.Fatal(failures[1])
				}
			case failures[1] != nil:
				w.Fatalf("neither was done: %v", failures)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := w.sub(t)
			test(s)
			s.lives()
			s.ok(s.deleteAll(s.ctx, keep))
			s.settled()
			w.asked = s.asked
		})
	}
}

// passing are the reasons with which one of two that meet on an object may be refused.
var passing = []errs.Reason{errs.NameTaken, errs.ObjectNotFound, errs.WrongPhase, errs.StaleUID, errs.StillReferenced, errs.AlreadyAttached}

// model is what six workers believe there is.
type model struct {
	mu        sync.Mutex
	sandboxes map[string]*client.Sandbox  // that were made and whose deletion was not asked for
	snapshots map[string]*client.Snapshot // likewise
	stubborn  bool
}

// pick takes one at random, or none.
func pick[T any](mu *sync.Mutex, from map[string]*T, n uint64) *T {
	mu.Lock()
	defer mu.Unlock()
	if len(from) == 0 {
		return nil
	}
	keys := make([]string, 0, len(from))
	for k := range from {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return from[keys[n%uint64(len(keys))]]
}

func add[T any](mu *sync.Mutex, to map[string]*T, uid string, v *T) {
	mu.Lock()
	defer mu.Unlock()
	to[uid] = v
}

func take[T any](mu *sync.Mutex, from map[string]*T, uid string) {
	mu.Lock()
	defer mu.Unlock()
	delete(from, uid)
}

// move is one step of an interleaving, all of it from the seed.
type move struct {
	what, which uint64
	name        string
}

const most = 6

// ask makes one call under a new operation id. A stubborn model asks until the answer is final.
func (m *model) ask(ctx context.Context, w *world, call func(ctx context.Context, id string) error) error {
	id := uid.New()
	if !m.stubborn {
		return call(ctx, id)
	}
	return w.insist(func(ctx context.Context) error { return call(ctx, id) })
}

// do makes the move; it gives the error of what was asked.
func (m *model) do(ctx context.Context, w *world, mv move) (string, error) {
	box := pick(&m.mu, m.sandboxes, mv.which)
	snap := pick(&m.mu, m.snapshots, mv.which)
	m.mu.Lock()
	many := len(m.sandboxes) >= most || len(m.snapshots) >= most
	m.mu.Unlock()
	switch kind := mv.what % 8; {
	case box != nil && (kind == 0 || many && kind < 4):
		take(&m.mu, m.sandboxes, box.UID)
		return "delete", m.ask(ctx, w, box.Delete)
	case snap != nil && (kind == 1 || many):
		take(&m.mu, m.snapshots, snap.UID)
		err := m.ask(ctx, w, snap.Delete)
		if errs.Has(err, errs.StillReferenced) {
			add(&m.mu, m.snapshots, snap.UID, snap)
		}
		return "delete-snapshot", err
	case box != nil && kind == 2:
		return "checkpoint", m.ask(ctx, w, func(ctx context.Context, id string) error {
			made, err := box.Checkpoint(ctx, &dormousev1.CheckpointSandboxRequest{OperationId: id})
			if err == nil {
				add(&m.mu, m.snapshots, made.UID, made)
			}
			return err
		})
	case snap != nil && kind < 5:
		return "restore", m.ask(ctx, w, func(ctx context.Context, id string) error {
			made, err := snap.Restore(ctx, &dormousev1.RestoreSandboxRequest{OperationId: id, Name: mv.name})
			if err == nil {
				add(&m.mu, m.sandboxes, made.UID, made)
			}
			return err
		})
	case box != nil && kind == 5:
		return "fork", m.ask(ctx, w, func(ctx context.Context, id string) error {
			copies, snapshot, err := w.api.Fork(ctx, &dormousev1.ForkSandboxRequest{OperationId: id, SandboxUid: box.UID, Count: 1})
			if err == nil {
				add(&m.mu, m.sandboxes, copies[0].UID, copies[0])
				add(&m.mu, m.snapshots, snapshot, w.api.Snapshot(snapshot))
			}
			return err
		})
	}
	return "create", m.ask(ctx, w, func(ctx context.Context, id string) error {
		made, err := w.api.CreateSandbox(ctx, &dormousev1.CreateSandboxRequest{OperationId: id, Name: mv.name, Spec: w.spec()})
		if err == nil {
			add(&m.mu, m.sandboxes, made.UID, made)
		}
		return err
	})
}

// TestRandomInterleavings has four callers do what the seed says, on names and objects that they share.
func TestRandomInterleavings(t *testing.T) {
	w := enter(t)
	w.interleave(moves(t, 100, 1), false, func() {})
}

// TestRandomInterleavingsWhileDaemonsDie is that with a daemon killed and started again now and then.
func TestRandomInterleavingsWhileDaemonsDie(t *testing.T) {
	w := enter(t)
	r := rand.New(rand.NewPCG(seed(t), 3)) //nolint:gosec // it is to be repeated, not to be secret
	w.interleave(moves(t, 40, 2), true, func() {
		daemon := []string{agentd, coordinator}[r.IntN(2)]
		w.ok(w.kill(daemon))
		w.restart(daemon)
		w.online()
	})
}

// moves makes as many as the environment says, or some.
func moves(t *testing.T, steps int, stream uint64) []move {
	t.Helper()
	if s := os.Getenv("CRASH_STEPS"); s != "" {
		var err error
		if steps, err = strconv.Atoi(s); err != nil {
			t.Fatalf("CRASH_STEPS: %v", err)
		}
	}
	r := rand.New(rand.NewPCG(seed(t), stream)) //nolint:gosec // it is to be repeated, not to be secret
	all := make([]move, steps)
	for i := range all {
		all[i] = move{what: r.Uint64(), which: r.Uint64(), name: fmt.Sprintf("name-%d", r.IntN(most))}
	}
	return all
}

// between is how many moves there are between two calls of the disturbance.
const between = 10

// interleave has four callers make the moves, and disturbs them.
func (w *world) interleave(all []move, stubborn bool, disturb func()) {
	w.Helper()
	todo := make(chan move)
	m := &model{sandboxes: map[string]*client.Sandbox{}, snapshots: map[string]*client.Snapshot{}, stubborn: stubborn}
	counts := map[string]int{}
	var mu sync.Mutex
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for mv := range todo {
				what, err := m.do(w.ctx, w, mv)
				verdict := "done"
				if err != nil {
					verdict = string(errs.ReasonOf(err))
					if !slices.Contains(passing, errs.ReasonOf(err)) {
						w.Errorf("%s: %v", what, err)
					}
				}
				mu.Lock()
				counts[what+" "+verdict]++
				mu.Unlock()
			}
		})
	}
	func() {
		defer close(todo) // also when the disturbance fails the test
		for i, mv := range all {
			todo <- mv
			if i%between == between-1 {
				disturb()
			}
		}
	}()
	wg.Wait()
	w.Logf("%v", counts)
	w.lives()
	w.asModelled(m)
}

// asModelled compares the catalog with the model, and asks every sandbox.
func (w *world) asModelled(m *model) {
	w.Helper()
	boxes, err := client.Collect(w.api.ListSandboxes(w.ctx, &dormousev1.ListSandboxesRequest{}))
	w.ok(err)
	running := 0
	for _, s := range boxes {
		id := s.GetMeta().GetUid()
		failed := s.GetStatus().GetPhase() == dormousev1.SandboxPhase_SANDBOX_PHASE_FAILED && s.GetStatus().GetNode() == ""
		if id == w.survivor.UID || failed {
			continue // a start that a deletion of its snapshot, or the like, refused leaves its record
		}
		running++
		if m.sandboxes[id] == nil {
			w.Errorf("sandbox %s is there and was deleted, or was never made: %v", id, s.GetStatus())
		} else {
			w.answers(m.sandboxes[id])
		}
	}
	if running != len(m.sandboxes) {
		w.Errorf("%d sandboxes are there, %d were made and not deleted", running, len(m.sandboxes))
	}
	snaps, err := client.Collect(w.api.ListSnapshots(w.ctx, &dormousev1.ListSnapshotsRequest{}))
	w.ok(err)
	for _, s := range snaps {
		id := s.GetMeta().GetUid()
		if id != w.snapshot.UID && m.snapshots[id] == nil && s.GetStatus().GetPhase() == dormousev1.SnapshotPhase_SNAPSHOT_PHASE_READY {
			w.Errorf("snapshot %s is there and nobody has it", id)
		}
	}
	found, err := w.Doctor(w.ctx, 1)
	if err != nil || len(found) > 0 {
		w.Errorf("the doctor finds %v (%v)", found, err)
	}
}
