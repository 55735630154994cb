package checkpoint

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/dormouse-run/dormouse/agentd/internal/spread"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/fault"
	"github.com/dormouse-run/dormouse/pkg/snapshot"
	"github.com/dormouse-run/dormouse/pkg/uid"
)

const (
	manifestName = "manifest.json"
	stagingName  = ".staging"
	trashName    = ".trash"
	// maxManifest bounds what is read of a manifest.
	maxManifest = 4 << 20
)

// StoreOptions say where artefacts are and what has to be in one.
type StoreOptions struct {
	Root string
	// Require are files that every artefact of this node's driver has.
	Require []string
	// Reserve is how much of the disk captures leave free.
	Reserve int64
	// Direct: large files may be read past the page cache.
	Direct bool
}

// Store owns the folders. Safe for concurrent use; one uid is handled by one caller at a time.
type Store struct {
	opts StoreOptions

	mu sync.Mutex
	// reserved is what captures that are going on may still write.
	reserved int64
}

// OpenStore makes the folders.
func OpenStore(opts StoreOptions) (*Store, error) {
	s := &Store{opts: opts}
	if err := s.makeFolders(); err != nil {
		return nil, err
	}
	_ = spread.Below(s.dir(stagingName)) // a hint
	return s, nil
}

// makeFolders makes the folders that are not there: at the start, and before each change, so that one that somebody
// removed does not keep an undo from its end.
func (s *Store) makeFolders() error {
	for _, dir := range []string{s.opts.Root, s.dir(stagingName), s.dir(trashName)} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return hostError(err, "make the snapshots' folder")
		}
		if err := os.Chmod(dir, 0o700); err != nil {
			return hostError(err, "protect the snapshots' folder")
		}
	}
	return nil
}

func (s *Store) dir(parts ...string) string {
	return filepath.Join(append([]string{s.opts.Root}, parts...)...)
}

// Path is where the artefact is once published.
func (s *Store) Path(id string) string { return s.dir(id) }

func hostError(err error, what string) error {
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return errs.Wrap(err, errs.DiskFull, "%s: the disk is full; delete snapshots or use another node", what)
	}
	return errs.Wrap(err, errs.InternalError, "%s: %v", what, err)
}

func checkUID(id string) error {
	if err := uid.Check(id); err != nil {
		return errs.New(errs.InvalidField, "snapshot uid: %v", err).With("field", "snapshot_uid")
	}
	return nil
}

// reserve checks that the disk has room for the bytes besides what other captures still may write, and
// counts them until release.
func (s *Store) reserve(bytes int64) (release func(), err error) {
	var st unix.Statfs_t
	if err := unix.Statfs(s.opts.Root, &st); err != nil {
		return nil, hostError(err, "look at the snapshots' disk")
	}
	free := int64(st.Bavail) * st.Bsize
	s.mu.Lock()
	defer s.mu.Unlock()
	left := free - s.opts.Reserve - s.reserved
	if bytes > left {
		return nil, errs.New(errs.DiskFull, "the snapshot may take %d bytes, the disk has %d left for it; delete snapshots or use another node", bytes, max(left, 0)).
			With("asked", strconv.FormatInt(bytes, 10)).With("left", strconv.FormatInt(max(left, 0), 10))
	}
	s.reserved += bytes
	return sync.OnceFunc(func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.reserved -= bytes
	}), nil
}

// stage makes an empty staging folder. CONFLICT when the artefact is published already.
func (s *Store) stage(id string) (string, error) {
	if err := checkUID(id); err != nil {
		return "", err
	}
	if _, err := os.Lstat(s.dir(id)); err == nil {
		return "", errs.New(errs.NameTaken, "the snapshot %s exists already", id).With("uid", id)
	}
	if err := s.makeFolders(); err != nil {
		return "", err
	}
	dir := s.dir(stagingName, id)
	if err := os.RemoveAll(dir); err != nil {
		return "", hostError(err, "remove an old staging folder")
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		return "", hostError(err, "make a staging folder")
	}
	fault.At("artefact.stage.after")
	return dir, nil
}

// inspect lists the files of a folder and checks the structure: regular files, the required ones among
// them, none of those empty.
func (s *Store) inspect(id, dir string) ([]snapshot.File, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, hostError(err, "list an artefact")
	}
	var files []snapshot.File
	for _, e := range entries {
		info, err := e.Info()
		if err != nil {
			return nil, hostError(err, "look at an artefact")
		}
		if !info.Mode().IsRegular() {
			return nil, damaged(id, e.Name(), "is no regular file")
		}
		if e.Name() != manifestName {
			files = append(files, snapshot.File{Name: e.Name(), SizeBytes: info.Size()})
		}
	}
	if len(files) == 0 {
		return nil, damaged(id, "", "has no files")
	}
	for _, name := range s.opts.Require {
		i := slices.IndexFunc(files, func(f snapshot.File) bool { return f.Name == name })
		if i < 0 {
			return nil, damaged(id, name, "is missing")
		}
		if files[i].SizeBytes == 0 {
			return nil, damaged(id, name, "is empty")
		}
	}
	return files, nil
}

