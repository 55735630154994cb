// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package layers

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	containerd "github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/leases"
	"github.com/containerd/containerd/v2/core/remotes"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/errdefs"
	"github.com/containerd/platforms"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sync/errgroup"

	"github.com/dormouse-run/dormouse/agentd/internal/layers/flatten"
	"github.com/dormouse-run/dormouse/pkg/errs"
)

const (
	maxManifest = 4 << 20
	maxNesting  = 3
	leaseTime   = 24 * time.Hour
	leaseEnd    = 10 * time.Second
	rootLabel   = "dormouse.dev/layers-root"
	gcLabel     = "containerd.io/gc.ref.content."
)

// remote is the side of containerd: pulls, their leases, and the images kept there as a cache.
type remote struct {
	client    *containerd.Client
	namespace string
	root      string // hashed: which root an image in containerd is kept for
	downloads int
}

func newRemote(client *containerd.Client, cfg Config) *remote {
	sum := sha256.Sum256([]byte(cfg.Root))
	return &remote{client: client, namespace: cfg.Namespace, root: hex.EncodeToString(sum[:8]), downloads: cfg.Downloads}
}

func (r *remote) in(ctx context.Context) context.Context {
	return namespaces.WithNamespace(quiet(ctx), r.namespace)
}

// lease protects from containerd's collector what is fetched until the returned function is called.
func (r *remote) lease(ctx context.Context) (context.Context, func(), error) {
	ctx = r.in(ctx)
	ctx, done, err := r.client.WithLease(ctx, leases.WithRandomID(), leases.WithExpiration(leaseTime),
		leases.WithLabel(rootLabel, r.root))
	if err != nil {
		return nil, nil, fmt.Errorf("containerd lease: %w", err)
	}
	return ctx, func() {
		// The lease ends by itself too; ending it must not depend on the caller's patience.
		end, cancel := context.WithTimeout(context.WithoutCancel(ctx), leaseEnd)
		defer cancel()
		_ = done(end)
	}, nil
}

// pulled is an image whose bytes are all in containerd.
type pulled struct {
	manifest ocispec.Descriptor
	layers   []ocispec.Descriptor
	config   ocispec.Image
}

// puller fetches one image. Its context carries the lease.
type puller struct {
	*remote
	reg      *registry
	fetcher  remotes.Fetcher
	platform ocispec.Platform
	report   func(func(*Progress))
}

func (r *remote) pull(ctx context.Context, reg *registry, desc ocispec.Descriptor, platform ocispec.Platform, report func(func(*Progress))) (pulled, error) {
	fetcher, err := reg.resolver.Fetcher(ctx, reg.ref.full)
	if err != nil {
		return pulled{}, reg.explain(ctx, err)
	}
	p := &puller{remote: r, reg: reg, fetcher: fetcher, platform: platform, report: report}
	man, desc, err := p.manifest(ctx, desc, 0)
	if err != nil {
		return pulled{}, err
	}
	img := pulled{manifest: desc, layers: man.Layers}
	if img.config, err = p.configOf(ctx, man); err != nil {
		return pulled{}, err
	}
	if err := p.fetchLayers(ctx, man.Layers); err != nil {
		return pulled{}, err
	}
	return img, p.keep(ctx, desc, man)
}

func (p *puller) bad(format string, args ...any) error {
	return errs.New(errs.ImageMalformed, "the image %s cannot be used: %s", p.reg.ref.full, fmt.Sprintf(format, args...)).With("image", p.reg.ref.full)
}

// fetch brings a blob into containerd. What a manifest says about other places to get it from, or brings
// along itself, is ignored: content comes from the registry that was asked. What containerd has already is not
// merely looked at: to be told so of a write adds it to the lease, and the collector may be about to take it.
func (p *puller) fetch(ctx context.Context, desc ocispec.Descriptor) error {
	desc.URLs, desc.Data = nil, nil
	err := remotes.Fetch(ctx, p.client.ContentStore(), p.fetcher, desc)
	if err != nil && !errdefs.IsAlreadyExists(err) {
		return p.reg.explain(ctx, err)
	}
	return nil
}

// small fetches and reads a manifest, index or configuration.
func (p *puller) small(ctx context.Context, desc ocispec.Descriptor, v any) error {
	if err := desc.Digest.Validate(); err != nil || desc.Size <= 0 || desc.Size > maxManifest {
		return p.bad("a manifest or configuration of %d bytes, %d are allowed", desc.Size, maxManifest)
	}
	if err := p.fetch(ctx, desc); err != nil {
		return err
	}
	data, err := content.ReadBlob(ctx, p.client.ContentStore(), desc)
	if err != nil {
		return fmt.Errorf("containerd: read %s: %w", desc.Digest, err)
	}
	if json.Unmarshal(data, v) != nil {
		return p.bad("%s is not valid JSON", desc.Digest)
	}
	return nil
}

