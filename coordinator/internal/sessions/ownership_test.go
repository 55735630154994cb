package sessions_test

import (
	"context"
	"errors"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/dormouse-run/dormouse/coordinator/internal/operations"
	"github.com/dormouse-run/dormouse/coordinator/internal/placement"
	"github.com/dormouse-run/dormouse/coordinator/internal/records"
	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/fence"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
	nodev1 "github.com/dormouse-run/dormouse/proto/dormouse/node/v1"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

func there(snapshots ...string) *nodev1.GetInventoryResponse {
	inv := &nodev1.GetInventoryResponse{}
	for _, u := range snapshots {
		inv.Snapshots = append(inv.Snapshots, &nodev1.SnapshotObservation{Uid: u, Tenant: tenant})
	}
	return inv
}

func running(box string, number uint64) *nodev1.SandboxObservation {
	return &nodev1.SandboxObservation{Uid: box, Tenant: tenant, Phase: dormousev1.SandboxPhase_SANDBOX_PHASE_RUNNING, Observation: number}
}

// buried makes a snapshot and deletes it.
func (w *world) buried(box string) string {
	w.Helper()
	u := w.snapshot(box)
	_, err := w.engine.DeleteSnapshot(w.Context(), w.call(), operations.Delete{UID: u})
	w.ok(err)
	_ = w.agents.forget()
	return u
}

// A node that comes back in the middle of the deletion of a snapshot keeps the artefact: what is
// Deleting has an owner, whose operation removes it. Only what has a tombstone is removed unasked.
func TestC12ReturningNodeKeepsADeletingSnapshot(t *testing.T) {
	w := newWorld(t)
	first := w.begin()
	box := w.sandbox()
	orphan, snap := w.buried(box), w.snapshot(box)
	w.agents.setAway(snap)
	deletion := w.call()
	for wait := 50 * time.Millisecond; ; wait *= 2 { // until that is long enough to learn why it is over
		short, cancel := context.WithTimeout(t.Context(), wait)
		_, err := w.engine.DeleteSnapshot(short, deletion, operations.Delete{UID: snap})
		cancel()
		if errs.Has(err, errs.NodeAway) {
			break
		}
		if !errs.Has(err, errs.DeadlineExpired) {
			t.Fatal(err)
		}
	}
	w.leave(first)
	before := w.record(records.SnapshotKey(tenant, snap))
	inv := there(snap, orphan) // in this order: once the orphan is gone, the other was looked at
	inv.Sandboxes = append(inv.Sandboxes, running(box, 1))
	w.holds(inv, nil)
	w.open()
	var gone []string
	w.eventually("the orphan is removed", func() bool {
		gone = append(gone, w.agents.forget()...)
		return slices.Contains(gone, orphan)
	})
	if len(gone) != 1 {
		t.Errorf("the node was told to delete %v, want only %s", gone, orphan)
	}
	if after := w.record(before.Key); !reflect.DeepEqual(after, before) {
		t.Errorf("the record became %v", after)
	}
	w.agents.setAway("")
	_, err := w.engine.DeleteSnapshot(t.Context(), deletion, operations.Delete{UID: snap})
	w.ok(err)
	if gone := w.agents.forget(); !slices.Equal(gone, []string{snap}) {
		t.Errorf("the deletion removed %v", gone)
	}
}

// Neither a catalog nor a node that cannot be read is taken for an empty one: nothing is deleted and nothing
// published until they can.
func TestC13UnreadableMeansNothing(t *testing.T) {
	for _, broken := range []string{"List", "Get", "Living", "Tombstone", "Status", "inventory"} {
		t.Run(broken, func(t *testing.T) {
			w := newWorld(t)
			first := w.begin()
			box := w.sandbox()
			orphan := w.buried(box)
			w.leave(first)

			inv := there(orphan)
			reads := broken == "Living" || broken == "Tombstone" || broken == "Status" // of the look for orphans
			lost := !reads                                                             // a sandbox that was lost is, with or without tombstones
			if !lost {
				inv.Sandboxes = append(inv.Sandboxes, running(box, 1))
			}
			unread := errors.New("the test broke the inventory")
			w.holds(inv, unread)
			if reads || broken == "List" {
				w.store.breakReads(broken)
			}
			w.open()
			seq, before := w.seq(), w.record(records.SandboxKey(tenant, box))
			if broken != "inventory" {
				if broken == "Get" { // opening a session reads the node's record
					w.store.breakReads(broken)
				}
				w.holds(inv, nil)
				w.eventually("it was tried again", func() bool { return w.store.failures() >= 2 })
			} else {
				asked := w.asked.Load()
				w.eventually("it was tried again", func() bool { return w.asked.Load() >= asked+2 })
			}
			if gone := w.agents.forget(); len(gone) > 0 {
				t.Errorf("the node was told to delete %v", gone)
			}
			if now := w.seq(); now != seq {
				t.Errorf("%d commits", now-seq)
			}
			if after := w.record(before.Key); !reflect.DeepEqual(after, before) {
				t.Errorf("the record became %v", after)
			}

			w.store.breakReads("")
			w.holds(inv, nil)
			w.eventually("the orphan is removed", func() bool { return slices.Equal(w.agents.forget(), []string{orphan}) })
			if failed := w.record(before.Key).Phase == string(sandbox.Failed); failed != lost {
				t.Errorf("phase %s", w.record(before.Key).Phase)
			}
		})
	}
}

// What a replaced session sends, and what is committed in its name, changes nothing.
func TestC20StaleSessionIsFenced(t *testing.T) {
	w := newWorld(t)
	old := w.begin()
	box := w.sandbox()
	inv := there()
	inv.Sandboxes = append(inv.Sandboxes, running(box, 1))
	w.holds(inv, nil)
	key := records.SandboxKey(tenant, box)
	before := w.record(key)
	same := func(what string) {
		t.Helper()
		if after := w.record(key); !reflect.DeepEqual(after, before) {
			t.Errorf("%s: the record became %v, was %v", what, after, before)
		}
	}
	stopped := running(box, 100)
	stopped.Phase = dormousev1.SandboxPhase_SANDBOX_PHASE_STOPPED

	// Over the stream of a session that gave way.
	current := w.open()
	if current.epoch <= old.epoch {
		t.Fatalf("session %d after %d", current.epoch, old.epoch)
	}
	_ = old.report(stopped) // the stream may have ended already
	if _, err := old.Recv(); !errs.Has(errs.From(err), errs.Fenced) {
		t.Errorf("the old session ended with %v", err)
	}
	same("a report over the old session")

	// In the name of the old session.
	forged := operations.Observation{UID: box, Tenant: tenant, Phase: sandbox.Stopped, Number: 100, Session: old.epoch}
	if err := w.engine.Observe(t.Context(), node, forged); !errs.Has(err, errs.Fenced) {
		t.Errorf("an observation of the old session: %v", err)
	}
	if err := w.engine.Lost(t.Context(), node, old.epoch, tenant, box, before.Revision); !errs.Has(err, errs.Fenced) {
		t.Errorf("a loss of the old session: %v", err)
	}
	for what, owner := range map[string]fence.Owner{
		"node session": {Coordinator: w.epoch, Node: node, Session: old.epoch},
		"coordinator":  {Coordinator: w.epoch - 1},
	} {
		_, err := w.queue.Publish(t.Context(), func(ctx context.Context, r catalog.Reader) (catalog.Commit, error) {
			rec, err := r.Get(ctx, key)
			if err != nil {
				return catalog.Commit{}, err
			}
			return catalog.Commit{Owner: owner, Deletes: []catalog.Delete{{Key: key, ExpectRevision: rec.Revision}}}, nil
		})
		if !errs.Has(err, errs.Fenced) {
			t.Errorf("a commit of the old %s: %v", what, err)
		}
	}
	same("commits")

	// A session that was replaced elsewhere, by another coordinator: its stream is still there, but
	// what comes over it is refused by the store, and not acknowledged.
	_, err := w.store.OpenSession(t.Context(), w.epoch, node, 0)
	w.ok(err)
	w.ok(current.report(stopped))
	w.eventually("the report is refused", func() bool {
		select {
		case err := <-w.observed:
			return errs.Has(err, errs.Fenced)
		default:
			return false
		}
	})
	w.ok(current.Send(&nodev1.SessionRequest{Message: &nodev1.SessionRequest_Heartbeat{Heartbeat: &nodev1.Heartbeat{}}}))
	msg, err := current.Recv()
	w.ok(err)
	if msg.GetHeartbeatAck() == nil {
		t.Errorf("the coordinator answered %v", msg)
	}
	same("a report over a session that was replaced elsewhere")
}

// A node says which networks it has; one that does not say is not held to have none.
func TestTheNetworksOfANode(t *testing.T) {
	w := newWorld(t)
	const none, outbound = dormousev1.NetworkMode_NETWORK_MODE_NONE, dormousev1.NetworkMode_NETWORK_MODE_OUTBOUND
	for _, c := range []struct {
		says []dormousev1.NetworkMode
		no   bool
	}{{nil, false}, {[]dormousev1.NetworkMode{none}, true}, {[]dormousev1.NetworkMode{none, outbound}, false}, {[]dormousev1.NetworkMode{99}, false}} {
		s := w.open(c.says...)
		var all []placement.Node
		w.eventually("it is online", func() bool { // it is welcomed a moment before
			all = w.registry.Nodes()
			return len(all) == 1 && all[0].Online
		})
		if all[0].NoOutbound != c.no {
			t.Errorf("%v makes %+v", c.says, all)
		}
		w.leave(s)
	}
}
