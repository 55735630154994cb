// Package bundle handles runtime bundles: the runtime's binary and guest init under one digest.
//
// A bundle is a folder:
//
//	runsc            the runtime, static, executable
//	guestinit.erofs  guest init's file system
//	bundle.json      digest, the runtime's version, the digest of each file
//
// Its digest is the SHA-256 of the lines that sha256sum prints for the two files in the order of their
// names, so that a shell can make it. A sandbox and its snapshots are driven by the bundle that made
// them; therefore bundles are installed side by side, each in a folder named by its digest, and are
// never changed in place.
package bundle

import (
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/dormouse-run/dormouse/pkg/durable"
	"github.com/dormouse-run/dormouse/pkg/errs"
)

// The names of the files.
const (
	RunscFile     = "runsc"
	GuestInitFile = "guestinit.erofs"
	manifestFile  = "bundle.json"
)

// names of the content, in the order in which the digest takes them.
var names = []string{GuestInitFile, RunscFile}

// Bundle is a verified bundle.
type Bundle struct {
	Dir          string
	Digest       string // "sha256:..."
	RunscVersion string
	Files        map[string]string // name to "sha256:..."
}

// Runsc is the path of the runtime's binary.
func (b *Bundle) Runsc() string { return filepath.Join(b.Dir, RunscFile) }

// GuestInit is the path of guest init's EROFS file.
func (b *Bundle) GuestInit() string { return filepath.Join(b.Dir, GuestInitFile) }

type manifest struct {
	Digest       string            `json:"digest"`
	RunscVersion string            `json:"runsc_version"`
	Files        map[string]string `json:"files"`
}

// Open reads the bundle in the folder and verifies every file and the digest.
// ARTEFACT_DAMAGED when a file or the manifest is missing or cannot be read as one, DIGEST_MISMATCH when the
// content is another than the manifest says.
func Open(dir string) (*Bundle, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, errs.Wrap(err, errs.InternalError, "resolve the bundle's path: %v", err)
	}
	data, err := os.ReadFile(filepath.Join(dir, manifestFile))
	if err != nil {
		return nil, errs.Wrap(err, errs.ArtefactDamaged, "the runtime bundle %s has no readable %s; build it with scripts/bundle.sh or install it again", dir, manifestFile).With("file", manifestFile)
	}
	var m manifest
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&m); err != nil {
		return nil, errs.Wrap(err, errs.ArtefactDamaged, "the %s of the runtime bundle %s is not readable: %v", manifestFile, dir, err).With("file", manifestFile)
	}
	var lines strings.Builder
	for _, name := range names {
		sum, err := sumFile(filepath.Join(dir, name))
		if err != nil {
			return nil, errs.Wrap(err, errs.ArtefactDamaged, "the runtime bundle %s lacks %s: %v", dir, name, err).With("file", name)
		}
		if err := match(dir, name, m.Files[name], "sha256:"+sum); err != nil {
			return nil, err
		}
		fmt.Fprintf(&lines, "%s  %s\n", sum, name)
	}
	if len(m.Files) != len(names) {
		return nil, errs.New(errs.ArtefactDamaged, "the runtime bundle %s lists files that are none of a bundle's", dir).With("file", manifestFile)
	}
	all := sha256.Sum256([]byte(lines.String()))
	if err := match(dir, "bundle", m.Digest, "sha256:"+hex.EncodeToString(all[:])); err != nil {
		return nil, err
	}
	return &Bundle{Dir: dir, Digest: m.Digest, RunscVersion: m.RunscVersion, Files: m.Files}, nil
}

func match(dir, what, want, got string) error {
	if want == got {
		return nil
	}
	return errs.New(errs.DigestMismatch, "the runtime bundle %s is damaged: %s has digest %s, its manifest says %s; install it again", dir, what, got, want).
		With("want", want).With("got", got)
}

