// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package volumes

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dormouse-run/dormouse/pkg/durable"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/fault"
)

// Volume is a volume on this node.
type Volume struct {
	UID string `json:"uid"`
	// SizeLimit is in bytes; 0 is no limit.
	SizeLimit int64 `json:"size_limit"`
	// Source is the uid of the volume that this one was cloned from, or empty.
	Source  string    `json:"source,omitempty"`
	Created time.Time `json:"created"`
	// Path is the folder to mount into a sandbox.
	Path string `json:"-"`
}

// Options are of a new volume. The zero value is one without limit, of root, with mode 0755.
type Options struct {
	// SizeLimit is in bytes; 0 is no limit. It is refused with NOT_SUPPORTED where it cannot be enforced.
	SizeLimit int64
	// UID, GID and Mode are of the folder that the sandbox sees.
	UID, GID int
	Mode     os.FileMode
}

// Config is of a Store.
type Config struct {
	// Root is a folder that this process has for itself.
	Root string
	Log  *slog.Logger
}

// Store keeps the volumes under one root. Its methods may be called concurrently.
type Store struct {
	root   string
	log    *slog.Logger
	quota  limiter
	unlock func()

	mu      sync.Mutex
	busy    map[string]chan struct{} // volumes that are being made, attached or removed
	sources map[string]int           // volumes that are being copied from
}

type meta struct {
	Version int `json:"version"`
	Volume
	Project uint32      `json:"project,omitempty"`
	Owner   [2]int      `json:"owner"`
	Mode    os.FileMode `json:"mode"`
}

const metaVersion = 1

