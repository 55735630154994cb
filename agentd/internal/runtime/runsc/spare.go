package runsc

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/uid"
)

// spares are the files that records are written into before they get their name. One that has been replaced, or whose
// sandbox is gone, is written anew instead of being removed: where sandboxes come and go, a file system looks long for a free
// inode, and a start writes two records.
//
// Their names are this driver's alone, so that an earlier one that still writes meets none of them; those it left are
// removed by the next driver. What is in a spare is never read, and nobody reads a file that becomes one: reading and writing
// exclude each other (content), since whoever opened a record may find it replaced before the first byte was read.
type spares struct {
	dir, own string

	content sync.RWMutex

	mu   sync.Mutex
	free []string
	made int
}

const (
	sparePrefix = ".spare-"
	// maxSpares bounds the files that are kept for nothing.
	maxSpares = 64
)

// openSpares removes what an earlier driver left.
func openSpares(dir string) (*spares, error) {
	entries, err := os.ReadDir(dir)
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), sparePrefix) {
			if rmErr := os.Remove(filepath.Join(dir, e.Name())); rmErr != nil && !errors.Is(rmErr, fs.ErrNotExist) {
				err = errors.Join(err, rmErr)
			}
		}
	}
	if err != nil {
		return nil, errs.Wrap(err, errs.InternalError, "remove what an earlier driver left in %s: %v", dir, err)
	}
	return &spares{dir: dir, own: filepath.Join(dir, sparePrefix+uid.New()+"-")}, nil
}

// stage gives the path of a file with the data in it, which the caller renames or gives back.
func (s *spares) stage(data []byte) (string, error) {
	path := s.take()
	s.content.Lock()
	defer s.content.Unlock()
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE, 0o600)
	if err != nil {
		return "", err
	}
	// Cut last: a file that keeps its block needs no other.
	_, err = f.Write(data)
	if err == nil {
		err = f.Truncate(int64(len(data)))
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return "", errors.Join(err, os.Remove(path))
	}
	return path, nil
}

// read gives what the file of that name holds.
func (s *spares) read(path string) ([]byte, error) {
	s.content.RLock()
	defer s.content.RUnlock()
	return os.ReadFile(path)
}

func (s *spares) take() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if n := len(s.free); n > 0 {
		path := s.free[n-1]
		s.free = s.free[:n-1]
		return path
	}
	return s.name()
}

// name wants the lock.
func (s *spares) name() string {
	s.made++
	return s.own + strconv.Itoa(s.made)
}

// give takes a file of this driver's back.
func (s *spares) give(path string) error {
	s.mu.Lock()
	room := len(s.free) < maxSpares
	if room {
		s.free = append(s.free, path)
	}
	s.mu.Unlock()
	if room {
		return nil
	}
	return os.Remove(path)
}

// retire takes a file away from its name.
func (s *spares) retire(path string) error {
	s.mu.Lock()
	full, spare := len(s.free) >= maxSpares, s.name()
	s.mu.Unlock()
	if full {
		return os.Remove(path)
	}
	if err := os.Rename(path, spare); err != nil {
		return err
	}
	return s.give(spare)
}

// link gives a staged file a name that nothing has; fs.ErrExist where something does.
func (s *spares) link(staged, path string) error {
	err := unix.Renameat2(unix.AT_FDCWD, staged, unix.AT_FDCWD, path, unix.RENAME_NOREPLACE)
	if errors.Is(err, unix.EINVAL) { // not on this file system
		if err = os.Link(staged, path); err == nil {
			return os.Remove(staged)
		}
	}
	if err != nil {
		err = errors.Join(err, s.give(staged))
	}
	return err
}

// replace puts a staged file in the place of what is at the path, at one stroke, and keeps that for the next one.
func (s *spares) replace(staged, path string) error {
	err := unix.Renameat2(unix.AT_FDCWD, staged, unix.AT_FDCWD, path, unix.RENAME_EXCHANGE)
	if err == nil {
		return s.give(staged)
	}
	if err := os.Rename(staged, path); err != nil { // nothing was there, or it cannot be done on this file system
		return errors.Join(err, s.give(staged))
	}
	return nil
}