// manifest finds the manifest for the platform, through indexes if need be.
func (p *puller) manifest(ctx context.Context, desc ocispec.Descriptor, depth int) (ocispec.Manifest, ocispec.Descriptor, error) {
	var man ocispec.Manifest
	switch {
	case images.IsIndexType(desc.MediaType):
		if depth >= maxNesting {
			return man, desc, p.bad("its indexes are nested too deeply")
		}
		var index ocispec.Index
		if err := p.small(ctx, desc, &index); err != nil {
			return man, desc, err
		}
		next, err := p.choose(index.Manifests)
		if err != nil {
			return man, desc, err
		}
		return p.manifest(ctx, next, depth+1)
	case images.IsManifestType(desc.MediaType):
		if err := p.small(ctx, desc, &man); err != nil {
			return man, desc, err
		}
		return man, desc, p.checkManifest(&man)
	}
	return man, desc, p.bad("the registry gives it the media type %q, which is not one of an image", clip(desc.MediaType))
}

func (p *puller) checkManifest(man *ocispec.Manifest) error {
	if !images.IsConfigType(man.Config.MediaType) {
		return p.bad("its configuration has the media type %q: it is an artefact, not a container image", clip(man.Config.MediaType))
	}
	for i := range man.Layers {
		l := &man.Layers[i]
		l.URLs, l.Data = nil, nil
		if l.Digest.Validate() != nil || l.Size <= 0 {
			return p.bad("layer %d has no valid digest or size", i)
		}
		if !images.IsLayerType(l.MediaType) || strings.Contains(l.MediaType, "encrypted") {
			return p.bad("layer %d has the media type %q, which is not supported", i, clip(l.MediaType))
		}
	}
	return nil
}

// choose picks the entry of an index that fits the platform best.
func (p *puller) choose(entries []ocispec.Descriptor) (ocispec.Descriptor, error) {
	match := platforms.Only(p.platform)
	var fit []ocispec.Descriptor
	var has []string
	for _, e := range entries {
		if !images.IsManifestType(e.MediaType) && !images.IsIndexType(e.MediaType) || e.Platform == nil {
			continue
		}
		if e.Platform.OS == "unknown" {
			continue // attestations
		}
		has = append(has, platforms.Format(*e.Platform))
		if match.Match(*e.Platform) {
			fit = append(fit, e)
		}
	}
	if len(fit) == 0 {
		return ocispec.Descriptor{}, p.wrongArchitecture(has)
	}
	slices.SortStableFunc(fit, func(a, b ocispec.Descriptor) int {
		switch {
		case match.Less(*a.Platform, *b.Platform):
			return -1
		case match.Less(*b.Platform, *a.Platform):
			return 1
		}
		return 0
	})
	return fit[0], nil
}

func (p *puller) wrongArchitecture(has []string) error {
	for i := range has {
		has[i] = clip(has[i]) // the registry's words
	}
	slices.Sort(has)
	has = slices.Compact(has)
	list := strings.Join(has[:min(len(has), maxListed)], ",")
	want := platforms.Format(p.platform)
	return errs.New(errs.WrongArchitecture, "the image %s is for %s and this node is %s: build or choose one for %s", p.reg.ref.full, list, want, want).
		With("image", p.reg.ref.full).With("want", want).With("has", list)
}

func (p *puller) configOf(ctx context.Context, man ocispec.Manifest) (ocispec.Image, error) {
	var cfg ocispec.Image
	if err := p.small(ctx, man.Config, &cfg); err != nil {
		return cfg, err
	}
	return cfg, p.checkConfig(man, cfg)
}

func (p *puller) checkConfig(man ocispec.Manifest, cfg ocispec.Image) error {
	if cfg.OS == "" || cfg.Architecture == "" {
		return p.bad("its configuration names no operating system or architecture")
	}
	if !platforms.Only(p.platform).Match(platforms.Normalize(cfg.Platform)) {
		return p.wrongArchitecture([]string{platforms.Format(cfg.Platform)})
	}
	if len(cfg.RootFS.DiffIDs) != len(man.Layers) {
		return p.bad("it has %d layers and its configuration speaks of %d", len(man.Layers), len(cfg.RootFS.DiffIDs))
	}
	return nil
}

// fetchLayers downloads what is missing, several layers at a time.
func (p *puller) fetchLayers(ctx context.Context, all []ocispec.Descriptor) error {
	var distinct []ocispec.Descriptor
	seen := map[digest.Digest]bool{}
	for _, l := range all {
		if !seen[l.Digest] {
			seen[l.Digest] = true
			distinct = append(distinct, l)
		}
	}
	p.report(func(pr *Progress) {
		pr.Phase = PhasePulling
		for _, l := range distinct {
			pr.Layers = append(pr.Layers, LayerProgress{Digest: l.Digest, Total: l.Size})
			pr.Total += l.Size
		}
	})
	group, gctx := errgroup.WithContext(ctx)
	group.SetLimit(p.downloads)
	for i, l := range distinct {
		group.Go(func() error {
			one := *p
			one.fetcher = remotes.FetcherFunc(func(ctx context.Context, d ocispec.Descriptor) (io.ReadCloser, error) {
				rc, err := p.fetcher.Fetch(ctx, d)
				if err != nil {
					return nil, err
				}
				return &counted{ReadCloser: rc, add: func(n int64) {
					p.report(func(pr *Progress) { pr.advance(i, n) })
				}}, nil
			})
			if err := one.fetch(gctx, l); err != nil {
				return err
			}
			p.report(func(pr *Progress) { pr.advance(i, l.Size) })
			return nil
		})
	}
	return group.Wait()
}

