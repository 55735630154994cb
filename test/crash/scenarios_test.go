package crash

import (
	"context"
	"fmt"

	"github.com/dormouse-run/dormouse/pkg/client"
	"github.com/dormouse-run/dormouse/pkg/uid"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
	"github.com/dormouse-run/dormouse/test/cluster"
)

// operation is one call of the public API that a daemon's death cuts in two.
type operation struct {
	// id is the operation's; empty for calls that have none.
	id string
	// run asks once. It may be called again until it says how it ended.
	run func(ctx context.Context) error
	// check looks at what a success made.
	check func()
	// clean deletes what prepare and run made.
	clean func()
}

// scenario prepares an operation.
type scenario func(w *world) operation

// answers checks that a copy of the survivor's program answers, and keeps its memory.
func (w *world) answers(s *client.Sandbox) {
	w.Helper()
	me, first := w.talk(s)
	if again, second := w.talk(s); again != me || second <= first {
		w.Fatalf("sandbox %s is %s, asked %d times, and then %s, asked %d times", s.UID, me, first, again, second)
	}
}

func (w *world) drop(sandboxes ...*client.Sandbox) {
	w.Helper()
	for _, s := range sandboxes {
		w.ok(gone(s.Delete(w.ctx, "")))
	}
}

func create(w *world) operation {
	v := w.newVolume("")
	var made *client.Sandbox
	req := &dormousev1.CreateSandboxRequest{OperationId: uid.New(), Spec: w.spec(v)}
	return operation{
		id:    req.OperationId,
		run:   func(ctx context.Context) (err error) { made, err = w.api.CreateSandbox(ctx, req); return err },
		check: func() { w.answers(made) },
		clean: func() {
			w.drop(made)
			w.ok(gone(v.Delete(w.ctx, "")))
		},
	}
}

// bare is a creation that needs nothing else.
func bare(w *world) operation {
	var made *client.Sandbox
	req := &dormousev1.CreateSandboxRequest{OperationId: uid.New(), Spec: w.spec()}
	return operation{
		id:    req.OperationId,
		run:   func(ctx context.Context) (err error) { made, err = w.api.CreateSandbox(ctx, req); return err },
		check: func() { w.answers(made) },
		clean: func() { w.drop(made) },
	}
}

func restore(w *world) operation {
	var made *client.Sandbox
	clone := &dormousev1.VolumeBinding{Path: "/data0", Policy: dormousev1.VolumePolicy_VOLUME_POLICY_CLONE}
	req := &dormousev1.RestoreSandboxRequest{OperationId: uid.New(), Volumes: []*dormousev1.VolumeBinding{clone}}
	return operation{
		id:  req.OperationId,
		run: func(ctx context.Context) (err error) { made, err = w.snapshot.Restore(ctx, req); return err },
		check: func() {
			if me, _ := w.talk(made); me != w.me {
				w.Fatalf("restored was %s, not %s", me, w.me)
			}
		},
		clean: func() {
			w.drop(made)
			w.dropClones()
		},
	}
}

// sweep deletes everything but the world's own, after a failure: the next row is not to pay for it.
func (w *world) sweep() {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	keep := map[string]bool{w.survivor.UID: true, w.snapshot.UID: true, w.volume.UID: true, w.loose.UID: true}
	w.disarm(agentd)
	w.disarm(coordinator)
	w.ctx = ctx
	for _, daemon := range []string{coordinator, agentd} {
		if !w.Running(daemon) {
			w.restart(daemon)
		}
	}
	err := w.deleteAll(ctx, keep)
	if err != nil {
		w.Logf("sweep: %v", err)
	}
}

// dropClones deletes every volume but the world's own.
func (w *world) dropClones() {
	w.Helper()
	volumes, err := client.Collect(w.api.ListVolumes(w.ctx, &dormousev1.ListVolumesRequest{}))
	w.ok(err)
	for _, v := range volumes {
		if id := v.GetMeta().GetUid(); id != w.volume.UID && id != w.loose.UID {
			w.ok(gone(w.api.Volume(id).Delete(w.ctx, "")))
		}
	}
}

func fork(w *world) operation {
	var copies []*client.Sandbox
	var snapshot string
	req := &dormousev1.ForkSandboxRequest{OperationId: uid.New(), SandboxUid: w.survivor.UID, Count: 2}
	return operation{
		id:  req.OperationId,
		run: func(ctx context.Context) (err error) { copies, snapshot, err = w.api.Fork(ctx, req); return err },
		check: func() {
			if len(copies) != 2 || copies[0].UID == copies[1].UID {
				w.Fatalf("the fork made %v", copies)
			}
			for _, s := range copies {
				if me, _ := w.talk(s); me != w.me {
					w.Fatalf("a copy is %s, not %s", me, w.me)
				}
			}
		},
		clean: func() {
			w.drop(copies...)
			w.dropClones()
			w.ok(gone(w.api.Snapshot(snapshot).Delete(w.ctx, "")))
		},
	}
}

