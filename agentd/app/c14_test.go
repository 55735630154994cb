package app

import (
	"context"
	"testing"

	nodev1 "github.com/dormouse-run/dormouse/proto/dormouse/node/v1"
)

// A node whose coordinator is not there, and that was started so, has never had a view of the catalog. What it keeps itself can be read all the
// same: what it holds, by its own records, and what its sandboxes say.
func TestC14StandaloneNodeKeepsDurableReads(t *testing.T) {
	b := newBench(t)
	box := b.start()
	snap := b.checkpoint(box.GetUid())
	before := b.inventory()
	b.stopCoordinator()
	must(t, b.stack.StopAgentd(ctx(t), 1))
	must(t, b.stack.StartAgentd(ctx(t), 1, func(ctx context.Context) error {
		_, err := b.agent.GetInventory(ctx, &nodev1.GetInventoryRequest{})
		return err
	}))
	after := b.inventory()
	if len(after.GetSandboxes()) != 1 || after.GetSandboxes()[0].GetUid() != box.GetUid() || after.GetSandboxes()[0].GetPhase() != before.GetSandboxes()[0].GetPhase() {
		t.Errorf("sandboxes: before %v, now %v", before.GetSandboxes(), after.GetSandboxes())
	}
	if len(after.GetSnapshots()) != 1 || after.GetSnapshots()[0].GetUid() != snap || len(after.GetImages()) != len(before.GetImages()) {
		t.Errorf("before %v\nnow %v", before, after)
	}
	if out, code := b.sh(box.GetUid(), "echo alive"); out != "alive\n" || code != 0 {
		t.Errorf("the sandbox says %q, %d", out, code)
	}
	if b.coord.epoch() != 1 {
		t.Errorf("there were %d sessions; the test wants no coordinator", b.coord.epoch())
	}
	b.doctor()
	b.serveCoordinator()
	eventually(t, "the node comes back to its coordinator", func() bool { return b.coord.epoch() > 1 })
	b.deleteSnapshot(snap)
	b.delete(box.GetUid())
}