func damaged(id, file, what string) error {
	return errs.New(errs.ArtefactDamaged, "the artefact of snapshot %s cannot be used: %s %s; use another snapshot", id, file, what).With("uid", id).With("file", file)
}

// publish syncs the staged files, writes the manifest and renames the folder into place.
func (s *Store) publish(m *Manifest) error {
	dir := s.dir(stagingName, m.UID)
	for _, f := range m.Files {
		path := filepath.Join(dir, f.Name)
		if err := os.Chmod(path, 0o600); err != nil {
			return hostError(err, "protect an artefact")
		}
		if err := syncPath(path); err != nil {
			return hostError(err, "sync an artefact")
		}
	}
	data, err := json.Marshal(m)
	if err == nil && len(data) >= maxManifest {
		return errs.New(errs.LimitExceeded, "the manifest of snapshot %s is larger than this node reads", m.UID).
			With("field", "manifest").With("limit", strconv.Itoa(maxManifest)).With("got", strconv.Itoa(len(data)))
	}
	if err != nil {
		return hostError(err, "encode a manifest")
	}
	path := filepath.Join(dir, manifestName)
	if err := os.WriteFile(path, data, 0o600); err != nil {
		return hostError(err, "write a manifest")
	}
	for _, p := range []string{path, dir} {
		if err := syncPath(p); err != nil {
			return hostError(err, "sync an artefact")
		}
	}
	fault.At("artefact.manifest.after")
	if err := os.Rename(dir, s.dir(m.UID)); err != nil {
		return hostError(err, "publish an artefact")
	}
	fault.At("artefact.rename.after")
	if err := syncPath(s.opts.Root); err != nil {
		return hostError(err, "sync the snapshots' folder")
	}
	return nil
}

func syncPath(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// Load reads the manifest of a published artefact and checks that its files are there in full size.
// OBJECT_NOT_FOUND, or ARTEFACT_DAMAGED with the file.
func (s *Store) Load(id string) (*Manifest, error) {
	if err := checkUID(id); err != nil {
		return nil, err
	}
	dir := s.dir(id)
	f, err := os.Open(filepath.Join(dir, manifestName))
	if errors.Is(err, fs.ErrNotExist) {
		if _, statErr := os.Lstat(dir); statErr == nil {
			return nil, damaged(id, manifestName, "is missing")
		}
		return nil, errs.New(errs.ObjectNotFound, "this node has no artefact of snapshot %s", id).With("kind", "snapshot").With("uid", id)
	}
	if err != nil {
		return nil, hostError(err, "open a manifest")
	}
	defer f.Close()
	data := make([]byte, 0, 16<<10)
	buf := bytes.NewBuffer(data)
	if n, err := buf.ReadFrom(&limited{f, maxManifest}); err != nil || n >= maxManifest {
		return nil, damaged(id, manifestName, "cannot be read")
	}
	var m Manifest
	if err := json.Unmarshal(buf.Bytes(), &m); err != nil || m.UID != id || m.Spec == nil {
		return nil, damaged(id, manifestName, "cannot be read")
	}
	if m.Version != ManifestVersion {
		return nil, errs.New(errs.IncompatibleRuntime, "the manifest of snapshot %s has version %d, this agentd reads %d", id, m.Version, ManifestVersion).
			With("want", strconv.Itoa(m.Version)).With("has", strconv.Itoa(ManifestVersion))
	}
	has, err := s.inspect(id, dir)
	if err != nil {
		return nil, err
	}
	var sum int64
	for _, f := range m.Files {
		sum += f.SizeBytes
		if !slices.ContainsFunc(has, func(h snapshot.File) bool { return h.Name == f.Name && h.SizeBytes == f.SizeBytes }) {
			return nil, damaged(id, f.Name, "is missing or has another size")
		}
	}
	if len(m.Files) == 0 || sum != m.SizeBytes {
		return nil, damaged(id, manifestName, "does not add up")
	}
	return &m, nil
}

// directFrom is the size from which reading past the page cache is worth it.
const directFrom = 64 << 20

// ReadDirect tells how a restore should read the artefact: past the page cache if it is large and not in
// it. Memory that was written directly is not, until somebody has read it.
func (s *Store) ReadDirect(m *Manifest) bool {
	if !s.opts.Direct || m.SizeBytes < directFrom {
		return false
	}
	largest := slices.MaxFunc(m.Files, func(a, b snapshot.File) int { return cmp.Compare(a.SizeBytes, b.SizeBytes) })
	f, err := os.Open(filepath.Join(s.dir(m.UID), largest.Name))
	if err != nil {
		return false // the restore says why
	}
	defer f.Close()
	const samples = 8
	cached := 0
	page := make([]byte, 1)
	for i := range int64(samples) {
		if n, err := unix.Preadv2(int(f.Fd()), [][]byte{page}, largest.SizeBytes*i/samples, unix.RWF_NOWAIT); err == nil && n == 1 {
			cached++
		}
	}
	return cached < samples/2
}

// DropCache gives the page cache of all published artefacts back, as far as nobody is reading, and tells of how many files.
func (s *Store) DropCache(ctx context.Context) (files int, err error) {
	seen, err := s.Observe()
	if err != nil {
		return 0, err
	}
	for _, id := range seen.Published {
		list, err := os.ReadDir(s.dir(id))
		if errors.Is(err, fs.ErrNotExist) {
			continue // deleted meanwhile
		}
		if err != nil {
			return files, hostError(err, "look at an artefact")
		}
		for _, e := range list {
			if ctx.Err() != nil {
				return files, context.Cause(ctx)
			}
			f, err := os.Open(s.dir(id, e.Name()))
			if err != nil {
				continue // deleted meanwhile
			}
			if unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED) == nil {
				files++
			}
			_ = f.Close() // only read
		}
	}
	return files, nil
}

