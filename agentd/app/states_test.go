package app

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"

	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/uid"
	nodev1 "github.com/dormouse-run/dormouse/proto/dormouse/node/v1"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

func (b *bench) checkpoint(box string) string {
	b.t.Helper()
	snap := uid.New()
	_, err := b.agent.CheckpointSandbox(ctx(b.t), &nodev1.CheckpointSandboxRequest{Command: b.cmd(), Uid: box, SnapshotUid: snap})
	must(b.t, err)
	return snap
}

func (b *bench) deleteSnapshot(snap string) {
	b.t.Helper()
	_, err := b.agent.DeleteSnapshot(ctx(b.t), &nodev1.DeleteSnapshotRequest{Command: b.cmd(), Uid: snap})
	must(b.t, err)
}

// sentry gives the host's process of a sandbox, as the node observes it.
func (b *bench) sentry(box string) int {
	b.t.Helper()
	got, err := b.debug.Inspect(ctx(b.t), &nodev1.InspectRequest{Kind: nodev1.DebugKind_DEBUG_KIND_SANDBOX, Uid: box}, grpc.WaitForReady(true))
	must(b.t, err)
	var detail struct {
		Observed struct{ Pid int } `json:"observed"`
	}
	must(b.t, json.Unmarshal([]byte(got.GetJson()), &detail))
	if detail.Observed.Pid == 0 {
		b.t.Fatalf("no pid in %s", got.GetJson())
	}
	return detail.Observed.Pid
}

// TestI04SnapshotsHoldTheirImage: an image stays while a sandbox or a snapshot needs it, and goes after.
func TestI04SnapshotsHoldTheirImage(t *testing.T) {
	b := newBench(t)
	box := b.start()
	remove := func() error {
		_, err := b.agent.RemoveImage(ctx(t), &nodev1.RemoveImageRequest{Command: b.cmd(), Digest: box.GetImageDigest()})
		return err
	}
	wantReason(t, remove(), errs.StillReferenced)
	snap := b.checkpoint(box.GetUid())
	b.delete(box.GetUid())
	wantReason(t, remove(), errs.StillReferenced)
	b.deleteSnapshot(snap)
	must(t, remove())
	must(t, remove())
	if n := len(b.inventory().GetImages()); n != 0 {
		t.Fatalf("%d images are left", n)
	}
}

// TestB28AFileThatWentFromAVolume: what a process held open is gone; the restore says which file, leaves
// nothing, and succeeds once it is back.
func TestB28AFileThatWentFromAVolume(t *testing.T) {
	b := newBench(t)
	vol := uid.New()
	_, err := b.agent.CreateVolume(ctx(t), &nodev1.CreateVolumeRequest{Command: b.cmd(), Uid: vol})
	must(t, err)
	box := b.start(func(r *nodev1.StartSandboxRequest) {
		r.Spec.Volumes = []*dormousev1.VolumeMount{{VolumeUid: vol, Path: "/data"}}
		r.Spec.Command = []string{"/bin/sh", "-c", "exec 3>/data/open; echo start >&3; sleep 1000"}
	})
	file := filepath.Join(b.stack.NodeDir(1), "agentd", "volumes", "volumes", vol, "data", "open")
	eventually(t, "the file is open", func() bool { info, err := os.Stat(file); return err == nil && info.Size() > 0 })
	snap := b.checkpoint(box.GetUid())
	b.delete(box.GetUid())
	must(t, os.Rename(file, file+".away"))
	restore := func() (*nodev1.RestoreSandboxResponse, error) {
		return b.agent.RestoreSandbox(ctx(t), &nodev1.RestoreSandboxRequest{Command: b.cmd(), Uid: uid.New(), SnapshotUid: snap,
			Volumes: []*nodev1.RestoreVolume{{Path: "/data", VolumeUid: vol}}})
	}
	_, err = restore()
	wantReason(t, err, errs.VolumeDiverged)
	b.doctor()
	must(t, os.Rename(file+".away", file))
	back, err := restore()
	must(t, err)
	b.delete(back.GetSandbox().GetUid())
	b.doctor()
}

