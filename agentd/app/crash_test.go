package app

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/uid"
	nodev1 "github.com/dormouse-run/dormouse/proto/dormouse/node/v1"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// crashAt has agentd kill itself at the point while call goes on, and starts it again.
func (b *bench) crashAt(point string, call func() error) {
	b.t.Helper()
	fault := filepath.Join(b.stack.NodeDir(1), "agentd", "fault")
	must(b.t, os.WriteFile(fault, []byte(point), 0o600))
	err := call()
	if err == nil {
		b.t.Fatalf("%s: the call succeeded", point)
	}
	if _, err := os.Stat(fault); err == nil {
		b.t.Fatalf("%s was not passed: %v", point, err)
	}
	must(b.t, b.stack.KillAgentd(ctx(b.t), 1))
	b.startAgentd()
	eventually(b.t, "the API answers again", func() bool {
		_, err := b.agent.GetInventory(ctx(b.t), &nodev1.GetInventoryRequest{})
		return err == nil
	})
}

func (b *bench) inventory() *nodev1.GetInventoryResponse {
	b.t.Helper()
	inv, err := b.agent.GetInventory(ctx(b.t), &nodev1.GetInventoryRequest{})
	must(b.t, err)
	return inv
}

// TestF10AgentdKilledAtCrashPoints kills a real agentd at points of each verb, beside a sandbox that must
// not notice.
func TestF10AgentdKilledAtCrashPoints(t *testing.T) {
	b := newBench(t)
	box := b.start()
	if _, code := b.sh(box.GetUid(), "echo kept > /tmp/f"); code != 0 {
		t.Fatal(code)
	}
	alive := func(id string) {
		t.Helper()
		if out, code := b.sh(id, "cat /tmp/f"); out != "kept\n" || code != 0 {
			t.Fatalf("%q %d", out, code)
		}
	}
	for _, point := range []string{"start.intent.after", "start.volumes.after", "start.runtime.after", "start.guest.after", "start.running.before"} {
		id := uid.New()
		b.crashAt(point, func() error {
			_, err := b.agent.StartSandbox(ctx(t), &nodev1.StartSandboxRequest{Command: b.cmd(), Uid: id, Spec: &dormousev1.SandboxSpec{Image: b.image}})
			return err
		})
		if n := len(b.inventory().GetSandboxes()); n != 1 {
			t.Fatalf("%s: %d sandboxes", point, n)
		}
		alive(box.GetUid())
		b.doctor()
	}
	for point, kept := range map[string]int{"checkpoint.pause.after": 0, "checkpoint.save.after": 0, "checkpoint.resume.before": 0, "checkpoint.record.before": 1} {
		snap := uid.New()
		b.crashAt(point, func() error {
			_, err := b.agent.CheckpointSandbox(ctx(t), &nodev1.CheckpointSandboxRequest{Command: b.cmd(), Uid: box.GetUid(), SnapshotUid: snap})
			return err
		})
		alive(box.GetUid())
		if n := len(b.inventory().GetSnapshots()); n != kept {
			t.Fatalf("%s: %d snapshots, want %d", point, n, kept)
		}
		b.doctor()
		_, err := b.agent.DeleteSnapshot(ctx(t), &nodev1.DeleteSnapshotRequest{Command: b.cmd(), Uid: snap})
		must(t, err)
	}
	snap := uid.New()
	_, err := b.agent.CheckpointSandbox(ctx(t), &nodev1.CheckpointSandboxRequest{Command: b.cmd(), Uid: box.GetUid(), SnapshotUid: snap})
	must(t, err)
	for _, point := range []string{"restore.runtime.after", "restore.guest.after"} {
		b.crashAt(point, func() error {
			_, err := b.agent.RestoreSandbox(ctx(t), &nodev1.RestoreSandboxRequest{Command: b.cmd(), Uid: uid.New(), SnapshotUid: snap})
			return err
		})
		if n := len(b.inventory().GetSandboxes()); n != 1 {
			t.Fatalf("%s: %d sandboxes", point, n)
		}
		b.doctor()
	}
	b.crashAt("delete.runtime.after", func() error {
		_, err := b.agent.DeleteSandbox(ctx(t), &nodev1.DeleteSandboxRequest{Command: b.cmd(), Uid: box.GetUid()})
		return err
	})
	if n := len(b.inventory().GetSandboxes()); n != 0 {
		t.Fatalf("%d sandboxes after a delete", n)
	}
	restored, err := b.agent.RestoreSandbox(ctx(t), &nodev1.RestoreSandboxRequest{Command: b.cmd(), Uid: uid.New(), SnapshotUid: snap})
	must(t, err)
	alive(restored.GetSandbox().GetUid())
	b.delete(restored.GetSandbox().GetUid())
	b.crashAt("snapshot.artefact.after", func() error {
		_, err := b.agent.DeleteSnapshot(ctx(t), &nodev1.DeleteSnapshotRequest{Command: b.cmd(), Uid: snap})
		return err
	})
	if n := len(b.inventory().GetSnapshots()); n != 0 {
		t.Fatalf("%d snapshots after a delete", n)
	}
	b.doctor()
}

