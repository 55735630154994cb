package app_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	"github.com/dormouse-run/dormouse/coordinator/app"
	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/catalog/redis"
	"github.com/dormouse-run/dormouse/pkg/catalog/redis/redistest"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/fence"
	"github.com/dormouse-run/dormouse/pkg/pki"
	"github.com/dormouse-run/dormouse/pkg/uid"
	"github.com/dormouse-run/dormouse/pkg/wire"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// childEnv has a child process of the test be a coordinator.
const childEnv = "DORMOUSE_TEST_COORDINATOR"

// child runs a coordinator until its stdin ends.
func child(conf string) int {
	cfg := app.DefaultConfig()
	if err := json.Unmarshal([]byte(conf), &cfg); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	a, err := app.Start(context.Background(), cfg, app.WithLog(io.Discard))
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	fmt.Println(a.Addresses("grpc")[0], a.Addresses("node")[0])
	_, _ = io.Copy(io.Discard, os.Stdin)
	a.Stop()
	return 0
}

// process is a coordinator in a process of its own.
type process struct {
	t          *testing.T
	cmd        *exec.Cmd
	grpc, node string
}

// process starts one like the rig's.
func (r *rig) process(server *redistest.Server, ttl time.Duration) *process {
	r.t.Helper()
	conf := map[string]any{
		"Holder": "paused", "TLS": r.cfg.TLS, "Keys": r.cfg.Keys, "Admin": "",
		"Listen": map[string]any{"GRPC": []string{"127.0.0.1:0"}, "REST": []string{"127.0.0.1:0"}, "Node": []string{"127.0.0.1:0"}},
		"Redis":  map[string]any{"Address": server.Socket, "Catalog": r.cfg.Redis.Catalog},
		"Lease":  map[string]any{"TTL": ttl},
		"Nodes":  map[string]any{"Heartbeat": r.cfg.Nodes.Heartbeat, "Missed": r.cfg.Nodes.Missed, "PlacementWait": r.cfg.Nodes.PlacementWait},
	}
	text, err := json.Marshal(conf)
	if err != nil {
		r.t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		r.t.Fatal(err)
	}
	p := &process{t: r.t, cmd: exec.Command(self)}
	p.cmd.Env = append(os.Environ(), childEnv+"="+string(text))
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	var said bytes.Buffer
	p.cmd.Stderr = &said
	if _, err = p.cmd.StdinPipe(); err != nil {
		r.t.Fatal(err)
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		r.t.Fatal(err)
	}
	if err := p.cmd.Start(); err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() {
		_ = p.cmd.Process.Kill() // its error is that it is gone
		_ = p.cmd.Wait()
	})
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		r.t.Fatalf("the coordinator does not start: %v\n%s", err, said.String())
	}
	p.grpc, p.node, _ = strings.Cut(strings.TrimSpace(line), " ")
	return p
}

func (p *process) signal(s syscall.Signal) {
	p.t.Helper()
	if err := p.cmd.Process.Signal(s); err != nil {
		p.t.Fatal(err)
	}
}

// at gives a client of the coordinator at an address.
func (r *rig) at(address, key string) dormousev1.SandboxServiceClient {
	r.t.Helper()
	src, err := pki.Open(pki.Files{CA: r.cfg.TLS.CA}, nil)
	if err != nil {
		r.t.Fatal(err)
	}
	cc, err := grpc.NewClient("passthrough:///"+address, append(wire.DialOptions(), grpc.WithTransportCredentials(credentials.NewTLS(src.Client(pki.RoleCoordinator, ""))), grpc.WithPerRPCCredentials(bearer(key)))...)
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { _ = cc.Close() })
	return dormousev1.NewSandboxServiceClient(cc)
}

// epochs are those of all commits, in their order.
func epochs(t *testing.T, server *redistest.Server) (all []uint64) {
	t.Helper()
	c := goredis.NewClient(&goredis.Options{Network: "unix", Addr: server.Socket})
	defer func() { _ = c.Close() }() // only a test's
	log, err := c.XRange(context.Background(), "{"+app.DefaultConfig().Redis.Catalog+"}:log", "-", "+").Result()
	if err != nil {
		t.Fatal(err)
	}
	for _, entry := range log {
		text, _ := entry.Values["e"].(string)
		n, err := strconv.ParseUint(text, 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, n)
	}
	return all
}

// oneAfterAnother wants no commit of an epoch after one of a higher epoch, and commits of at least two.
func oneAfterAnother(t *testing.T, server *redistest.Server) {
	t.Helper()
	all := epochs(t, server)
	for i := range all {
		if i > 0 && all[i] < all[i-1] {
			t.Fatalf("a commit of epoch %d after one of epoch %d: %v", all[i], all[i-1], all)
		}
	}
	if len(all) == 0 || all[0] == all[len(all)-1] {
		t.Fatalf("there are commits of one epoch only: %v", all)
	}
}

// traffic creates sandboxes through any of the clients, one after another, each with an operation id that is asked again until it
// is answered. The result says how many were made; each is made once.
type traffic struct {
	stop chan struct{}
	wg   sync.WaitGroup
	made []string // names, answered
}

