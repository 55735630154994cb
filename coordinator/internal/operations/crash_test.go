package operations_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/dormouse-run/dormouse/coordinator/internal/operations"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/uid"
	"github.com/dormouse-run/dormouse/pkg/volume"
)

// scene is an operation, with what it needs before.
type scene struct {
	name  string
	setUp func(*testing.T, *term) func(context.Context, *term, operations.Call) (*operations.Operation, error)
	want  errs.Reason // of a failure that the node causes
	fail  func(verb, u string) error
	// settle waits for what goes on beside the operation.
	settle func(*world)
}

func create(name string, volumes ...string) func(context.Context, *term, operations.Call) (*operations.Operation, error) {
	return func(ctx context.Context, e *term, c operations.Call) (*operations.Operation, error) {
		return e.CreateSandbox(ctx, c, operations.CreateSandbox{Name: name, Spec: spec(volumes...)})
	}
}

func madeVolume(t *testing.T, e *term, name string) string {
	t.Helper()
	op := must(e.CreateVolume(context.Background(), call(""), operations.CreateVolume{Name: name, Spec: volume.Spec{Access: volume.Exclusive}}))(t)
	return op.Plan.VolumeUID
}

func madeSandbox(t *testing.T, e *term, volumes ...string) string {
	t.Helper()
	op := must(create("", volumes...)(context.Background(), e, call("")))(t)
	return op.Plan.Copies[0].SandboxUID
}

func madeSnapshot(t *testing.T, e *term, sandboxUID string) string {
	t.Helper()
	op := must(e.CheckpointSandbox(context.Background(), call(""), operations.CheckpointSandbox{UID: sandboxUID}))(t)
	return op.Plan.SnapshotUID
}

func refuse(verb string, reason errs.Reason) func(v, u string) error {
	return func(v, _ string) error {
		if v == verb {
			return errs.New(reason, "no")
		}
		return nil
	}
}

func pause(u string) run {
	return func(ctx context.Context, e *term, c operations.Call) (*operations.Operation, error) {
		return e.PauseSandbox(ctx, c, operations.Turn{UID: u})
	}
}

func hibernate(u string) run {
	return func(ctx context.Context, e *term, c operations.Call) (*operations.Operation, error) {
		return e.HibernateSandbox(ctx, c, operations.Turn{UID: u})
	}
}

func resume(u string) run {
	return func(ctx context.Context, e *term, c operations.Call) (*operations.Operation, error) {
		return e.ResumeSandbox(ctx, c, operations.Turn{UID: u})
	}
}

// createBeside creates a sandbox where there is another node that is preferred; those that are named refuse it.
func createBeside(e *term, full ...string) run {
	other := e.w.nodes.all[0]
	other.Name = "n0"
	e.w.nodes.all = append(e.w.nodes.all, other)
	e.w.node.full = make(map[string]bool)
	for _, name := range full {
		e.w.node.full[name] = true
	}
	return create("box")
}

type run = func(context.Context, *term, operations.Call) (*operations.Operation, error)

