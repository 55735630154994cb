// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package layers

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	containerd "github.com/containerd/containerd/v2/client"
	"github.com/containerd/errdefs"
	"github.com/containerd/platforms"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sync/semaphore"

	"github.com/dormouse-run/dormouse/agentd/internal/layers/flatten"
	"github.com/dormouse-run/dormouse/pkg/errs"
)

// ensureRounds bounds how often Ensure begins anew because the image was collected under its hands.
const ensureRounds = 3

// Store prepares images and keeps them. Its methods may be called concurrently, also by other processes
// with a Store on the same root.
type Store struct {
	cfg      Config
	disk     disk
	remote   *remote
	builder  *flatten.Builder
	platform ocispec.Platform
	log      *slog.Logger
	client   *containerd.Client
	slots    *semaphore.Weighted

	// ctx ends with Close; flights run under it.
	ctx    context.Context
	cancel context.CancelCauseFunc
	wg     sync.WaitGroup

	mu      sync.Mutex
	flights map[string]*flight
}

// New opens the folder and connects to containerd, which may still be starting. Call Recover before the
// first use and Close after the last.
func New(cfg Config) (*Store, error) {
	cfg.setDefaults()
	platform := platforms.DefaultSpec()
	if cfg.Platform != "" {
		var err error
		if platform, err = platforms.Parse(cfg.Platform); err != nil {
			return nil, fmt.Errorf("platform %q: %w", cfg.Platform, err)
		}
	}
	d := disk{root: filepath.Clean(cfg.Root)}
	if !filepath.IsAbs(d.root) {
		return nil, fmt.Errorf("the layers folder %q is not an absolute path", cfg.Root)
	}
	if !nodeName.MatchString(cfg.Node) {
		return nil, fmt.Errorf("the node's name %q cannot be part of a file's name", cfg.Node)
	}
	if err := d.make(); err != nil {
		return nil, fmt.Errorf("layers folder: %w", err)
	}
	if _, err := cfg.trusted(); err != nil {
		return nil, err
	}
	client, err := containerd.New(cfg.ContainerdSocket, containerd.WithDefaultNamespace(cfg.Namespace), containerd.WithTimeout(connectTimeout))
	if err != nil {
		return nil, fmt.Errorf("containerd at %s: %w", cfg.ContainerdSocket, err)
	}
	s := &Store{
		cfg: cfg, disk: d, remote: newRemote(client, cfg), platform: platforms.Normalize(platform), log: cfg.Log, client: client,
		builder: &flatten.Builder{Mkfs: cfg.Mkfs, Limits: cfg.Limits},
		slots:   semaphore.NewWeighted(int64(cfg.Conversions)),
		flights: make(map[string]*flight),
	}
	s.ctx, s.cancel = context.WithCancelCause(context.Background())
	return s, nil
}

const connectTimeout = 3 * time.Second

func (c *Config) setDefaults() {
	if c.Root == "" {
		c.Root = DefaultRoot
	}
	if c.Namespace == "" {
		c.Namespace = DefaultNamespace
	}
	if c.Conversions <= 0 {
		c.Conversions = 2
	}
	if c.Downloads <= 0 {
		c.Downloads = 4
	}
	if c.Log == nil {
		c.Log = slog.Default()
	}
}

// Close ends what is under way and waits for it. Images stay; what was not finished is begun again when
// asked for.
func (s *Store) Close() error {
	s.mu.Lock()
	s.cancel(errs.New(errs.ShuttingDown, "the node agent is stopping; ask again when it is back"))
	s.mu.Unlock()
	s.wg.Wait()
	return s.client.Close()
}

// Ensure makes an image ready and returns where it is: it pulls and converts what is not there. A tag is
// resolved once, at the registry; a digest that is here needs no registry. Callers that ask for the same
// image wait for the same preparation; one that gives up does not end it for the others, nor for itself
// when it comes back.
func (s *Store) Ensure(ctx context.Context, ref string, opts EnsureOptions) (Image, error) {
	parsed, err := parseRef(ref)
	if err != nil {
		return Image{}, err
	}
	if opts.Holder != "" {
		if err := checkHolder(opts.Holder); err != nil {
			return Image{}, err
		}
	}
	platform := s.platform
	if opts.Platform != "" {
		p, err := platforms.Parse(opts.Platform)
		if err != nil {
			return Image{}, errs.New(errs.InvalidField, "%q is not a platform: write it as linux/amd64", opts.Platform).With("field", "platform")
		}
		platform = platforms.Normalize(p)
	}
	for range ensureRounds {
		img, err := s.ensure(ctx, parsed, platform, opts)
		if !errs.Has(err, errs.ImageNotFound) || !errors.Is(err, errCollected) {
			return img, err
		}
	}
	return Image{}, errs.New(errs.DiskFull, "the image %s is removed again and again as soon as it is prepared: the disk has no room for it", parsed.full)
}

