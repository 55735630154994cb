package app_test

import (
	"context"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/dormouse-run/dormouse/coordinator/app"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

func TestAdminAndHealth(t *testing.T) {
	r := newRig(t)
	r.node("n1")
	r.create("one")
	client := &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", r.cfg.Admin)
	}}}
	defer client.CloseIdleConnections()
	get := func(path string) string {
		resp, err := client.Get("http://admin" + path)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		b, err := io.ReadAll(resp.Body)
		if err != nil || resp.StatusCode != http.StatusOK {
			t.Fatalf("%s: %d %s %v", path, resp.StatusCode, b, err)
		}
		return string(b)
	}
	get("/readyz")
	metrics := get("/metrics")
	for _, want := range []string{"dormouse_coordinator_leading 1", "dormouse_nodes_online 1", `dormouse_operations_ended_total{kind="CreateSandbox",reason=""} 1`, "dormouse_rpc_total"} {
		if !strings.Contains(metrics, want) {
			t.Errorf("no %q among the metrics", want)
		}
	}
	h, err := healthv1.NewHealthClient(r.conn("")).Check(context.Background(), &healthv1.HealthCheckRequest{})
	if err != nil || h.GetStatus() != healthv1.HealthCheckResponse_SERVING {
		t.Fatalf("%v, %v", h, err)
	}
}

// A sandbox that waits for a node says what it waits for, and goes on as soon as one is there.
func TestPendingSaysWhy(t *testing.T) {
	r := newRig(t, func(c *app.Config) { c.Nodes.PlacementWait = 10 * time.Minute })
	c := dormousev1.NewSandboxServiceClient(r.conn(r.user))
	ctx := context.Background()
	ended := make(chan error, 1)
	go func() {
		_, err := c.CreateSandbox(ctx, box("one"))
		ended <- err
	}()
	eventually(t, "it says what it waits for", func() bool {
		list, err := c.ListSandboxes(ctx, &dormousev1.ListSandboxesRequest{})
		if err != nil || len(list.GetSandboxes()) != 1 {
			return false
		}
		for _, cond := range list.GetSandboxes()[0].GetStatus().GetConditions() {
			if cond.GetType() == "Scheduled" && !cond.GetStatus() && strings.Contains(cond.GetMessage(), "no node") {
				return true
			}
		}
		return false
	})
	r.node("n1")
	select {
	case err := <-ended:
		if err != nil {
			t.Fatal(err)
		}
	case <-time.After(time.Minute):
		t.Fatal("it waits although a node is there")
	}
}

// Watches do not hold up a stop.
func TestStopEndsWatches(t *testing.T) {
	r := newRig(t)
	r.node("n1")
	c := dormousev1.NewSandboxServiceClient(r.conn(r.user))
	list, err := c.ListSandboxes(context.Background(), &dormousev1.ListSandboxesRequest{})
	if err != nil {
		t.Fatal(err)
	}
	w, err := c.WatchSandboxes(context.Background(), &dormousev1.WatchSandboxesRequest{AfterSequence: list.GetSequence()})
	if err != nil {
		t.Fatal(err)
	}
	r.create("one")
	if _, err := w.Recv(); err != nil {
		t.Fatal(err)
	}
	stopped := make(chan struct{})
	go func() {
		r.app.Stop()
		close(stopped)
	}()
	for err == nil {
		_, err = w.Recv()
	}
	<-stopped
	r.start()
}