func capture(w *world) operation {
	var made *client.Snapshot
	req := &dormousev1.CheckpointSandboxRequest{OperationId: uid.New()}
	return operation{
		id:  req.OperationId,
		run: func(ctx context.Context) (err error) { made, err = w.survivor.Checkpoint(ctx, req); return err },
		check: func() {
			clone := &dormousev1.VolumeBinding{Path: "/data0", Policy: dormousev1.VolumePolicy_VOLUME_POLICY_CLONE}
			s, err := made.Restore(w.ctx, &dormousev1.RestoreSandboxRequest{Volumes: []*dormousev1.VolumeBinding{clone}})
			w.ok(err)
			if me, _ := w.talk(s); me != w.me {
				w.Fatalf("what was captured was %s, not %s", me, w.me)
			}
			w.drop(s)
			w.dropClones()
		},
		clean: func() { w.ok(gone(made.Delete(w.ctx, ""))) },
	}
}

// pause is a sandbox of its own that stands still, and goes on afterwards as if nothing had been.
func pause(w *world) operation {
	s := w.newSandbox()
	me, _ := w.talk(s)
	id := uid.New()
	return operation{
		id:  id,
		run: func(ctx context.Context) error { return s.Pause(ctx, id) },
		check: func() {
			w.isPaused(s)
			w.ok(s.Resume(w.ctx, ""))
			if again, _ := w.talk(s); again != me {
				w.Fatalf("it was %s, and is %s", me, again)
			}
		},
		clean: func() { w.drop(s) },
	}
}

func resume(w *world) operation {
	s := w.newSandbox()
	me, _ := w.talk(s)
	w.ok(s.Pause(w.ctx, ""))
	id := uid.New()
	return operation{
		id:  id,
		run: func(ctx context.Context) error { return s.Resume(ctx, id) },
		check: func() {
			if again, _ := w.talk(s); again != me {
				w.Fatalf("it was %s, and is %s", me, again)
			}
		},
		clean: func() { w.drop(s) },
	}
}

// hibernate is a sandbox of its own that is put on the disk, and wakes with its memory.
func hibernate(w *world) operation {
	v := w.newVolume("")
	s := w.newSandbox(v)
	me, _ := w.talk(s)
	id := uid.New()
	return operation{
		id:    id,
		run:   func(ctx context.Context) error { return s.Hibernate(ctx, id) },
		check: func() { w.wakes(s, me) },
		clean: func() {
			w.drop(s)
			w.ok(gone(v.Delete(w.ctx, "")))
		},
	}
}

func wake(w *world) operation {
	s := w.newSandbox()
	me, _ := w.talk(s)
	w.ok(s.Hibernate(w.ctx, ""))
	id := uid.New()
	return operation{
		id:    id,
		run:   func(ctx context.Context) error { return s.Resume(ctx, id) },
		check: func() { w.wakes(s, me) },
		clean: func() { w.drop(s) },
	}
}

func removeHibernated(w *world) operation {
	v := w.newVolume("")
	s := w.newSandbox(v)
	w.ok(s.Hibernate(w.ctx, ""))
	id := uid.New()
	return operation{
		id:    id,
		run:   func(ctx context.Context) error { return s.Delete(ctx, id) },
		check: func() { w.ok(v.Delete(w.ctx, "")) },
		clean: func() {},
	}
}

// wakes resumes a sandbox, in whatever phase it is, and checks that it has its memory.
func (w *world) wakes(s *client.Sandbox, me string) {
	w.Helper()
	w.ok(s.Resume(w.ctx, ""))
	if again, _ := w.talk(s); again != me {
		w.Fatalf("it was %s, and is %s", me, again)
	}
}

// capturePaused takes a snapshot of a paused sandbox, which stays paused.
func capturePaused(w *world) operation {
	s := w.newSandbox()
	me, _ := w.talk(s)
	w.ok(s.Pause(w.ctx, ""))
	var made *client.Snapshot
	req := &dormousev1.CheckpointSandboxRequest{OperationId: uid.New()}
	return operation{
		id:  req.OperationId,
		run: func(ctx context.Context) (err error) { made, err = s.Checkpoint(ctx, req); return err },
		check: func() {
			w.isPaused(s)
			restored, err := made.Restore(w.ctx, &dormousev1.RestoreSandboxRequest{})
			w.ok(err)
			if again, _ := w.talk(restored); again != me {
				w.Fatalf("what was captured was %s, not %s", again, me)
			}
			w.drop(restored)
		},
		clean: func() {
			w.drop(s)
			w.ok(gone(made.Delete(w.ctx, "")))
		},
	}
}

