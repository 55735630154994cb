package bulkguest

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/dormouse-run/dormouse/agentd/internal/bulkwire"
)

const (
	// maxWatched bounds the folders of one watch.
	maxWatched = 1024
	// eventBatch is how many events an answer has: their paths fit in a frame.
	eventBatch = 12

	interest = unix.IN_CREATE | unix.IN_MODIFY | unix.IN_DELETE | unix.IN_MOVED_FROM | unix.IN_MOVED_TO | unix.IN_ATTRIB |
		unix.IN_DELETE_SELF | unix.IN_MOVE_SELF
)

// watching is a set of watches of the sandbox's kernel.
type watching struct {
	h      *helper
	fd     int
	byPath map[string]int
	paths  map[int]string
	top    string
	// lost: events are missing, or a folder could not be watched.
	lost  bool
	batch []bulkwire.Event
}

func (h *helper) watch() error {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	w := &watching{h: h, fd: fd, byPath: make(map[string]int), paths: make(map[int]string), top: filepath.Clean(h.order.Path)}
	if err := w.add(w.top, true); err != nil {
		return err
	}
	if err := h.answer(bulkwire.Events{Overflow: w.lost}); err != nil {
		return err
	}
	w.lost = false
	buf := make([]byte, 64<<10)
	for {
		n, err := unix.Read(fd, buf)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return err
		}
		gone := w.take(buf[:n])
		if err := w.flush(); err != nil {
			return err
		}
		if gone {
			return h.done(nil)
		}
	}
}

// add watches a path, and the folders below it where that was asked for. A path that is too much, or gone
// already, is one of which events are lost.
func (w *watching) add(path string, must bool) error {
	if len(w.paths) >= maxWatched {
		if must && len(w.paths) == 0 {
			return refuse("TOO_MANY", "at most %d directories are watched", maxWatched)
		}
		w.lost = true
		return nil
	}
	wd, err := unix.InotifyAddWatch(w.fd, path, interest)
	if err != nil {
		if must {
			return &fs.PathError{Op: "watch", Path: path, Err: err}
		}
		w.lost = w.lost || !errors.Is(err, unix.ENOENT)
		return nil
	}
	w.paths[wd], w.byPath[path] = path, wd
	if !w.h.order.Recursive {
		return nil
	}
	dir, err := os.Open(path)
	if err != nil {
		return nil //nolint:nilerr // a file, or gone
	}
	defer dir.Close()
	entries, err := dir.ReadDir(-1)
	if err != nil {
		w.lost = w.lost || !errors.Is(err, unix.ENOTDIR)
	}
	for _, e := range entries {
		if e.IsDir() {
			if err := w.add(filepath.Join(path, e.Name()), false); err != nil {
				return err
			}
		}
	}
	return nil
}

// take reads the kernel's events; it tells whether what was watched is gone.
func (w *watching) take(buf []byte) (gone bool) {
	for len(buf) >= unix.SizeofInotifyEvent {
		wd := int(int32(binary.NativeEndian.Uint32(buf)))
		mask := binary.NativeEndian.Uint32(buf[4:])
		length := int(binary.NativeEndian.Uint32(buf[12:]))
		buf = buf[unix.SizeofInotifyEvent:]
		if length > len(buf) {
			w.lost = true
			return gone
		}
		name := string(bytes.TrimRight(buf[:length], "\x00"))
		buf = buf[length:]
		if mask&unix.IN_Q_OVERFLOW != 0 {
			w.lost = true
			continue
		}
		path, ok := w.paths[wd]
		if !ok {
			continue
		}
		if mask&(unix.IN_DELETE_SELF|unix.IN_MOVE_SELF|unix.IN_IGNORED|unix.IN_UNMOUNT) != 0 {
			delete(w.paths, wd)
			delete(w.byPath, path)
			if path == w.top {
				w.batch = append(w.batch, bulkwire.Event{Path: path, What: bulkwire.Removed})
				gone = true
			}
			continue
		}
		if name != "" {
			path = filepath.Join(path, name)
		}
		w.note(path, mask)
	}
	return gone
}

var changes = []struct {
	mask uint32
	what bulkwire.Change
}{
	{unix.IN_CREATE, bulkwire.Created}, {unix.IN_MODIFY, bulkwire.Modified}, {unix.IN_DELETE, bulkwire.Removed},
	{unix.IN_MOVED_FROM, bulkwire.MovedFrom}, {unix.IN_MOVED_TO, bulkwire.MovedTo}, {unix.IN_ATTRIB, bulkwire.Changed},
}

func (w *watching) note(path string, mask uint32) {
	for _, c := range changes {
		if mask&c.mask == 0 {
			continue
		}
		e := bulkwire.Event{Path: strings.ToValidUTF8(path, "\uFFFD"), What: c.what, Dir: mask&unix.IN_ISDIR != 0}
		// A file that is being written says so with each write.
		if n := len(w.batch); n == 0 || w.batch[n-1] != e {
			w.batch = append(w.batch, e)
		}
		if w.h.order.Recursive && e.Dir && (c.what == bulkwire.Created || c.what == bulkwire.MovedTo) {
			_ = w.add(path, false) // not asked to be sure: never an error
			w.inside(path)
		}
	}
}

// inside tells of what was put into a new folder before it was watched.
func (w *watching) inside(path string) {
	entries, err := os.ReadDir(path)
	if err != nil {
		return // gone already
	}
	for _, e := range entries {
		child := filepath.Join(path, e.Name())
		w.batch = append(w.batch, bulkwire.Event{Path: strings.ToValidUTF8(child, "\uFFFD"), What: bulkwire.Created, Dir: e.IsDir()})
		if e.IsDir() {
			w.inside(child)
		}
	}
}

func (w *watching) flush() error {
	for len(w.batch) > 0 || w.lost {
		n := min(len(w.batch), eventBatch)
		if err := w.h.answer(bulkwire.Events{Events: w.batch[:n], Overflow: w.lost}); err != nil {
			return err
		}
		w.batch, w.lost = w.batch[n:], false
	}
	return nil
}
