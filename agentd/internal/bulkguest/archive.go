package bulkguest

import (
	"archive/tar"
	"crypto/sha256"
	"errors"
	"hash"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dormouse-run/dormouse/agentd/internal/bulkwire"
)

const (
	// maxLinks bounds the hard links that are known as such; the files of more become copies.
	maxLinks = 64 << 10
	// maxName bounds a path in an archive.
	maxName = 4096
)

type inode struct{ dev, ino uint64 }

// packing is an archive being made.
type packing struct {
	out     output
	digest  hash.Hash
	tar     *tar.Writer
	links   map[inode]string
	entries int64
	buf     []byte
}

func (p *packing) Write(data []byte) (int, error) {
	p.digest.Write(data)
	return p.out.Write(data)
}

func (h *helper) pack() error {
	top := filepath.Clean(h.order.Path)
	st, err := os.Lstat(top)
	if err != nil {
		return err
	}
	if strings.HasSuffix(h.order.Path, "/") || h.order.Name == "." {
		if st, err = os.Stat(top); err != nil {
			return err
		}
		if !st.IsDir() {
			return &fs.PathError{Op: "pack", Path: top, Err: unix.ENOTDIR}
		}
	}
	if err := h.answer(infoOf(top, st)); err != nil {
		return err
	}
	name := h.order.Name
	if name == "" {
		if name = filepath.Base(top); name == "/" {
			name = "."
		}
	}
	p := &packing{out: output{out: h.out}, digest: sha256.New(), links: make(map[inode]string), buf: make([]byte, bulkwire.MaxData)}
	p.tar = tar.NewWriter(p)
	if err := p.add(top, name, st); err != nil {
		return err
	}
	if err := p.tar.Close(); err != nil {
		return err
	}
	return h.done(bulkwire.Done{Bytes: p.out.n, Digest: sum(p.digest), Entries: p.entries})
}

