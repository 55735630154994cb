package crash

import (
	"context"
	"errors"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/fault"
	"github.com/dormouse-run/dormouse/pkg/uid"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// meeting is a deletion that comes while an operation on the sandbox stands still at a fault point.
type meeting struct {
	name   string
	daemon string
	point  string
	// begin starts the operation on, or with, the sandbox of this name.
	begin func(ctx context.Context, w *world, name string) error
	// made has the sandbox run before the operation begins.
	made bool
}

func (m meeting) String() string { return m.daemon + "/" + m.name + "/" + m.point }

// meetings lists every step of start, restore and checkpoint, on the node and in the coordinator. The coordinator's
// commits are left out: they are one after the other, a deletion's too.
func meetings() []meeting {
	clone := []*dormousev1.VolumeBinding{{Path: "/data0", Policy: dormousev1.VolumePolicy_VOLUME_POLICY_CLONE}}
	verbs := []struct {
		meeting
		agentd, coordinator []string // prefixes of points
	}{
		{
			meeting: meeting{name: "create", begin: func(ctx context.Context, w *world, name string) error {
				_, err := w.api.CreateSandbox(ctx, &dormousev1.CreateSandboxRequest{Name: name, Spec: w.spec()})
				return err
			}},
			agentd:      []string{"start.", "runtime.recorded", "runtime.group", "runtime.launched", "runtime.attached", "image.hold", "command."},
			coordinator: []string{"node.start.", "operation."},
		},
		{
			meeting: meeting{name: "restore", begin: func(ctx context.Context, w *world, name string) error {
				_, err := w.snapshot.Restore(ctx, &dormousev1.RestoreSandboxRequest{Name: name, Volumes: clone})
				return err
			}},
			agentd: []string{"restore."}, coordinator: []string{"node.restore.", "operation."},
		},
		{
			meeting: meeting{name: "checkpoint", made: true, begin: func(ctx context.Context, w *world, name string) error {
				s, err := w.api.FindSandbox(ctx, name)
				if err == nil {
					_, err = s.Checkpoint(ctx, &dormousev1.CheckpointSandboxRequest{})
				}
				return err
			}},
			agentd: []string{"checkpoint.", "artefact."}, coordinator: []string{"node.checkpoint.", "operation."},
		},
	}
	var all []meeting
	for _, v := range verbs {
		for _, side := range []struct {
			daemon           string
			points, prefixes []string
		}{{agentd, fault.Agentd(), v.agentd}, {coordinator, fault.Coordinator(), v.coordinator}} {
			for _, p := range side.points {
				if slices.ContainsFunc(side.prefixes, func(prefix string) bool { return strings.HasPrefix(p, prefix) }) {
					m := v.meeting
					m.daemon, m.point = side.daemon, p
					all = append(all, m)
				}
			}
		}
	}
	return all
}

// TestDeleteAgainstEachStep deletes a sandbox while its start, restore or checkpoint stands still at each of its
// points. The deletion succeeds, and nothing is left of either.
func TestDeleteAgainstEachStep(t *testing.T) {
	w := enter(t)
	keep := map[string]bool{w.survivor.UID: true, w.snapshot.UID: true, w.volume.UID: true, w.loose.UID: true}
	for _, m := range chosen(t, meetings(), 30) {
		t.Run(m.String(), func(t *testing.T) {
			s := w.sub(t)
			s.meet(m)
			s.lives()
			s.ok(s.deleteAll(s.ctx, keep))
			s.settled()
			w.asked = s.asked
		})
	}
}

func (w *world) meet(m meeting) {
	w.Helper()
	name := "d-" + uid.New()
	if m.made {
		_, err := w.api.CreateSandbox(w.ctx, &dormousev1.CreateSandboxRequest{Name: name, Spec: w.spec()})
		w.ok(err)
	}
	w.hold(m.daemon, m.point)
	begun := make(chan error, 1)
	go func() { begun <- m.begin(w.ctx, w, name) }()
	w.heldAt(m.daemon, m.point, begun)
	victim, err := w.api.FindSandbox(w.ctx, name)
	w.ok(err)
	id, deleted := uid.New(), make(chan error, 1)
	go func() { deleted <- gone(victim.Delete(w.ctx, id)) }()
	w.await("the deletion is accepted", func() error {
		_, err := w.api.GetOperation(w.ctx, id)
		return err
	})
	w.release(m.daemon)
	if err := <-deleted; err != nil {
		w.Errorf("the deletion says %v", err)
	}
	if err := <-begun; err != nil && !slices.Contains(passing, errs.ReasonOf(err)) {
		w.Errorf("%s says %v", m.name, err)
	}
	if err := victim.Refresh(w.ctx); !errs.Has(err, errs.ObjectNotFound) {
		w.Errorf("the sandbox is there: %v (%v)", victim.Last, err)
	}
}

// ---- holding ----------------------------------------------------------------------

func (w *world) heldFile(daemon string) string { return w.faultFile(daemon) + ".held" }

// hold arms a point at which one goroutine of the daemon will stay. It is let go at the latest when the test ends.
func (w *world) hold(daemon, point string) {
	w.Helper()
	w.arm(daemon, []string{point + "!"})
	w.Cleanup(func() {
		w.disarm(daemon)
		w.release(daemon)
	})
}

// heldAt waits until a goroutine stays at the point. ended hears of the operation that is to get it there.
func (w *world) heldAt(daemon, point string, ended chan error) {
	w.Helper()
	w.await("it gets to "+point, func() error {
		at, err := os.ReadFile(w.heldFile(daemon))
		if err == nil && string(at) == point {
			return nil
		}
		select {
		case end := <-ended:
			w.Fatalf("%s was not passed; the operation ended with %v", point, end)
		default:
		}
		return errors.Join(err, errors.New("nobody stays there"))
	})
}

// release lets go on what is held.
func (w *world) release(daemon string) {
	w.Helper()
	if err := os.Remove(w.heldFile(daemon)); err != nil && !errors.Is(err, os.ErrNotExist) {
		w.Fatal(err)
	}
}