// TestDoctorFixesWhatALostStateFileLeft takes the records away under a running sandbox. Agentd then
// leaves alone what it does not know, doctor names it, and only --fix removes it.
func TestDoctorFixesWhatALostStateFileLeft(t *testing.T) {
	b := newBench(t)
	vol := uid.New()
	_, err := b.agent.CreateVolume(ctx(t), &nodev1.CreateVolumeRequest{Command: b.cmd(), Uid: vol})
	must(t, err)
	box := b.start(func(r *nodev1.StartSandboxRequest) {
		r.Spec.Volumes = []*dormousev1.VolumeMount{{VolumeUid: vol, Path: "/data"}}
	})
	must(t, b.stack.StopAgentd(ctx(t), 1))
	state := filepath.Join(b.stack.NodeDir(1), "agentd", "state.db")
	whole, err := os.ReadFile(state)
	must(t, err)
	must(t, os.WriteFile(state, append(make([]byte, 8192), whole[8192:]...), 0o600))
	err = b.stack.StartAgentd(ctx(t), 1, func(context.Context) error { return errors.New("it must not be ready") })
	if err == nil || !strings.Contains(err.Error(), "agentctl doctor") {
		t.Fatalf("a damaged state file was taken: %v", err)
	}
	must(t, os.Rename(state, state+".damaged"))
	b.startAgentd()
	found := func(fix bool) map[string]bool {
		t.Helper()
		resp, err := b.debug.Doctor(ctx(t), &nodev1.DoctorRequest{Fix: fix})
		must(t, err)
		kinds := make(map[string]bool)
		for _, f := range resp.GetFindings() {
			kinds[f.GetKind()] = f.GetFixed()
			if f.GetName() != box.GetUid() || fix && !f.GetFixed() {
				t.Errorf("%v", f)
			}
		}
		return kinds
	}
	eventually(t, "the debug socket answers", func() bool {
		_, err := b.debug.Overview(ctx(t), &nodev1.OverviewRequest{})
		return err == nil
	})
	for _, kind := range []string{"orphan-sandbox", "orphan-cgroup", "orphan-folder", "orphan-image-hold", "orphan-volume-hold"} {
		if _, ok := found(false)[kind]; !ok {
			t.Errorf("doctor does not name the %s", kind)
		}
	}
	found(true)
	b.doctor()
	_, err = b.process.ListProcesses(ctx(t), &dormousev1.ListProcessesRequest{SandboxUid: box.GetUid()})
	wantReason(t, err, errs.ObjectNotFound)
}

// TestRefusals: the node API takes nobody but a coordinator, and whoever is refused changes nothing.
func TestRefusals(t *testing.T) {
	b := newBench(t)
	api := "unix:" + filepath.Join(b.stack.NodeDir(1), "run", "api.sock")
	for name, files := range strangers(t, b) {
		conn := dialAs(t, api, files)
		_, err := nodev1.NewAgentServiceClient(conn).GetInventory(ctx(t), &nodev1.GetInventoryRequest{})
		if err == nil {
			t.Errorf("%s was let in", name)
		}
	}
	for path, mode := range map[string]os.FileMode{"run": 0o700, "run/agentd.sock": 0o600, "run/admin.sock": 0o600, "agentd": 0o700, "agentd/state.db": 0o600} {
		info, err := os.Stat(filepath.Join(b.stack.NodeDir(1), path))
		must(t, err)
		if info.Mode().Perm() != mode {
			t.Errorf("%s has mode %o, want %o", path, info.Mode().Perm(), mode)
		}
	}
}