// errCollected marks an image that was removed between its preparation and its hold.
var errCollected = errors.New("removed meanwhile")

func (s *Store) ensure(ctx context.Context, ref imageRef, platform ocispec.Platform, opts EnsureOptions) (Image, error) {
	tell := opts.Progress
	if tell == nil {
		tell = func(Progress) {}
	}
	tell(Progress{Phase: PhaseResolving})
	if rec, ok, err := s.local(ref, platform, opts.PreferLocal); err != nil {
		return Image{}, err
	} else if ok {
		return s.finish(ref, rec.asked, rec.record, opts.Holder, platform, tell)
	}
	reg, err := s.cfg.dial(ref, opts.Credentials)
	if err != nil {
		return Image{}, s.hostError("registry settings", err)
	}
	desc, err := reg.resolve(ctx)
	if err != nil {
		reg.close()
		return Image{}, err
	}
	rec, err := s.lookup(desc.Digest, platform)
	switch {
	case err == nil && s.disk.present(rec) && rec.runsOn(platform):
		reg.close()
	case err != nil && !errors.Is(err, errNotRecorded):
		reg.close()
		return Image{}, s.hostError("look up", err)
	default:
		f := s.join(reg, desc, platform)
		if rec, err = f.wait(ctx, opts.Progress); err != nil {
			return Image{}, err
		}
	}
	return s.finish(ref, desc.Digest, rec, opts.Holder, platform, tell)
}

type localImage struct {
	record
	asked digest.Digest
}

// local finds an image without the registry: by digest always, by tag if the caller wants that.
func (s *Store) local(ref imageRef, platform ocispec.Platform, tagToo bool) (localImage, bool, error) {
	asked := ref.digest
	if asked == "" {
		if !tagToo {
			return localImage{}, false, nil
		}
		a, err := s.disk.loadAlias(indexRef(ref.full, platform))
		if errors.Is(err, errNotRecorded) {
			return localImage{}, false, nil
		}
		if err != nil {
			return localImage{}, false, s.hostError("look up", err)
		}
		asked = a.Digest
	}
	rec, err := s.lookup(asked, platform)
	if errors.Is(err, errNotRecorded) {
		return localImage{}, false, nil
	}
	if err != nil {
		return localImage{}, false, s.hostError("look up", err)
	}
	return localImage{rec, asked}, s.disk.present(rec) && rec.runsOn(platform), nil
}

func indexRef(full string, p ocispec.Platform) string { return full + " " + platforms.Format(p) }

// runsOn tells whether the image is for the platform: a manifest may have been prepared for another one.
func (r record) runsOn(p ocispec.Platform) bool { return platforms.Only(p).Match(r.Platform) }

// lookup finds the record that a digest leads to: of a manifest, of an index, or of a file.
func (s *Store) lookup(dgst digest.Digest, platform ocispec.Platform) (record, error) {
	if dgst.Validate() != nil {
		return record{}, errNotRecorded
	}
	rec, err := s.disk.load(dgst)
	if err == nil && rec.ManifestDigest == dgst {
		return rec, nil
	}
	var bad *damagedRecord
	if err != nil && !errors.Is(err, errNotRecorded) && !errors.As(err, &bad) {
		return record{}, err
	}
	a, err := s.disk.loadAlias(indexName(dgst, platforms.Format(platform)))
	if err == nil {
		rec, err = s.disk.load(a.ManifestDigest)
		if err == nil || !errors.Is(err, errNotRecorded) && !errors.As(err, &bad) {
			return rec, err
		}
	} else if !errors.Is(err, errNotRecorded) {
		return record{}, err
	}
	if _, err := os.Stat(s.disk.erofsPath(dgst)); err != nil {
		return record{}, errNotRecorded
	}
	all, _, err := s.disk.all()
	if err != nil {
		return record{}, err
	}
	for _, r := range all {
		if r.ErofsDigest == dgst {
			return r, nil
		}
	}
	return record{}, errNotRecorded
}