// isPaused waits until the record says so: the operation's answer is of the moment in which it ended.
func (w *world) isPaused(s *client.Sandbox) {
	w.Helper()
	w.await("it is paused", func() error {
		if err := s.Refresh(w.ctx); err != nil {
			return err
		}
		if p := s.Last.GetStatus().GetPhase(); p != dormousev1.SandboxPhase_SANDBOX_PHASE_PAUSED {
			return fmt.Errorf("it is %s", p)
		}
		return nil
	})
}

func remove(w *world) operation {
	v := w.newVolume("")
	s := w.newSandbox(v)
	id := uid.New()
	return operation{
		id:  id,
		run: func(ctx context.Context) error { return s.Delete(ctx, id) },
		// A volume that is free again can be deleted.
		check: func() { w.ok(v.Delete(w.ctx, "")) },
		clean: func() {},
	}
}

func dropSnapshot(w *world) operation {
	snap, err := w.survivor.Checkpoint(w.ctx, &dormousev1.CheckpointSandboxRequest{})
	w.ok(err)
	id := uid.New()
	return operation{id: id, run: func(ctx context.Context) error { return snap.Delete(ctx, id) }, check: func() {}, clean: func() {}}
}

// ending is a sandbox whose command ends while its agentd dies.
func ending(w *world) operation {
	spec := w.spec()
	spec.Command = []string{"sh", "-c", "mkfifo /tmp/q; read line </tmp/q; exit 7"}
	s, err := w.api.CreateSandbox(w.ctx, &dormousev1.CreateSandboxRequest{Spec: spec})
	w.ok(err)
	return operation{
		run: func(ctx context.Context) error {
			if err := s.Refresh(ctx); err != nil {
				return err
			}
			if s.Last.GetStatus().GetPhase() == dormousev1.SandboxPhase_SANDBOX_PHASE_STOPPED {
				return nil
			}
			_, err := cluster.Exec(ctx, s, "sh", "-c", "[ -p /tmp/q ] && echo x 1<>/tmp/q")
			return fmt.Errorf("it is %s (%v)", s.Last.GetStatus().GetPhase(), err) //nolint:errorlint // not the operation's own
		},
		check: func() {
			if code := s.Last.GetStatus().GetExitCode(); code != 7 {
				w.Fatalf("the command ended with 7, recorded is %d", code)
			}
		},
		clean: func() { w.drop(s) },
	}
}

func createVolume(w *world) operation { return makeVolume(w, "") }
func cloneVolume(w *world) operation  { return makeVolume(w, w.loose.UID) }

func makeVolume(w *world, source string) operation {
	var made *client.Volume
	req := &dormousev1.CreateVolumeRequest{OperationId: uid.New(), Spec: &dormousev1.VolumeSpec{SourceVolumeUid: source}}
	return operation{
		id:    req.OperationId,
		run:   func(ctx context.Context) (err error) { made, err = w.api.CreateVolume(ctx, req); return err },
		check: func() { w.drop(w.newSandbox(made)) },
		clean: func() { w.ok(gone(made.Delete(w.ctx, ""))) },
	}
}

func dropVolume(w *world) operation {
	v := w.newVolume("")
	id := uid.New()
	return operation{id: id, run: func(ctx context.Context) error { return v.Delete(ctx, id) }, check: func() {}, clean: func() {}}
}

// pull makes a sandbox of an image that the node does not have.
func pull(w *world) operation {
	var made *client.Sandbox
	ref := w.newImage()
	spec := w.spec()
	spec.Image = ref
	req := &dormousev1.CreateSandboxRequest{OperationId: uid.New(), Spec: spec}
	return operation{
		id:    req.OperationId,
		run:   func(ctx context.Context) (err error) { made, err = w.api.CreateSandbox(ctx, req); return err },
		check: func() { w.answers(made) },
		clean: func() {
			w.drop(made)
			w.ok(gone(w.Client.Image(made.Last.GetStatus().GetImageDigest()).Delete(w.ctx)))
		},
	}
}

func dropImage(w *world) operation {
	ref := w.newImage()
	img, err := w.Client.PullImage(w.ctx, ref, "", nil)
	w.ok(err)
	return operation{
		run: func(ctx context.Context) error { return gone(img.Delete(ctx)) },
		check: func() {
			// It is gone and can be had again.
			again, err := w.Client.PullImage(w.ctx, ref, "", nil)
			w.ok(err)
			if again.Last.GetErofsDigest() != img.Last.GetErofsDigest() {
				w.Fatalf("pulled again it is %s, not %s", again.Last.GetErofsDigest(), img.Last.GetErofsDigest())
			}
		},
		clean: func() { w.ok(gone(img.Delete(w.ctx))) },
	}
}
