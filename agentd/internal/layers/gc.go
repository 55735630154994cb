// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package layers

import (
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"

	"github.com/dormouse-run/dormouse/pkg/durable"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/fault"
)

// Removed is a file that GC or Recover removed.
type Removed struct {
	Digest digest.Digest
	Size   int64
}

// Remove removes an image's file and records, and its layers in containerd. One that is held is refused
// with STILL_REFERENCED; one that is not there is IMAGE_NOT_FOUND.
func (s *Store) Remove(ctx context.Context, dgst digest.Digest) error {
	file, err := s.fileOf(dgst)
	if err != nil {
		return err
	}
	_, err = s.remove(ctx, file)
	return err
}

// remove is Remove for the digest of a file, and says how large it was.
func (s *Store) remove(ctx context.Context, file digest.Digest) (int64, error) {
	size, manifests, err := s.removeFiles(file)
	if err != nil {
		return 0, err
	}
	// Layers are a cache: failing to drop them does not undo the removal. Recover tries again.
	if err := s.remote.forget(ctx, manifests); err != nil {
		s.log.WarnContext(ctx, "layers stay in containerd until the next start", "image", file, "error", err)
	}
	fault.At("image.layers.after")
	return size, nil
}

func (s *Store) removeFiles(file digest.Digest) (int64, []digest.Digest, error) {
	unlock, err := s.disk.lock()
	if err != nil {
		return 0, nil, s.hostError("remove", err)
	}
	defer unlock()
	held, err := s.holdersOf(file)
	if err != nil {
		return 0, nil, err
	}
	if len(held) > 0 {
		return 0, nil, stillHeld(file, held)
	}
	manifests, err := s.dropRecords(file)
	if err != nil {
		return 0, nil, s.hostError("remove", err)
	}
	fault.At("image.unrecord.after")
	size, err := s.unlink(file)
	if err != nil {
		return 0, nil, s.hostError("remove", err)
	}
	fault.At("image.unlink.after")
	return size, manifests, nil
}

// dropRecords removes the records that lead to a file. The caller holds the lock.
func (s *Store) dropRecords(file digest.Digest) ([]digest.Digest, error) {
	all, _, err := s.disk.all()
	if err != nil {
		return nil, err
	}
	var names []string
	var manifests []digest.Digest
	for _, r := range all {
		if r.ErofsDigest == file {
			names = append(names, s.disk.recordName(r.ManifestDigest))
			manifests = append(manifests, r.ManifestDigest)
		}
	}
	return manifests, durable.Remove(s.disk.records(), names...)
}

// unlink removes a file and its empty folder of holders. The caller holds the lock and has looked for holders.
func (s *Store) unlink(file digest.Digest) (int64, error) {
	path := s.disk.erofsPath(file)
	var size int64
	if st, err := os.Stat(path); err == nil {
		size = st.Size()
	}
	if err := durable.Remove(s.disk.images(), filepath.Base(path)); err != nil {
		return 0, err
	}
	if err := os.RemoveAll(filepath.Join(s.disk.holders(), file.Encoded())); err != nil {
		return 0, err
	}
	return size, nil
}

// GC frees room until the disk of the root has so many bytes free, or nothing is left to give up: first the
// layers kept in containerd, then images without a holder, the one not asked for the longest first. It
// returns what it removed, also with an error. It can be cut short anywhere and called again.
func (s *Store) GC(ctx context.Context, targetFreeBytes int64) ([]Removed, error) {
	if enough, err := s.enoughFree(targetFreeBytes); enough || err != nil {
		return nil, err
	}
	if err := s.remote.forgetAll(ctx); err != nil {
		s.log.WarnContext(ctx, "layers kept in containerd could not be dropped", "error", err)
	}
	candidates, err := s.byLastUse()
	if err != nil {
		return nil, s.hostError("collect", err)
	}
	var removed []Removed
	for _, file := range candidates {
		if err := ctx.Err(); err != nil {
			return removed, context.Cause(ctx)
		}
		if enough, err := s.enoughFree(targetFreeBytes); enough || err != nil {
			return removed, err
		}
		// Whether it is held is decided under the lock, not by an earlier look.
		size, err := s.remove(ctx, file)
		switch {
		case err == nil:
			removed = append(removed, Removed{Digest: file, Size: size})
			s.log.InfoContext(ctx, "image removed to free room", "image", file, "bytes", size)
		case isHeld(err):
		default:
			return removed, err
		}
	}
	return removed, nil
}

func (s *Store) enoughFree(target int64) (bool, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(s.disk.root, &st); err != nil {
		return false, s.hostError("collect", err)
	}
	return int64(st.Bavail)*st.Bsize >= target, nil
}

// byLastUse lists the files, the longest unused first. A record's own time is when it was last asked for.
func (s *Store) byLastUse() ([]digest.Digest, error) {
	all, _, err := s.disk.all()
	if err != nil {
		return nil, err
	}
	last := map[digest.Digest]int64{}
	for _, r := range all {
		at := int64(0)
		if st, err := os.Stat(filepath.Join(s.disk.records(), s.disk.recordName(r.ManifestDigest))); err == nil {
			at = st.ModTime().UnixNano()
		}
		last[r.ErofsDigest] = max(last[r.ErofsDigest], at)
	}
	files := make([]digest.Digest, 0, len(last))
	for f := range last {
		files = append(files, f)
	}
	slices.SortFunc(files, func(a, b digest.Digest) int {
		if last[a] != last[b] {
			if last[a] < last[b] {
				return -1
			}
			return 1
		}
		return strings.Compare(string(a), string(b))
	})
	return files, nil
}

// Verify reads an image's file and compares it with its digest: a damaged one is DIGEST_MISMATCH. Nothing is
// removed: sandboxes may be running from it, and its holders decide. It reads the whole file; the context
// bounds it.
func (s *Store) Verify(ctx context.Context, dgst digest.Digest) error {
	file, err := s.fileOf(dgst)
	if err != nil {
		return err
	}
	f, err := os.Open(s.disk.erofsPath(file))
	if errors.Is(err, os.ErrNotExist) {
		return notHere(dgst.String())
	}
	if err != nil {
		return s.hostError("verify", err)
	}
	defer f.Close()
	h := sha256.New()
	buf := make([]byte, 1<<20)
	for {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		n, err := f.Read(buf)
		h.Write(buf[:n])
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return s.hostError("verify", err)
		}
	}
	if got := digest.NewDigest(digest.SHA256, h); got != file {
		return errs.New(errs.DigestMismatch, "the file of the image %s is damaged on this node: end what uses it, remove it and pull it again", file).
			With("want", file.String()).With("got", got.String())
	}
	return nil
}
