package bulkguest

import (
	"container/heap"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/dormouse-run/dormouse/agentd/internal/bulkwire"
)

const (
	permBits = 0o7777
	// listBatch is how many entries an answer has: their names and targets fit in a frame.
	listBatch = 16
	// maxTarget bounds a link's target in a description; the link itself may have more.
	maxTarget = 1024
	dirMode   = 0o755
	fileMode  = 0o644
)

// infoOf describes a file; st is of Lstat or Stat.
func infoOf(path string, st fs.FileInfo) bulkwire.Info {
	sys := st.Sys().(*syscall.Stat_t)
	info := bulkwire.Info{
		Path: path, Name: filepath.Base(path), Size: st.Size(), Mode: sys.Mode & permBits, UID: sys.Uid, GID: sys.Gid,
		MTime: st.ModTime().UnixNano(), Type: typeOf(st.Mode()), Version: versionOf(st),
	}
	if info.Type == bulkwire.Symlink {
		target, err := os.Readlink(path)
		if err == nil {
			info.Target = target[:min(len(target), maxTarget)]
		}
	}
	return info
}

func typeOf(mode fs.FileMode) bulkwire.Type {
	switch {
	case mode.IsRegular():
		return bulkwire.File
	case mode.IsDir():
		return bulkwire.Directory
	case mode&fs.ModeSymlink != 0:
		return bulkwire.Symlink
	}
	return bulkwire.Other
}

// versionOf is another one once a file's content was changed.
func versionOf(st fs.FileInfo) string {
	return strconv.FormatInt(st.Size(), 36) + "-" + strconv.FormatInt(st.ModTime().UnixNano(), 36)
}

func (h *helper) stat() error {
	look := os.Stat
	if h.order.NoFollow {
		look = os.Lstat
	}
	st, err := look(h.order.Path)
	if err != nil {
		return err
	}
	if err := h.answer(infoOf(h.order.Path, st)); err != nil {
		return err
	}
	return h.done(nil)
}

// names are the first so many in order of those that come after one, largest on top.
type names []string

func (n names) Len() int           { return len(n) }
func (n names) Less(i, j int) bool { return n[i] > n[j] }
func (n names) Swap(i, j int)      { n[i], n[j] = n[j], n[i] }
func (n *names) Push(x any)        { *n = append(*n, x.(string)) }
func (n *names) Pop() any {
	last := (*n)[len(*n)-1]
	*n = (*n)[:len(*n)-1]
	return last
}

// list gives a page of a directory, of whatever size that is, in the memory of a page.
func (h *helper) list() error {
	dir, err := os.Open(h.order.Path)
	if err != nil {
		return err
	}
	defer dir.Close()
	page, more, err := pageOf(dir, string(h.order.After), h.order.Limit)
	if err != nil {
		return err
	}
	var batch bulkwire.Entries
	for i, name := range page {
		path := filepath.Join(h.order.Path, name)
		st, err := os.Lstat(path)
		if err == nil {
			batch.Entries = append(batch.Entries, infoOf(path, st))
		} else if !errors.Is(err, fs.ErrNotExist) { // gone meanwhile
			return err
		}
		if len(batch.Entries) == listBatch || i == len(page)-1 {
			if err := h.answerEntries(batch); err != nil {
				return err
			}
			batch.Entries = nil
		}
	}
	var end bulkwire.Listed
	if more {
		end.Next = []byte(page[len(page)-1])
	}
	return h.done(end)
}

// answerEntries sends entries, in more than one frame where their names are very long.
func (h *helper) answerEntries(batch bulkwire.Entries) error {
	err := h.answer(batch)
	if !errors.Is(err, bulkwire.ErrGarbage) || len(batch.Entries) < 2 {
		return err
	}
	half := len(batch.Entries) / 2
	if err := h.answerEntries(bulkwire.Entries{Entries: batch.Entries[:half]}); err != nil {
		return err
	}
	return h.answerEntries(bulkwire.Entries{Entries: batch.Entries[half:]})
}

func pageOf(dir *os.File, after string, limit int) (page []string, more bool, err error) {
	var kept names
	for {
		found, err := dir.Readdirnames(1024)
		for _, name := range found {
			if name <= after {
				continue
			}
			if heap.Push(&kept, name); len(kept) > limit {
				heap.Pop(&kept)
				more = true
			}
		}
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, false, err
		}
	}
	slices.Sort(kept)
	return kept, more, nil
}

