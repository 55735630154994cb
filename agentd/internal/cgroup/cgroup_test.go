package cgroup

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/dormouse-run/dormouse/pkg/errs"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func ptr[T any](v T) *T { return &v }

var limits = &specs.LinuxResources{
	Memory: &specs.LinuxMemory{Limit: ptr(int64(64 << 20)), Reservation: ptr(int64(16 << 20))},
	CPU:    &specs.LinuxCPU{Quota: ptr(int64(50_000)), Period: ptr(uint64(100_000)), Shares: ptr(uint64(512))},
	Pids:   &specs.LinuxPids{Limit: ptr(int64(100))},
}

// newManager works on the machine's own hierarchies, below a parent of its own.
func newManager(t *testing.T) *Manager {
	t.Helper()
	m, err := Open(Options{Parent: "/dormouse-cgroup-" + strconv.Itoa(os.Getpid()) + "/node"})
	must(t, err)
	t.Cleanup(func() { must(t, m.RemoveParent()) })
	return m
}

func TestLifecycle(t *testing.T) {
	m := newManager(t)
	g := m.Group("one")
	if _, err := g.Stats(); !errs.Has(err, errs.ObjectNotFound) {
		t.Fatalf("stats of nothing: %v", err)
	}
	for range 2 {
		must(t, g.Create(limits))
	}
	must(t, m.Group("two").Create(nil))
	must(t, m.Guarantee(16<<20))
	if dir, v1 := g.v1dir("memory"); v1 && number(dir, softLimit) != 16<<20 {
		t.Fatalf("the soft limit is %d", number(dir, softLimit))
	}
	ids, err := m.List()
	must(t, err)
	if !slices.Equal(ids, []string{"one", "two"}) {
		t.Fatalf("list %v", ids)
	}
	cmd := exec.Command("sleep", "1000")
	must(t, cmd.Start())
	for _, mount := range m.mounts() {
		must(t, write(g.dir(mount), "cgroup.procs", strconv.Itoa(cmd.Process.Pid)))
	}
	pids, err := g.Pids()
	must(t, err)
	if !slices.Equal(pids, []int{cmd.Process.Pid}) {
		t.Fatalf("pids %v, want %d", pids, cmd.Process.Pid)
	}
	s, err := g.Stats()
	must(t, err)
	if s.MemoryLimitBytes != 64<<20 || s.Pids != 1 || s.OOMKills != 0 {
		t.Fatalf("stats %+v", s)
	}
	ctx := context.WithoutCancel(t.Context())
	for range 2 {
		must(t, g.Remove(ctx))
		must(t, m.Group("two").Remove(ctx))
	}
	if g.Exists() {
		t.Fatal("the group is still there")
	}
	_ = cmd.Wait() // killed, and perhaps reaped by Remove
	if cmd.ProcessState != nil && cmd.ProcessState.Success() {
		t.Fatal("the process ended by itself")
	}
}

func TestOutOfMemoryIsCounted(t *testing.T) {
	m := newManager(t)
	g := m.Group("oom")
	must(t, g.Create(&specs.LinuxResources{Memory: &specs.LinuxMemory{Limit: ptr(int64(8 << 20))}}))
	t.Cleanup(func() { must(t, g.Remove(context.WithoutCancel(t.Context()))) })
	cmd := exec.Command("sh", "-c", "read x; exec dd if=/dev/zero of=/dev/null bs=100M count=1")
	in, err := cmd.StdinPipe()
	must(t, err)
	must(t, cmd.Start())
	for _, mount := range m.mounts() {
		must(t, write(g.dir(mount), "cgroup.procs", strconv.Itoa(cmd.Process.Pid)))
	}
	_, err = in.Write([]byte("\n"))
	must(t, err)
	if err := cmd.Wait(); err == nil {
		t.Fatal("the process lived past its limit")
	}
	s, err := g.Stats()
	must(t, err)
	if s.OOMKills == 0 {
		t.Fatalf("stats %+v, want a kill", s)
	}
}

