package integration

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/dormouse-run/dormouse/pkg/client"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/uid"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// Deletions that are going on when agentd and then the coordinator are killed come to their end, by what is written down: the
// records, the artefacts and the operations agree again, and the verification finds nothing.
func TestDeletionsThroughDeaths(t *testing.T) {
	w := enter(t)
	s := w.create(w.spec())
	node := w.nodeOf(s)
	var snaps []*client.Snapshot
	for range 10 {
		snaps = append(snaps, w.checkpoint(s))
	}
	ended := make(chan error, len(snaps))
	for _, snap := range snaps {
		go func() {
			op := uid.New()
			ended <- poll(w.ctx, func() error { // the same operation, until it says how it ended
				err := snap.Delete(w.ctx, op)
				if errs.Has(err, errs.ObjectNotFound) {
					err = nil
				}
				return err
			})
		}()
	}
	w.ok(w.KillAgentd(w.ctx, node))
	w.ok(w.StartAgentdReady(w.ctx, node))
	w.ok(w.KillCoordinator(w.ctx))
	w.ok(w.EndLease(w.ctx)) // which would run out
	w.ok(w.StartCoordinatorReady(w.ctx))
	for range snaps {
		w.ok(<-ended)
	}
	if left := w.artefacts(node); len(left) > 0 {
		t.Errorf("left on the node: %v", left)
	}
	if out := w.said(0, "snapshot", "ls", "--source", s.UID, "-q"); out != "" {
		t.Errorf("left in the catalog:\n%s", out)
	}
	// By selection, and seen by an operator.
	for range 3 {
		snaps = append(snaps, w.checkpoint(s))
	}
	if out := w.said(0, "snapshot", "rm", "--source", s.UID); len(strings.Fields(out)) != 3 {
		t.Errorf("rm --source said:\n%s", out)
	}
	op := w.sub(t)
	op.key = w.operatorKey()
	if out := op.said(0, "admin", "catalog", "status"); !strings.Contains(out, "Orphans:") || !strings.Contains(out, "ended in the last minute") {
		t.Errorf("status:\n%s", out)
	}
	w.ok(s.Delete(w.ctx, ""))
	w.nodesOnline()
	w.verified()
}

// verified checks that the verification finds nothing.
func (w *world) verified() {
	w.Helper()
	found, err := client.Collect(w.Client.VerifyCatalog(w.ctx))
	w.ok(err)
	for _, f := range found {
		w.Errorf("the catalog and the nodes differ: %v", f)
	}
}

// A node that came back with an older disk holds what was deleted since. Its tombstone proves that, and so it is removed, with
// an event; what has a record stays.
func TestOrphanOfAnOlderDiskIsRemoved(t *testing.T) {
	w := enter(t)
	s := w.create(w.spec())
	node := w.nodeOf(s)
	deleted, kept := w.checkpoint(s), w.checkpoint(s)
	dir := w.NodeDir(node)
	aside := t.TempDir()
	copied := func(from, to string) {
		out, err := exec.CommandContext(w.ctx, "cp", "-a", from, to).CombinedOutput()
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	artefact := filepath.Join(dir, "snapshots", deleted.UID)
	w.ok(w.StopAgentd(w.ctx, node))
	copied(filepath.Join(dir, "state.db"), aside)
	copied(artefact, aside)
	w.ok(w.StartAgentdReady(w.ctx, node))
	w.nodesOnline()
	w.ok(deleted.Delete(w.ctx, ""))

	w.ok(w.StopAgentd(w.ctx, node))
	copied(filepath.Join(aside, "state.db"), filepath.Join(dir, "state.db"))
	copied(filepath.Join(aside, deleted.UID), artefact)
	w.ok(w.StartAgentdReady(w.ctx, node))
	w.await("the orphan is removed", func() error {
		_, err := os.Stat(artefact)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return nil
		case err == nil:
			return errors.New("it is there")
		}
		return err
	})
	w.await("an event says so", func() error {
		events, err := client.Collect(w.api.ListEvents(w.ctx, &dormousev1.ListEventsRequest{ObjectUid: deleted.UID}))
		if err != nil {
			return err
		}
		for _, e := range events {
			if e.GetReason() == "OrphanRemoved" {
				return nil
			}
		}
		return fmt.Errorf("%d other events of %s", len(events), deleted.UID)
	})
	w.nodesOnline()
	if there := w.artefacts(node); !slices.Contains(there, filepath.Join(dir, "snapshots", kept.UID)) {
		t.Errorf("on the node is %v, not %s", there, kept.UID)
	}
	w.verified()
	w.ok(kept.Delete(context.WithoutCancel(w.ctx), ""))
	w.ok(s.Delete(w.ctx, ""))
}
