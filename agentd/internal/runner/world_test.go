package runner

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"go.uber.org/goleak"

	"github.com/dormouse-run/dormouse/agentd/internal/checkpoint"
	"github.com/dormouse-run/dormouse/agentd/internal/nodestate"
	"github.com/dormouse-run/dormouse/agentd/internal/runtime"
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

// fakeInit is guest init as a process inside: it outlives channels.
type fakeInit struct {
	generation uint64
	quiet      bool
	identity   Identity
	named      uint64 // the generation at which it was last told who it is
	hooks      int    // for claims
	mains      []Main
	exit       chan struct{}
	end        MainExit
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

func (w *world) Ensure(_ context.Context, ref, holder string) (Image, error) {
	if err := w.failing("image"); err != nil {
		return Image{}, err
	}
	return w.hold(Image{Reference: ref, Digest: "sha256:i", ErofsDigest: "sha256:e", Path: "/layers/e.erofs",
		Config: ImageConfig{Entrypoint: []string{"/entry"}, Cmd: []string{"arg"}, Env: []string{"A=1", "B=2"}, User: "bob", WorkingDir: "/w"}}, holder)
}

func (w *world) EnsureExact(_ context.Context, want Image, holder string) (Image, error) {
	return w.hold(want, holder)
}

func (w *world) hold(img Image, holder string) (Image, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.holds[holder] = img.ErofsDigest
	return img, nil
}

func (w *world) Hold(_ context.Context, digest, holder string) error {
	_, err := w.hold(Image{ErofsDigest: digest}, holder)
	return err
}

func (w *world) Release(_ context.Context, _, holder string) error {
	if err := w.failing("release"); err != nil {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.holds, holder)
	return nil
}

type volumes struct{ *world }

func (v volumes) Attach(_ context.Context, vol, holder string, _ bool) (string, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if h, ok := v.world.volumes[vol]; ok && h != holder {
		return "", errs.New(errs.AlreadyAttached, "held by %s", h).With("holder", h)
	}
	v.world.volumes[vol] = holder
	return "/volumes/" + vol, nil
}

func (v volumes) Detach(_ context.Context, uids []string, holder string) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	maps.DeleteFunc(v.world.volumes, func(id, h string) bool { return h == holder && (uids == nil || slices.Contains(uids, id)) })
	return nil
}

type networks struct{ *world }

type lease struct {
	w    *world
	once sync.Once
}

func (l *lease) Path() string { return "/proc/1/fd/9" }
func (l *lease) Release() error {
	l.once.Do(func() {
		l.w.mu.Lock()
		defer l.w.mu.Unlock()
		l.w.leases--
	})
	return nil
}

func (l *lease) Nameservers() []string { return nil }

