package runner

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/dormouse-run/dormouse/agentd/internal/runtime"
	"github.com/dormouse-run/dormouse/agentd/internal/spread"
	"github.com/dormouse-run/dormouse/pkg/errs"
)

// shelf keeps folders of sandboxes ready: with their FIFOs, that nobody has opened, and with empty files where the specs
// go. Making these was a good third of what a start cost agentd: a file system looks long for a free inode where files come and go
// all the time. A start takes one by a rename, so that there is no moment with half a folder.
//
// They are below a folder of their own, beside that of the sandboxes, and belong to nobody: what an earlier agentd left there is removed
// when the next one starts, and where none is ready a start makes its own.
type shelf struct {
	root  string
	ready chan string
	taken chan struct{} // signalled when one was taken
	last  atomic.Int64  // when, in nanoseconds since began
	began time.Time
	made  int // names them; filler's
}

const (
	// calm is how long nobody started when more are made: making them takes the CPU that starts want.
	calm = 300 * time.Millisecond
	// shelfRetry is how long one that could not be made is left alone.
	shelfRetry = 30 * time.Second
)

// openShelf removes what is left of an earlier one. With size 0 nothing is kept ready.
func openShelf(root string, size int) (*shelf, error) {
	s := &shelf{root: root, ready: make(chan string, max(size, 0)), taken: make(chan struct{}, 1), began: time.Now()}
	if size <= 0 {
		return s, nil
	}
	err := os.RemoveAll(root)
	if err == nil {
		err = os.MkdirAll(root, 0o700)
	}
	if err == nil {
		err = os.Chmod(root, 0o700)
	}
	if err != nil {
		return nil, errs.Wrap(err, errs.InternalError, "make the folder of folders kept ready: %v", err)
	}
	_ = spread.Below(root) // a hint
	return s, nil
}

// take makes a ready folder the one at dir. false: none was ready, or there is one at dir already; nothing was done.
func (s *shelf) take(dir string) bool {
	if _, err := os.Lstat(dir); !errors.Is(err, fs.ErrNotExist) {
		return false
	}
	select {
	case from := <-s.ready:
		s.last.Store(int64(time.Since(s.began)))
		select {
		case s.taken <- struct{}{}:
		default:
		}
		if os.Rename(from, dir) != nil {
			_ = os.RemoveAll(from) // else the next agentd does
			return false
		}
		return true
	default:
		return false
	}
}

// fill keeps the shelf full until the context ends.
func (s *shelf) fill(ctx context.Context, failed func(error)) {
	if cap(s.ready) == 0 {
		return
	}
	pause := time.NewTimer(calm)
	defer pause.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.taken:
			pause.Reset(calm)
			continue
		case <-pause.C:
		}
		if len(s.ready) == cap(s.ready) {
			continue // until one is taken
		}
		if wait := calm - (time.Since(s.began) - time.Duration(s.last.Load())); s.last.Load() != 0 && wait > 0 {
			pause.Reset(wait)
			continue
		}
		dir, err := s.stock()
		if err != nil {
			failed(err)
			pause.Reset(shelfRetry)
			continue
		}
		s.ready <- dir // has room: nobody else adds
		pause.Reset(0)
	}
}

// stock makes one folder, or nothing.
func (s *shelf) stock() (string, error) {
	s.made++
	dir := filepath.Join(s.root, strconv.Itoa(s.made))
	err := furnish(dir)
	for _, name := range []string{specName, runtime.ConfigName} {
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, name), nil, 0o600)
		}
	}
	if err != nil {
		return "", errors.Join(err, os.RemoveAll(dir))
	}
	return dir, nil
}

// furnish makes a sandbox's folder with fresh FIFOs in it. Those of an earlier run go.
func furnish(dir string) error {
	fifos := filepath.Join(dir, fifoDir)
	for _, d := range []string{dir, fifos} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			return errs.Wrap(err, errs.InternalError, "make the sandbox's folder: %v", err)
		}
		if err := os.Chmod(d, 0o700); err != nil {
			return errs.Wrap(err, errs.InternalError, "protect the sandbox's folder: %v", err)
		}
	}
	_, err := runtime.MakeFIFOs(fifos)
	return err
}