// advance moves a layer's count; it never passes the total, whatever was read twice.
func (pr *Progress) advance(layer int, n int64) {
	l := &pr.Layers[layer]
	n = min(n, l.Total-l.Done)
	l.Done += n
	pr.Done += n
}

// counted counts what is read. It can seek if the reader beneath can, so that a cut download goes on.
type counted struct {
	io.ReadCloser
	add func(int64)
}

func (c *counted) Read(b []byte) (int, error) {
	n, err := c.ReadCloser.Read(b)
	if n > 0 {
		c.add(int64(n))
	}
	return n, err
}

func (c *counted) Seek(offset int64, whence int) (int64, error) {
	s, ok := c.ReadCloser.(io.Seeker)
	if !ok {
		return 0, errors.ErrUnsupported
	}
	return s.Seek(offset, whence)
}

// keep makes the content outlive the lease: an image record in containerd refers to the manifest, and the
// manifest, by labels, to the rest.
func (p *puller) keep(ctx context.Context, desc ocispec.Descriptor, man ocispec.Manifest) error {
	labels := map[string]string{gcLabel + "config": man.Config.Digest.String()}
	for i, l := range man.Layers {
		labels[fmt.Sprintf("%sl.%d", gcLabel, i)] = l.Digest.String()
	}
	fields := make([]string, 0, len(labels))
	for k := range maps.Keys(labels) {
		fields = append(fields, "labels."+k)
	}
	if _, err := p.client.ContentStore().Update(ctx, content.Info{Digest: desc.Digest, Labels: labels}, fields...); err != nil {
		return fmt.Errorf("containerd: label the manifest: %w", err)
	}
	img := images.Image{Name: p.imageName(desc.Digest), Target: desc, Labels: map[string]string{rootLabel: p.root}}
	if _, err := p.client.ImageService().Create(ctx, img); err != nil && !errdefs.IsAlreadyExists(err) {
		return fmt.Errorf("containerd: keep the image: %w", err)
	}
	return nil
}

func (r *remote) imageName(manifest digest.Digest) string {
	return "dormouse.dev/layers/" + r.root + "@" + manifest.String()
}

// open reads a layer from containerd.
func (r *remote) open(desc ocispec.Descriptor) func(context.Context) (io.ReadCloser, error) {
	return func(ctx context.Context) (io.ReadCloser, error) {
		ra, err := r.client.ContentStore().ReaderAt(ctx, desc)
		if err != nil {
			return nil, fmt.Errorf("containerd: open %s: %w", desc.Digest, err)
		}
		return struct {
			io.Reader
			io.Closer
		}{bufio.NewReaderSize(io.NewSectionReader(ra, 0, ra.Size()), 1<<20), ra}, nil
	}
}

// toFlatten gives the layers of a pulled image to the builder.
func (r *remote) toFlatten(img pulled) []flatten.Layer {
	out := make([]flatten.Layer, len(img.layers))
	for i, l := range img.layers {
		out[i] = flatten.Layer{Name: l.Digest.String(), DiffID: img.config.RootFS.DiffIDs[i], Open: r.open(l)}
	}
	return out
}

// forget gives up what containerd keeps of the manifests.
func (r *remote) forget(ctx context.Context, manifests []digest.Digest) error {
	var all []error
	for _, m := range manifests {
		if err := r.client.ImageService().Delete(r.in(ctx), r.imageName(m)); err != nil && !errdefs.IsNotFound(err) {
			all = append(all, err)
		}
	}
	return errors.Join(all...)
}

// forgetAll gives up everything kept for this root and waits until the room is free.
func (r *remote) forgetAll(ctx context.Context) error {
	_, err := r.forgetWhere(ctx, func(string) bool { return true })
	return err
}

// forgetUnknown gives up what is kept for manifests that are not in keep.
func (r *remote) forgetUnknown(ctx context.Context, keep map[digest.Digest]bool) (int, error) {
	names := make(map[string]bool, len(keep))
	for m := range keep {
		names[r.imageName(m)] = true
	}
	return r.forgetWhere(ctx, func(name string) bool { return !names[name] })
}

func (r *remote) forgetWhere(ctx context.Context, which func(string) bool) (int, error) {
	ctx = r.in(ctx)
	list, err := r.client.ImageService().List(ctx, fmt.Sprintf("labels.%q==%s", rootLabel, r.root))
	if err != nil {
		return 0, fmt.Errorf("containerd: list images: %w", err)
	}
	var all []error
	n := 0
	for _, img := range list {
		if !which(img.Name) {
			continue
		}
		if err := r.client.ImageService().Delete(ctx, img.Name, images.SynchronousDelete()); err != nil && !errdefs.IsNotFound(err) {
			all = append(all, err)
			continue
		}
		n++
	}
	return n, errors.Join(all...)
}
