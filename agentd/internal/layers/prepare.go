// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package layers

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"time"

	"github.com/containerd/platforms"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/dormouse-run/dormouse/agentd/internal/layers/flatten"
	"github.com/dormouse-run/dormouse/pkg/durable"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/fault"
)

// join gives the flight that prepares the image, a new one if there is none. It takes the registry over.
func (s *Store) join(reg *registry, desc ocispec.Descriptor, platform ocispec.Platform) *flight {
	key := indexName(desc.Digest, platforms.Format(platform))
	s.mu.Lock()
	defer s.mu.Unlock()
	if f := s.flights[key]; f != nil {
		reg.close()
		return f
	}
	f := newFlight()
	if s.ctx.Err() != nil {
		reg.close()
		f.err = context.Cause(s.ctx)
		close(f.done)
		return f
	}
	s.flights[key] = f
	s.wg.Add(1)
	go func() {
		defer s.wg.Done()
		defer reg.close()
		f.rec, f.err = s.prepare(s.ctx, reg, desc, platform, f)
		s.mu.Lock()
		delete(s.flights, key)
		s.mu.Unlock()
		close(f.done)
	}()
	return f
}

// prepare pulls and converts one image. It runs under the Store's own context.
func (s *Store) prepare(ctx context.Context, reg *registry, desc ocispec.Descriptor, platform ocispec.Platform, f *flight) (record, error) {
	began := time.Now()
	ctx, done, err := s.remote.lease(ctx)
	if err != nil {
		return record{}, s.hostError("pull", err)
	}
	defer done()
	img, err := s.remote.pull(ctx, reg, desc, platform, f.update)
	if err != nil {
		return record{}, s.hostError("pull", err)
	}
	fault.At("image.pull.after")
	pulledAt := time.Now()
	if err := s.slots.Acquire(ctx, 1); err != nil {
		return record{}, context.Cause(ctx)
	}
	defer s.slots.Release(1)
	f.update(func(p *Progress) { p.Phase = PhaseConverting })
	unlock, err := waitLockFile(ctx, s.disk.conversionLock(img.manifest.Digest))
	if err != nil {
		return record{}, s.hostError("convert", err)
	}
	defer unlock()
	// Another process may have been quicker.
	rec, err := s.disk.load(img.manifest.Digest)
	if err != nil || !s.disk.present(rec) {
		if rec, err = s.convert(ctx, reg.ref, desc, img); err != nil {
			return record{}, err
		}
	}
	if err := s.publishAlias(desc.Digest, img.manifest.Digest, platform); err != nil {
		return record{}, s.hostError("convert", err)
	}
	s.log.InfoContext(ctx, "image ready", "image", reg.ref.full, "manifest", rec.ManifestDigest, "erofs", rec.ErofsDigest,
		"bytes", rec.Size, "layers", rec.Layers, "pull", pulledAt.Sub(began), "convert", time.Since(pulledAt))
	return rec, nil
}

func (s *Store) publishAlias(asked, manifest digest.Digest, platform ocispec.Platform) error {
	if asked == manifest {
		return nil
	}
	unlock, err := s.disk.lock()
	if err != nil {
		return err
	}
	defer unlock()
	return s.disk.saveAlias(alias{Name: indexName(asked, platforms.Format(platform)), Digest: asked, ManifestDigest: manifest})
}

// convert makes the file in a staging folder and publishes it with its record.
func (s *Store) convert(ctx context.Context, ref imageRef, desc ocispec.Descriptor, img pulled) (record, error) {
	dir, unstage, err := s.stage()
	if err != nil {
		return record{}, s.hostError("convert", err)
	}
	defer unstage()
	fault.At("image.stage.after")
	res, err := s.builder.Build(ctx, dir, s.remote.toFlatten(img))
	if err != nil {
		var known *errs.Error
		if errors.As(err, &known) {
			return record{}, known.With("image", ref.full)
		}
		return record{}, s.hostError("convert", err)
	}
	fault.At("image.build.after")
	rec := record{
		Version: recordVersion, Reference: ref.full, Digest: desc.Digest, ManifestDigest: img.manifest.Digest,
		ErofsDigest: res.Digest, Size: res.Size, Format: flatten.Format, Platform: platforms.Normalize(img.config.Platform),
		Layers: len(img.layers), Config: img.config.Config, PulledAt: time.Now().UTC(),
	}
	if err := s.publish(res.Path, rec); err != nil {
		return record{}, s.hostError("publish", err)
	}
	return rec, nil
}

// publish puts a synced file in its place, then its record. A file of the digest that is there already is
// the same one, and sandboxes may be using it: it stays.
func (s *Store) publish(staged string, rec record) error {
	unlock, err := s.disk.lock()
	if err != nil {
		return err
	}
	defer unlock()
	if !s.disk.present(rec) {
		if err := os.Rename(staged, s.disk.erofsPath(rec.ErofsDigest)); err != nil {
			return err
		}
		fault.At("image.file.after")
		if err := durable.SyncDir(s.disk.images()); err != nil {
			return err
		}
	}
	if err := durable.WriteJSON(filepath.Join(s.disk.records(), s.disk.recordName(rec.ManifestDigest)), rec); err != nil {
		return err
	}
	fault.At("image.record.after")
	return nil
}

// stage makes a folder that Recover, of any process, leaves alone as long as this one lives.
func (s *Store) stage() (string, func(), error) {
	// Otherwise Recover, of another process, could come between the two steps below.
	unlockRoot, err := s.disk.lock()
	if err != nil {
		return "", nil, err
	}
	defer unlockRoot()
	dir, err := os.MkdirTemp(s.disk.staging(), "")
	if err != nil {
		return "", nil, err
	}
	unlock, err := lockFile(filepath.Join(dir, "lock"))
	if err != nil {
		return "", nil, errors.Join(err, os.RemoveAll(dir))
	}
	return dir, func() {
		_ = os.RemoveAll(dir) // what stays is Recover's
		unlock()
	}, nil
}
