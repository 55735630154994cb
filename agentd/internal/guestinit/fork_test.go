package guestinit

import (
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
)

// forked runs a line of sh, with descriptors of its own, and gives its output and how it ended.
func forked(t *testing.T, dir, line string) (string, syscall.WaitStatus) {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	pid, err := fork("/bin/sh", []string{"sh", "-c", line}, &syscall.ProcAttr{
		Dir: dir, Env: []string{"WORD=heard"}, Files: []uintptr{null.Fd(), w.Fd(), w.Fd()}, Sys: &syscall.SysProcAttr{Setsid: true},
	})
	_ = w.Close()
	if err != nil {
		t.Fatal(err)
	}
	out := make([]byte, 64<<10)
	n := 0
	for {
		m, err := r.Read(out[n:])
		if n += m; err != nil {
			break
		}
	}
	return string(out[:n]), ended(t, pid)
}

func ended(t *testing.T, pid int) (status syscall.WaitStatus) {
	t.Helper()
	for {
		if _, err := syscall.Wait4(pid, &status, 0, nil); !errors.Is(err, syscall.EINTR) {
			if err != nil {
				t.Fatal(err)
			}
			return status
		}
	}
}

// TestForkedProcess: what a program gets is what it was to get, and nothing of init's.
func TestForkedProcess(t *testing.T) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	for range 50 { // each with the memory of a parent that runs
		out, status := forked(t, dir, `pwd; echo $WORD; set -- $(cat /proc/$$/stat); echo $1 $6; exit 7`)
		lines := strings.Fields(out)
		if len(lines) != 4 || lines[0] != dir || lines[1] != "heard" || lines[2] != lines[3] || status.ExitStatus() != 7 {
			t.Fatalf("got %q, %v", out, status)
		}
	}
	// The signals' actions are the default ones, but for what this test was started without, as with nohup; cat has none of its own.
	out, _ := forked(t, dir, `exec cat /proc/self/status`)
	own, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	inherited := signals(t, string(own), "SigIgn")
	for _, set := range []string{"SigBlk", "SigIgn", "SigCgt"} {
		if got := signals(t, out, set); got&^inherited != 0 {
			t.Fatalf("%s is %x in %s", set, got, out)
		}
	}
}

// signals gives a set of signals of a process's status, without the two that belong to C libraries: what was started
// by posix_spawn, as make does, has them ignored, and so has all that descends from it.
func signals(t *testing.T, status, set string) uint64 {
	t.Helper()
	const libraries = 1<<(32-1) | 1<<(33-1)
	_, rest, found := strings.Cut(status, set+":\t")
	line, _, _ := strings.Cut(rest, "\n")
	mask, err := strconv.ParseUint(line, 16, 64)
	if !found || err != nil {
		t.Fatalf("no %s in %s: %v", set, status, err)
	}
	return mask &^ libraries
}

// TestForkFails: the error is that of the call that failed, and no child is left.
func TestForkFails(t *testing.T) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	dir := t.TempDir()
	garbage := filepath.Join(dir, "garbage")
	if err := os.WriteFile(garbage, []byte("no program\x00"), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		file, dir string
		want      syscall.Errno
	}{
		{filepath.Join(dir, "absent"), "/", syscall.ENOENT}, {garbage, "/", syscall.ENOEXEC}, {dir, "/", syscall.EACCES},
		{"/bin/sh", filepath.Join(dir, "absent"), syscall.ENOENT}, {"/bin/sh", garbage, syscall.ENOTDIR},
	} {
		fd := null.Fd()
		pid, err := fork(tc.file, []string{"x"}, &syscall.ProcAttr{Dir: tc.dir, Files: []uintptr{fd, fd, fd}, Sys: &syscall.SysProcAttr{Setsid: true}})
		if !errors.Is(err, tc.want) || pid != 0 {
			t.Errorf("%s in %s: %d, %v, want %v", tc.file, tc.dir, pid, err, tc.want)
		}
	}
	var status syscall.WaitStatus
	if pid, err := syscall.Wait4(-1, &status, syscall.WNOHANG, nil); pid > 0 || !errors.Is(err, syscall.ECHILD) {
		t.Errorf("a child is left: %d, %v", pid, err)
	}
}

// TestRememberedFile: it is not read again while it is the same, and read when it is another or has just changed.
func TestRememberedFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	later := func() int64 { return wallClock() + 2*settled }
	write := func(content string) {
		t.Helper()
		if err := os.WriteFile(path+".new", []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(path+".new", path); err != nil {
			t.Fatal(err)
		}
	}
	var r remembered
	if got := r.read(path, 100, later); got != nil {
		t.Fatalf("an absent file has %q", got)
	}
	write("one")
	before := func() int64 { return wallClock() - settled }
	if got := r.read(path, 100, before); string(got) != "one" || r.content != nil {
		t.Fatalf("got %q; of a file that may change within its clock's tick %q is kept", got, r.content)
	}
	if got := r.read(path, 100, later); string(got) != "one" {
		t.Fatalf("got %q", got)
	}
	copy(r.content, "was")
	if got := r.read(path, 100, later); string(got) != "was" {
		t.Fatalf("it was read again: %q", got)
	}
	write("two")
	if got := r.read(path, 100, later); string(got) != "two" {
		t.Fatalf("the new file was not seen: %q", got)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if got := r.read(path, 100, later); got != nil {
		t.Fatalf("a file that is gone has %q", got)
	}
	write(strings.Repeat("x", rememberMost+1))
	if got := r.read(path, 1<<20, later); len(got) != rememberMost+1 || r.content != nil {
		t.Fatalf("%d bytes, of which %d are kept", len(got), len(r.content))
	}
}