// The files of v2, on a tree that stands for its mount.
func TestV2Files(t *testing.T) {
	root := t.TempDir()
	mountinfo := filepath.Join(t.TempDir(), "mountinfo")
	must(t, os.WriteFile(mountinfo, []byte("30 1 0:26 / "+root+" rw - cgroup2 cgroup2 rw\n"), 0o600))
	m, err := Open(Options{Parent: "/dormouse/node", Mountinfo: mountinfo})
	must(t, err)
	g := m.Group("one")
	put := func(dir, file, value string) {
		must(t, os.MkdirAll(filepath.Join(root, dir), 0o755))
		must(t, os.WriteFile(filepath.Join(root, dir, file), []byte(value), 0o600))
	}
	for _, dir := range []string{"", "dormouse", "dormouse/node"} {
		put(dir, "cgroup.controllers", "cpu io memory pids\n")
		put(dir, "cgroup.subtree_control", "")
	}
	must(t, m.Guarantee(1)) // nothing is there yet
	for _, file := range []string{low, "memory.max", "memory.swap.max", "memory.oom.group", "cpu.max", "cpu.weight", "pids.max"} {
		put("dormouse/node/one", file, "")
	}
	must(t, g.Create(limits))
	for file, want := range map[string]string{
		low: "16777216", "memory.max": "67108864", "memory.swap.max": "0", "memory.oom.group": "1", "cpu.max": "50000 100000",
		"cpu.weight": "50", "pids.max": "100", "../cgroup.subtree_control": "+cpu +memory +pids",
	} {
		got, err := os.ReadFile(filepath.Join(root, "dormouse/node/one", file))
		must(t, err)
		if string(got) != want {
			t.Errorf("%s is %q, want %q", file, got, want)
		}
	}
	for _, dir := range []string{"dormouse", "dormouse/node"} {
		put(dir, low, "0\n")
	}
	put("dormouse/other", low, "1000\n")
	is := func(dir, want string) {
		t.Helper()
		got, err := os.ReadFile(filepath.Join(root, dir, low))
		must(t, err)
		if strings.TrimSpace(string(got)) != want {
			t.Errorf("%s has %q, want %q", dir, got, want)
		}
	}
	must(t, m.Guarantee(500))
	is("dormouse/node", "500")
	is("dormouse", "1500")
	put("dormouse/node", low, "") // a file of the kernel's is written whole
	must(t, m.Guarantee(20))
	is("dormouse/node", "20")
	is("dormouse", "1500") // what others may need is not taken away
	put("dormouse", low, "max\n")
	must(t, m.Guarantee(20))
	is("dormouse", "max")
	put("dormouse/node/one", "cpu.stat", "usage_usec 1500\nuser_usec 1\n")
	put("dormouse/node/one", "memory.current", "4096\n")
	put("dormouse/node/one", "memory.events", "low 0\noom 3\noom_kill 2\n")
	s, err := g.Stats()
	must(t, err)
	if s.CPU.Microseconds() != 1500 || s.MemoryBytes != 4096 || s.OOMKills != 2 || s.MemoryLimitBytes != 64<<20 {
		t.Errorf("stats %+v", s)
	}
	put("", "cgroup.controllers", "cpu\n")
	if err := g.Create(limits); !errs.Has(err, errs.NotSupported) || !strings.Contains(err.Error(), "memory") {
		t.Errorf("a missing controller: %v", err)
	}
}

func TestRefusesPathsOfOthers(t *testing.T) {
	for _, parent := range []string{"", "/", "x", "/a/../b"} {
		if _, err := Open(Options{Parent: parent}); !errs.Has(err, errs.InvalidField) {
			t.Errorf("parent %q: %v", parent, err)
		}
	}
	m := newManager(t)
	for _, path := range []string{"/", "/other/x", m.Path("a/b"), m.Path("..")} {
		if _, err := m.At(path); !errs.Has(err, errs.InvalidField) {
			t.Errorf("path %q: %v", path, err)
		}
	}
}
