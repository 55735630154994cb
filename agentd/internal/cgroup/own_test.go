package cgroup

import (
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/dormouse-run/dormouse/pkg/errs"
)

// TestOwnGroup: a process of its own protects itself, and leaves nothing behind. It is this test's program once more, so that the tests' own
// process stays where it is.
func TestOwnGroup(t *testing.T) {
	if path := os.Getenv("DORMOUSE_TEST_OWN_GROUP"); path != "" {
		m, err := Open(Options{Parent: "/dormouse-cgroup-test/node"})
		must(t, err)
		before, err := os.ReadFile("/proc/self/cgroup")
		must(t, err)
		own, err := m.Protect(path, 64<<20)
		must(t, err)
		file := "memory.soft_limit_in_bytes"
		if m.V2Only() {
			file = "memory.low"
		}
		if got := number(own.Path(), file); got != 64<<20 {
			t.Errorf("%s is %d", file, got)
		}
		procs, err := os.ReadFile(filepath.Join(own.Path(), "cgroup.procs"))
		must(t, err)
		if !strings.Contains("\n"+string(procs), "\n"+strconv.Itoa(os.Getpid())+"\n") {
			t.Errorf("the group has %q", procs)
		}
		must(t, own.Leave())
		must(t, own.Leave())
		after, err := os.ReadFile("/proc/self/cgroup")
		must(t, err)
		if string(before) != string(after) {
			t.Errorf("left in %s, was in %s", after, before)
		}
		if _, err := os.Stat(own.Path()); own.Path() != own.from && err == nil {
			t.Error("the group is left")
		}
		return
	}
	self, err := os.Executable()
	must(t, err)
	cmd := exec.CommandContext(t.Context(), self, "-test.run=^TestOwnGroup$")
	cmd.Env = append(os.Environ(), "DORMOUSE_TEST_OWN_GROUP=/dormouse-own-"+strconv.Itoa(os.Getpid())+"/node")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
}

// The files of v2, on a tree that stands for its mount.
func TestOwnGroupV2(t *testing.T) {
	for name, at := range map[string]string{"root": "/", "unit": "/system.slice/agentd.service"} {
		t.Run(name, func(t *testing.T) {
			root, etc := t.TempDir(), t.TempDir()
			put := func(path, text string) {
				t.Helper()
				must(t, os.MkdirAll(filepath.Dir(path), 0o755))
				must(t, os.WriteFile(path, []byte(text), 0o600))
			}
			put(filepath.Join(etc, "mountinfo"), "30 1 0:26 / "+root+" rw - cgroup2 cgroup2 rw\n")
			put(filepath.Join(etc, "self"), "0::"+at+"\n")
			for _, dir := range []string{"", "dormouse-agentd", "dormouse-agentd/n1", at} {
				for _, file := range []string{"cgroup.procs", "cgroup.subtree_control", "memory.low"} {
					put(filepath.Join(root, dir, file), "")
				}
			}
			m, err := Open(Options{Parent: "/dormouse/n1", Mountinfo: filepath.Join(etc, "mountinfo"), Self: filepath.Join(etc, "self")})
			must(t, err)
			own, err := m.Protect("/dormouse-agentd/n1", 1000)
			must(t, err)
			want := filepath.Join(root, "dormouse-agentd/n1")
			if name == "unit" {
				want = filepath.Join(root, at)
			}
			procs, err := os.ReadFile(filepath.Join(want, "cgroup.procs"))
			must(t, err)
			if own.Path() != want || number(want, "memory.low") != 1000 || (string(procs) == strconv.Itoa(os.Getpid())) != (name == "root") {
				t.Errorf("%s: low %d, %q", own.Path(), number(want, "memory.low"), procs)
			}
			// Who has more keeps it.
			put(filepath.Join(want, "memory.low"), "5000")
			put(filepath.Join(etc, "self"), "0::"+strings.TrimPrefix(want, root)+"\n")
			_, err = m.Protect("/dormouse-agentd/n1", 2000)
			must(t, err)
			if got := number(want, "memory.low"); got != 5000 {
				t.Errorf("low is %d", got)
			}
		})
	}
	m := newManager(t)
	for _, bad := range []string{"", "/", "x", "/a/../b"} {
		if _, err := m.Protect(bad, 1); !errs.Has(err, errs.InvalidField) {
			t.Errorf("%q: %v", bad, err)
		}
	}
}
