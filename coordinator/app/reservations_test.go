package app_test

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/dormouse-run/dormouse/coordinator/app"
	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/catalog/redis"
	"github.com/dormouse-run/dormouse/pkg/catalog/redis/redistest"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// requested is what is counted on the node.
func (r *rig) requested(node string) string {
	r.t.Helper()
	resp, err := dormousev1.NewNodeServiceClient(r.conn(r.root)).GetNode(context.Background(), &dormousev1.GetNodeRequest{Name: node})
	if err != nil {
		r.t.Fatal(err)
	}
	return resp.GetNode().GetRequested().String()
}

// reborn kills the server and starts it on its data, and waits until the coordinator has proven what it knows of it.
func (r *rig) reborn(server *redistest.Server) {
	r.t.Helper()
	server.Kill(r.t)
	server.Restart(r.t)
	eventually(r.t, "the view is proven", func() bool {
		_, err := r.app.Engine()
		return err == nil && strings.Contains(r.adminPage("/metrics"), "dormouse_catalog_servers_replaced_total 1")
	})
}

// records are the sandboxes, whole: with their deadlines, revisions and times.
func (r *rig) records(server *redistest.Server) []catalog.Record {
	r.t.Helper()
	s, err := redis.Open(context.Background(), redis.Options{Address: server.Socket, Catalog: r.cfg.Redis.Catalog})
	if err != nil {
		r.t.Fatal(err)
	}
	defer func() { _ = s.Close() }() // only a test's
	page, err := s.List(context.Background(), catalog.Query{Kind: catalog.KindSandbox})
	if err != nil {
		r.t.Fatal(err)
	}
	return page.Records
}

// While the view is proven anew, and when a term begins anew, what this process has dispatched stays reserved, what is recorded wins, and
// nothing is counted for a session that another replaced.
func TestC18RepairKeepsValidReservations(t *testing.T) {
	server := redistest.Start(t)
	r := newRig(t, func(c *app.Config) { c.Nodes.PlacementWait = time.Minute })
	r.onRedis(server)
	n := newFakeNode(t, r.pki, "n1")
	began, end := make(chan string, 8), make(chan struct{})
	n.begin = func(uid string) {
		began <- uid
		<-end
	}
	dial := func() {
		t.Helper()
		if err := n.dial(r.app.Addresses("node")[0], 20*time.Millisecond); err != nil {
			t.Fatal(err)
		}
	}
	dial()
	nothing := r.requested("n1")
	sandboxes := dormousev1.NewSandboxServiceClient(r.conn(r.user))
	req := box("dispatched")
	made := make(chan error, 1)
	go func() {
		_, err := sandboxes.CreateSandbox(context.Background(), req)
		made <- err
	}()
	uid := <-began
	reserved := r.requested("n1")
	if reserved == nothing {
		t.Fatal("a start that was dispatched is not counted")
	}
	r.reborn(server)
	if now := r.requested("n1"); now != reserved {
		t.Errorf("after the proof %s is counted, before it was %s", now, reserved)
	}
	n.hangUp() // the session is replaced: the start is asked for again under the new one, and counted once
	dial()
	if again := <-began; again != uid {
		t.Errorf("the node is asked to start %s, not %s", again, uid)
	}
	if now := r.requested("n1"); now != reserved {
		t.Errorf("in the new session %s is counted, before it was %s", now, reserved)
	}
	close(end)
	if err := <-made; err != nil {
		t.Fatal(err)
	}
	n.hangUp()
	r.again() // another process, which dispatched nothing: what is recorded counts
	dial()
	if now := r.requested("n1"); now != reserved {
		t.Errorf("in the new term %s is counted, before it was %s", now, reserved)
	}
	sandboxes = dormousev1.NewSandboxServiceClient(r.conn(r.user))
	if _, err := sandboxes.DeleteSandbox(context.Background(), &dormousev1.DeleteSandboxRequest{Uid: uid}); err != nil {
		t.Fatal(err)
	}
	if now := r.requested("n1"); now != nothing {
		t.Errorf("with nothing there %s is counted", now)
	}
}

func TestC19RepairChangesNoDeadlineAndNoCount(t *testing.T) {
	server := redistest.Start(t)
	r := newRig(t)
	r.onRedis(server)
	n := r.node("n1")
	sandboxes := dormousev1.NewSandboxServiceClient(r.conn(r.user))
	for _, life := range []time.Duration{0, time.Hour, 5 * time.Hour} {
		req := box("")
		if life > 0 {
			req.Spec.Lifetime, req.Spec.IdleTimeout = durationpb.New(life), durationpb.New(life/2)
		}
		if _, err := sandboxes.CreateSandbox(context.Background(), req); err != nil {
			t.Fatal(err)
		}
	}
	before, counted := r.records(server), r.requested("n1")
	same := func(after string) {
		t.Helper()
		if d := cmp.Diff(before, r.records(server)); d != "" {
			t.Errorf("%s (-before +after):\n%s", after, d)
		}
		if now := r.requested("n1"); now != counted {
			t.Errorf("%s %s is counted, before it was %s", after, now, counted)
		}
	}
	r.reborn(server)
	same("after the proof")
	n.hangUp()
	r.again()
	same("in the new term, with the node away,")
	if err := n.dial(r.app.Addresses("node")[0], 20*time.Millisecond); err != nil {
		t.Fatal(err)
	}
	same("with the node there")
	if !slices.ContainsFunc(before, func(r catalog.Record) bool { return len(r.Body) > 0 }) {
		t.Error("the records say nothing")
	}
}
