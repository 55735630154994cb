package bulkguest

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"hash"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/dormouse-run/dormouse/agentd/internal/bulkwire"
)

func sum(h hash.Hash) string { return hex.EncodeToString(h.Sum(nil)) }

// openRegular opens a file to read, and nothing that would wait or act when it is opened or read.
func openRegular(path string) (*os.File, fs.FileInfo, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ENXIO) {
		return nil, nil, notAFile(path)
	}
	if err != nil {
		return nil, nil, err
	}
	st, err := f.Stat()
	switch {
	case err != nil:
	case st.IsDir():
		err = &fs.PathError{Op: "read", Path: path, Err: unix.EISDIR}
	case !st.Mode().IsRegular():
		err = notAFile(path)
	default:
		return f, st, nil
	}
	_ = f.Close()
	return nil, nil, err
}

func notAFile(path string) error {
	return refuse("NOT_A_FILE", "%s: it is a device, a FIFO or a socket, and no file; run a command to use it", path).with("path", path)
}

// read sends a file. It goes on to the end that it finds, so that a file that grows, or one of /proc that
// says it is empty, is sent as it is read.
func (h *helper) read() error {
	f, st, err := openRegular(h.order.Path)
	if err != nil {
		return err
	}
	defer f.Close()
	if has := versionOf(st); h.order.Version != "" && h.order.Version != has {
		return refuse("FILE_CHANGED", "%s was changed since it was first read; read it again from its beginning", h.order.Path).with("path", h.order.Path)
	}
	digest := sha256.New()
	if err := h.skip(f, digest); err != nil {
		return err
	}
	if err := h.answer(infoOf(h.order.Path, st)); err != nil {
		return err
	}
	var sent int64
	for h.order.Length == 0 || sent < h.order.Length {
		room := h.out.Room()
		if h.order.Length > 0 {
			room = room[:min(int64(len(room)), h.order.Length-sent)]
		}
		n, err := f.Read(room)
		if n > 0 {
			digest.Write(room[:n])
			sent += int64(n)
			if err := h.out.WriteRoom(n); err != nil {
				return err
			}
		}
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
	}
	return h.done(bulkwire.Done{Bytes: sent, Digest: sum(digest)})
}

// skip goes to the order's offset, through the digest where that begins before.
func (h *helper) skip(f *os.File, digest hash.Hash) error {
	if h.order.Offset == 0 {
		return nil
	}
	if !h.order.HashAll {
		_, err := f.Seek(h.order.Offset, io.SeekStart)
		return err
	}
	n, err := io.CopyBuffer(digest, io.LimitReader(f, h.order.Offset), make([]byte, bulkwire.MaxData))
	if err == nil && n < h.order.Offset {
		err = refuse("FILE_CHANGED", "%s is shorter than the offset; read it again from its beginning", h.order.Path).with("path", h.order.Path)
	}
	return err
}

// writing is a file that is being replaced: its content goes into a hidden file beside it.
type writing struct {
	h      *helper
	target string // where links lead
	part   string
	f      *os.File
	old    fs.FileInfo // of what is replaced; nil for nothing
	owner  *syscall.Credential
	digest hash.Hash
	size   int64
}

func (h *helper) write() (err error) {
	w := &writing{h: h, digest: sha256.New()}
	if err := w.resolve(); err != nil {
		return err
	}
	if w.owner, err = h.newOwner(); err != nil {
		return err
	}
	if h.order.Parents {
		if err := h.parents(w.target, w.owner); err != nil {
			return err
		}
	}
	if err := w.open(); err != nil {
		return err
	}
	defer w.f.Close()
	discard := func() { _ = os.Remove(w.part) }
	defer h.onLeave(nil)
	if err := w.fill(); err != nil {
		// What a client may take up again is kept, but for what can only fail again.
		if h.order.Upload == "" || !errors.Is(err, io.ErrUnexpectedEOF) {
			discard()
		}
		return err
	}
	if err := w.place(); err != nil {
		discard()
		return err
	}
	h.order.Path = w.target
	return h.finish(bulkwire.Done{Bytes: w.size, Digest: sum(w.digest)})
}

// resolve follows links at the path's end, also one to what is not there yet, and looks at what is there.
func (w *writing) resolve() error {
	w.target = filepath.Clean(w.h.order.Path)
	if strings.HasSuffix(w.h.order.Path, "/") {
		return &fs.PathError{Op: "write", Path: w.h.order.Path, Err: unix.EISDIR}
	}
	for range 40 {
		st, err := os.Lstat(w.target)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return nil
		case err != nil:
			return err
		case st.IsDir():
			return &fs.PathError{Op: "write", Path: w.target, Err: unix.EISDIR}
		case st.Mode().IsRegular():
			w.old = st
			return nil
		case st.Mode()&fs.ModeSymlink == 0:
			return notAFile(w.target)
		}
		link, err := os.Readlink(w.target)
		if err != nil {
			return err
		}
		if !filepath.IsAbs(link) {
			// The kernel's own way: the folder as it really is, not as it is called.
			dir, err := filepath.EvalSymlinks(filepath.Dir(w.target))
			if err != nil {
				return err
			}
			link = filepath.Join(dir, link)
		}
		w.target = link
	}
	return &fs.PathError{Op: "write", Path: w.h.order.Path, Err: unix.ELOOP}
}