func (v networks) Reserve(_ context.Context, uid, mode string) (string, error) {
	if err := v.failing("reserve"); err != nil || mode == "none" {
		return "", err
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.addresses[uid] == "" {
		v.addresses[uid] = "10.0.0." + uid
	}
	return v.addresses[uid], nil
}

func (v networks) SetEgress(uid string, egress *sandbox.Egress) error {
	if err := v.failing("egress"); err != nil {
		return err
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	if _, has := v.policies[uid]; has {
		v.policies[uid] = egress
	}
	return nil
}

func (v networks) Remove(uid string) error {
	if err := v.failing("remove network"); err != nil {
		return err
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	delete(v.policies, uid)
	return nil
}

func (v networks) Free(uid string) {
	v.mu.Lock()
	defer v.mu.Unlock()
	delete(v.addresses, uid)
}

func (v networks) Acquire(_ context.Context, uid, mode string, egress *sandbox.Egress) (Lease, error) {
	if err := v.failing("network"); err != nil {
		return nil, err
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	v.leases++
	if mode == "outbound" {
		v.policies[uid] = egress
	}
	return &lease{w: v.world}, nil
}

type bundles struct{}

func (bundles) Current() Bundle {
	return Bundle{Bundle: runtime.Bundle{Digest: "sha256:b", Dir: "/bundle"}, Version: "v1", Init: "/bundle/init.erofs"}
}

func (b bundles) ByDigest(d string) (Bundle, error) {
	if d != b.Current().Digest {
		return Bundle{}, errs.New(errs.IncompatibleRuntime, "no bundle %s", d)
	}
	return b.Current(), nil
}

type groups struct{}

func (groups) Path(id string) string { return "/dormouse/n1/" + id }
func (groups) Exists(string) bool    { return false }

type specBuilder struct{}

func (specBuilder) New(in SpecInput) (*specs.Spec, error) {
	return &specs.Spec{Version: "1.2.0", Hostname: in.Hostname, Process: &specs.Process{Args: []string{"/init"}}}, nil
}

func (specBuilder) ForRestore(saved *specs.Spec, in SpecInput) (*specs.Spec, error) {
	out := *saved
	out.Hostname = in.Hostname
	return &out, nil
}

type guests struct{ *world }

func (g guests) Open(ctx context.Context, id string, generation uint64, stdio runtime.Stdio) (Guest, error) {
	if err := g.failing("guest"); err != nil {
		return nil, err
	}
	if _, err := os.Stat(stdio.In); err != nil {
		return nil, err
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	in := g.world.guests[id]
	if in == nil {
		in = &fakeInit{exit: make(chan struct{})}
		g.world.guests[id] = in
	}
	if generation < in.generation {
		return nil, errs.New(errs.Fenced, "generation %d", generation)
	}
	in.generation, in.quiet = generation, false
	return &channel{w: g.world, id: id, in: in, closed: make(chan struct{})}, nil
}

type channel struct {
	w      *world
	id     string
	in     *fakeInit
	closed chan struct{}
	once   sync.Once
}

func (c *channel) Configure(_ context.Context, id Identity) error {
	if err := c.w.failing("configure"); err != nil {
		return err
	}
	c.w.mu.Lock()
	defer c.w.mu.Unlock()
	if id.Hook == HookNow && c.in.named != c.in.generation {
		c.in.hooks++
	}
	c.in.identity, c.in.named = id, c.in.generation
	return nil
}

func (c *channel) StartMain(_ context.Context, m Main) error {
	if err := c.w.failing("main"); err != nil {
		return err
	}
	c.w.mu.Lock()
	defer c.w.mu.Unlock()
	c.in.mains = append(c.in.mains, m)
	return nil
}

func (c *channel) WaitMain(ctx context.Context) (MainExit, error) {
	select {
	case <-c.in.exit:
		return c.in.end, nil
	case <-ctx.Done():
		return MainExit{}, ctx.Err()
	case <-c.closed:
		return MainExit{}, errs.New(errs.GuestSilent, "closed")
	}
}

func (c *channel) FinalOf(context.Context) (Final, error) {
	return Final{Argv: []string{"/entry"}, Exit: c.in.end, Stdout: Tail{Offset: 3, Data: []byte("bye")}}, nil
}

func (c *channel) ProcessTable(ctx context.Context) ([]checkpoint.ProcessEntry, error) {
	if c.w.silent != nil {
		close(c.w.silent)
		<-ctx.Done()
		return nil, errs.Wrap(ctx.Err(), errs.GuestSilent, "no answer")
	}
	return []checkpoint.ProcessEntry{{ID: "main", Pid: 2, Main: true}}, nil
}

func (c *channel) Quiesce(context.Context) error {
	if err := c.w.failing("quiesce"); err != nil {
		return err
	}
	c.w.mu.Lock()
	defer c.w.mu.Unlock()
	c.in.quiet = true
	return nil
}

func (c *channel) Drain(context.Context) error { return c.w.failing("drain") }

func (c *channel) Resume(context.Context) error {
	c.w.mu.Lock()
	defer c.w.mu.Unlock()
	c.in.quiet = false
	return nil
}

func (c *channel) Done() <-chan struct{} { return c.closed }

func (c *channel) Close() error {
	c.once.Do(func() { close(c.closed) })
	return nil
}

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
