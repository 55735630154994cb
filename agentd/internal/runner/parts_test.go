package runner

import (
	"context"
	"maps"
	"os"
	"slices"
	"sync"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/dormouse-run/dormouse/agentd/internal/checkpoint"
	"github.com/dormouse-run/dormouse/agentd/internal/runtime"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
)

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

func (groups) Exists(string) bool { return false }

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