// open opens the hidden file, a new one or the one that is taken up. Before it, what earlier writes left is removed: it may
// be what takes the room.
func (w *writing) open() (err error) {
	o := w.h.order
	name := o.Upload
	if name == "" {
		name = randomName()
	}
	base := filepath.Base(w.target)
	w.part = filepath.Join(filepath.Dir(w.target), "."+base[:min(len(base), 100)]+"."+name+partMark)
	sweep(filepath.Dir(w.part), filepath.Base(w.part))
	flags := os.O_RDWR | unix.O_NOFOLLOW | unix.O_CLOEXEC | unix.O_NONBLOCK
	if o.Resume {
		if err = w.reopen(flags); err == nil {
			return w.takeUp()
		}
		if !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	} else if o.Upload != "" {
		// The same name without resume is a new beginning.
		if err := os.Remove(w.part); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return renamed(err, w.target)
		}
	}
	if err := w.create(flags | os.O_CREATE | os.O_EXCL); err != nil {
		return renamed(err, w.target)
	}
	var fsys unix.Statfs_t
	if err := unix.Fstatfs(int(w.f.Fd()), &fsys); err == nil && fsys.Blocks > 0 && o.Size > int64(fsys.Bavail)*fsys.Bsize {
		_ = w.f.Close()
		_ = os.Remove(w.part)
		return &fs.PathError{Op: "write", Path: w.target, Err: unix.ENOSPC}
	}
	return w.h.answer(bulkwire.Opened{Part: w.part})
}

// create makes the hidden file. It is not made when the host has gone, and removed if the host goes, unless it
// can be taken up.
func (w *writing) create(flags int) (err error) {
	w.h.mu.Lock()
	defer w.h.mu.Unlock()
	if w.f, err = os.OpenFile(w.part, flags, 0o600); err != nil {
		return err
	}
	if w.h.order.Upload == "" {
		w.h.undo = func() { _ = os.Remove(w.part) }
	}
	return hold(w.f)
}

// reopen opens the hidden file of a write that is taken up.
func (w *writing) reopen(flags int) (err error) {
	if w.f, err = os.OpenFile(w.part, flags, 0); err != nil {
		return err
	}
	if err = hold(w.f); err != nil {
		_ = w.f.Close()
	}
	return err
}

// renamed says an error of the hidden file as one of the file that it stands for.
func renamed(err error, target string) error {
	var p *fs.PathError
	if errors.As(err, &p) {
		return &fs.PathError{Op: p.Op, Path: target, Err: p.Err}
	}
	return err
}

// takeUp goes on with an unfinished file, after reading back what it has.
func (w *writing) takeUp() error {
	st, err := w.f.Stat()
	if err != nil {
		return err
	}
	if !st.Mode().IsRegular() {
		return notAFile(w.part)
	}
	touch(w.f)
	if w.size, err = io.CopyBuffer(onlyWriter{w.digest}, onlyReader{w.f}, make([]byte, bulkwire.MaxData)); err != nil {
		return err
	}
	return w.h.answer(bulkwire.Opened{Offset: w.size, Part: w.part})
}

// onlyReader and onlyWriter hide what would make a copy choose a buffer of its own.
type onlyReader struct{ io.Reader }
type onlyWriter struct{ io.Writer }

const block = 4096

var zeroes [block]byte

// fill writes what the host sends. Blocks of zeroes become holes.
func (w *writing) fill() error {
	in := &input{in: w.h.in}
	for {
		data, err := in.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
		w.digest.Write(data)
		if err := w.put(data); err != nil {
			return renamed(err, w.target)
		}
	}
	// A hole at the end is only there with its size.
	if err := w.f.Truncate(w.size); err != nil {
		return renamed(err, w.target)
	}
	return nil
}

// put writes data at the end, but for blocks of zeroes.
func (w *writing) put(data []byte) error {
	for len(data) > 0 {
		n, hole := run(data, w.size)
		if !hole {
			if _, err := w.f.WriteAt(data[:n], w.size); err != nil {
				return err
			}
		}
		w.size += int64(n)
		data = data[n:]
	}
	return nil
}

// run gives how many of the first bytes are blocks of zeroes, or are not.
func run(data []byte, at int64) (n int, hole bool) {
	for len(data) > n {
		step := min(block-int((at+int64(n))%block), len(data)-n)
		zero := step == block && bytes.Equal(data[n:n+step], zeroes[:])
		if n > 0 && zero != hole {
			return n, hole
		}
		hole = zero
		n += step
	}
	return n, hole
}

// place gives the file its owner and mode, makes it last, and puts it where it belongs.
func (w *writing) place() error {
	o := w.h.order
	if want := o.Digest; want != "" && want != sum(w.digest) {
		return refuse("DIGEST_MISMATCH", "what arrived for %s has not the digest that was said; write it again", w.target).with("got", sum(w.digest))
	}
	mode := uint32(fileMode)
	uid, gid := -1, -1
	if w.owner != nil {
		uid, gid = int(w.owner.Uid), int(w.owner.Gid)
	}
	if w.old != nil {
		sys := w.old.Sys().(*syscall.Stat_t)
		mode = sys.Mode & permBits
		if o.Owner == "" && os.Geteuid() == 0 {
			uid, gid = int(sys.Uid), int(sys.Gid)
		}
	}
	if o.HasMode {
		mode = o.Mode
	}
	if uid >= 0 {
		if err := w.f.Chown(uid, gid); err != nil {
			return renamed(err, w.target)
		}
	}
	if err := unix.Fchmod(int(w.f.Fd()), mode); err != nil {
		return &fs.PathError{Op: "chmod", Path: w.target, Err: err}
	}
	if err := w.f.Sync(); err != nil {
		return renamed(err, w.target)
	}
	if err := os.Rename(w.part, w.target); err != nil {
		return linkError(err, w.target)
	}
	return syncDir(filepath.Dir(w.target))
}

func randomName() string {
	var b [12]byte
	_, _ = unix.Getrandom(b[:], 0)
	return hex.EncodeToString(b[:])
}