func (r *rig) traffic(clients ...dormousev1.SandboxServiceClient) *traffic {
	tr := &traffic{stop: make(chan struct{})}
	tr.wg.Go(func() {
		for i := 0; ; i++ {
			req := box(fmt.Sprint("made-", i))
			for try := 0; ; try++ {
				ctx, cancel := context.WithTimeout(context.Background(), time.Second)
				_, err := clients[try%len(clients)].CreateSandbox(ctx, req)
				cancel()
				if err == nil {
					tr.made = append(tr.made, req.GetName())
					break
				}
				select {
				case <-tr.stop: // what is not answered may have been made or not
					return
				case <-time.After(5 * time.Millisecond):
				}
			}
			select {
			case <-tr.stop:
				return
			case <-time.After(50 * time.Millisecond):
			}
		}
	})
	return tr
}

func (tr *traffic) end() []string {
	close(tr.stop)
	tr.wg.Wait()
	return tr.made
}

// allThere wants each sandbox that was acknowledged, once.
func (r *rig) allThere(c dormousev1.SandboxServiceClient, n *fakeNode, made []string) {
	r.t.Helper()
	count := make(map[string]int)
	page := ""
	for {
		list, err := c.ListSandboxes(context.Background(), &dormousev1.ListSandboxesRequest{PageToken: page, PageSize: 500})
		if err != nil {
			r.t.Fatal(err)
		}
		for _, s := range list.GetSandboxes() {
			count[s.GetMeta().GetName()]++
		}
		if page = list.GetNextPageToken(); page == "" {
			break
		}
	}
	for _, name := range made {
		if count[name] != 1 {
			r.t.Errorf("%s was acknowledged and is there %d times", name, count[name])
		}
	}
	if len(count) > len(made)+1 {
		r.t.Errorf("%d were acknowledged, one at a time, and %d are there", len(made), len(count))
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if len(n.sandboxes) > len(made)+1 {
		r.t.Errorf("%d were acknowledged, and the node has %d", len(made), len(n.sandboxes))
	}
}

// follow keeps the node in a session with whoever leads.
func (n *fakeNode) follow(t *testing.T, addresses ...string) {
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		for ctx.Err() == nil {
			for _, a := range addresses {
				if n.dialFor(ctx, a) {
					n.session.Wait() // until it ends
				}
			}
			select {
			case <-ctx.Done():
			case <-time.After(20 * time.Millisecond):
			}
		}
	})
	t.Cleanup(func() {
		cancel()
		n.hangUp()
		wg.Wait()
	})
}

// dialFor gives a coordinator a while to let the node in: one that stands still does not say no.
func (n *fakeNode) dialFor(ctx context.Context, address string) bool {
	in := make(chan error, 1)
	go func() { in <- n.dial(address, 20*time.Millisecond) }()
	select {
	case err := <-in:
		return err == nil
	case <-ctx.Done():
		return false
	case <-time.After(2 * time.Second):
		return false
	}
}

// TestC22PausedCoordinator has two coordinators, of which the one that leads stops being heard: paused as a process, or behind a connection that carries
// nothing, which is then cut and comes back. The other takes over; nothing that was accepted is lost or done again; the first commits nothing.
func TestC22PausedCoordinator(t *testing.T) {
	pausedCoordinator(t, time.Second, 4*time.Second)
}

func pausedCoordinator(t *testing.T, ttl, pause time.Duration) {
	server := redistest.Start(t)
	r := newRig(t, func(c *app.Config) { c.Lease.TTL = ttl })
	r.app.Stop()
	first := r.process(server, ttl)
	n := newFakeNode(t, r.pki, "n1")
	n.times = 1000
	old := r.at(first.grpc, r.user)
	eventually(t, "the first leads", func() bool { return n.dialFor(t.Context(), first.node) })
	madeBefore(t, old)
	r.standBy(server.Socket)
	n.follow(t, first.node, r.app.Addresses("node")[0])
	standby := r.at(r.app.Addresses("grpc")[0], r.user)
	tr := r.traffic(old, standby)
	eventually(t, "there is traffic", func() bool { return len(epochs(t, server)) > 20 })
	first.signal(syscall.SIGSTOP)
	over := time.After(pause)
	began := time.Now()
	eventually(t, "the standby leads", r.app.Leading)
	t.Logf("the standby led %s after the pause began, with leases of %s", time.Since(began).Round(time.Millisecond), ttl)
	n.hangUp() // as its connection to a machine that is gone would end
	before := len(epochs(t, server))
	eventually(t, "it does the work", func() bool { return len(epochs(t, server)) > before+20 })
	<-over
	first.signal(syscall.SIGCONT)
	before = len(epochs(t, server))
	old = r.at(first.grpc, r.user) // the one before may wait long until it dials again
	eventually(t, "the first answers, and work goes on", func() bool {
		_, err := old.ListSandboxes(context.Background(), &dormousev1.ListSandboxesRequest{PageSize: 1})
		return err == nil && len(epochs(t, server)) > before+20
	})
	made := append(tr.end(), "made-before")
	oneAfterAnother(t, server)
	r.allThere(standby, n, made)
}

