package app_test

import (
	"context"
	"fmt"
	"testing"

	"golang.org/x/sync/errgroup"

	"github.com/dormouse-run/dormouse/pkg/catalog/redis/redistest"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// Hundreds of callers at once on a durable store: each gets its own sandbox, and nothing is left in the end.
func TestManyAtOnce(t *testing.T) {
	const many = 256
	server := redistest.Start(t)
	r := newRig(t)
	r.onRedis(server)
	nodes := []*fakeNode{r.node("n1"), r.node("n2")}
	c := dormousev1.NewSandboxServiceClient(r.conn(r.user))
	uids := make([]string, many)
	group, ctx := errgroup.WithContext(context.Background())
	for i := range uids {
		group.Go(func() error {
			req := box(fmt.Sprintf("many-%d", i))
			req.Spec.Resources = &dormousev1.Resources{CpuRequestMillis: 10, MemoryRequestBytes: 16 << 20}
			made, err := c.CreateSandbox(ctx, req)
			uids[i] = made.GetSandbox().GetMeta().GetUid()
			return err
		})
	}
	if err := group.Wait(); err != nil {
		t.Fatal(err)
	}
	if a, b := len(nodes[0].sandboxes), len(nodes[1].sandboxes); a+b != many || a != b {
		t.Fatalf("the nodes have %d and %d", a, b)
	}
	if got := r.nodeView("n1").GetRequested().GetSandboxes(); got != many/2 {
		t.Fatalf("%d sandboxes are counted on n1", got)
	}
	group, ctx = errgroup.WithContext(context.Background())
	for _, u := range uids {
		group.Go(func() error {
			_, err := c.DeleteSandbox(ctx, &dormousev1.DeleteSandboxRequest{Uid: u})
			return err
		})
	}
	if err := group.Wait(); err != nil {
		t.Fatal(err)
	}
	if a, b := len(nodes[0].sandboxes), len(nodes[1].sandboxes); a+b != 0 {
		t.Fatalf("the nodes still have %d and %d", a, b)
	}
	if got := r.nodeView("n1").GetRequested().GetSandboxes(); got != 0 {
		t.Fatalf("%d sandboxes are still counted on n1", got)
	}
}
