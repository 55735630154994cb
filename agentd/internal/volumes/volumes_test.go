// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package volumes

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/dormouse-run/dormouse/pkg/durable"
	"github.com/dormouse-run/dormouse/pkg/errs"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var ctx = context.Background()

func open(t *testing.T, root string) *Store {
	t.Helper()
	s, err := New(Config{Root: root})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// told is what an error says to its reader.
type told struct {
	Message string
	Details map[string]string
}

func wants(t *testing.T, err error, reason errs.Reason) told {
	t.Helper()
	if !errs.Has(err, reason) {
		t.Fatalf("got %v, want %s", err, reason)
	}
	e := errs.From(err)
	return told{e.Message, e.Details}
}

func TestCreateIsIdempotentByUID(t *testing.T) {
	s := open(t, t.TempDir())
	v, err := s.Create(ctx, "v1", Options{Mode: 0o1777, UID: 1000, GID: 100})
	must(t, err)
	var st unix.Stat_t
	must(t, unix.Stat(v.Path, &st))
	if st.Mode != unix.S_IFDIR|0o1777 || st.Uid != 1000 || st.Gid != 100 {
		t.Errorf("%o %d:%d", st.Mode, st.Uid, st.Gid)
	}
	must(t, os.WriteFile(filepath.Join(v.Path, "f"), []byte("kept"), 0o600))
	again, err := s.Create(ctx, "v1", Options{Mode: 0o1777, UID: 1000, GID: 100})
	must(t, err)
	if data, err := os.ReadFile(filepath.Join(again.Path, "f")); err != nil || string(data) != "kept" || !again.Created.Equal(v.Created) {
		t.Errorf("%q %v %+v", data, err, again)
	}
	_, err = s.Create(ctx, "v1", Options{})
	wants(t, err, errs.OperationBodyMismatch)
	_, err = s.Clone(ctx, "v1", "v1", Options{})
	wants(t, err, errs.InvalidField)
	list, err := s.List(ctx)
	if err != nil || len(list) != 1 || list[0].UID != "v1" {
		t.Errorf("%+v %v", list, err)
	}
	if st, err := os.Stat(s.root); err != nil || st.Mode().Perm() != 0o700 {
		t.Errorf("%v %v", st.Mode(), err)
	}
	if _, err := New(Config{Root: s.root}); err == nil {
		t.Error("a second process may use the root")
	}
}

func TestBadInput_VolumeNames(t *testing.T) {
	s := open(t, t.TempDir())
	for _, bad := range []string{"", ".", "..", "../x", "a/b", ".x", strings.Repeat("x", 129), "a\x00"} {
		_, err := s.Create(ctx, bad, Options{})
		wants(t, err, errs.InvalidField)
		_, err = s.Attach(ctx, "v", bad, false)
		wants(t, err, errs.InvalidField)
		wants(t, s.Delete(ctx, bad), errs.InvalidField)
		wants(t, s.Detach(ctx, bad, "h"), errs.InvalidField)
	}
	_, err := s.Create(ctx, "v", Options{SizeLimit: -1})
	wants(t, err, errs.InvalidField)
	_, err = s.Get(ctx, "nothing")
	wants(t, err, errs.ObjectNotFound)
	_, err = s.Clone(ctx, "nothing", "v", Options{})
	wants(t, err, errs.ObjectNotFound)
	if left, err := os.ReadDir(s.dir("staging")); err != nil || len(left) != 0 {
		t.Errorf("staging: %v %v", left, err)
	}
}

func TestBadInput_SizeLimitIsEnforcedOrRefused(t *testing.T) {
	s := open(t, t.TempDir())
	if s.EnforcesLimits() {
		t.Log("the file system here enforces project quota: trying it")
		v, err := s.Create(ctx, "limited", Options{SizeLimit: 1 << 20})
		must(t, err)
		if err := os.WriteFile(filepath.Join(v.Path, "big"), make([]byte, 2<<20), 0o600); !errors.Is(err, unix.EDQUOT) && !errors.Is(err, unix.ENOSPC) {
			t.Errorf("2 MiB fit into 1: %v", err)
		}
		return
	}
	_, err := s.Create(ctx, "limited", Options{SizeLimit: 1 << 20})
	if e := wants(t, err, errs.NotSupported); !strings.Contains(e.Message, "prjquota") {
		t.Errorf("it does not say what to do: %v", e)
	}
	if _, err := os.Stat(s.home("limited")); !errors.Is(err, fs.ErrNotExist) {
		t.Error("left behind")
	}
}

// fakeQuota stands for a file system with project quota: it notes what it was told.
type fakeQuota struct {
	limits map[uint32]int64
	empty  bool
	full   bool
}

func (f *fakeQuota) limit(dir string, project uint32, bytes int64) error {
	left, err := os.ReadDir(dir)
	f.empty = err == nil && len(left) == 0
	if f.full {
		return unix.EDQUOT
	}
	f.limits[project] = bytes
	return err
}

func (f *fakeQuota) clear(_ string, project uint32) error {
	delete(f.limits, project)
	return nil
}

func TestSizeLimitIsSetBeforeThereIsContentAndForgottenWithTheVolume(t *testing.T) {
	root := t.TempDir()
	s := open(t, root)
	q := &fakeQuota{limits: map[uint32]int64{}}
	s.quota = q
	src, err := s.Create(ctx, "src", Options{})
	must(t, err)
	must(t, os.WriteFile(filepath.Join(src.Path, "f"), []byte("x"), 0o600))
	_, err = s.Clone(ctx, "src", "a", Options{SizeLimit: 4096})
	must(t, err)
	_, err = s.Create(ctx, "b", Options{SizeLimit: 8192})
	must(t, err)
	if len(q.limits) != 2 || !q.empty || q.limits[firstProject+1] != 4096 || q.limits[firstProject+2] != 8192 {
		t.Errorf("%+v", q)
	}
	must(t, s.Delete(ctx, "a"))
	if len(q.limits) != 1 {
		t.Errorf("%+v", q)
	}
	// Ids are not given twice, also after a restart.
	s.Close()
	s = open(t, root)
	s.quota = q
	_, err = s.Create(ctx, "c", Options{SizeLimit: 1})
	must(t, err)
	if q.limits[firstProject+3] != 1 {
		t.Errorf("%+v", q)
	}
	q.full = true
	_, err = s.Clone(ctx, "src", "d", Options{SizeLimit: 1})
	wants(t, err, errs.DiskFull)
}

func TestAttachIsExclusiveOrShared(t *testing.T) {
	root := t.TempDir()
	s := open(t, root)
	_, err := s.Create(ctx, "v", Options{})
	must(t, err)
	for range 2 {
		v, err := s.Attach(ctx, "v", "sandbox-1", false)
		if err != nil || v.Path == "" {
			t.Fatalf("%+v %v", v, err)
		}
	}
	for _, readOnly := range []bool{true, false} {
		_, err = s.Attach(ctx, "v", "sandbox-2", readOnly)
		if e := wants(t, err, errs.AlreadyAttached); e.Details["holder"] != "sandbox-1" || e.Details["volume"] != "v" {
			t.Errorf("%v", e.Details)
		}
	}
	e := wants(t, s.Delete(ctx, "v"), errs.StillReferenced)
	if e.Details["references"] != "sandbox-1" {
		t.Errorf("%v", e.Details)
	}
	// It outlives the process.
	s.Close()
	s = open(t, root)
	_, err = s.Recover(ctx)
	must(t, err)
	all, err := s.Attachments(ctx)
	if err != nil || len(all["v"]) != 1 || all["v"][0].Name != "sandbox-1" || all["v"][0].ReadOnly {
		t.Errorf("%+v %v", all, err)
	}
	for range 2 {
		must(t, s.Detach(ctx, "v", "sandbox-1"))
	}
	for _, h := range []string{"sandbox-2", "sandbox-3"} {
		_, err = s.Attach(ctx, "v", h, true)
		must(t, err)
	}
	_, err = s.Attach(ctx, "v", "sandbox-2", false)
	wants(t, err, errs.AlreadyAttached)
	held, err := s.Holders(ctx, "v")
	if err != nil || len(held) != 2 {
		t.Errorf("%+v %v", held, err)
	}
	must(t, s.Detach(ctx, "v", "sandbox-2"))
	must(t, s.Detach(ctx, "v", "sandbox-3"))
	must(t, s.Delete(ctx, "v"))
	must(t, s.Delete(ctx, "v"))
	must(t, s.Detach(ctx, "v", "sandbox-3"))
	_, err = s.Attach(ctx, "v", "sandbox-1", false)
	wants(t, err, errs.ObjectNotFound)
}

func TestOneOfManyWinsTheAttachment(t *testing.T) {
	s := open(t, t.TempDir())
	_, err := s.Create(ctx, "v", Options{})
	must(t, err)
	var won atomic.Int32
	var wg sync.WaitGroup
	for i := range 32 {
		wg.Go(func() {
			_, err := s.Attach(ctx, "v", fmt.Sprint("sandbox-", i), false)
			if err == nil {
				won.Add(1)
			} else if !errs.Has(err, errs.AlreadyAttached) {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if won.Load() != 1 {
		t.Errorf("%d won", won.Load())
	}
}

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

func TestCrashPoints(t *testing.T) {
	root := t.TempDir()
	s := open(t, root)
	for _, uid := range []string{"kept", "deleted"} {
		v, err := s.Create(ctx, uid, Options{})
		must(t, err)
		fillVolume(t, v.Path)
	}
	want := look(t, filepath.Join(s.home("kept"), "data"))
	// In Clone, before the rename.
	m := meta{Version: metaVersion, Volume: Volume{UID: "half", Source: "kept"}}
	stop := errors.New("killed here")
	if err := s.build(ctx, s.stagingOf("half"), &m, func(ctx context.Context, data string) error {
		must(t, copyTree(ctx, filepath.Join(s.home("kept"), "data"), data))
		return stop
	}); !errors.Is(err, stop) {
		t.Fatal(err)
	}
	// In Delete, after the rename.
	_, err := s.discard("deleted")
	must(t, err)
	// In Attach, before the rename.
	must(t, os.WriteFile(filepath.Join(s.attachments("kept"), durable.Unfinished+"1"), nil, 0o600))
	// Someone removed a record.
	_, err = s.Create(ctx, "broken", Options{})
	must(t, err)
	must(t, os.Remove(filepath.Join(s.home("broken"), "meta.json")))
	s.Close()

	s = open(t, root)
	rep, err := s.Recover(ctx)
	must(t, err)
	if !slices.Equal(rep.Unfinished, []string{"half"}) || rep.Trash != 1 || !slices.Equal(rep.Damaged, []string{"broken"}) {
		t.Errorf("%+v", rep)
	}
	list, err := s.List(ctx)
	if err != nil || len(list) != 1 || list[0].UID != "kept" {
		t.Errorf("%+v %v", list, err)
	}
	if d := cmp.Diff(want, look(t, list[0].Path)); d != "" {
		t.Errorf("the volume changed: %.1000s", d)
	}
	held, err := s.Holders(ctx, "kept")
	if err != nil || len(held) != 0 {
		t.Errorf("%+v %v", held, err)
	}
	_, err = s.Attach(ctx, "broken", "sandbox", false)
	wants(t, err, errs.StateDamaged)
	_, err = s.Create(ctx, "broken", Options{})
	wants(t, err, errs.StateDamaged) // its data is not overwritten
	must(t, s.Delete(ctx, "broken"))
	_, err = s.Clone(ctx, "kept", "half", Options{})
	must(t, err)
	if rep, err := s.Recover(ctx); err != nil || rep.Trash+len(rep.Unfinished)+len(rep.Damaged) != 0 {
		t.Errorf("%+v %v", rep, err)
	}
}

func TestDiskFullLeavesNothing(t *testing.T) {
	root := t.TempDir()
	must(t, unix.Mount("tmpfs", root, "tmpfs", 0, "size=4m"))
	t.Cleanup(func() { must(t, unix.Unmount(root, 0)) })
	s, err := New(Config{Root: root})
	must(t, err)
	defer s.Close()
	src, err := s.Create(ctx, "src", Options{})
	must(t, err)
	must(t, os.WriteFile(filepath.Join(src.Path, "big"), make([]byte, 3<<20), 0o600))
	_, err = s.Clone(ctx, "src", "dst", Options{})
	wants(t, err, errs.DiskFull)
	if left, err := os.ReadDir(s.dir("staging")); err != nil || len(left) != 0 {
		t.Errorf("staging: %v %v", left, err)
	}
	must(t, s.Delete(ctx, "src"))
}

func TestDeleteWaitsForNoCloneButIsRefused(t *testing.T) {
	s := open(t, t.TempDir())
	_, err := s.Create(ctx, "src", Options{})
	must(t, err)
	done, err := s.pin(ctx, "src")
	must(t, err)
	e := wants(t, s.Delete(ctx, "src"), errs.StillReferenced)
	if e.Details["references"] != "a clone in progress" {
		t.Errorf("%v", e.Details)
	}
	done()
	must(t, s.Delete(ctx, "src"))
}
