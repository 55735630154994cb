package app

import (
	"context"
	"errors"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/opencontainers/go-digest"

	"github.com/dormouse-run/dormouse/agentd/internal/bundle"
	"github.com/dormouse-run/dormouse/agentd/internal/cgroup"
	"github.com/dormouse-run/dormouse/agentd/internal/layers"
	"github.com/dormouse-run/dormouse/agentd/internal/ocispec"
	"github.com/dormouse-run/dormouse/agentd/internal/runner"
	"github.com/dormouse-run/dormouse/agentd/internal/runtime"
	"github.com/dormouse-run/dormouse/pkg/errs"
)

// This file gives the node's parts the forms that the runner asks for.

// images is the layers store as the runner and reconcile see it.
type images struct {
	store *layers.Store
	node  string
}

func runnerImage(img layers.Image) runner.Image {
	return runner.Image{
		Reference: img.Reference, Digest: img.Digest.String(), ErofsDigest: img.ErofsDigest.String(), Path: img.ErofsPath,
		Config: runner.ImageConfig{Entrypoint: img.Config.Entrypoint, Cmd: img.Config.Cmd, Env: img.Config.Env, User: img.Config.User, WorkingDir: img.Config.WorkingDir},
	}
}

func (i images) Ensure(ctx context.Context, reference, holder string) (runner.Image, error) {
	img, err := i.store.Ensure(ctx, reference, layers.EnsureOptions{Holder: holder})
	if err != nil {
		return runner.Image{}, err
	}
	return runnerImage(img), nil
}

// EnsureExact takes the file that is here, whatever the reference stands for by now, and pulls the
// image by its digest otherwise.
func (i images) EnsureExact(ctx context.Context, want runner.Image, holder string) (runner.Image, error) {
	err := i.Hold(ctx, want.ErofsDigest, holder)
	if err == nil {
		img, err := i.store.Get(ctx, want.ErofsDigest)
		if err == nil {
			return runnerImage(img), nil
		}
		return runner.Image{}, errors.Join(err, i.Release(ctx, want.ErofsDigest, holder))
	}
	if !errs.Has(err, errs.ImageNotFound) {
		return runner.Image{}, err
	}
	img, err := i.store.Ensure(ctx, byDigest(want.Reference, want.Digest), layers.EnsureOptions{Holder: holder})
	if err != nil {
		return runner.Image{}, err
	}
	if img.ErofsDigest.String() != want.ErofsDigest {
		mismatch := errs.New(errs.IdentityMismatch, "the image %s became another file on this node than the snapshot is bound to", want.Reference).
			With("want", want.ErofsDigest).With("has", img.ErofsDigest.String())
		return runner.Image{}, errors.Join(mismatch, i.Release(ctx, img.ErofsDigest.String(), holder))
	}
	return runnerImage(img), nil
}

// byDigest names the image by its digest alone, in the repository of the reference.
func byDigest(reference, dgst string) string {
	for n := len(reference) - 1; n >= 0 && reference[n] != '/'; n-- {
		if reference[n] == ':' || reference[n] == '@' {
			reference = reference[:n]
		}
	}
	return reference + "@" + dgst
}

func (i images) Hold(ctx context.Context, erofsDigest, holder string) error {
	return i.store.Hold(ctx, digest.Digest(erofsDigest), holder)
}

func (i images) Release(ctx context.Context, erofsDigest, holder string) error {
	if erofsDigest != "" {
		return i.store.Release(ctx, digest.Digest(erofsDigest), holder)
	}
	held, err := i.store.Holds(ctx)
	if err != nil {
		return err
	}
	var all []error
	for file, holders := range held {
		for _, h := range holders {
			if h.Name == holder && h.Node == i.node {
				all = append(all, i.store.Release(ctx, file, holder))
			}
		}
	}
	return errors.Join(all...)
}

// holds lists what each holder of this node holds: a shared root has others' too.
func (i images) holds(ctx context.Context) (map[string][]string, error) {
	held, err := i.store.Holds(ctx)
	if err != nil {
		return nil, err
	}
	out := make(map[string][]string)
	for file, holders := range held {
		for _, h := range holders {
			if h.Node == i.node {
				out[h.Name] = append(out[h.Name], file.String())
			}
		}
	}
	return out, nil
}

// bundles are the runtime bundles below a root. Each was verified when it was opened first.
type bundles struct {
	root    string
	current runner.Bundle
	others  map[string]runner.Bundle
}

func runnerBundle(b *bundle.Bundle) runner.Bundle {
	return runner.Bundle{Bundle: runtime.Bundle{Digest: b.Digest, Dir: b.Dir}, Version: b.RunscVersion, Init: b.GuestInit()}
}

// openBundles installs the bundle for new sandboxes and opens those that are installed already. A
// damaged old one is left out: what needs it is refused, the rest goes on.
func openBundles(src, root string, damaged func(digest string, err error)) (*bundles, error) {
	current, err := bundle.Install(src, root)
	if err != nil {
		return nil, err
	}
	b := &bundles{root: root, current: runnerBundle(current), others: make(map[string]runner.Bundle)}
	installed, err := bundle.List(root)
	if err != nil {
		return nil, err
	}
	for _, d := range installed {
		found, err := bundle.Find(root, d)
		if err != nil {
			damaged(d, err)
			continue
		}
		b.others[d] = runnerBundle(found)
	}
	return b, nil
}

func (b *bundles) Current() runner.Bundle { return b.current }

func (b *bundles) ByDigest(d string) (runner.Bundle, error) {
	found, ok := b.others[d]
	if !ok {
		return runner.Bundle{}, errs.New(errs.IncompatibleRuntime, "the runtime bundle %s is not installed on this node; install it or use another node", d).
			With("want", d).With("has", b.current.Digest)
	}
	return found, nil
}

func (b *bundles) digests() []string {
	var out []string
	for d := range b.others {
		out = append(out, d)
	}
	return out
}

type groups struct{ *cgroup.Manager }

func (g groups) Exists(uid string) bool { return g.Group(uid).Exists() }

type specBuilder struct{}

func (specBuilder) New(in runner.SpecInput) (*specs.Spec, error) {
	s := ocispec.Sandbox{
		Hostname: in.Hostname, Rootfs: in.Image, Init: in.Init, NetNS: in.NetNS,
		MemoryBytes: in.MemoryBytes, MemoryRequest: in.MemoryRequestBytes, LayerBytes: in.LayerBytes, CPUMillis: in.CPUMillis, CPURequest: in.CPURequestMillis,
	}
	for _, v := range in.Volumes {
		s.Volumes = append(s.Volumes, ocispec.Volume{Source: v.Source, Path: v.Path, ReadOnly: v.ReadOnly})
	}
	return ocispec.New(s)
}

func (specBuilder) ForRestore(saved *specs.Spec, in runner.SpecInput) (*specs.Spec, error) {
	b := ocispec.Bindings{Hostname: in.Hostname, NetNS: in.NetNS, Init: in.Init, Volumes: make(map[string]string, len(in.Volumes))}
	for _, v := range in.Volumes {
		b.Volumes[v.Path] = v.Source
	}
	return ocispec.ForRestore(saved, b)
}