// add adds a file, and what is in it if it is a folder. A name of "." has no entry of its own.
func (p *packing) add(file, name string, st fs.FileInfo) error {
	if name != "." {
		if err := p.entry(file, name, st); err != nil {
			return err
		}
	}
	if !st.IsDir() {
		return nil
	}
	dir, err := os.Open(file)
	if err != nil {
		return err
	}
	defer dir.Close()
	for {
		found, err := dir.Readdirnames(256)
		for _, n := range found {
			child := filepath.Join(file, n)
			st, err := os.Lstat(child)
			if errors.Is(err, fs.ErrNotExist) {
				continue // gone meanwhile
			}
			if err != nil {
				return err
			}
			if err := p.add(child, path.Join(name, n), st); err != nil {
				return err
			}
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

func (p *packing) entry(file, name string, st fs.FileInfo) error {
	if st.Mode()&fs.ModeSocket != 0 {
		return nil // no archive has those
	}
	link := ""
	if st.Mode()&fs.ModeSymlink != 0 {
		var err error
		if link, err = os.Readlink(file); err != nil {
			return err
		}
	}
	head, err := tar.FileInfoHeader(st, link)
	if err != nil {
		return err
	}
	head.Name, head.Uname, head.Gname, head.Format = name, "", "", tar.FormatPAX
	head.AccessTime, head.ChangeTime = time.Time{}, time.Time{}
	if st.IsDir() {
		head.Name += "/"
	}
	sys := st.Sys().(*syscall.Stat_t)
	if id := (inode{sys.Dev, sys.Ino}); st.Mode().IsRegular() && sys.Nlink > 1 {
		if first, ok := p.links[id]; ok {
			head.Typeflag, head.Linkname, head.Size = tar.TypeLink, first, 0
		} else if len(p.links) < maxLinks {
			p.links[id] = name
		}
	}
	if head.Typeflag != tar.TypeReg {
		p.entries++
		return p.tar.WriteHeader(head)
	}
	return p.content(file, head)
}

// content adds a file as long as its header says; one that shrinks meanwhile is an error.
func (p *packing) content(file string, head *tar.Header) error {
	f, st, err := openRegular(file)
	if err != nil {
		return err
	}
	defer f.Close()
	head.Size = st.Size()
	if err := p.tar.WriteHeader(head); err != nil {
		return err
	}
	p.entries++
	n, err := io.CopyBuffer(onlyWriter{p.tar}, onlyReader{io.LimitReader(f, head.Size)}, p.buf)
	if err == nil && n < head.Size {
		err = refuse("FILE_CHANGED", "%s became shorter while it was read; try again", file).with("path", file)
	}
	return err
}

// unpacking is an archive being unpacked below a folder, out of which no name and no link leads.
type unpacking struct {
	h      *helper
	root   *os.Root
	owner  *syscall.Credential
	digest hash.Hash
	done   bulkwire.Done
	buf    []byte
	// dirs get their times last, when nothing is put into them any more; bounded as links are.
	dirs []*tar.Header
}

func (h *helper) unpack() error {
	owner, err := h.newOwner()
	if err != nil {
		return err
	}
	dir := filepath.Clean(h.order.Path)
	if h.order.Parents {
		if err := h.parents(filepath.Join(dir, "x"), owner); err != nil {
			return err
		}
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	if err := h.answer(nil); err != nil {
		return err
	}
	in := &input{in: h.in}
	u := &unpacking{h: h, root: root, owner: owner, digest: sha256.New(), buf: make([]byte, bulkwire.MaxData)}
	counted := &counting{r: in, digest: u.digest}
	archive := tar.NewReader(counted)
	for {
		head, err := archive.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return badArchive(err)
		}
		if err := u.entry(head, archive); err != nil {
			return err
		}
		u.done.Entries++
	}
	// What follows the end of an archive is padding; the host is not done before it is read.
	if _, err := io.CopyBuffer(io.Discard, onlyReader{counted}, u.buf); err != nil {
		return err
	}
	for i := len(u.dirs) - 1; i >= 0; i-- {
		_ = root.Chtimes(u.dirs[i].Name, u.dirs[i].ModTime, u.dirs[i].ModTime)
	}
	unix.Sync()
	u.done.Bytes, u.done.Digest = counted.n, sum(u.digest)
	return h.done(u.done)
}

type counting struct {
	r      io.Reader
	digest hash.Hash
	n      int64
}

func (c *counting) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	c.digest.Write(p[:n])
	c.n += int64(n)
	return n, err
}

func badArchive(err error) error {
	if errors.Is(err, tar.ErrHeader) || errors.Is(err, tar.ErrFieldTooLong) || errors.Is(err, tar.ErrInsecurePath) {
		return refuse("INVALID_FIELD", "what was sent is no tar archive: %v", err).with("field", "data")
	}
	return err
}

// entry makes one entry.
func (u *unpacking) entry(head *tar.Header, content io.Reader) error {
	name := path.Clean(strings.TrimLeft(head.Name, "/"))
	if len(head.Name) > maxName || strings.ContainsRune(name, 0) {
		return refuse("UNSAFE_PATH", "a name in the archive has %d bytes, at most %d are taken", len(head.Name), maxName)
	}
	head.Name = name
	if name == "." {
		return nil
	}
	if name == ".." || strings.HasPrefix(name, "../") {
		return escapes(name)
	}
	if err := u.root.MkdirAll(path.Dir(name), dirMode); err != nil {
		return u.failed(name, err)
	}
	if err := u.make(head, content); err != nil {
		return u.failed(name, err)
	}
	return nil
}

func escapes(name string) error {
	return refuse("UNSAFE_PATH", "the entry %s leads out of the directory, by itself or through a link; unpack the archive further up", name).with("path", name)
}

// failed says what went wrong with an entry.
func (u *unpacking) failed(name string, err error) error {
	var r *refusal
	if errors.As(err, &r) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, tar.ErrHeader) {
		return badArchive(err)
	}
	var errno unix.Errno
	if !errors.As(err, &errno) {
		var p *fs.PathError
		var l *os.LinkError
		if errors.As(err, &p) || errors.As(err, &l) {
			return escapes(name) // of os.Root itself, which has no error number for it
		}
		return err
	}
	return &fs.PathError{Op: "unpack", Path: filepath.Join(u.h.order.Path, name), Err: errno}
}

func (u *unpacking) make(head *tar.Header, content io.Reader) error {
	name, mode := head.Name, fs.FileMode(head.Mode&0o777)
	if head.Typeflag == tar.TypeDir {
		err := u.root.Mkdir(name, dirMode)
		if st, statErr := u.root.Stat(name); errors.Is(err, fs.ErrExist) && statErr == nil && st.IsDir() {
			err = nil
		}
		if err == nil && len(u.dirs) < maxLinks {
			u.dirs = append(u.dirs, head)
		}
		return errors.Join(err, u.dress(head))
	}
	// Like a move over it: never into what a link leads to.
	if st, err := u.root.Lstat(name); err == nil {
		if st.IsDir() {
			return unix.EISDIR
		}
		if err := u.root.Remove(name); err != nil {
			return err
		}
	}
	switch head.Typeflag {
	case tar.TypeReg, tar.TypeRegA: //nolint:staticcheck // old archives have it
		return u.file(head, mode, content)
	case tar.TypeSymlink:
		if err := u.root.Symlink(head.Linkname, name); err != nil {
			return err
		}
		return u.chown(head)
	case tar.TypeLink:
		return u.root.Link(path.Clean(strings.TrimLeft(head.Linkname, "/")), name)
	}
	return refuse("NOT_SUPPORTED", "the entry %s is a device, a FIFO or of another kind that is not unpacked", name).with("path", name)
}

func (u *unpacking) file(head *tar.Header, mode fs.FileMode, content io.Reader) error {
	f, err := u.root.OpenFile(head.Name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, mode)
	if err != nil {
		return err
	}
	_, err = io.CopyBuffer(onlyWriter{f}, onlyReader{content}, u.buf)
	if err := errors.Join(err, f.Close()); err != nil {
		return err
	}
	return u.dress(head)
}

// dress gives an entry its owner, mode and time.
func (u *unpacking) dress(head *tar.Header) error {
	if err := u.chown(head); err != nil {
		return err
	}
	// After the owner, which takes set-id bits away.
	mode := fs.FileMode(head.Mode & 0o777)
	for bit, is := range map[int64]fs.FileMode{0o4000: fs.ModeSetuid, 0o2000: fs.ModeSetgid, 0o1000: fs.ModeSticky} {
		if head.Mode&bit != 0 {
			mode |= is
		}
	}
	if err := u.root.Chmod(head.Name, mode); err != nil {
		return err
	}
	return u.root.Chtimes(head.Name, head.ModTime, head.ModTime)
}

func (u *unpacking) chown(head *tar.Header) error {
	switch {
	case u.h.order.KeepOwners:
		return u.root.Lchown(head.Name, head.Uid, head.Gid)
	case u.owner != nil:
		return u.root.Lchown(head.Name, int(u.owner.Uid), int(u.owner.Gid))
	}
	return nil
}
