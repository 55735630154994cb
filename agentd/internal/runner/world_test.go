package runner

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/dormouse-run/dormouse/agentd/internal/checkpoint"
	"github.com/dormouse-run/dormouse/agentd/internal/nodestate"
	"github.com/dormouse-run/dormouse/agentd/internal/runtime/fake"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
	"github.com/dormouse-run/dormouse/pkg/uid"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// world is everything that outlives an agentd: the machine with its sandboxes and guests, images,
// volumes and folders. Nodes come and go on it.
type world struct {
	// silent, if set, is closed by a channel that then does not list its processes.
	silent chan struct{}
	t      *testing.T
	root   string
	host   *fake.Host

	mu      sync.Mutex
	holds   map[string]string // holder to digest
	volumes map[string]string // volume to holder
	guests  map[string]*fakeInit
	leases  int
	// addresses and policies are of the network that outlives an agentd, by uid.
	addresses map[string]string
	policies  map[string]*sandbox.Egress
	fail      map[string]error // by what is asked
	room      Room             // nil: there is always enough

	dead bool // a fault struck: the process does nothing more
	at   string
}

func newWorld(t *testing.T) *world {
	return &world{t: t, root: t.TempDir(), host: fake.NewHost(), holds: map[string]string{}, volumes: map[string]string{},
		guests: map[string]*fakeInit{}, fail: map[string]error{}, addresses: map[string]string{}, policies: map[string]*sandbox.Egress{}}
}

func (w *world) failing(what string) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.fail[what]
}

func (w *world) setFail(what string, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.fail[what] = err
}

// fault strikes once at the point, and at every point after it.
func (w *world) fault(point string) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if point == w.at {
		w.dead = true
	}
	if w.dead {
		return errors.New("struck")
	}
	return nil
}

// agent is one life of an agentd.
type agent struct {
	*Node
	w      *world
	store  *nodestate.Store
	driver *fake.Driver
}

// boot starts an agentd on the world; end is its end, however it went.
func (w *world) boot() *agent {
	w.t.Helper()
	store, err := nodestate.Open(nodestate.Options{Path: filepath.Join(w.root, "state.db"), Node: "n1"})
	must(w.t, err)
	snaps, err := checkpoint.OpenStore(checkpoint.StoreOptions{Root: filepath.Join(w.root, "snapshots")})
	must(w.t, err)
	must(w.t, snaps.Sweep())
	driver := w.host.Open()
	n, err := New(Options{Store: store, Driver: driver, Images: w, Volumes: volumes{w}, Networks: networks{w}, Bundles: bundles{}, Groups: groups{},
		Specs: specBuilder{}, Guests: guests{w}, Room: w.room, Snapshots: snaps, Capturer: checkpoint.NewCapturer(snaps, 2, false),
		Host: checkpoint.Host{Node: "n1", Driver: "fake", Architecture: "amd64", CPUFeatures: []string{"a", "b"}},
		Root: filepath.Join(w.root, "sandboxes"), ReadyRoot: filepath.Join(w.root, "prepared"), Ready: 1, Flags: []string{"--flag"}, Fault: w.fault})
	must(w.t, err)
	a := &agent{Node: n, w: w, store: store, driver: driver}
	w.t.Cleanup(a.end)
	return a
}

func (a *agent) end() {
	a.Close()
	a.driver.Close()
	a.store.Close()
}

// reboot is a crash and a new agentd that recovers as reconcile would have it.
func (a *agent) reboot() *agent {
	a.w.t.Helper()
	a.end()
	a.w.mu.Lock()
	a.w.dead, a.w.at = false, ""
	a.w.mu.Unlock()
	b := a.w.boot()
	snaps, err := b.store.Snapshots()
	must(a.w.t, err)
	for _, s := range snaps {
		must(a.w.t, b.FinishSnapshot(ctx(a.w.t), s.UID))
	}
	all, err := b.store.Sandboxes()
	must(a.w.t, err)
	for _, rec := range all {
		if rec.Intent == nodestate.IntentKeep {
			must(a.w.t, b.Reattach(ctx(a.w.t), rec.UID))
		} else {
			must(a.w.t, b.Remove(ctx(a.w.t), rec.UID))
		}
	}
	return b
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func ctx(t *testing.T) context.Context {
	c, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel)
	return c
}

func wantReason(t *testing.T, err error, want errs.Reason) {
	t.Helper()
	if errs.ReasonOf(err) != want {
		t.Fatalf("got %v, want reason %s", err, want)
	}
}

// eventually polls a condition; the test's own deadline is the bound.
func eventually(t *testing.T, what string, cond func() bool) {
	t.Helper()
	c := ctx(t)
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for !cond() {
		select {
		case <-tick.C:
		case <-c.Done():
			t.Fatalf("never: %s", what)
		}
	}
}

// nothingLeft tells what there is of a sandbox anywhere in the world.
func (w *world) leftOf(id string) []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	var left []string
	if _, ok := w.holds[id]; ok {
		left = append(left, "image hold")
	}
	for v, h := range w.volumes {
		if h == id {
			left = append(left, "volume "+v)
		}
	}
	if _, err := os.Lstat(filepath.Join(w.root, "sandboxes", id)); err == nil {
		left = append(left, "folder")
	}
	if slices.Contains(w.host.IDs(), id) {
		left = append(left, "runtime")
	}
	if w.leases != 0 {
		left = append(left, fmt.Sprintf("%d leases", w.leases))
	}
	if w.addresses[id] != "" {
		left = append(left, "address "+w.addresses[id])
	}
	if _, ok := w.policies[id]; ok {
		left = append(left, "policy")
	}
	return left
}

func (a *agent) wantGone(id string) {
	a.w.t.Helper()
	if left := a.w.leftOf(id); len(left) > 0 {
		a.w.t.Fatalf("left of %s: %s", id, strings.Join(left, ", "))
	}
	if _, err := a.store.Sandbox(id); !errs.Has(err, errs.ObjectNotFound) {
		a.w.t.Fatalf("the record of %s: %v", id, err)
	}
}

// Images.

func startRequest(change ...func(*StartRequest)) StartRequest {
	req := StartRequest{UID: uid.New(), Tenant: "t", Name: "box_1", Generation: 1, CommandID: "start-1",
		Spec: sandbox.Spec{Image: "example/app:1", RunImageCommand: true, Env: map[string]string{"B": "3", "C": "4"},
			Volumes: []sandbox.VolumeMount{{VolumeUID: uid.New(), Path: "/data"}}},
		SecretEnv: map[string]string{"TOKEN": "hunter2-secret"}}
	for _, c := range change {
		c(&req)
	}
	return req
}

func text(v any) string {
	data, _ := json.Marshal(v)
	return string(data)
}
