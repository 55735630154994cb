package app

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/uid"
	nodev1 "github.com/dormouse-run/dormouse/proto/dormouse/node/v1"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// A coordinator that gave way, and one that speaks of a session that gave way, get nothing done on a
// node, by no command: what the node has, and its record of that, stay as they are.
func TestC20StaleCommandsAreFenced(t *testing.T) {
	b := newBench(t)
	box := b.start()
	volume, snap := uid.New(), uid.New()
	_, err := b.agent.CreateVolume(ctx(t), &nodev1.CreateVolumeRequest{Command: b.cmd(), Uid: volume})
	must(t, err)
	_, err = b.agent.CheckpointSandbox(ctx(t), &nodev1.CheckpointSandboxRequest{Command: b.cmd(), Uid: box.GetUid(), SnapshotUid: snap})
	must(t, err)
	must(t, b.stack.KillAgentd(ctx(t), 1))
	b.startAgentd() // in another session
	// A later coordinator makes itself known by a command.
	const later = 7
	leader := func() *nodev1.Command {
		c := b.cmd()
		c.CoordinatorEpoch = later
		return c
	}
	b.await(leader)
	before := b.holdings()

	for who, stale := range map[string]func() *nodev1.Command{
		"an earlier coordinator": func() *nodev1.Command {
			c := leader()
			c.CoordinatorEpoch--
			return c
		},
		"an earlier session": func() *nodev1.Command {
			c := leader()
			c.SessionEpoch--
			return c
		},
		"nobody": func() *nodev1.Command { return &nodev1.Command{CommandId: uid.New(), Tenant: "dev"} },
	} {
		for what, do := range b.commands(box.GetUid(), snap, volume) {
			if err := do(stale()); !errs.Has(err, errs.Fenced) {
				t.Errorf("%s of %s: %v, want %s", what, who, err, errs.Fenced)
			}
		}
		if after := b.holdings(); !proto.Equal(after, before) {
			t.Errorf("after %s the node has %v, had %v", who, after, before)
		}
	}
	if out, code := b.sh(box.GetUid(), "echo alive"); code != 0 || out != "alive\n" {
		t.Errorf("the sandbox says %q, %d", out, code)
	}
	if _, err := os.Stat(filepath.Join(b.stack.NodeDir(1), "agentd", "snapshots", snap)); err != nil {
		t.Errorf("the artefact: %v", err)
	}
	b.doctor()

	// The one in force is obeyed all the same.
	for _, do := range []error{
		second(b.agent.DeleteSandbox(ctx(t), &nodev1.DeleteSandboxRequest{Command: leader(), Uid: box.GetUid()})),
		second(b.agent.DeleteSnapshot(ctx(t), &nodev1.DeleteSnapshotRequest{Command: leader(), Uid: snap})),
		second(b.agent.DeleteVolume(ctx(t), &nodev1.DeleteVolumeRequest{Command: leader(), Uid: volume})),
	} {
		must(t, do)
	}
	b.doctor()
}

func second[T any](_ T, err error) error { return err }

// await waits until a command is admitted: the session may be a moment younger here than there.
func (b *bench) await(cmd func() *nodev1.Command) {
	b.t.Helper()
	eventually(b.t, "a command is admitted", func() bool {
		_, err := b.agent.DeleteVolume(ctx(b.t), &nodev1.DeleteVolumeRequest{Command: cmd(), Uid: uid.New()})
		return err == nil
	})
}

// holdings is all that the node has, from its records.
func (b *bench) holdings() *nodev1.GetInventoryResponse {
	b.t.Helper()
	inv, err := b.agent.GetInventory(ctx(b.t), &nodev1.GetInventoryRequest{})
	must(b.t, err)
	if len(inv.GetSandboxes()) != 1 || len(inv.GetSnapshots()) != 1 || len(inv.GetVolumes()) != 1 || len(inv.GetImages()) != 1 {
		b.t.Fatalf("the node has %v", inv)
	}
	return inv
}

// commands are all that a coordinator can tell a node, each with an effect if it were admitted.
func (b *bench) commands(box, snap, volume string) map[string]func(*nodev1.Command) error {
	c := ctx(b.t)
	return map[string]func(*nodev1.Command) error{
		"StartSandbox": func(cmd *nodev1.Command) error {
			return second(b.agent.StartSandbox(c, &nodev1.StartSandboxRequest{Command: cmd, Uid: uid.New(), Generation: 1, Spec: &dormousev1.SandboxSpec{Image: b.image}}))
		},
		"RestoreSandbox": func(cmd *nodev1.Command) error {
			return second(b.agent.RestoreSandbox(c, &nodev1.RestoreSandboxRequest{Command: cmd, Uid: uid.New(), Generation: 1, SnapshotUid: snap}))
		},
		"CheckpointSandbox": func(cmd *nodev1.Command) error {
			return second(b.agent.CheckpointSandbox(c, &nodev1.CheckpointSandboxRequest{Command: cmd, Uid: box, SnapshotUid: uid.New()}))
		},
		"ClaimSandbox": func(cmd *nodev1.Command) error {
			return second(b.agent.ClaimSandbox(c, &nodev1.ClaimSandboxRequest{Command: cmd, Uid: box, Generation: 2}))
		},
		"DeleteSandbox": func(cmd *nodev1.Command) error {
			return second(b.agent.DeleteSandbox(c, &nodev1.DeleteSandboxRequest{Command: cmd, Uid: box}))
		},
		"DeleteSnapshot": func(cmd *nodev1.Command) error {
			return second(b.agent.DeleteSnapshot(c, &nodev1.DeleteSnapshotRequest{Command: cmd, Uid: snap}))
		},
		"CreateVolume": func(cmd *nodev1.Command) error {
			return second(b.agent.CreateVolume(c, &nodev1.CreateVolumeRequest{Command: cmd, Uid: uid.New()}))
		},
		"DeleteVolume": func(cmd *nodev1.Command) error {
			return second(b.agent.DeleteVolume(c, &nodev1.DeleteVolumeRequest{Command: cmd, Uid: volume}))
		},
		"PullImage": func(cmd *nodev1.Command) error {
			stream, err := b.agent.PullImage(c, &nodev1.PullImageRequest{Command: cmd, Reference: b.image})
			if err != nil {
				return err
			}
			return second(stream.Recv())
		},
		"RemoveImage": func(cmd *nodev1.Command) error {
			_, digest, _ := strings.Cut(b.image, "@")
			return second(b.agent.RemoveImage(c, &nodev1.RemoveImageRequest{Command: cmd, Digest: digest}))
		},
	}
}
