// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package layers

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/opencontainers/go-digest"

	"github.com/dormouse-run/dormouse/pkg/durable"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/fault"
)

// Holder is who needs an image's file: a sandbox or a snapshot, by its uid.
type Holder struct {
	Name  string    `json:"name"`
	Node  string    `json:"node"`
	Since time.Time `json:"since"`
}

var holderName = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._:-]{0,127}$`)

const maxListed = 10

// nodeName may be empty: for a root that only one process uses.
var nodeName = regexp.MustCompile(`^[A-Za-z0-9._:-]{0,128}$`)

// holderFile is where a hold is recorded. Nodes that share a root may each hold for the same snapshot.
func holderFile(holder, node string) string { return holder + "@" + node }

func checkHolder(name string) error {
	if !holderName.MatchString(name) {
		return errs.New(errs.InvalidField, "%q cannot hold an image: use the uid of a sandbox or snapshot", name).With("field", "holder")
	}
	return nil
}

// Hold keeps an image's file until the holder releases it. The digest may be of the file, the manifest or
// the index. It is durable when it returns, and holding twice is holding once. An image that is not there
// is IMAGE_NOT_FOUND.
func (s *Store) Hold(_ context.Context, dgst digest.Digest, holder string) error {
	if err := checkHolder(holder); err != nil {
		return err
	}
	file, err := s.hold(dgst, holder)
	if err != nil {
		return err
	}
	return s.syncHolds(file)
}

func (s *Store) hold(dgst digest.Digest, holder string) (digest.Digest, error) {
	unlock, err := s.disk.lock()
	if err != nil {
		return "", s.hostError("hold", err)
	}
	defer unlock()
	file, err := s.fileOf(dgst)
	if err != nil {
		return "", err
	}
	return file, s.holdLocked(file, holder)
}

// holdLocked makes the hold; it counts from now on, and outlives the machine once syncHolds returned. The
// two are apart because every start on the node waits for the lock, and none has to wait for the disk.
func (s *Store) holdLocked(file digest.Digest, holder string) error {
	if _, err := os.Stat(s.disk.erofsPath(file)); errors.Is(err, os.ErrNotExist) {
		return notHere(file.String())
	} else if err != nil {
		return s.hostError("hold", err)
	}
	dir := filepath.Join(s.disk.holders(), file.Encoded())
	path := filepath.Join(dir, holderFile(holder, s.cfg.Node))
	if _, err := os.Stat(path); err == nil {
		return nil
	}
	if err := os.Mkdir(dir, 0o700); err == nil {
		if err := durable.SyncDir(s.disk.holders()); err != nil {
			return s.hostError("hold", err)
		}
	} else if !errors.Is(err, os.ErrExist) {
		return s.hostError("hold", err)
	}
	// The name is the hold and its content is for people, so it is neither synced nor put there at one stroke.
	data, err := json.Marshal(Holder{Name: holder, Node: s.cfg.Node, Since: time.Now().UTC()})
	if err == nil {
		err = os.WriteFile(path, data, 0o600)
	}
	if err != nil {
		return s.hostError("hold", errors.Join(err, os.RemoveAll(path)))
	}
	fault.At("image.hold.after")
	return nil
}

// syncHolds makes the holds of a file durable, and the ends of holds.
func (s *Store) syncHolds(file digest.Digest) error {
	err := durable.SyncDir(filepath.Join(s.disk.holders(), file.Encoded()))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return s.hostError("hold", err)
	}
	return nil
}

// Release ends a hold of this node. Releasing what is not held is success: the end is the same.
func (s *Store) Release(_ context.Context, dgst digest.Digest, holder string) error {
	if err := checkHolder(holder); err != nil {
		return err
	}
	file, err := s.release(dgst, holder)
	if err != nil || file == "" {
		return err
	}
	if err := s.syncHolds(file); err != nil {
		return err
	}
	fault.At("image.release.after")
	return nil
}

// release gives the file that was held, "" where there is none.
func (s *Store) release(dgst digest.Digest, holder string) (digest.Digest, error) {
	unlock, err := s.disk.lock()
	if err != nil {
		return "", s.hostError("release", err)
	}
	defer unlock()
	file, err := s.fileOf(dgst)
	if errs.Has(err, errs.ImageNotFound) {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	err = os.Remove(filepath.Join(s.disk.holders(), file.Encoded(), holderFile(holder, s.cfg.Node)))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return "", s.hostError("release", err)
	}
	return file, nil
}

// Holders lists who holds an image's file, by name.
func (s *Store) Holders(_ context.Context, dgst digest.Digest) ([]Holder, error) {
	file, err := s.fileOf(dgst)
	if err != nil {
		return nil, err
	}
	return s.holdersOf(file)
}

// Holds lists every hold under the root, by the digest of the file: what reconcile compares with the
// sandboxes and snapshots it knows. Those of other nodes are of a shared root, and theirs to release.
func (s *Store) Holds(_ context.Context) (map[digest.Digest][]Holder, error) {
	entries, err := os.ReadDir(s.disk.holders())
	if err != nil {
		return nil, s.hostError("holders", err)
	}
	all := make(map[digest.Digest][]Holder)
	for _, e := range entries {
		file := digest.NewDigestFromEncoded(digest.SHA256, e.Name())
		if file.Validate() != nil {
			continue
		}
		held, err := s.holdersOf(file)
		if err != nil {
			return nil, err
		}
		if len(held) > 0 {
			all[file] = held
		}
	}
	return all, nil
}

func (s *Store) holdersOf(file digest.Digest) ([]Holder, error) {
	dir := filepath.Join(s.disk.holders(), file.Encoded())
	entries, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, s.hostError("holders", err)
	}
	var all []Holder
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), ".") {
			continue // being written
		}
		h := Holder{}
		// The name is the hold: one whose content is damaged holds all the same.
		if err := readJSON(filepath.Join(dir, e.Name()), &h); errors.Is(err, errNotRecorded) {
			continue
		}
		h.Name, h.Node, _ = strings.Cut(e.Name(), "@")
		all = append(all, h)
	}
	slices.SortFunc(all, func(a, b Holder) int { return strings.Compare(holderFile(a.Name, a.Node), holderFile(b.Name, b.Node)) })
	return all, nil
}

func stillHeld(file digest.Digest, held []Holder) error {
	names := make([]string, 0, maxListed)
	for _, h := range held[:min(len(held), maxListed)] {
		names = append(names, h.Name)
	}
	list := strings.Join(names, ",")
	return errs.New(errs.StillReferenced, "the image is in use by %s (%d in all): delete these first", list, len(held)).
		With("uid", file.String()).With("references", list).With("count", strconv.Itoa(len(held)))
}

// fileOf gives the digest of the EROFS file that a digest of any kind stands for. A file that is held or
// there without a record is found by its own digest too.
func (s *Store) fileOf(dgst digest.Digest) (digest.Digest, error) {
	r, err := s.lookup(dgst, s.platform)
	if err == nil {
		return r.ErofsDigest, nil
	}
	if !errors.Is(err, errNotRecorded) {
		return "", s.hostError("look up", err)
	}
	for _, path := range []string{s.disk.erofsPath(dgst), filepath.Join(s.disk.holders(), dgst.Encoded())} {
		if _, err := os.Stat(path); err == nil {
			return dgst, nil
		}
	}
	return "", notHere(dgst.String())
}

func notHere(image string) error {
	return errs.New(errs.ImageNotFound, "the image %s is not on this node; pull it first", image).With("image", image)
}
