package app_test

import (
	"context"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/dormouse-run/dormouse/coordinator/app"
	"github.com/dormouse-run/dormouse/pkg/catalog/redis/redistest"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/uid"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// onRedis makes the rig open its own catalog in a real server.
func (r *rig) onRedis(s *redistest.Server) {
	r.app.Stop()
	r.store = nil
	r.cfg.Redis.Address = s.Socket
	a, err := app.Start(context.Background(), r.cfg, app.WithLog(io.Discard))
	if err != nil {
		r.t.Fatal(err)
	}
	r.app = a
	eventually(r.t, "it leads", a.Leading)
}

func (r *rig) again() {
	r.app.Stop()
	a, err := app.Start(context.Background(), r.cfg, app.WithLog(io.Discard))
	if err != nil {
		r.t.Fatal(err)
	}
	r.app = a
	eventually(r.t, "it leads", a.Leading)
}

func TestOnRedis(t *testing.T) {
	server := redistest.Start(t)
	r := newRig(t)
	r.onRedis(server)
	n := r.node("n1")
	ctx := context.Background()
	c := dormousev1.NewSandboxServiceClient(r.conn(r.user))
	u := r.create("one")
	req := &dormousev1.CheckpointSandboxRequest{OperationId: uid.New(), Uid: u}
	first, err := c.CheckpointSandbox(ctx, req)
	if err != nil {
		t.Fatal(err)
	}
	fork, err := c.ForkSandbox(ctx, &dormousev1.ForkSandboxRequest{SnapshotUid: first.GetSnapshot().GetMeta().GetUid(), Count: 8})
	if err != nil || len(fork.GetSandboxes()) != 8 {
		t.Fatalf("%v, %v", fork, err)
	}
	// The server is killed and comes back on its data; the coordinator is restarted.
	server.Kill(t)
	server.Restart(t)
	n.hangUp()
	r.again()
	c = dormousev1.NewSandboxServiceClient(r.conn(r.user))
	again, err := c.CheckpointSandbox(ctx, req)
	if err != nil || again.String() != first.String() {
		t.Fatalf("first %v\nagain %v, %v", first, again, err)
	}
	if err := n.dial(r.app.Addresses("node")[0], 20*time.Millisecond); err != nil {
		t.Fatal(err)
	}
	if _, err := c.DeleteSandbox(ctx, &dormousev1.DeleteSandboxRequest{Uid: u}); err != nil {
		t.Fatal(err)
	}
	list, err := c.ListSandboxes(ctx, &dormousev1.ListSandboxesRequest{})
	if err != nil || len(list.GetSandboxes()) != 8 {
		t.Fatalf("%d sandboxes, %v", len(list.GetSandboxes()), err)
	}
}

func TestRedisPausedIsStoreUnavailable(t *testing.T) {
	server := redistest.Start(t)
	r := newRig(t, func(c *app.Config) { c.Lease.TTL = time.Second })
	r.onRedis(server)
	server.Pause(t) // with such a lease, a term may have ended by itself before
	eventually(t, "the term ends with its lease", func() bool { return !r.app.Leading() })
	_, err := dormousev1.NewSandboxServiceClient(r.conn(r.user)).CreateSandbox(context.Background(), box(""))
	wantReason(t, err, errs.NoLeader)
	server.Resume(t)
	eventually(t, "it leads again", r.app.Leading)
}

func TestRedisThatIsNotDurableIsRefused(t *testing.T) {
	server := redistest.Start(t, "appendfsync", "everysec")
	r := newRig(t)
	cfg := r.cfg
	cfg.Redis.Address, cfg.Admin = server.Socket, ""
	_, err := app.Start(context.Background(), cfg, app.WithLog(io.Discard))
	wantReason(t, err, errs.StoreNotDurable)
	if !strings.Contains(err.Error(), cfg.Redis.Address) {
		t.Errorf("which server is not said: %v", err)
	}
}