// finish holds the image if asked to, remembers what the reference stood for, and notes the use.
func (s *Store) finish(ref imageRef, asked digest.Digest, rec record, holder string, platform ocispec.Platform, tell func(Progress)) (Image, error) {
	img, err := s.finishLocked(ref, asked, rec, holder, platform)
	if err == nil && holder != "" {
		err = s.syncHolds(rec.ErofsDigest)
	}
	if err != nil {
		return Image{}, err
	}
	tell(Progress{Phase: PhaseDone})
	return img, nil
}

func (s *Store) finishLocked(ref imageRef, asked digest.Digest, rec record, holder string, platform ocispec.Platform) (Image, error) {
	unlock, err := s.disk.lock()
	if err != nil {
		return Image{}, s.hostError("finish", err)
	}
	defer unlock()
	if !s.disk.present(rec) {
		return Image{}, errs.Wrap(errCollected, errs.ImageNotFound, "the image %s was removed while it was being prepared; ask again", ref.full).With("image", ref.full)
	}
	if holder != "" {
		if err := s.holdLocked(rec.ErofsDigest, holder); err != nil {
			return Image{}, err
		}
	}
	if ref.digest == "" {
		if err := s.disk.saveAlias(alias{Name: indexRef(ref.full, platform), Digest: asked, ManifestDigest: rec.ManifestDigest}); err != nil {
			return Image{}, s.hostError("finish", err)
		}
	}
	now := time.Now()
	// Only the order of collection hangs on it.
	_ = os.Chtimes(filepath.Join(s.disk.records(), s.disk.recordName(rec.ManifestDigest)), now, now)
	img := s.disk.image(rec)
	img.Reference, img.Digest = ref.full, asked
	return img, nil
}

// Get gives an image that is on this node, by reference or by digest (of the index, manifest or file),
// without asking anyone. One that is not there is IMAGE_NOT_FOUND.
func (s *Store) Get(_ context.Context, digestOrRef string) (Image, error) {
	if d, err := digest.Parse(digestOrRef); err == nil {
		rec, err := s.lookup(d, s.platform)
		if errors.Is(err, errNotRecorded) || err == nil && !s.disk.present(rec) {
			return Image{}, notHere(digestOrRef)
		}
		if err != nil {
			return Image{}, s.hostError("look up", err)
		}
		return s.disk.image(rec), nil
	}
	ref, err := parseRef(digestOrRef)
	if err != nil {
		return Image{}, err
	}
	rec, ok, err := s.local(ref, s.platform, true)
	if err != nil {
		return Image{}, err
	}
	if !ok {
		return Image{}, notHere(ref.full)
	}
	img := s.disk.image(rec.record)
	img.Reference, img.Digest = ref.full, rec.asked
	return img, nil
}

// List gives every image on this node, one a manifest, in the order of their digests.
func (s *Store) List(_ context.Context) ([]Image, error) {
	all, _, err := s.disk.all()
	if err != nil {
		return nil, s.hostError("list", err)
	}
	out := make([]Image, 0, len(all))
	for _, r := range all {
		if s.disk.present(r) {
			out = append(out, s.disk.image(r))
		}
	}
	return out, nil
}

// hostError wraps a failure of this machine. A full disk has a reason of its own; errors that are in the
// envelope already, and a caller's cancellation, pass.
func (s *Store) hostError(step string, err error) error {
	var known *errs.Error
	switch {
	case err == nil:
		return nil
	case errors.As(err, &known), errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return err
	case errdefs.IsUnavailable(err):
		return errs.Wrap(err, errs.ContainerdAway, "containerd does not answer on this node: check that it runs and where its socket is")
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT), strings.Contains(err.Error(), syscall.ENOSPC.Error()):
		return errs.Wrap(err, errs.DiskFull, "the disk of the layers folder or of containerd is full; free some room")
	}
	return fmt.Errorf("layers: %s: %w", step, err)
}

func isHeld(err error) bool { return errs.Has(err, errs.StillReferenced) }