// newOwner is who gets what is new: whom the order names, else the default; nil leaves it as the kernel does,
// which is right for who acts as another than root.
func (h *helper) newOwner() (*syscall.Credential, error) {
	switch {
	case h.order.Owner != "":
		return account(h.order.Owner)
	case h.order.User != "":
		return nil, nil
	}
	return account(h.order.DefaultOwner)
}

// parents makes the missing folders above a path, each the owner's.
func (h *helper) parents(path string, owner *syscall.Credential) error {
	dir := filepath.Dir(path)
	if st, err := os.Stat(dir); err == nil {
		if !st.IsDir() {
			return &fs.PathError{Op: "mkdir", Path: dir, Err: unix.ENOTDIR}
		}
		return nil
	} else if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := h.parents(dir, owner); err != nil {
		return err
	}
	err := os.Mkdir(dir, dirMode)
	if errors.Is(err, fs.ErrExist) {
		return nil
	}
	if err != nil {
		return err
	}
	return own(dir, owner)
}

func own(path string, owner *syscall.Credential) error {
	if owner == nil {
		return nil
	}
	return os.Lchown(path, int(owner.Uid), int(owner.Gid))
}

// finish reports the file at the path as it is now.
func (h *helper) finish(done bulkwire.Done) error {
	st, err := os.Lstat(h.order.Path)
	if err != nil {
		return err
	}
	info := infoOf(h.order.Path, st)
	done.Info = &info
	return h.done(done)
}

func (h *helper) makeDir() error {
	path := filepath.Clean(h.order.Path)
	owner, err := h.newOwner()
	if err != nil {
		return err
	}
	if h.order.Parents {
		if err := h.parents(path, owner); err != nil {
			return err
		}
	}
	err = os.Mkdir(path, dirMode)
	if st, statErr := os.Stat(path); errors.Is(err, fs.ErrExist) && h.order.Parents && statErr == nil && st.IsDir() {
		return h.finish(bulkwire.Done{})
	}
	if err != nil {
		return err
	}
	if err := own(path, owner); err != nil {
		return err
	}
	if h.order.HasMode {
		if err := unix.Chmod(path, h.order.Mode); err != nil {
			return &fs.PathError{Op: "chmod", Path: path, Err: err}
		}
	}
	return h.finish(bulkwire.Done{})
}

func (h *helper) remove() error {
	path := filepath.Clean(h.order.Path)
	if path == "/" {
		return refuse("UNSAFE_PATH", "the root of the sandbox is not removed; delete the sandbox").with("path", path)
	}
	if _, err := os.Lstat(path); err != nil {
		return err
	}
	err := os.Remove(path)
	if err != nil && h.order.Recursive {
		err = os.RemoveAll(path)
	}
	if err != nil {
		return err
	}
	if err := syncDir(filepath.Dir(path)); err != nil {
		return err
	}
	return h.done(nil)
}

func (h *helper) move() error {
	from, to := filepath.Clean(h.order.Path), filepath.Clean(h.order.To)
	if _, err := os.Lstat(from); err != nil {
		return err
	}
	if to == from || strings.HasPrefix(to, strings.TrimSuffix(from, "/")+"/") {
		return refuse("UNSAFE_PATH", "%s cannot be moved to %s, into itself", from, to).with("path", to)
	}
	if st, err := os.Lstat(to); err == nil {
		if !h.order.Replace {
			return &fs.PathError{Op: "move", Path: to, Err: unix.EEXIST}
		}
		if st.IsDir() {
			return &fs.PathError{Op: "move", Path: to, Err: unix.EISDIR}
		}
	}
	if err := os.Rename(from, to); err != nil {
		return linkError(err, to)
	}
	if err := errors.Join(syncDir(filepath.Dir(from)), syncDir(filepath.Dir(to))); err != nil {
		return err
	}
	h.order.Path = to
	return h.finish(bulkwire.Done{})
}

// linkError says which path a failed rename was about: that which is to be made, since the other one was seen.
func linkError(err error, to string) error {
	var link *os.LinkError
	if errors.As(err, &link) {
		return &fs.PathError{Op: link.Op, Path: to, Err: link.Err}
	}
	return err
}

// syncDir makes a change of a folder's names last. A file system that cannot do that for a folder has its
// own way.
func syncDir(path string) error {
	dir, err := os.Open(path)
	if err != nil {
		if errors.Is(err, fs.ErrPermission) {
			return nil // it may be written to but not read
		}
		return err
	}
	defer dir.Close()
	if err := dir.Sync(); err != nil && !errors.Is(err, unix.EINVAL) {
		return err
	}
	return nil
}
