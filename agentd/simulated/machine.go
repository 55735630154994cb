package simulated

import (
	"context"
	"sync"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/dormouse-run/dormouse/agentd/internal/checkpoint"
	"github.com/dormouse-run/dormouse/agentd/internal/runner"
	"github.com/dormouse-run/dormouse/agentd/internal/runtime"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
)

// This file is what is simulated.

// images are there, unless the machine's options refuse them.
type images struct{ m *Machine }

var theImage = runner.Image{Digest: "sha256:image", ErofsDigest: "sha256:erofs", Path: "/layers/erofs"}

func (i images) hold(img runner.Image, holder string) (runner.Image, error) {
	i.m.mu.Lock()
	defer i.m.mu.Unlock()
	i.m.holds[holder] = img.ErofsDigest
	return img, nil
}

func (i images) Ensure(ctx context.Context, reference, holder string) (runner.Image, error) {
	if asked := i.m.opts.Image; asked != nil {
		if err := asked(ctx, reference); err != nil {
			return runner.Image{}, err
		}
	}
	img := theImage
	img.Reference = reference
	return i.hold(img, holder)
}

func (i images) EnsureExact(_ context.Context, want runner.Image, holder string) (runner.Image, error) {
	return i.hold(want, holder)
}

func (i images) Hold(_ context.Context, erofsDigest, holder string) error {
	_, err := i.hold(runner.Image{ErofsDigest: erofsDigest}, holder)
	return err
}

func (i images) Release(_ context.Context, _, holder string) error {
	i.m.mu.Lock()
	defer i.m.mu.Unlock()
	delete(i.m.holds, holder)
	return nil
}

// networks has none.
type networks struct{}

type noLease struct{}

func (noLease) Path() string          { return "/proc/self/ns/net" }
func (noLease) Nameservers() []string { return nil }
func (noLease) Release() error        { return nil }

func (networks) Reserve(context.Context, string, string) (string, error) { return "", nil }
func (networks) Acquire(context.Context, string, string, *sandbox.Egress) (runner.Lease, error) {
	return noLease{}, nil
}
func (networks) SetEgress(string, *sandbox.Egress) error { return nil }
func (networks) Remove(string) error                     { return nil }
func (networks) Free(string)                             {}

// bundles has one.
type bundles struct{}

func (bundles) Current() runner.Bundle {
	return runner.Bundle{Bundle: runtime.Bundle{Digest: "sha256:bundle", Dir: "/bundle"}, Version: "simulated", Init: "/bundle/init"}
}

func (b bundles) ByDigest(d string) (runner.Bundle, error) {
	if d != b.Current().Digest {
		return runner.Bundle{}, errs.New(errs.IncompatibleRuntime, "the runtime bundle %s is not installed on this node", d).With("want", d).With("has", b.Current().Digest)
	}
	return b.Current(), nil
}

// groups has none.
type groups struct{}

func (groups) Path(uid string) string { return "/simulated/" + uid }
func (groups) Exists(string) bool     { return false }

type specBuilder struct{}

func (specBuilder) New(in runner.SpecInput) (*specs.Spec, error) {
	return &specs.Spec{Version: "1.2.0", Hostname: in.Hostname, Process: &specs.Process{Args: []string{"/init"}}}, nil
}

func (specBuilder) ForRestore(saved *specs.Spec, in runner.SpecInput) (*specs.Spec, error) {
	out := *saved
	out.Hostname = in.Hostname
	return &out, nil
}

// guest is guest init as a process inside, which outlives channels. It has no main command.
type guest struct {
	generation uint64
	identity   Identity
}

// Identity is what the guest of a sandbox was told of itself.
type Identity struct {
	Hostname string
	// Generation is the channel's, at the time.
	Generation uint64
	// Hooks counts how often the image's hook was to be started for a claim.
	Hooks int
}

// Told gives what the guest of a sandbox was told last; false when there was none.
func (m *Machine) Told(uid string) (Identity, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	in := m.guests[uid]
	if in == nil {
		return Identity{}, false
	}
	return in.identity, true
}

type guests struct{ m *Machine }

func (g guests) Open(_ context.Context, uid string, generation uint64, _ runtime.Stdio) (runner.Guest, error) {
	g.m.mu.Lock()
	defer g.m.mu.Unlock()
	in := g.m.guests[uid]
	if in == nil {
		in = new(guest)
		g.m.guests[uid] = in
	}
	if generation < in.generation {
		return nil, errs.New(errs.Fenced, "guest init of sandbox %s has a channel of generation %d", uid, in.generation)
	}
	in.generation = generation
	return &channel{m: g.m, in: in, closed: make(chan struct{})}, nil
}

type channel struct {
	m      *Machine
	in     *guest
	closed chan struct{}
	once   sync.Once
}

func (c *channel) Configure(_ context.Context, id runner.Identity) error {
	c.m.mu.Lock()
	defer c.m.mu.Unlock()
	told := &c.in.identity
	if id.Hook == runner.HookNow && told.Generation != c.in.generation {
		told.Hooks++
	}
	told.Hostname, told.Generation = id.Hostname, c.in.generation
	return nil
}

func (*channel) StartMain(context.Context, runner.Main) error { return notHere("commands") }

func (*channel) WaitMain(context.Context) (runner.MainExit, error) {
	return runner.MainExit{}, errs.New(errs.ProcessNotFound, "there is no main command")
}

func (*channel) FinalOf(context.Context) (runner.Final, error) {
	return runner.Final{}, errs.New(errs.ProcessNotFound, "there is no main command")
}

func (*channel) ProcessTable(context.Context) ([]checkpoint.ProcessEntry, error) { return nil, nil }
func (*channel) Quiesce(context.Context) error                                   { return nil }
func (*channel) Drain(context.Context) error                                     { return nil }
func (*channel) Resume(context.Context) error                                    { return nil }
func (c *channel) Done() <-chan struct{}                                         { return c.closed }

func (c *channel) Close() error {
	c.once.Do(func() { close(c.closed) })
	return nil
}