func sumFile(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return "", err
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

// Path is where the bundle of the digest is or would be below the root. It is good in every process
// that sees the root, and for as long as the bundle is installed.
func Path(root, digest string) (string, error) {
	sum, ok := strings.CutPrefix(digest, "sha256:")
	if raw, err := hex.DecodeString(sum); !ok || err != nil || len(raw) != sha256.Size {
		return "", errs.New(errs.InvalidField, "%q is not a bundle digest (sha256:...)", digest).With("field", "bundle")
	}
	return filepath.Join(root, "bundles", sum), nil
}

// Find opens the installed bundle of the digest. INCOMPATIBLE_RUNTIME when it is not installed.
func Find(root, digest string) (*Bundle, error) {
	dir, err := Path(root, digest)
	if err != nil {
		return nil, err
	}
	if _, err := os.Stat(dir); errors.Is(err, fs.ErrNotExist) {
		return nil, errs.New(errs.IncompatibleRuntime, "the runtime bundle %s is not installed on this node; install it or use another node", digest).With("want", digest)
	}
	return Open(dir)
}

// List gives the digests of the installed bundles, in order, without verifying them.
func List(root string) ([]string, error) {
	entries, err := os.ReadDir(filepath.Join(root, "bundles"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, errs.Wrap(err, errs.InternalError, "list the runtime bundles: %v", err)
	}
	var digests []string
	for _, e := range entries {
		digest := "sha256:" + e.Name()
		if _, err := Path(root, digest); err == nil && e.IsDir() {
			digests = append(digests, digest)
		}
	}
	slices.Sort(digests)
	return digests, nil
}

// Install copies the bundle in src below the root, if it is not there, and opens it. Atomic: the folder
// appears complete and synced, or not at all; what a crash leaves has a name of its own and is removed
// by the next Install. Idempotent, and safe beside other installs of the same bundle.
func Install(src, root string) (*Bundle, error) {
	from, err := Open(src)
	if err != nil {
		return nil, err
	}
	dir, err := Path(root, from.Digest)
	if err != nil {
		return nil, err
	}
	if _, err := os.Stat(dir); err == nil {
		return Open(dir)
	}
	parent := filepath.Dir(dir)
	if err := os.MkdirAll(parent, 0o755); err != nil {
		return nil, errs.Wrap(err, errs.InternalError, "make the folder of the runtime bundles: %v", err)
	}
	unlock, err := lock(parent)
	if err != nil {
		return nil, err
	}
	defer unlock()
	if err := removeStaged(parent); err != nil {
		return nil, err
	}
	if _, err := os.Stat(dir); err == nil {
		return Open(dir)
	}
	staged := filepath.Join(parent, stagePrefix+rand.Text())
	if err := copyBundle(from.Dir, staged); err != nil {
		return nil, errors.Join(errs.Wrap(err, errs.InternalError, "copy the runtime bundle to %s: %v", staged, err), os.RemoveAll(staged))
	}
	if err := os.Rename(staged, dir); err != nil {
		return nil, errors.Join(errs.Wrap(err, errs.InternalError, "publish the runtime bundle: %v", err), os.RemoveAll(staged))
	}
	if err := durable.SyncDir(parent); err != nil {
		return nil, errs.Wrap(err, errs.InternalError, "sync %s: %v", parent, err)
	}
	return Open(dir)
}

const stagePrefix = ".stage-"

// lock keeps other installs out; the kernel lets go of it when this process dies.
func lock(dir string) (unlock func(), err error) {
	fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err == nil {
		err = unix.Flock(fd, unix.LOCK_EX)
	}
	if err != nil {
		return nil, errs.Wrap(err, errs.InternalError, "lock %s: %v", dir, err)
	}
	return func() { _ = unix.Close(fd) }, nil // closing is what unlocks
}

// removeStaged removes what an install that crashed left. The caller holds the lock.
func removeStaged(parent string) error {
	old, err := filepath.Glob(filepath.Join(parent, stagePrefix+"*"))
	if err != nil {
		return errs.Wrap(err, errs.InternalError, "look for staged bundles: %v", err)
	}
	for _, dir := range old {
		if err := os.RemoveAll(dir); err != nil {
			return errs.Wrap(err, errs.InternalError, "remove the staged bundle %s: %v", dir, err)
		}
	}
	return nil
}

func copyBundle(from, to string) error {
	if err := os.Mkdir(to, 0o755); err != nil {
		return err
	}
	for _, name := range append([]string{manifestFile}, names...) {
		mode := fs.FileMode(0o644)
		if name == RunscFile {
			mode = 0o755
		}
		if err := copyFile(filepath.Join(from, name), filepath.Join(to, name), mode); err != nil {
			return err
		}
	}
	return durable.SyncDir(to)
}

func copyFile(from, to string, mode fs.FileMode) (err error) {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_EXCL, mode)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, out.Close()) }()
	if _, err := io.Copy(out, in); err != nil {
		return err
	}
	return out.Sync()
}