var uidPattern = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$`)

// New opens the root, which it makes if need be, and keeps other processes out of it until Close.
func New(cfg Config) (*Store, error) {
	s := &Store{root: filepath.Clean(cfg.Root), log: cfg.Log, busy: map[string]chan struct{}{}, sources: map[string]int{}}
	if s.log == nil {
		s.log = slog.Default()
	}
	if !filepath.IsAbs(s.root) {
		return nil, fmt.Errorf("the volumes folder %q is not an absolute path", cfg.Root)
	}
	for _, d := range []string{s.root, s.dir("volumes"), s.dir("staging"), s.dir("trash")} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			return nil, fmt.Errorf("volumes folder: %w", err)
		}
		// Also where it was there: what guests wrote is nobody else's to read.
		if err := os.Chmod(d, 0o700); err != nil {
			return nil, fmt.Errorf("volumes folder: %w", err)
		}
	}
	f, err := os.OpenFile(s.dir("lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("volumes folder: %w", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		return nil, fmt.Errorf("the volumes folder %s is in use by another process: %w", s.root, err)
	}
	s.unlock = func() { _ = f.Close() }
	if s.quota, err = detectQuota(s.root); err != nil {
		s.unlock()
		return nil, fmt.Errorf("volumes folder: %w", err)
	}
	return s, nil
}

// Close lets another process have the root. The caller has ended all calls before.
func (s *Store) Close() { s.unlock() }

// EnforcesLimits tells whether volumes with a size limit can be made here.
func (s *Store) EnforcesLimits() bool { return s.quota != nil }

func (s *Store) dir(name string) string        { return filepath.Join(s.root, name) }
func (s *Store) home(uid string) string        { return filepath.Join(s.root, "volumes", uid) }
func (s *Store) stagingOf(uid string) string   { return filepath.Join(s.root, "staging", uid) }
func (s *Store) attachments(uid string) string { return filepath.Join(s.home(uid), "attach") }

func checkUID(uid string) error {
	if !uidPattern.MatchString(uid) {
		return errs.New(errs.InvalidField, "%.140q is not the uid of a volume", uid).With("field", "volume_uid")
	}
	return nil
}

func notFound(uid string) error {
	return errs.New(errs.ObjectNotFound, "there is no volume %s on this node", uid).With("kind", "volume").With("uid", uid)
}

// claim waits until the volume is nobody's and makes it the caller's; the returned function gives it back.
func (s *Store) claim(ctx context.Context, uid string) (func(), error) {
	for {
		s.mu.Lock()
		taken := s.busy[uid]
		if taken == nil {
			done := make(chan struct{})
			s.busy[uid] = done
			s.mu.Unlock()
			return func() {
				s.mu.Lock()
				delete(s.busy, uid)
				s.mu.Unlock()
				close(done)
			}, nil
		}
		s.mu.Unlock()
		select {
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-taken:
		}
	}
}

// Create makes an empty volume. The same uid with the same options again gives the same volume; with other
// options it is CONFLICT.
func (s *Store) Create(ctx context.Context, uid string, opts Options) (Volume, error) {
	return s.create(ctx, uid, "", opts, func(context.Context, string) error { return nil })
}

// Clone makes a volume with a copy of another's content, shared blocks where the file system can. The source
// stays as it is; see the package comment for what the caller owes. The copy has the limit that opts say and
// the owner and mode of the source. The same request again gives the same volume.
func (s *Store) Clone(ctx context.Context, source, uid string, opts Options) (Volume, error) {
	if err := checkUID(source); err != nil {
		return Volume{}, err
	}
	if source == uid {
		return Volume{}, errs.New(errs.InvalidField, "a volume cannot be a clone of itself").With("field", "source_volume_uid")
	}
	opts.UID, opts.GID, opts.Mode = 0, 0, 0
	return s.create(ctx, uid, source, opts, func(ctx context.Context, data string) error {
		done, err := s.pin(ctx, source)
		if err != nil {
			return err
		}
		defer done()
		return copyTree(ctx, filepath.Join(s.home(source), "data"), data)
	})
}

// pin keeps a volume from being deleted while it is copied from.
func (s *Store) pin(ctx context.Context, uid string) (func(), error) {
	release, err := s.claim(ctx, uid)
	if err != nil {
		return nil, err
	}
	defer release()
	if _, err := s.load(uid); err != nil {
		return nil, err
	}
	s.mu.Lock()
	s.sources[uid]++
	s.mu.Unlock()
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.sources[uid]--; s.sources[uid] == 0 {
			delete(s.sources, uid)
		}
	}, nil
}

func (s *Store) create(ctx context.Context, uid, source string, opts Options, fill func(context.Context, string) error) (Volume, error) {
	if err := s.checkOptions(uid, &opts); err != nil {
		return Volume{}, err
	}
	release, err := s.claim(ctx, uid)
	if err != nil {
		return Volume{}, err
	}
	defer release()
	old, err := s.load(uid)
	switch {
	case err == nil && old.SizeLimit == opts.SizeLimit && old.Source == source && old.Owner == [2]int{opts.UID, opts.GID} && old.Mode == opts.Mode:
		return old.Volume, nil
	case err == nil:
		return Volume{}, errs.New(errs.OperationBodyMismatch, "the volume %s is there already and was made with other options", uid).With("uid", uid)
	case !errs.Has(err, errs.ObjectNotFound):
		return Volume{}, err
	}
	m := meta{Version: metaVersion, Owner: [2]int{opts.UID, opts.GID}, Mode: opts.Mode,
		Volume: Volume{UID: uid, SizeLimit: opts.SizeLimit, Source: source, Created: time.Now().UTC(), Path: filepath.Join(s.home(uid), "data")}}
	stage := s.stagingOf(uid)
	err = s.build(ctx, stage, &m, fill)
	if err == nil {
		err = s.publish(stage, uid)
	}
	if err != nil {
		// What cannot be removed now is Recover's, or the next try's.
		return Volume{}, s.fail("make", uid, errors.Join(err, os.RemoveAll(stage)))
	}
	return m.Volume, nil
}

func (s *Store) checkOptions(uid string, opts *Options) error {
	if err := checkUID(uid); err != nil {
		return err
	}
	if opts.SizeLimit < 0 || opts.UID < 0 || opts.GID < 0 || opts.Mode&^0o7777 != 0 {
		return errs.New(errs.InvalidField, "a volume's size limit, owner and mode cannot be negative or more than 07777").With("field", "size_limit_bytes")
	}
	if opts.Mode == 0 {
		opts.Mode = 0o755
	}
	if opts.SizeLimit > 0 && s.quota == nil {
		return errs.New(errs.NotSupported, "this node cannot enforce a size limit on volumes: the file system of %s has no project quota switched on. "+
			"Mount it with the option prjquota (ext4 needs the features quota and project first: tune2fs -O quota,project), or ask for no limit", s.root).With("feature", "volume_size_limit")
	}
	return nil
}

// build makes the whole volume in the staging folder and syncs it.
func (s *Store) build(ctx context.Context, stage string, m *meta, fill func(context.Context, string) error) error {
	if err := os.RemoveAll(stage); err != nil { // of a try that a crash ended
		return err
	}
	data := filepath.Join(stage, "data")
	for _, d := range []string{stage, data, filepath.Join(stage, "attach")} {
		if err := os.Mkdir(d, 0o700); err != nil {
			return err
		}
	}
	fault.At("volume.stage.after")
	if m.SizeLimit > 0 {
		id, err := s.nextProject()
		if err != nil {
			return err
		}
		m.Project = id
		// Before there is anything in it: what is made in it later inherits the id.
		if err := s.quota.limit(data, id, m.SizeLimit); err != nil {
			return fmt.Errorf("set the size limit: %w", err)
		}
	}
	if m.Source == "" {
		if err := errors.Join(os.Chown(data, m.Owner[0], m.Owner[1]), unix.Chmod(data, uint32(m.Mode))); err != nil {
			return err
		}
	}
	if err := fill(ctx, data); err != nil {
		return err
	}
	fault.At("volume.fill.after")
	if err := durable.WriteJSON(filepath.Join(stage, "meta.json"), m); err != nil {
		return err
	}
	fault.At("volume.meta.after")
	return syncTree(stage, m.Source != "")
}

// syncTree makes a staged volume durable: all of a copy with one call, an empty one folder by folder.
func syncTree(stage string, copied bool) error {
	if !copied {
		return errors.Join(durable.SyncDir(filepath.Join(stage, "data")), durable.SyncDir(filepath.Join(stage, "attach")), durable.SyncDir(stage))
	}
	d, err := os.Open(stage)
	if err != nil {
		return err
	}
	defer d.Close()
	return unix.Syncfs(int(d.Fd()))
}

func (s *Store) publish(stage, uid string) error {
	if err := os.Rename(stage, s.home(uid)); err != nil {
		return err
	}
	fault.At("volume.rename.after")
	return errors.Join(durable.SyncDir(s.dir("volumes")), durable.SyncDir(s.dir("staging")))
}

// load reads a volume's record.
func (s *Store) load(uid string) (meta, error) {
	data, err := os.ReadFile(filepath.Join(s.home(uid), "meta.json"))
	if errors.Is(err, os.ErrNotExist) {
		if _, err := os.Lstat(s.home(uid)); err == nil {
			return meta{}, damaged(uid, "its record is missing")
		}
		return meta{}, notFound(uid)
	}
	if err != nil {
		return meta{}, s.fail("read", uid, err)
	}
	var m meta
	if json.Unmarshal(data, &m) != nil || m.Version != metaVersion || m.UID != uid {
		return meta{}, damaged(uid, "its record cannot be read")
	}
	m.Path = filepath.Join(s.home(uid), "data")
	return m, nil
}

func damaged(uid, what string) error {
	return errs.New(errs.StateDamaged, "the volume %s is damaged: %s; its data is left alone: restore meta.json from a backup, or move the folder away", uid, what).With("uid", uid)
}

// Get gives a volume, or OBJECT_NOT_FOUND.
func (s *Store) Get(_ context.Context, uid string) (Volume, error) {
	if err := checkUID(uid); err != nil {
		return Volume{}, err
	}
	m, err := s.load(uid)
	return m.Volume, err
}

// List gives every volume in the order of their uids. Damaged ones are left out: Recover reports them.
func (s *Store) List(_ context.Context) ([]Volume, error) {
	entries, err := os.ReadDir(s.dir("volumes"))
	if err != nil {
		return nil, s.fail("list", "", err)
	}
	all := make([]Volume, 0, len(entries))
	for _, e := range entries {
		m, err := s.load(e.Name())
		switch {
		case err == nil:
			all = append(all, m.Volume)
		case errs.Has(err, errs.ObjectNotFound), errs.Has(err, errs.StateDamaged):
		default:
			return nil, err
		}
	}
	return all, nil
}

// Delete removes a volume for good. One that is attached or being cloned is refused with STILL_REFERENCED; one
// that is not there is success. A damaged one is removed: that is the wish.
func (s *Store) Delete(ctx context.Context, uid string) error {
	if err := checkUID(uid); err != nil {
		return err
	}
	release, err := s.claim(ctx, uid)
	if err != nil {
		return err
	}
	defer release()
	m, err := s.load(uid)
	if errs.Has(err, errs.ObjectNotFound) {
		return nil
	}
	if err != nil && !errs.Has(err, errs.StateDamaged) {
		return err
	}
	held, err := s.holders(uid)
	if err != nil {
		return err
	}
	s.mu.Lock()
	copying := s.sources[uid]
	s.mu.Unlock()
	if len(held) > 0 || copying > 0 {
		return inUse(uid, held, copying)
	}
	gone, err := s.discard(uid)
	if err != nil {
		return s.fail("delete", uid, err)
	}
	// It is gone. What remains is room to be won back, which Recover does too.
	if err := os.RemoveAll(gone); err != nil {
		s.log.WarnContext(ctx, "a deleted volume still takes room until the next start", "volume", uid, "error", err)
	}
	fault.At("volume.emptied.after")
	s.unlimit(ctx, m)
	return nil
}

func (s *Store) unlimit(ctx context.Context, m meta) {
	if m.Project == 0 || s.quota == nil {
		return
	}
	if err := s.quota.clear(s.root, m.Project); err != nil {
		s.log.WarnContext(ctx, "the quota of a deleted volume stays", "volume", m.UID, "project", m.Project, "error", err)
	}
}

// discard moves a volume to the trash: from then on it does not exist.
func (s *Store) discard(uid string) (string, error) {
	gone, err := os.MkdirTemp(s.dir("trash"), uid+".")
	if err != nil {
		return "", err
	}
	fault.At("volume.trash.before")
	// The system's own rename replaces an empty folder.
	if err := unix.Rename(s.home(uid), gone); err != nil {
		return "", errors.Join(err, os.Remove(gone))
	}
	fault.At("volume.trash.after")
	return gone, errors.Join(durable.SyncDir(s.dir("volumes")), durable.SyncDir(s.dir("trash")))
}

func inUse(uid string, held []Holder, copying int) error {
	names := make([]string, 0, maxListed)
	for _, h := range held[:min(len(held), maxListed)] {
		names = append(names, h.Name)
	}
	if copying > 0 {
		names = append(names, "a clone in progress")
	}
	list := strings.Join(names, ",")
	return errs.New(errs.StillReferenced, "the volume %s is in use by %s", uid, list).
		With("uid", uid).With("references", list).With("count", fmt.Sprint(len(held)+copying))
}

// fail gives a failure of this machine its reason. Errors of the envelope and cancellations pass.
func (s *Store) fail(step, uid string, err error) error {
	var known *errs.Error
	switch {
	case errors.As(err, &known):
		return known
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return err
	case errors.Is(err, syscall.EDQUOT):
		return errs.Wrap(err, errs.DiskFull, "the content does not fit into the volume's size limit: ask for a larger one").With("uid", uid)
	case errors.Is(err, syscall.ENOSPC):
		return errs.Wrap(err, errs.DiskFull, "the disk of the volumes folder is full; free some room").With("uid", uid)
	}
	return fmt.Errorf("volumes: %s %s: %w", step, uid, err)
}