// TestB29AStuckSentry: looking does not wait for a sandbox that does not answer, and B12: it can be deleted.
func TestB29AStuckSentry(t *testing.T) {
	b := newBench(t)
	box := b.start()
	pid := b.sentry(box.GetUid())
	must(t, syscall.Kill(pid, syscall.SIGSTOP))
	look, cancel := context.WithTimeout(ctx(t), time.Minute)
	defer cancel()
	if _, err := b.agent.GetInventory(look, &nodev1.GetInventoryRequest{}); err != nil {
		t.Error(err)
	}
	if _, err := b.debug.Inspect(look, &nodev1.InspectRequest{Kind: nodev1.DebugKind_DEBUG_KIND_SANDBOX, Uid: box.GetUid()}); err != nil {
		t.Error(err)
	}
	ask, cancel := context.WithTimeout(ctx(t), 300*time.Millisecond)
	defer cancel()
	_, err := b.process.ListProcesses(ask, &dormousev1.ListProcessesRequest{SandboxUid: box.GetUid()})
	wantReason(t, err, errs.DeadlineExpired)
	b.delete(box.GetUid())
	b.doctor()
	if !ended(pid) {
		t.Error("the sentry is still there")
	}
}

// ended tells whether a process is gone, or waits only for its parent to look.
func ended(pid int) bool {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err != nil || bytes.Contains(data, []byte(") Z "))
}

// TestTheSentryIsKilled under agentd, and while there is none: a plain SIGKILL is not called OOM.
func TestTheSentryIsKilled(t *testing.T) {
	b := newBench(t)
	watched, unwatched := b.start(), b.start()
	must(t, syscall.Kill(b.sentry(watched.GetUid()), syscall.SIGKILL))
	eventually(t, "it is Killed", func() bool { return b.coord.reported(watched.GetUid()).GetReason() == "Killed" })
	pid := b.sentry(unwatched.GetUid())
	must(t, b.stack.KillAgentd(ctx(t), 1))
	must(t, syscall.Kill(pid, syscall.SIGKILL))
	eventually(t, "it is gone", func() bool { return ended(pid) })
	b.startAgentd()
	// How it ended is known only where its new parent has not looked yet.
	eventually(t, "it is Lost or Killed", func() bool {
		reason := b.coord.reported(unwatched.GetUid()).GetReason()
		return reason == "Lost" || reason == "Killed"
	})
	b.delete(watched.GetUid())
	b.delete(unwatched.GetUid())
	b.doctor()
}

// TestManyAtOnce starts, captures, restores and deletes several at once, and leaves nothing.
func TestManyAtOnce(t *testing.T) {
	b := newBench(t)
	const count = 8
	var mu sync.Mutex
	command := func() *nodev1.Command {
		mu.Lock()
		defer mu.Unlock()
		return b.cmd()
	}
	c := ctx(t)
	each := func(what string, do func(i int) error) {
		t.Helper()
		began := time.Now()
		var group sync.WaitGroup
		failed := make([]error, count)
		for i := range count {
			group.Go(func() { failed[i] = do(i) })
		}
		group.Wait()
		for i, err := range failed {
			if err != nil {
				t.Fatalf("%s %d: %v", what, i, err)
			}
		}
		t.Logf("%s %d: %s", what, count, time.Since(began).Round(time.Millisecond))
	}
	var boxes, snaps, copies [count]string
	for i := range count {
		boxes[i], snaps[i], copies[i] = uid.New(), uid.New(), uid.New()
	}
	each("start", func(i int) error {
		_, err := b.agent.StartSandbox(c, &nodev1.StartSandboxRequest{Command: command(), Uid: boxes[i], Spec: &dormousev1.SandboxSpec{Image: b.image}})
		return err
	})
	each("checkpoint", func(i int) error {
		_, err := b.agent.CheckpointSandbox(c, &nodev1.CheckpointSandboxRequest{Command: command(), Uid: boxes[i], SnapshotUid: snaps[i]})
		return err
	})
	each("restore", func(i int) error {
		_, err := b.agent.RestoreSandbox(c, &nodev1.RestoreSandboxRequest{Command: command(), Uid: copies[i], SnapshotUid: snaps[i], Name: fmt.Sprintf("copy-%d", i)})
		return err
	})
	each("delete", func(i int) error {
		_, err := b.agent.DeleteSandbox(c, &nodev1.DeleteSandboxRequest{Command: command(), Uid: boxes[i]})
		if err == nil {
			_, err = b.agent.DeleteSandbox(c, &nodev1.DeleteSandboxRequest{Command: command(), Uid: copies[i]})
		}
		if err == nil {
			_, err = b.agent.DeleteSnapshot(c, &nodev1.DeleteSnapshotRequest{Command: command(), Uid: snaps[i]})
		}
		return err
	})
	b.doctor()
	if inv := b.inventory(); len(inv.GetSandboxes())+len(inv.GetSnapshots()) != 0 {
		t.Fatalf("left: %v", inv)
	}
}