// madeBefore makes a sandbox by a coordinator that leads alone: with such leases it may lose its term on a slow machine, and leads again.
func madeBefore(t *testing.T, c dormousev1.SandboxServiceClient) {
	t.Helper()
	req := box("made-before")
	eventually(t, "a sandbox is made", func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		_, err := c.CreateSandbox(ctx, req)
		return err == nil
	})
}

// standBy starts the rig's coordinator beside one that leads.
func (r *rig) standBy(address string) {
	r.t.Helper()
	cfg := r.cfg
	cfg.Holder, cfg.Admin, cfg.Redis.Address = "standby", "", address
	a, err := app.Start(context.Background(), cfg, app.WithLog(io.Discard))
	if err != nil {
		r.t.Fatal(err)
	}
	r.app = a
}

func TestC22HalfOpenConnection(t *testing.T) {
	server := redistest.Start(t)
	way := newBlackhole(t, server.Socket)
	r := newRig(t, func(c *app.Config) { c.Lease.TTL = time.Second })
	r.app.Stop()
	r.store = nil
	r.cfg.Redis.Address, r.cfg.Holder = way.Address, "first"
	cfg := r.cfg
	cfg.Admin = ""
	first, err := app.Start(context.Background(), cfg, app.WithLog(io.Discard))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(first.Stop)
	eventually(t, "the first leads", first.Leading)
	n := newFakeNode(t, r.pki, "n1")
	n.times = 1000
	eventually(t, "the node is let in", func() bool { return n.dialFor(t.Context(), first.Addresses("node")[0]) })
	old := r.at(first.Addresses("grpc")[0], r.user)
	madeBefore(t, old)
	r.standBy(server.Socket)
	n.follow(t, first.Addresses("node")[0], r.app.Addresses("node")[0])
	standby := r.at(r.app.Addresses("grpc")[0], r.user)
	tr := r.traffic(old, standby)
	eventually(t, "there is traffic", func() bool { return len(epochs(t, server)) > 20 })
	way.set(true)
	eventually(t, "the standby leads", r.app.Leading)
	leases, err := redis.Open(t.Context(), redis.Options{Address: server.Socket, Catalog: r.cfg.Redis.Catalog})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = leases.Close() }() // only a test's
	lease := func() fence.Epoch {
		now, err := leases.Leader(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return now.Epoch
	}
	taken := lease()
	eventually(t, "the first knows by its own clock that it does not", func() bool { return !first.Leading() })
	before := len(epochs(t, server))
	eventually(t, "work goes on", func() bool { return len(epochs(t, server)) > before+20 })
	way.set(false)
	eventually(t, "the first is back", func() bool {
		_, err := old.ListSandboxes(context.Background(), &dormousev1.ListSandboxesRequest{PageSize: 1})
		return err == nil
	})
	made := append(tr.end(), "made-before")
	oneAfterAnother(t, server)
	r.allThere(standby, n, made)
	// On a machine that stands still for a second the standby may lose such a lease too: then there is nothing to compare.
	if lead := first.Leading(); lead && lease() == taken {
		t.Error("the first leads again, though nobody gave the lease up")
	}
	eventually(t, "the standby leads on", func() bool { return r.app.Leading() || lease() != taken })
}

// Whatever a coordinator believes of its lease, by a clock that stands still or one that runs: the server takes nothing from it.
func TestC22AWrongClockCommitsNothing(t *testing.T) {
	server := redistest.Start(t)
	ctx := context.Background()
	open := func() *redis.Store {
		s, err := redis.Open(ctx, redis.Options{Address: server.Socket, Catalog: app.DefaultConfig().Redis.Catalog})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = s.Close() }) // only a test's
		return s
	}
	forever := open() // it will hold its lease for valid for ever
	lease, won, err := forever.Lead(ctx, catalog.Claim{Holder: "forever", TTL: time.Millisecond})
	if err != nil || !won {
		t.Fatal(lease, won, err)
	}
	commit := func() *errs.Error {
		key := catalog.Key{Tenant: "acme", Kind: catalog.KindVolume, UID: uid.New()}
		results, err := forever.Commit(ctx, []catalog.Commit{{Owner: fence.Owner{Coordinator: lease.Epoch}, Puts: []catalog.Put{{Record: catalog.Record{Key: key}}}}})
		if err != nil {
			t.Fatal(err)
		}
		return results[0].Err
	}
	if e := commit(); e != nil {
		t.Fatalf("while nobody else leads: %v", e)
	}
	r := newRig(t)
	r.onRedis(server)
	seq := r.status().GetHead().GetSeq()
	if e := commit(); !errs.Has(e, errs.Fenced) {
		t.Errorf("after another has the lease: %v", e)
	}
	if _, err := forever.OpenSession(ctx, lease.Epoch, "n1", 0); !errs.Has(err, errs.Fenced) {
		t.Errorf("a session: %v", err)
	}
	if now := r.status().GetHead().GetSeq(); now != seq {
		t.Errorf("%d commits", now-seq)
	}
}
