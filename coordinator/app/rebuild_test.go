package app_test

import (
	"context"
	"io"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/dormouse-run/dormouse/coordinator/app"
	"github.com/dormouse-run/dormouse/coordinator/internal/auth"
	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/catalog/redis"
	"github.com/dormouse-run/dormouse/pkg/catalog/redis/redistest"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/fence"
	nodev1 "github.com/dormouse-run/dormouse/proto/dormouse/node/v1"
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

// askedStore is a real store that tells when a caller of the API, not the coordinator itself, asks for its status, and counts how often
// it was taken into service.
type askedStore struct {
	catalog.Store
	asked   atomic.Bool
	resumed atomic.Int32
}

func (s *askedStore) Status(ctx context.Context) (catalog.Status, error) {
	if _, err := auth.From(ctx); err == nil {
		s.asked.Store(true)
	}
	return s.Store.Status(ctx)
}

func (s *askedStore) Resume(ctx context.Context, epoch fence.Epoch) error {
	s.resumed.Add(1)
	return s.Store.Resume(ctx, epoch)
}

// A repair in the middle of which the server is replaced takes nothing into service, whatever the operator has accepted: what it
// compared was of two servers. The next one may.
func TestC17RepairAcrossATransportChangeStartsAgain(t *testing.T) {
	server := redistest.Start(t)
	r := newRig(t)
	r.app.Stop()
	store, err := redis.Open(context.Background(), redis.Options{Address: server.Socket, Catalog: r.cfg.Redis.Catalog})
	if err != nil {
		t.Fatal(err)
	}
	s := &askedStore{Store: store}
	if r.app, err = app.Start(context.Background(), r.cfg, app.WithStore(s), app.WithLog(io.Discard)); err != nil {
		t.Fatal(err)
	}
	eventually(t, "it leads", r.app.Leading)
	n := r.node("n1")
	reading, replaced := make(chan struct{}), make(chan struct{})
	goOn := sync.OnceFunc(func() { close(replaced) })
	t.Cleanup(goOn)
	var once sync.Once
	n.mu.Lock()
	n.read = func() {
		if s.asked.CompareAndSwap(true, false) { // the operator's repair: the coordinator's own waits for it
			once.Do(func() {
				close(reading)
				<-replaced
			})
		}
	}
	n.mu.Unlock()
	n.hangUp()
	head := r.status().GetHead()
	s.asked.Store(false)
	n.witness = &nodev1.CatalogPoint{Incarnation: head.GetIncarnation(), Seq: head.GetSeq() + 100, Digest: "of what was lost"}
	wantReason(t, n.dial(r.app.Addresses("node")[0], 20*time.Millisecond), errs.CatalogRewound)
	eventually(t, "the node is let in", func() bool { return n.dial(r.app.Addresses("node")[0], 20*time.Millisecond) == nil })

	keeper, accept := dormousev1.NewCatalogServiceClient(r.conn(r.root)), &dormousev1.RepairCatalogRequest{WithoutNodes: []string{"n1"}, AcceptLoss: true}
	answer := make(chan error, 1)
	go func() {
		_, err := keeper.RepairCatalog(context.Background(), accept)
		answer <- err
	}()
	<-reading
	first, _ := s.Generation()
	server.Kill(t)
	server.Restart(t)
	eventually(t, "the other process is met", func() bool {
		_, err := s.Seq(context.Background())
		now, _ := s.Generation()
		return err == nil && now > first
	})
	goOn()
	wantReason(t, <-answer, errs.StoreUnavailable)
	if n := s.resumed.Load(); n != 0 {
		t.Errorf("the catalog was taken into service %d times", n)
	}
	eventually(t, "the next one repairs", func() bool {
		_, err := keeper.RepairCatalog(context.Background(), accept)
		return err == nil
	})
	if st := r.status(); st.GetSuspended() != nil || st.GetHead().GetIncarnation() == head.GetIncarnation() {
		t.Errorf("%v", st)
	}
}
