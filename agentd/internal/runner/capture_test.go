package runner

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/dormouse-run/dormouse/agentd/internal/nodestate"
	"github.com/dormouse-run/dormouse/agentd/internal/runtime"
	"github.com/dormouse-run/dormouse/agentd/internal/runtime/fake"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
	"github.com/dormouse-run/dormouse/pkg/snapshot"
	"github.com/dormouse-run/dormouse/pkg/uid"
)

// checkpointed gives a world with a sandbox whose counter stands at 1, and a snapshot of it.
func checkpointed(t *testing.T) (*agent, StartRequest, nodestate.Snapshot) {
	t.Helper()
	a := newWorld(t).boot()
	req := startRequest()
	_, err := a.Start(ctx(t), req)
	must(t, err)
	if _, ok := a.w.host.Count(req.UID); !ok {
		t.Fatal("it does not count")
	}
	snap, err := a.Checkpoint(ctx(t), CaptureRequest{UID: req.UID, SnapshotUID: uid.New(), Tenant: "t", CommandID: "save-1"})
	must(t, err)
	return a, req, snap
}

func restoreRequest(snap nodestate.Snapshot, volume string) RestoreRequest {
	return RestoreRequest{UID: uid.New(), Tenant: "t", Generation: 1, CommandID: "restore-1", SnapshotUID: snap.UID,
		Volumes: []snapshot.VolumeReference{{VolumeUID: volume, Path: "/data"}}}
}

// TestI08 shows that a restore attaches: the memory is the source's, no command is started.
func TestI08RestoreNeverStartsAnything(t *testing.T) {
	a, req, snap := checkpointed(t)
	was, _ := a.w.host.Count(req.UID) // the source goes on
	must(t, a.Delete(ctx(t), req.UID))
	if _, ok := a.w.holds[snap.UID]; !ok {
		t.Fatal("the snapshot does not hold its image")
	}
	rr := restoreRequest(snap, req.Spec.Volumes[0].VolumeUID)
	rec, err := a.Restore(ctx(t), rr)
	must(t, err)
	if rec.RestoredFrom != snap.UID || rec.GuestGeneration != 2 || rec.Hostname != rr.UID[len(rr.UID)-12:] || !rec.HasMain || rec.Flags[0] != "--flag" {
		t.Fatalf("%s", text(rec))
	}
	g, ok := a.w.host.Count(rr.UID)
	if !ok || g.Pid != was.Pid || g.Nonce != was.Nonce || g.Counter != was.Counter {
		t.Fatalf("not the same process: %+v, was %+v", g, was)
	}
	in := a.w.guests[rr.UID]
	if len(in.mains) != 0 || in.identity.SecretEnv != nil || in.generation != 2 {
		t.Fatalf("a restore started something: %+v", in)
	}
	again, err := a.Restore(ctx(t), rr)
	must(t, err)
	if again.Observation != rec.Observation {
		t.Fatal("restored twice")
	}
	must(t, a.Delete(ctx(t), rr.UID))
	a.wantGone(rr.UID)
	must(t, a.DeleteSnapshot(ctx(t), snap.UID))
	must(t, a.DeleteSnapshot(ctx(t), snap.UID))
	if _, ok := a.w.holds[snap.UID]; ok {
		t.Fatal("the image is still held")
	}
	wantReason(t, second(a.Restore(ctx(t), restoreRequest(snap, "v"))), errs.ObjectNotFound)
}

func second[T any](_ T, err error) error { return err }

func TestRestoreIsRefusedBeforeAnythingIsTouched(t *testing.T) {
	a, req, snap := checkpointed(t)
	volume := req.Spec.Volumes[0].VolumeUID
	for name, c := range map[string]struct {
		host   func(*Node)
		change func(*RestoreRequest)
		want   errs.Reason
	}{
		"cpu":          {host: func(n *Node) { n.Host.CPUFeatures = []string{"a"} }, want: errs.IncompatibleNode},
		"architecture": {host: func(n *Node) { n.Host.Architecture = "arm64" }, want: errs.IncompatibleNode},
		"driver":       {host: func(n *Node) { n.Host.Driver = "runsc" }, want: errs.IncompatibleRuntime},
		"B07 one less": {change: func(r *RestoreRequest) { r.Volumes = nil }, want: errs.InvalidField},
		"B07 one more": {change: func(r *RestoreRequest) {
			r.Volumes = append(r.Volumes, snapshot.VolumeReference{VolumeUID: "v", Path: "/more"})
		}, want: errs.InvalidField},
		"other access": {change: func(r *RestoreRequest) { r.Volumes[0].ReadOnly = true }, want: errs.InvalidField},
		"other tenant": {change: func(r *RestoreRequest) { r.Tenant = "other" }, want: errs.ObjectNotFound},
		"held volume":  {want: errs.AlreadyAttached},
	} {
		t.Run(name, func(t *testing.T) {
			host := a.Host
			defer func() { a.Host = host }()
			if c.host != nil {
				c.host(a.Node)
			}
			rr := restoreRequest(snap, volume)
			if c.change != nil {
				c.change(&rr)
			}
			wantReason(t, second(a.Restore(ctx(t), rr)), c.want)
			a.wantGone(rr.UID)
		})
	}
	must(t, os.Truncate(filepath.Join(a.Snapshots.Path(snap.UID), "checkpoint.json"), 1))
	wantReason(t, second(a.Restore(ctx(t), restoreRequest(snap, volume))), errs.ArtefactDamaged)
}

