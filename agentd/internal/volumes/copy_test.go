package volumes

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/dormouse-run/dormouse/pkg/errs"
)

// fillVolume makes everything that a guest could.
func fillVolume(t *testing.T, d string) {
	t.Helper()
	p := func(n string) string { return filepath.Join(d, n) }
	must(t, os.WriteFile(p("plain"), bytes.Repeat([]byte("data "), 100_000), 0o640))
	must(t, os.WriteFile(p("setuid"), []byte("s"), 0o600))
	must(t, os.Lchown(p("setuid"), 1234, 5678))
	must(t, unix.Chmod(p("setuid"), 0o4711))
	must(t, unix.Lsetxattr(p("setuid"), "security.capability", []byte("\x01\x00\x00\x02\x00\x20\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"), 0))
	must(t, unix.Lsetxattr(p("plain"), "user.k", []byte("v\x00w"), 0))
	must(t, os.Link(p("plain"), p("same")))
	must(t, os.MkdirAll(p("a/b/c"), 0o700))
	must(t, os.Link(p("plain"), p("a/b/c/same-too")))
	must(t, os.Symlink("/etc/passwd", p("out")))
	must(t, os.Symlink("a", p("in")))
	must(t, os.Lchown(p("out"), 7, 8))
	must(t, unix.Mkfifo(p("fifo"), 0o622))
	must(t, unix.Mknod(p("dev"), unix.S_IFCHR|0o600, int(unix.Mkdev(1, 3))))
	must(t, unix.Mknod(p("sock"), unix.S_IFSOCK|0o600, 0))
	f, err := os.Create(p("sparse"))
	must(t, err)
	for _, off := range []int64{1 << 20, 32 << 20} {
		_, err := f.WriteAt([]byte("island"), off)
		must(t, err)
	}
	must(t, f.Truncate(64<<20))
	must(t, f.Close())
	must(t, os.WriteFile(p("a/"+strings.Repeat("n", 255)), nil, 0o600))
	must(t, unix.UtimesNanoAt(unix.AT_FDCWD, p("a/b"), []unix.Timespec{{Sec: 5, Nsec: 6}, {Sec: 1_500_000_000, Nsec: 123_456_789}}, 0))
	must(t, unix.Chmod(p("a"), 0o2775))
}

type entry struct {
	Mode     uint32
	UID, GID uint32
	Size     int64
	Rdev     uint64
	Mtime    int64
	Content  string
	Xattrs   map[string]string
	SameAs   string
}

func look(t *testing.T, root string) map[string]entry {
	t.Helper()
	all := map[string]entry{}
	first := map[uint64]string{}
	must(t, filepath.WalkDir(root, func(path string, _ fs.DirEntry, err error) error {
		must(t, err)
		rel, err := filepath.Rel(root, path)
		must(t, err)
		var st unix.Stat_t
		must(t, unix.Lstat(path, &st))
		e := entry{Mode: st.Mode, UID: st.Uid, GID: st.Gid, Rdev: st.Rdev, Mtime: st.Mtim.Nano(), Xattrs: map[string]string{}}
		switch st.Mode & unix.S_IFMT {
		case unix.S_IFREG:
			data, err := os.ReadFile(path)
			must(t, err)
			e.Size, e.Content = st.Size, string(bytes.TrimRight(data, "\x00"))
		case unix.S_IFLNK:
			e.Content, err = os.Readlink(path)
			must(t, err)
		}
		if st.Mode&unix.S_IFMT != unix.S_IFDIR {
			if first[st.Ino] == "" {
				first[st.Ino] = rel
			}
			e.SameAs = first[st.Ino]
		}
		for _, k := range []string{"user.k", "security.capability"} {
			buf := make([]byte, 256)
			if n, err := unix.Lgetxattr(path, k, buf); err == nil {
				e.Xattrs[k] = string(buf[:n])
			}
		}
		all[rel] = e
		return nil
	}))
	return all
}

func TestCloneIsTheSameAndApart(t *testing.T) {
	s := open(t, t.TempDir())
	src, err := s.Create(ctx, "src", Options{Mode: 0o1777, UID: 11, GID: 12})
	must(t, err)
	fillVolume(t, src.Path)
	dst, err := s.Clone(ctx, "src", "dst", Options{})
	must(t, err)
	if d := cmp.Diff(look(t, src.Path), look(t, dst.Path)); d != "" {
		t.Errorf("source (-), clone (+):\n%.3000s", d)
	}
	if tree := look(t, dst.Path); tree["setuid"].Xattrs["security.capability"] == "" || tree["a/b/c/same-too"].SameAs != "a/b/c/same-too" || tree["same"].SameAs != "a/b/c/same-too" {
		t.Errorf("%+v", tree["same"])
	}
	// The sparse file stayed sparse.
	a, err := s.Usage(ctx, "src")
	must(t, err)
	b, err := s.Usage(ctx, "dst")
	must(t, err)
	if a != b || a.Bytes > 8<<20 || a.Files != int64(len(look(t, src.Path))-3) {
		t.Errorf("%+v %+v", a, b)
	}
	must(t, os.WriteFile(filepath.Join(dst.Path, "plain"), []byte("other"), 0o600))
	if data, err := os.ReadFile(filepath.Join(src.Path, "plain")); err != nil || len(data) != 500_000 {
		t.Errorf("the source changed: %d %v", len(data), err)
	}
	again, err := s.Clone(ctx, "src", "dst", Options{})
	if err != nil || !again.Created.Equal(dst.Created) || again.Source != "src" {
		t.Errorf("%+v %v", again, err)
	}
	must(t, s.Delete(ctx, "src"))
	// The answer to the same request stays the same, whatever became of the source.
	if _, err := s.Clone(ctx, "src", "dst", Options{}); err != nil {
		t.Error(err)
	}
}

func TestCloneCancelledLeavesNothing(t *testing.T) {
	s := open(t, t.TempDir())
	src, err := s.Create(ctx, "src", Options{})
	must(t, err)
	must(t, os.WriteFile(filepath.Join(src.Path, "f"), []byte("x"), 0o600))
	why := errors.New("nobody waits")
	c, cancel := context.WithCancelCause(ctx)
	cancel(why)
	if _, err := s.Clone(c, "src", "dst", Options{}); err == nil {
		t.Fatal("cloned")
	}
	for _, d := range []string{"staging", "trash"} {
		if left, err := os.ReadDir(s.dir(d)); err != nil || len(left) != 0 {
			t.Errorf("%s: %v %v", d, left, err)
		}
	}
	_, err = s.Get(ctx, "dst")
	wants(t, err, errs.ObjectNotFound)
	must(t, s.Delete(ctx, "src"))
}

func TestCloneRefusesAMountInside(t *testing.T) {
	s := open(t, t.TempDir())
	src, err := s.Create(ctx, "src", Options{})
	must(t, err)
	at := filepath.Join(src.Path, "mnt")
	must(t, os.Mkdir(at, 0o700))
	must(t, unix.Mount("tmpfs", at, "tmpfs", 0, "size=64k"))
	defer func() { must(t, unix.Unmount(at, 0)) }()
	_, err = s.Clone(ctx, "src", "dst", Options{})
	wants(t, err, errs.InvalidField)
}
