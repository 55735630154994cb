// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package volumes

import (
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
