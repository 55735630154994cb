package app_test

import (
	"context"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/dormouse-run/dormouse/coordinator/app"
	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/catalog/redis"
	"github.com/dormouse-run/dormouse/pkg/catalog/redis/redistest"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/fence"
	nodev1 "github.com/dormouse-run/dormouse/proto/dormouse/node/v1"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

func (r *rig) status() *dormousev1.CatalogStatus {
	r.t.Helper()
	resp, err := dormousev1.NewCatalogServiceClient(r.conn(r.root)).GetCatalogStatus(context.Background(), &dormousev1.GetCatalogStatusRequest{})
	if err != nil {
		r.t.Fatal(err)
	}
	return resp.GetCatalog()
}

// A node of another cluster does not stop this one.
func TestC21ForeignNodeIsRefused(t *testing.T) {
	r := newRig(t)
	r.node("n1")
	foreign := newFakeNode(t, r.pki, "n2")
	foreign.witness = &nodev1.CatalogPoint{Incarnation: "of another cluster", Seq: 5, Digest: "x"}
	wantReason(t, foreign.dial(r.app.Addresses("node")[0], 20*time.Millisecond), errs.NotAllowed)
	if why := r.status().GetSuspended(); why != nil {
		t.Errorf("suspended: %v", why)
	}
	if _, err := dormousev1.NewSandboxServiceClient(r.conn(r.user)).CreateSandbox(context.Background(), box("goes-on")); err != nil {
		t.Error(err)
	}
}

// A node that has seen more than the catalog has suspends it, until an operator goes on without what that node knows.
func TestC21WitnessSuspends(t *testing.T) {
	r := newRig(t)
	n := r.node("n1")
	ctx := context.Background()
	sandboxes := dormousev1.NewSandboxServiceClient(r.conn(r.user))
	if _, err := sandboxes.CreateSandbox(ctx, box("before")); err != nil {
		t.Fatal(err)
	}
	n.hangUp()
	head := r.status().GetHead()
	n.witness = &nodev1.CatalogPoint{Incarnation: head.GetIncarnation(), Seq: head.GetSeq() + 100, Digest: "of what was lost"}
	wantReason(t, n.dial(r.app.Addresses("node")[0], 20*time.Millisecond), errs.CatalogRewound)
	eventually(t, "the leader knows", func() bool {
		_, err := sandboxes.CreateSandbox(ctx, box(""))
		return errs.Has(err, errs.CatalogRewound)
	})
	if why := r.status().GetSuspended(); why.GetFoundBy() != "n1" || why.GetWitness().GetSeq() != head.GetSeq()+100 {
		t.Errorf("suspended: %v; the head was %v", why, head)
	}
	if list, err := sandboxes.ListSandboxes(ctx, &dormousev1.ListSandboxesRequest{}); err != nil || len(list.GetSandboxes()) != 1 {
		t.Errorf("reads: %v, %v", list, err)
	}
	// The node is let in for its journal, which this one does not give.
	eventually(t, "the node is let in", func() bool { return n.dial(r.app.Addresses("node")[0], 20*time.Millisecond) == nil })
	keeper := dormousev1.NewCatalogServiceClient(r.conn(r.root))
	for _, not := range []*dormousev1.RepairCatalogRequest{{}, {AcceptLoss: true}, {WithoutNodes: []string{"n2"}, AcceptLoss: true}} {
		_, err := keeper.RepairCatalog(ctx, not)
		wantReason(t, err, errs.CatalogRewound)
	}
	resp, err := keeper.RepairCatalog(ctx, &dormousev1.RepairCatalogRequest{WithoutNodes: []string{"n1"}, AcceptLoss: true})
	if err != nil {
		t.Fatal(err)
	}
	if found := resp.GetFindings(); len(found) == 0 || found[0].GetDifference() != dormousev1.CatalogDifference_CATALOG_DIFFERENCE_UNKNOWN {
		t.Errorf("what was found is not told: %v", resp)
	}
	eventually(t, "it leads again", r.app.Leading)
	if now := r.status().GetHead(); now.GetIncarnation() == head.GetIncarnation() || now.GetSeq() <= head.GetSeq()+100 {
		t.Errorf("it goes on at %v", now)
	}
	eventually(t, "the node is in session", func() bool { return n.dial(r.app.Addresses("node")[0], 20*time.Millisecond) == nil })
	if _, err := sandboxes.CreateSandbox(ctx, box("after")); err != nil {
		t.Error(err)
	}
}

// A coordinator that has just begun, on a catalog that came back older before, is told so by the first node that comes. Others, of which that catalog does not know, may be
// on their way: whatever an operator accepts, it waits for them, and says who has come. One that has known them all does not.
func TestC21OperatorsWordWaitsForTheNodes(t *testing.T) {
	r := newRig(t, func(c *app.Config) { c.Nodes.ReturnTime = time.Hour })
	head := r.status().GetHead()
	n := newFakeNode(t, r.pki, "n1")
	n.witness = &nodev1.CatalogPoint{Incarnation: head.GetIncarnation(), Seq: head.GetSeq() + 100, Digest: "of what was lost"}
	wantReason(t, n.dial(r.app.Addresses("node")[0], 20*time.Millisecond), errs.CatalogRewound)
	eventually(t, "the node is let in", func() bool { return n.dial(r.app.Addresses("node")[0], 20*time.Millisecond) == nil })
	keeper, accept := dormousev1.NewCatalogServiceClient(r.conn(r.root)), &dormousev1.RepairCatalogRequest{WithoutNodes: []string{"n1"}, AcceptLoss: true}
	_, err := keeper.RepairCatalog(context.Background(), accept)
	if env := wantEnvelope(t, err, errs.CatalogRewound); !strings.Contains(env.Message, "n1 came, and no other yet") {
		t.Errorf("it does not say who has come: %v", err)
	}
	if why := r.status().GetSuspended(); why == nil {
		t.Error("it was taken into service")
	}
	r.app.Stop()
	r.cfg.Nodes.ReturnTime = 0
	if r.app, err = app.Start(context.Background(), r.cfg, app.WithStore(r.store), app.WithLog(io.Discard)); err != nil {
		t.Fatal(err)
	}
	keeper = dormousev1.NewCatalogServiceClient(r.conn(r.root))
	eventually(t, "it is taken into service when the time is over", func() bool {
		_, err := keeper.RepairCatalog(context.Background(), accept)
		return err == nil
	})
}

// A server that was restarted on all of its data is proven to have it: the term, and the sessions of nodes, go on. It may be a newer
// program by then.
func TestC15RestartedServerIsProven(t *testing.T) {
	redistest.Each(t, restartedServerIsProven)
}

func restartedServerIsProven(t *testing.T, p redistest.Program) {
	server := redistest.Start(t)
	r := newRig(t)
	r.onRedis(server)
	r.node("n1")
	ctx := context.Background()
	sandboxes := dormousev1.NewSandboxServiceClient(r.conn(r.user))
	if _, err := sandboxes.CreateSandbox(ctx, box("before")); err != nil {
		t.Fatal(err)
	}
	before := r.status()
	server.Kill(t)
	server.Become(t, p)
	server.Restart(t)
	eventually(t, "writes go on", func() bool {
		_, err := sandboxes.CreateSandbox(ctx, box(""))
		return err == nil
	})
	// A write that was under way when the other process was met may be done before the proof is, while others are refused.
	var node *dormousev1.Node
	eventually(t, "it is proven", func() bool {
		resp, err := dormousev1.NewNodeServiceClient(r.conn(r.root)).GetNode(ctx, &dormousev1.GetNodeRequest{Name: "n1"})
		node = resp.GetNode()
		return err == nil
	})
	after := r.status()
	if after.GetCoordinatorEpoch() != before.GetCoordinatorEpoch() || after.GetHead().GetIncarnation() != before.GetHead().GetIncarnation() {
		t.Errorf("before %v\nafter %v", before, after)
	}
	if node.GetSessionEpoch() != 1 {
		t.Error(node)
	}
}

// What was in flight when the server came back older is not written by the term that sent it, nor by the one after.
func TestC16OldTermWritesNothing(t *testing.T) {
	redistest.Each(t, oldTermWritesNothing)
}

func oldTermWritesNothing(t *testing.T, p redistest.Program) {
	server := p.Start(t)
	r := newRig(t)
	r.onRedis(server)
	r.node("n1")
	ctx := context.Background()
	sandboxes := dormousev1.NewSandboxServiceClient(r.conn(r.user))
	server.Kill(t)
	kept := server.Copy(t)
	server.Restart(t)
	eventually(t, "a sandbox is made", func() bool {
		_, err := sandboxes.CreateSandbox(ctx, box(""))
		return err == nil
	})
	made := make(chan error, 8)
	server.Pause(t)
	for range cap(made) {
		go func() {
			_, err := sandboxes.CreateSandbox(ctx, box(""))
			made <- err
		}()
	}
	server.Kill(t)
	server.Rewind(t, kept)
	server.Restart(t)
	for range cap(made) {
		if err := <-made; err == nil {
			t.Error("a sandbox was made on a catalog that came back older")
		}
	}
	eventually(t, "it is suspended", func() bool {
		_, err := sandboxes.CreateSandbox(ctx, box(""))
		return errs.Has(err, errs.CatalogRewound)
	})
	if list, err := sandboxes.ListSandboxes(ctx, &dormousev1.ListSandboxesRequest{}); err != nil || len(list.GetSandboxes()) != 0 {
		t.Errorf("%d sandboxes, %v", len(list.GetSandboxes()), err)
	}
}

// Who only stands by is a witness, too: when the catalog comes back older, with another's lease in force, it is suspended by who knows better.
func TestC21StandbySuspends(t *testing.T) {
	redistest.Each(t, standbySuspends)
}

func standbySuspends(t *testing.T, p redistest.Program) {
	server := p.Start(t)
	ctx := context.Background()
	open := func() *redis.Store {
		s, err := redis.Open(ctx, redis.Options{Address: server.Socket, Catalog: app.DefaultConfig().Redis.Catalog})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = s.Close() }) // only a test's
		return s
	}
	rival := open()
	lease, won, err := rival.Lead(ctx, catalog.Claim{Holder: "rival", TTL: time.Hour})
	if err != nil || !won {
		t.Fatal(lease, won, err)
	}
	server.Kill(t)
	kept := server.Copy(t)
	server.Restart(t)
	if err := rival.Release(ctx, "rival", lease.Epoch); err != nil {
		t.Fatal(err)
	}
	r := newRig(t)
	r.onRedis(server)
	r.node("n1")
	if _, err := dormousev1.NewSandboxServiceClient(r.conn(r.user)).CreateSandbox(ctx, box("lost")); err != nil {
		t.Fatal(err)
	}
	server.Kill(t)
	server.Rewind(t, kept)
	server.Restart(t)
	old := open() // as the rival would be that was paused all the time
	eventually(t, "the catalog is suspended", func() bool {
		st, err := old.Status(ctx)
		return err == nil && st.Suspended != nil && st.Epoch == lease.Epoch
	})
	results, err := old.Commit(ctx, []catalog.Commit{{Owner: fence.Owner{Coordinator: lease.Epoch}}})
	if err != nil {
		t.Fatal(err)
	}
	wantReason(t, results[0].Err, errs.CatalogRewound)
	if r.app.Leading() {
		t.Error("it leads")
	}
}