func scenes() []scene {
	return []scene{
		{name: "create", setUp: func(t *testing.T, e *term) run { return create("box", madeVolume(t, e, "data")) }},
		{name: "create fails", want: errs.ImageNotFound, fail: refuse("start", errs.ImageNotFound),
			setUp: func(t *testing.T, e *term) run { return create("box", madeVolume(t, e, "data")) }},
		{name: "create where a node is full", setUp: func(t *testing.T, e *term) run { return createBeside(e, "n0") }},
		{name: "create where all are full", want: errs.OutOfMemory, setUp: func(t *testing.T, e *term) run { return createBeside(e, "n0", "n1") }},
		{name: "delete", setUp: func(t *testing.T, e *term) run {
			u := madeSandbox(t, e, madeVolume(t, e, "data"))
			return func(ctx context.Context, e *term, c operations.Call) (*operations.Operation, error) {
				return e.DeleteSandbox(ctx, c, operations.Delete{UID: u})
			}
		}},
		{name: "checkpoint", setUp: func(t *testing.T, e *term) run {
			u := madeSandbox(t, e, madeVolume(t, e, "data"))
			return func(ctx context.Context, e *term, c operations.Call) (*operations.Operation, error) {
				return e.CheckpointSandbox(ctx, c, operations.CheckpointSandbox{UID: u, Name: "snap"})
			}
		}},
		{name: "checkpoint fails", want: errs.DiskFull, fail: refuse("checkpoint", errs.DiskFull), setUp: func(t *testing.T, e *term) run {
			u := madeSandbox(t, e)
			return func(ctx context.Context, e *term, c operations.Call) (*operations.Operation, error) {
				return e.CheckpointSandbox(ctx, c, operations.CheckpointSandbox{UID: u, Name: "snap"})
			}
		}},
		{name: "pause", setUp: func(t *testing.T, e *term) run { return pause(madeSandbox(t, e, madeVolume(t, e, "data"))) }},
		{name: "pause fails", want: errs.GuestSilent, fail: refuse("pause", errs.GuestSilent),
			setUp: func(t *testing.T, e *term) run { return pause(madeSandbox(t, e)) }},
		{name: "hibernate", setUp: func(t *testing.T, e *term) run { return hibernate(madeSandbox(t, e, madeVolume(t, e, "data"))) }},
		{name: "hibernate fails", want: errs.DiskFull, fail: refuse("hibernate", errs.DiskFull),
			setUp: func(t *testing.T, e *term) run { return hibernate(madeSandbox(t, e)) }},
		{name: "resume from the disk", setUp: func(t *testing.T, e *term) run {
			u := madeSandbox(t, e)
			must(hibernate(u)(context.Background(), e, call("")))(t)
			return resume(u)
		}},
		{name: "resume from the disk fails", want: errs.ArtefactDamaged, fail: refuse("resume", errs.ArtefactDamaged), setUp: func(t *testing.T, e *term) run {
			u := madeSandbox(t, e)
			must(hibernate(u)(context.Background(), e, call("")))(t)
			return resume(u)
		}},
		{name: "resume", setUp: func(t *testing.T, e *term) run {
			u := madeSandbox(t, e)
			must(pause(u)(context.Background(), e, call("")))(t)
			return resume(u)
		}},
		{name: "set the egress", setUp: func(t *testing.T, e *term) run { return setEgress(madeOutbound(t, e)) }},
		{name: "setting the egress fails", want: errs.InvalidField, fail: refuse("update", errs.InvalidField), setUp: func(t *testing.T, e *term) run {
			return setEgress(madeOutbound(t, e))
		}},
		{name: "restore with a clone", setUp: func(t *testing.T, e *term) run {
			snap := madeSnapshot(t, e, madeSandbox(t, e, madeVolume(t, e, "data")))
			return func(ctx context.Context, e *term, c operations.Call) (*operations.Operation, error) {
				return e.RestoreSandbox(ctx, c, operations.RestoreSandbox{SnapshotUID: snap, Name: "again", Volumes: []operations.Binding{{Path: "/data0", Policy: operations.PolicyClone}}})
			}
		}},
		{name: "restore fails", want: errs.VolumeDiverged, fail: refuse("restore", errs.VolumeDiverged), setUp: func(t *testing.T, e *term) run {
			snap := madeSnapshot(t, e, madeSandbox(t, e, madeVolume(t, e, "data")))
			return func(ctx context.Context, e *term, c operations.Call) (*operations.Operation, error) {
				return e.RestoreSandbox(ctx, c, operations.RestoreSandbox{SnapshotUID: snap, Volumes: []operations.Binding{{Path: "/data0", Policy: operations.PolicyClone}}})
			}
		}},
		{name: "fork", setUp: func(t *testing.T, e *term) run {
			u := madeSandbox(t, e, madeVolume(t, e, "data"))
			return func(ctx context.Context, e *term, c operations.Call) (*operations.Operation, error) {
				return e.ForkSandbox(ctx, c, operations.ForkSandbox{SandboxUID: u, Count: 3, NamePrefix: "copy"})
			}
		}},
		{name: "fork fails", want: errs.OutOfMemory, fail: refuse("restore", errs.OutOfMemory), setUp: func(t *testing.T, e *term) run {
			u := madeSandbox(t, e, madeVolume(t, e, "data"))
			return func(ctx context.Context, e *term, c operations.Call) (*operations.Operation, error) {
				return e.ForkSandbox(ctx, c, operations.ForkSandbox{SandboxUID: u, Count: 2})
			}
		}},
		{name: "create volume", setUp: func(*testing.T, *term) run {
			return func(ctx context.Context, e *term, c operations.Call) (*operations.Operation, error) {
				return e.CreateVolume(ctx, c, operations.CreateVolume{Name: "v"})
			}
		}},
		{name: "create volume fails", want: errs.NotSupported, fail: refuse("volume", errs.NotSupported), setUp: func(*testing.T, *term) run {
			return func(ctx context.Context, e *term, c operations.Call) (*operations.Operation, error) {
				return e.CreateVolume(ctx, c, operations.CreateVolume{Name: "v", Spec: volume.Spec{SizeLimitBytes: 1}})
			}
		}},
		{name: "delete volume", setUp: func(t *testing.T, e *term) run {
			u := madeVolume(t, e, "data")
			return func(ctx context.Context, e *term, c operations.Call) (*operations.Operation, error) {
				return e.DeleteVolume(ctx, c, operations.Delete{UID: u})
			}
		}},
		{name: "delete snapshot", setUp: func(t *testing.T, e *term) run {
			u := madeSnapshot(t, e, madeSandbox(t, e))
			return func(ctx context.Context, e *term, c operations.Call) (*operations.Operation, error) {
				return e.DeleteSnapshot(ctx, c, operations.Delete{UID: u})
			}
		}},
	}
}