func TestASnapshotThatIsReadIsNotDeleted(t *testing.T) {
	a, req, snap := checkpointed(t)
	must(t, a.Delete(ctx(t), req.UID))
	reading, release := make(chan struct{}), make(chan struct{})
	a.w.host.SetHook(func(_ context.Context, op fake.Op, _ string) error {
		if op == fake.OpRestore {
			close(reading)
			<-release
		}
		return nil
	})
	restored := make(chan error, 1)
	go func() { restored <- second(a.Restore(ctx(t), restoreRequest(snap, req.Spec.Volumes[0].VolumeUID))) }()
	<-reading
	wantReason(t, a.DeleteSnapshot(ctx(t), snap.UID), errs.StillReferenced)
	wantReason(t, a.FinishSnapshot(ctx(t), snap.UID), errs.WrongPhase)
	close(release)
	must(t, <-restored)
	must(t, a.DeleteSnapshot(ctx(t), snap.UID))
}

func TestAFailedCheckpointNeverCostsTheSandbox(t *testing.T) {
	full := errs.New(errs.DiskFull, "no room")
	for _, what := range []string{"quiesce", "drain", "pause", "save", "cancel"} {
		t.Run(what, func(t *testing.T) {
			a := newWorld(t).boot()
			req := startRequest()
			_, err := a.Start(ctx(t), req)
			must(t, err)
			a.w.setFail(what, full)
			call, cancel := context.WithCancelCause(ctx(t))
			defer cancel(nil)
			a.w.host.SetHook(func(_ context.Context, op fake.Op, _ string) error {
				switch {
				case string(op) == what:
					return full
				case what == "cancel" && op == fake.OpSave:
					a.owner(req.UID).endsFor(full)
					return context.Canceled
				}
				return nil
			})
			snap := uid.New()
			_, err = a.Checkpoint(call, CaptureRequest{UID: req.UID, SnapshotUID: snap, Tenant: "t", CommandID: "c"})
			if err == nil {
				t.Fatal("it succeeded")
			}
			a.w.host.SetHook(nil)
			if _, ok := a.w.host.Count(req.UID); !ok {
				t.Fatal("the sandbox does not run")
			}
			if a.w.guests[req.UID].quiet {
				t.Fatal("the channel is still quiet")
			}
			rec, err := a.store.Sandbox(req.UID)
			must(t, err)
			if rec.Capture != nil || rec.Phase != sandbox.Running {
				t.Fatalf("%s", text(rec))
			}
			wantReason(t, second(a.store.Snapshot(snap)), errs.ObjectNotFound)
			seen, err := a.Snapshots.Observe()
			must(t, err)
			if len(seen.Published)+len(seen.Staging)+len(seen.Trash) > 0 || a.w.holds[snap] != "" {
				t.Fatalf("left: %+v %v", seen, a.w.holds)
			}
		})
	}
}

func TestASandboxThatCannotBeResumedIsEnded(t *testing.T) {
	// It may be the kernel that ends it, of its memory, which is seen only once it is over.
	for want, oom := range map[string]bool{sandbox.ReasonKilled: false, sandbox.ReasonOOMKilled: true} {
		t.Run(want, func(t *testing.T) {
			a := newWorld(t).boot()
			req := startRequest()
			_, err := a.Start(ctx(t), req)
			must(t, err)
			a.w.host.SetHook(func(_ context.Context, op fake.Op, id string) error {
				switch {
				case op == fake.OpResume:
					return errors.New("broken")
				case op == fake.OpKill && oom:
					a.w.host.Exit(id, runtime.Exit{Known: true, Signal: syscall.SIGKILL, OOM: true})
				}
				return nil
			})
			if _, err = a.Checkpoint(ctx(t), CaptureRequest{UID: req.UID, SnapshotUID: uid.New(), Tenant: "t", CommandID: "c"}); err == nil {
				t.Fatal("it succeeded")
			}
			if rec, err := a.store.Sandbox(req.UID); err != nil || rec.Phase != sandbox.Failed || rec.Reason != want {
				t.Fatalf("%s %v", text(rec), err)
			}
			a.w.host.SetHook(nil)
			must(t, a.Delete(ctx(t), req.UID))
			a.wantGone(req.UID)
		})
	}
}