// limited is io.LimitReader that stays readable as what it is.
type limited struct {
	f    *os.File
	left int
}

func (l *limited) Read(p []byte) (int, error) {
	if l.left <= 0 {
		return 0, errors.New("too large")
	}
	n, err := l.f.Read(p[:min(len(p), l.left)])
	l.left -= n
	return n, err
}

// Delete removes an artefact, wherever it stands, and returns once its absence was observed. Idempotent.
func (s *Store) Delete(id string) error {
	if err := checkUID(id); err != nil {
		return err
	}
	if err := s.makeFolders(); err != nil {
		return err
	}
	trash := s.dir(trashName, id)
	if err := os.RemoveAll(trash); err != nil {
		return hostError(err, "empty the trash")
	}
	// A rename first, so that no restore ever sees half an artefact.
	if err := os.Rename(s.dir(id), trash); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return hostError(err, "move an artefact to the trash")
	}
	fault.At("snapshot.trash.after")
	for _, dir := range []string{s.opts.Root, s.dir(trashName)} {
		if err := syncPath(dir); err != nil {
			return hostError(err, "sync the snapshots' folder")
		}
	}
	for _, dir := range []string{trash, s.dir(stagingName, id)} {
		if err := os.RemoveAll(dir); err != nil {
			return hostError(err, "remove an artefact")
		}
	}
	for _, dir := range []string{trash, s.dir(stagingName, id), s.dir(id)} {
		if _, err := os.Lstat(dir); !errors.Is(err, fs.ErrNotExist) {
			return errs.New(errs.InternalError, "the artefact of snapshot %s is still at %s; delete it again", id, dir)
		}
	}
	return nil
}

// Observed is what is on the disk.
type Observed struct {
	Published, Staging, Trash []string
}

// Observe lists what is there, in order; complete or an error.
func (s *Store) Observe() (Observed, error) {
	var o Observed
	for _, part := range []struct {
		dir  string
		into *[]string
	}{{s.opts.Root, &o.Published}, {s.dir(stagingName), &o.Staging}, {s.dir(trashName), &o.Trash}} {
		entries, err := os.ReadDir(part.dir)
		if err != nil {
			return Observed{}, hostError(err, "list the snapshots")
		}
		for _, e := range entries {
			if !strings.HasPrefix(e.Name(), ".") {
				*part.into = append(*part.into, e.Name())
			}
		}
	}
	return o, nil
}

// Sweep removes what a crash left in staging and trash. Only before the first capture of a process.
func (s *Store) Sweep() error {
	o, err := s.Observe()
	if err != nil {
		return err
	}
	var all []error
	for _, id := range o.Staging {
		all = append(all, os.RemoveAll(s.dir(stagingName, id)))
	}
	for _, id := range o.Trash {
		all = append(all, os.RemoveAll(s.dir(trashName, id)))
	}
	if err := errors.Join(all...); err != nil {
		return hostError(err, "remove what an earlier agentd left of its captures")
	}
	return nil
}
