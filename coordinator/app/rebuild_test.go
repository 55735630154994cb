package app_test

import (
	"context"
	"io"
	"net"
	"net/http"
	"sync"
	"testing"

	"github.com/dormouse-run/dormouse/coordinator/app"
	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/catalog/redis"
	"github.com/dormouse-run/dormouse/pkg/catalog/redis/redistest"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// heldStore is a real store whose lists of one kind tell that they were asked for, and wait to be let go.
type heldStore struct {
	catalog.Store
	kind  catalog.Kind
	asked chan struct{}
	mu    sync.Mutex
	hold  chan struct{} // nil: nothing waits
}

func (s *heldStore) List(ctx context.Context, q catalog.Query) (catalog.Page, error) {
	s.mu.Lock()
	hold := s.hold
	s.mu.Unlock()
	if q.Kind == s.kind && hold != nil {
		s.asked <- struct{}{}
		select {
		case <-hold:
		case <-ctx.Done():
			return catalog.Page{}, ctx.Err()
		}
	}
	return s.Store.List(ctx, q)
}

// letGo ends the waiting, for good.
func (s *heldStore) letGo() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.hold != nil {
		close(s.hold)
		s.hold = nil
	}
}

// held makes the rig's coordinator one that waits in the middle of reading the catalog for its first term.
func (r *rig) held(server *redistest.Server, kind catalog.Kind) *heldStore {
	r.t.Helper()
	r.app.Stop()
	store, err := redis.Open(context.Background(), redis.Options{Address: server.Socket, Catalog: r.cfg.Redis.Catalog})
	if err != nil {
		r.t.Fatal(err)
	}
	s := &heldStore{Store: store, kind: kind, asked: make(chan struct{}, 64), hold: make(chan struct{})}
	r.t.Cleanup(s.letGo)
	r.app, err = app.Start(context.Background(), r.cfg, app.WithStore(s), app.WithLog(io.Discard))
	if err != nil {
		r.t.Fatal(err)
	}
	return s
}

// ask asks the admin socket.
func (r *rig) ask(path string) (int, string) {
	r.t.Helper()
	way := &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", r.cfg.Admin)
	}}
	resp, err := (&http.Client{Transport: way}).Get("http://coordinator" + path)
	if err != nil {
		r.t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }() // nothing more to read
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		r.t.Fatal(err)
	}
	return resp.StatusCode, string(body)
}

func (r *rig) ready() int {
	code, _ := r.ask("/readyz")
	return code
}

func (r *rig) adminPage(path string) string {
	_, body := r.ask(path)
	return body
}

// Whether a coordinator is ready does not depend on who is writing its view of the catalog: it is asked while a term reads it,
// which ends only after that, and while the server does not answer.
func TestC08ReadinessWaitsForNoWriter(t *testing.T) {
	server := redistest.Start(t)
	r := newRig(t)
	s := r.held(server, catalog.KindSandbox)
	<-s.asked
	if code := r.ready(); code != http.StatusOK {
		t.Errorf("while the view is written: %d", code)
	}
	if r.app.Leading() {
		t.Error("it leads with half a view")
	}
	s.letGo()
	eventually(t, "it leads", r.app.Leading)
	server.Pause(t)
	if code := r.ready(); code != http.StatusServiceUnavailable {
		t.Errorf("while the server does not answer: %d", code)
	}
	server.Resume(t)
	eventually(t, "it is ready", func() bool { return r.ready() == http.StatusOK })
}

// A term that finds another server process in the middle of reading the catalog does not begin with what it has read: it
// reads all of it again.
func TestC17RecoveryAcrossATransportChangeStartsAgain(t *testing.T) {
	redistest.Each(t, recoveryAcrossATransportChangeStartsAgain)
}

func recoveryAcrossATransportChangeStartsAgain(t *testing.T, p redistest.Program) {
	server := p.Start(t)
	r := newRig(t)
	s := r.held(server, catalog.KindOperation) // the last of what is read
	<-s.asked
	first, _ := s.Generation()
	server.Kill(t)
	server.Restart(t)
	eventually(t, "the other process is met", func() bool {
		_, err := s.Seq(context.Background())
		now, _ := s.Generation()
		return err == nil && now > first
	})
	if r.app.Leading() {
		t.Fatal("it leads with a view of two servers")
	}
	before, err := s.Leader(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	s.letGo()
	eventually(t, "it leads", r.app.Leading)
	after, err := s.Leader(context.Background())
	if err != nil || after.Epoch <= before.Epoch {
		t.Errorf("it goes on under epoch %d, after %d, %v", after.Epoch, before.Epoch, err)
	}
	r.node("n1")
	if _, err := dormousev1.NewSandboxServiceClient(r.conn(r.user)).CreateSandbox(context.Background(), box("")); err != nil {
		t.Error(err)
	}
}
