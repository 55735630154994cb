package api

import (
	"context"
	"testing"
	"time"

	"github.com/dormouse-run/dormouse/coordinator/internal/auth"
	"github.com/dormouse-run/dormouse/coordinator/internal/nodeclient"
	"github.com/dormouse-run/dormouse/coordinator/internal/records"
	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/catalog/memory"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/fence"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
	"github.com/dormouse-run/dormouse/pkg/uid"
)

// counted counts the round trips to a store.
type counted struct {
	*memory.Store
	trips int
}

func (c *counted) Get(ctx context.Context, key catalog.Key) (catalog.Record, error) {
	c.trips++
	return c.Store.Get(ctx, key)
}

func (c *counted) GetMany(ctx context.Context, keys []catalog.Key) (map[catalog.Key]catalog.Record, error) {
	c.trips++
	return c.Store.GetMany(ctx, keys)
}

// TestLocate: what changed in the records is so at the next call, and a call that finds things as they were takes one round trip.
func TestLocate(t *testing.T) {
	store := &counted{Store: memory.New(memory.Options{})}
	defer func() { _ = store.Close() }()
	lease, _, err := store.Lead(t.Context(), catalog.Claim{Holder: "test", TTL: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	commit := func(c catalog.Commit) {
		t.Helper()
		c.Owner = fence.Owner{Coordinator: lease.Epoch}
		if results, err := store.Commit(t.Context(), []catalog.Commit{c}); err != nil || results[0].Err != nil {
			t.Fatalf("%v %v", err, results)
		}
	}
	put := func(tenant string, p catalog.Put, err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		commit(catalog.Commit{Tenant: tenant, Puts: []catalog.Put{p}})
	}
	nodes := map[string]*records.Node{"a": {Name: "a", Address: "a:1"}, "b": {Name: "b", Address: "b:1", DirectAddress: "b:2"}}
	for _, n := range nodes {
		p, err := n.Put()
		put(catalog.SystemTenant, p, err)
	}
	sb := &records.Sandbox{Sandbox: sandbox.Sandbox{UID: uid.New(), Tenant: "acme", Status: sandbox.Status{Phase: sandbox.Running, Node: "a"}}}
	save := func() {
		t.Helper()
		p, err := sb.Put()
		put("acme", p, err)
		sb.Revision++
	}
	save()

	s := &Server{cfg: Config{Store: store}}
	at := func(tenant, u string, trips int) (nodeclient.Place, error) {
		t.Helper()
		store.trips = 0
		place, err := s.locate(auth.With(t.Context(), auth.Identity{Tenant: tenant}), u)
		if store.trips != trips {
			t.Errorf("%d round trips, want %d", store.trips, trips)
		}
		return place, err
	}
	want := func(place nodeclient.Place, trips int) {
		t.Helper()
		place.Tenant, place.SandboxUID = "acme", sb.UID
		if got, err := at("acme", sb.UID, trips); err != nil || got != place {
			t.Errorf("it is at %+v (%v), want %+v", got, err, place)
		}
	}
	inA := nodeclient.Place{Node: "a", Address: "a:1"}
	want(inA, 2)
	want(inA, 1)

	n := nodes["a"]
	n.Address, n.Revision = "a:9", 1
	p, err := n.Put()
	put(catalog.SystemTenant, p, err)
	want(nodeclient.Place{Node: "a", Address: "a:9"}, 1) // the node has another address

	sb.Status.Node = "b"
	save()
	want(nodeclient.Place{Node: "b", Address: "b:1", Direct: "b:2"}, 2) // it is on another node
	want(nodeclient.Place{Node: "b", Address: "b:1", Direct: "b:2"}, 1)

	if _, err := at("other", sb.UID, 1); !errs.Has(err, errs.ObjectNotFound) {
		t.Errorf("another tenant: %v", err)
	}
	if _, err := at("acme", "no uid", 0); !errs.Has(err, errs.InvalidField) {
		t.Errorf("no uid: %v", err)
	}
	sb.Status.Phase = sandbox.Paused
	save()
	if _, err := at("acme", sb.UID, 1); !errs.Has(err, errs.SandboxPaused) {
		t.Errorf("paused: %v", err)
	}
	sb.Status.Phase = sandbox.Deleting
	save()
	if _, err := at("acme", sb.UID, 1); !errs.Has(err, errs.WrongPhase) {
		t.Errorf("while it is deleted: %v", err)
	}
	commit(catalog.Commit{Tenant: "acme", Deletes: []catalog.Delete{{Key: records.SandboxKey("acme", sb.UID), ExpectRevision: sb.Revision}}})
	if _, err := at("acme", sb.UID, 1); !errs.Has(err, errs.ObjectNotFound) {
		t.Errorf("deleted: %v", err)
	}
}

// TestLastNodesAreBounded, and hold the newest.
func TestLastNodesAreBounded(t *testing.T) {
	var l lastNodes
	for i := range 3 * maxLastNodes {
		key := records.SandboxKey("acme", string(rune(i)))
		l.note(key, "a")
		if l.of(key) != "a" || len(l.node) > maxLastNodes {
			t.Fatalf("%d are remembered, the last at %q", len(l.node), l.of(key))
		}
	}
}
