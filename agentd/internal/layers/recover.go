// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package layers

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/opencontainers/go-digest"

	"github.com/dormouse-run/dormouse/pkg/durable"
)

// Report is what Recover found and did.
type Report struct {
	Staging  int             // abandoned staging folders removed
	Orphans  []Removed       // files without record and holder, removed
	Dropped  []string        // records removed because they or their files were damaged
	Damaged  []digest.Digest // held files that are missing or of the wrong size: their holders cannot be restored here until the image is pulled again
	Contents int             // images in containerd without a record, removed
}

// Recover brings the folder into a consistent state after a crash. It is called at start, before the first
// Ensure, and is safe while another process uses the same root.
func (s *Store) Recover(ctx context.Context) (Report, error) {
	var rep Report
	var all []error
	n, err := s.clearStaging()
	rep.Staging = n
	all = append(all, err, s.recoverFiles(&rep))
	known, _, err := s.disk.all()
	if err == nil {
		keep := make(map[digest.Digest]bool, len(known))
		for _, r := range known {
			keep[r.ManifestDigest] = true
		}
		rep.Contents, err = s.remote.forgetUnknown(ctx, keep)
	}
	return rep, errors.Join(append(all, err)...)
}

// clearStaging removes the folders whose owner is gone.
func (s *Store) clearStaging() (int, error) {
	unlockRoot, err := s.disk.lock() // a folder is made and locked under it
	if err != nil {
		return 0, err
	}
	defer unlockRoot()
	entries, err := os.ReadDir(s.disk.staging())
	if err != nil {
		return 0, err
	}
	var all []error
	n := 0
	for _, e := range entries {
		dir := filepath.Join(s.disk.staging(), e.Name())
		unlock, err := tryLockFile(filepath.Join(dir, "lock"))
		if err != nil || unlock == nil {
			if err != nil && !errors.Is(err, os.ErrNotExist) {
				all = append(all, err)
			}
			continue
		}
		err = os.RemoveAll(dir)
		unlock()
		if err != nil {
			all = append(all, err)
			continue
		}
		n++
	}
	return n, errors.Join(all...)
}

func (s *Store) recoverFiles(rep *Report) error {
	unlock, err := s.disk.lock()
	if err != nil {
		return err
	}
	defer unlock()
	held, err := s.Holds(context.Background())
	if err != nil {
		return err
	}
	folders := []string{s.disk.records(), s.disk.refs()}
	for file := range held {
		folders = append(folders, filepath.Join(s.disk.holders(), file.Encoded()))
	}
	for _, dir := range folders {
		if err := durable.DropUnfinished(dir); err != nil {
			return err
		}
	}
	all, known, err := s.dropBadRecords(rep)
	if err != nil {
		return err
	}
	there, err := s.dropOrphans(rep, known, held)
	if err != nil {
		return err
	}
	for file := range held {
		if !there[file] || !known[file] && s.disk.sizeWrong(file, all) {
			rep.Damaged = append(rep.Damaged, file)
		}
	}
	return nil
}

// dropBadRecords removes records that cannot be read or whose files are not whole. It gives what it could
// read, and the files that are recorded and whole. The caller holds the lock.
func (s *Store) dropBadRecords(rep *Report) ([]record, map[digest.Digest]bool, error) {
	all, bad, err := s.disk.all()
	if err != nil {
		return nil, nil, err
	}
	known := map[digest.Digest]bool{}
	for _, r := range all {
		if s.disk.present(r) {
			known[r.ErofsDigest] = true
			continue
		}
		bad = append(bad, s.disk.recordName(r.ManifestDigest))
	}
	rep.Dropped = bad
	return all, known, durable.Remove(s.disk.records(), bad...)
}

// dropOrphans removes files without record and holder and gives those that were there. The caller holds the lock.
func (s *Store) dropOrphans(rep *Report, known map[digest.Digest]bool, held map[digest.Digest][]Holder) (map[digest.Digest]bool, error) {
	entries, err := os.ReadDir(s.disk.images())
	if err != nil {
		return nil, err
	}
	there := map[digest.Digest]bool{}
	for _, e := range entries {
		name, ok := strings.CutSuffix(e.Name(), ".erofs")
		file := digest.NewDigestFromEncoded(digest.SHA256, name)
		if !ok || file.Validate() != nil {
			continue
		}
		there[file] = true
		if known[file] || len(held[file]) > 0 {
			continue
		}
		size, err := s.unlink(file)
		if err != nil {
			return nil, fmt.Errorf("remove %s: %w", e.Name(), err)
		}
		rep.Orphans = append(rep.Orphans, Removed{Digest: file, Size: size})
	}
	return there, nil
}

// sizeWrong tells whether a record says another size than the file has.
func (d disk) sizeWrong(file digest.Digest, all []record) bool {
	for _, r := range all {
		if r.ErofsDigest == file {
			return !d.present(r)
		}
	}
	return false
}
