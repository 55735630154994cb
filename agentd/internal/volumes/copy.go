// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package volumes

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/dormouse-run/dormouse/pkg/errs"
)

const (
	// maxDepth bounds the descriptors of a walk; a path that programs can name is never as deep.
	maxDepth  = 2048
	readBatch = 256
	copyChunk = 8 << 20
	maxXattr  = 64 << 10
)

// dirFD is an open folder. Everything in it is reached through it, so that a guest that swaps a folder for a
// link cannot lead anywhere.
type dirFD = *os.File

func openDir(at int, name string) (dirFD, error) {
	fd, err := unix.Openat(at, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), name), nil
}

func num(d dirFD) int { return int(d.Fd()) }

// each calls fn for the names in a folder, in the order of the disk, a batch at a time.
func each(ctx context.Context, d dirFD, fn func(name string, st *unix.Stat_t) error) error {
	for {
		names, err := d.Readdirnames(readBatch)
		for _, name := range names {
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			var st unix.Stat_t
			if err := unix.Fstatat(num(d), name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
				if errors.Is(err, unix.ENOENT) {
					continue // removed meanwhile
				}
				return err
			}
			if err := fn(name, &st); err != nil {
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

// walk calls fn for everything below a folder. It does not leave the file system.
func walk(ctx context.Context, d dirFD, depth int, fn func(dirFD, string, *unix.Stat_t) error) error {
	if depth > maxDepth {
		return tooDeep()
	}
	var own unix.Stat_t
	if err := unix.Fstat(num(d), &own); err != nil {
		return err
	}
	return each(ctx, d, func(name string, st *unix.Stat_t) error {
		if err := fn(d, name, st); err != nil {
			return err
		}
		if st.Mode&unix.S_IFMT != unix.S_IFDIR || st.Dev != own.Dev {
			return nil
		}
		sub, err := openDir(num(d), name)
		if err != nil {
			return err
		}
		defer sub.Close()
		return walk(ctx, sub, depth+1, fn)
	})
}

func tooDeep() error {
	return errs.New(errs.LimitExceeded, "the volume's folders are nested deeper than %d", maxDepth).With("field", "depth").With("limit", fmt.Sprint(maxDepth))
}

// copier copies one tree.
type copier struct {
	root      dirFD             // of the copy
	dev       uint64            // of the source
	links     map[uint64]string // where an inode with several names was copied to
	noReflink bool
}

// copyTree copies what is in the folder from into the empty folder to, attributes and all. It needs memory
// for one batch of names a level, and for one path a file with several names.
func copyTree(ctx context.Context, from, to string) error {
	src, err := openDir(unix.AT_FDCWD, from)
	if err != nil {
		return err
	}
	defer src.Close()
	dst, err := openDir(unix.AT_FDCWD, to)
	if err != nil {
		return err
	}
	defer dst.Close()
	var st unix.Stat_t
	if err := unix.Fstat(num(src), &st); err != nil {
		return err
	}
	c := &copier{root: dst, dev: st.Dev, links: map[uint64]string{}}
	if err := c.folder(ctx, src, dst, "", 0); err != nil {
		return err
	}
	return c.attributes(fdPath(src, "."), dst, ".", &st)
}

func (c *copier) folder(ctx context.Context, src, dst dirFD, path string, depth int) error {
	if depth > maxDepth {
		return tooDeep()
	}
	return each(ctx, src, func(name string, st *unix.Stat_t) error {
		if err := c.entry(ctx, src, dst, path, name, st, depth); err != nil {
			var known *errs.Error
			if errors.As(err, &known) || ctx.Err() != nil {
				return err
			}
			return fmt.Errorf("copy %q: %w", name, err)
		}
		return nil
	})
}

func (c *copier) entry(ctx context.Context, src, dst dirFD, path, name string, st *unix.Stat_t, depth int) error {
	if st.Dev != c.dev {
		return errs.New(errs.InvalidField, "another file system is mounted in the volume at %.200q: unmount it first", path+name).With("field", "source_volume_uid")
	}
	kind := st.Mode & unix.S_IFMT
	if kind != unix.S_IFDIR && st.Nlink > 1 {
		if first, ok := c.links[st.Ino]; ok {
			return unix.Linkat(num(c.root), first, num(dst), name, 0)
		}
		c.links[st.Ino] = path + name
	}
	var err error
	switch kind {
	case unix.S_IFDIR:
		err = c.subfolder(ctx, src, dst, path, name, depth)
	case unix.S_IFREG:
		err = c.file(ctx, src, dst, name, st)
	case unix.S_IFLNK:
		err = c.symlink(src, dst, name)
	default: // devices, FIFOs and sockets
		err = unix.Mknodat(num(dst), name, st.Mode, int(st.Rdev))
	}
	if err != nil {
		return err
	}
	return c.attributes(fdPath(src, name), dst, name, st)
}

func (c *copier) subfolder(ctx context.Context, src, dst dirFD, path, name string, depth int) error {
	if err := unix.Mkdirat(num(dst), name, 0o700); err != nil {
		return err
	}
	from, err := openDir(num(src), name)
	if err != nil {
		return err
	}
	defer from.Close()
	to, err := openDir(num(dst), name)
	if err != nil {
		return err
	}
	defer to.Close()
	return c.folder(ctx, from, to, path+name+"/", depth+1)
}

func (c *copier) symlink(src, dst dirFD, name string) error {
	buf := make([]byte, unix.PathMax)
	n, err := unix.Readlinkat(num(src), name, buf)
	if err != nil {
		return err
	}
	return unix.Symlinkat(string(buf[:n]), num(dst), name)
}

// file copies content: shared where the file system can, else the parts that are not holes.
func (c *copier) file(ctx context.Context, src, dst dirFD, name string, st *unix.Stat_t) error {
	// O_NONBLOCK, should it be a FIFO by now.
	in, err := unix.Openat(num(src), name, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(in)
	var now unix.Stat_t
	if err := unix.Fstat(in, &now); err != nil {
		return err
	}
	if now.Ino != st.Ino || now.Mode&unix.S_IFMT != unix.S_IFREG {
		return errors.New("it changed while it was copied: the volume is in use")
	}
	out, err := unix.Openat(num(dst), name, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return err
	}
	err = c.content(ctx, in, out, now.Size)
	if cerr := unix.Close(out); err == nil {
		err = cerr
	}
	return err
}

func (c *copier) content(ctx context.Context, in, out int, size int64) error {
	if !c.noReflink {
		err := unix.IoctlFileClone(out, in)
		if err == nil {
			return nil
		}
		if !errors.Is(err, unix.EOPNOTSUPP) && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.EXDEV) && !errors.Is(err, unix.ENOTTY) {
			return err
		}
		c.noReflink = true
	}
	if err := unix.Ftruncate(out, size); err != nil {
		return err
	}
	for pos := int64(0); pos < size; {
		data, err := unix.Seek(in, pos, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			return nil // only a hole is left
		}
		if err != nil {
			return err
		}
		end, err := unix.Seek(in, data, unix.SEEK_HOLE)
		if err != nil {
			return err
		}
		if pos, err = copyRange(ctx, in, out, data, min(end, size)); err != nil {
			return err
		}
	}
	return nil
}

// copyRange copies the bytes from one offset to another, in the kernel.
func copyRange(ctx context.Context, in, out int, from, to int64) (int64, error) {
	for from < to {
		if ctx.Err() != nil {
			return from, context.Cause(ctx)
		}
		r, w := from, from
		n, err := unix.CopyFileRange(in, &r, out, &w, int(min(to-from, copyChunk)), 0)
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return from, err
		case n == 0:
			return from, errors.New("it became shorter while it was copied: the volume is in use")
		}
		from += int64(n)
	}
	return to, nil
}

// attributes gives a copy the owner, mode, extended attributes and times of the original, in an order in which
// none undoes another.
func (c *copier) attributes(from string, dst dirFD, name string, st *unix.Stat_t) error {
	if err := unix.Fchownat(num(dst), name, int(st.Uid), int(st.Gid), unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return err
	}
	to := fdPath(dst, name)
	if err := copyXattrs(from, to); err != nil {
		return err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFLNK {
		if err := unix.Fchmodat(num(dst), name, st.Mode&0o7777, 0); err != nil {
			return err
		}
	}
	return unix.UtimesNanoAt(num(dst), name, []unix.Timespec{st.Atim, st.Mtim}, unix.AT_SYMLINK_NOFOLLOW)
}

// fdPath names something in an open folder to calls that take only paths.
func fdPath(d dirFD, name string) string { return fmt.Sprintf("/proc/self/fd/%d/%s", num(d), name) }

func copyXattrs(from, to string) error {
	n, err := unix.Llistxattr(from, nil)
	if n == 0 || errors.Is(err, unix.ENOTSUP) {
		return nil
	}
	if err != nil {
		return err
	}
	list := make([]byte, maxXattr)
	if n, err = unix.Llistxattr(from, list); err != nil {
		return err
	}
	val := make([]byte, maxXattr)
	for _, k := range strings.Split(strings.TrimSuffix(string(list[:n]), "\x00"), "\x00") {
		size, err := unix.Lgetxattr(from, k, val)
		if errors.Is(err, unix.ENODATA) {
			continue
		}
		if err != nil {
			return err
		}
		if err := unix.Lsetxattr(to, k, val[:size], 0); err != nil {
			return fmt.Errorf("attribute %s: %w", k, err)
		}
	}
	return nil
}