// TestCrashAtEveryBoundary stops the engine before and after each commit and each command, starts
// another on the same catalog, and asks again with the same operation id: the end is that of an
// undisturbed run, and nothing is left over.
func TestCrashAtEveryBoundary(t *testing.T) {
	for _, sc := range append(scenes(), warmScenes()...) {
		t.Run(sc.name, func(t *testing.T) {
			boundaries := playScene(t, sc, 0)
			if boundaries < 4 {
				t.Fatalf("only %d boundaries were passed", boundaries)
			}
			for at := 1; at <= boundaries; at++ {
				t.Run(fmt.Sprintf("boundary %d", at), func(t *testing.T) { playScene(t, sc, at) })
			}
		})
	}
}

// playScene runs the scene with a crash at the boundary, and gives how many there were.
func playScene(t *testing.T, sc scene, crash int) int {
	w := newWorld(t)
	e := w.lead()
	do := sc.setUp(t, e)
	if sc.fail != nil {
		w.node.fail = sc.fail
	}
	c := call(uid.New())
	w.mu.Lock()
	w.passed, w.crash = 0, crash
	w.mu.Unlock()
	if crash > 0 {
		first := make(chan struct{})
		go func() {
			defer close(first)
			_, _ = do(context.Background(), e, c) // its outcome is asked for again below
		}()
		select {
		case <-w.down:
		case <-first: // what runs in parallel passes a few boundaries more or less
		}
		e.Stop(errs.New(errs.NoLeader, "the process died"))
		close(w.gone)
		<-first
		e.stop()
		e = w.lead()
	}
	op, err := do(context.Background(), e, c)
	if got := errs.ReasonOf(err); got != sc.want {
		t.Fatalf("ended with %v, want reason %q", err, sc.want)
	}
	again, err2 := do(context.Background(), e, c)
	if errs.ReasonOf(err2) != sc.want || err == nil && again.ID != op.ID {
		t.Fatalf("a replay gave %v, %v", again, err2)
	}
	if sc.settle != nil {
		sc.settle(w)
	}
	w.agree(e)
	e.stop()
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.passed
}
