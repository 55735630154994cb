package runsc

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dormouse-run/dormouse/agentd/internal/cgroup"
	"github.com/dormouse-run/dormouse/agentd/internal/launcher"
	"github.com/dormouse-run/dormouse/agentd/internal/network"
	"github.com/dormouse-run/dormouse/agentd/internal/ocispec"
	"github.com/dormouse-run/dormouse/agentd/internal/runtime"
	"github.com/dormouse-run/dormouse/agentd/internal/runtime/runtimetest"
	"github.com/dormouse-run/dormouse/test/tools"
)

// guestScript stands for guest init. It answers a word with a line, as the same process for good.
const guestScript = `#!/bin/sh
nonce=$(head -c8 /dev/urandom | od -An -tx8 | tr -d ' ')
n=0
while read -r what arg; do
	case $what in
	count) n=$((n+1)); echo "$$ $nonce $n" ;;
	exit) exit "$arg" ;;
	sh) eval "$arg" 2>&1; echo "done $?" ;;
	esac
done
`

// testEnv is one node with its own folders, groups and image.
type testEnv struct {
	dir     string
	bundle  runtime.Bundle
	init    string
	rootfs  string
	cgroups *cgroup.Manager
	pool    *network.Pool
	guests  map[string]*guest
}

// guest is the test's end of a sandbox's FIFOs.
type guest struct{ in, out *os.File }

func newEnv(t testing.TB) *testEnv {
	t.Helper()
	return newEnvOn(t, "")
}

// newEnvOn makes the environment with the hierarchies of a mount table, the machine's when it is empty.
func newEnvOn(t testing.TB, mountinfo string) *testEnv {
	t.Helper()
	dir := t.TempDir()
	cg, err := cgroup.Open(cgroup.Options{Parent: "/dormouse/" + filepath.Base(filepath.Dir(dir)) + "-" + strconv.Itoa(os.Getpid()), Mountinfo: mountinfo})
	must(t, err)
	e := &testEnv{
		dir: dir, cgroups: cg, pool: network.NewPool(network.Options{Size: 2}), guests: make(map[string]*guest),
		bundle: runtime.Bundle{Digest: "sha256:test", Dir: filepath.Join(dir, "bundle")},
		init:   filepath.Join(dir, "init.erofs"), rootfs: filepath.Join(dir, "root.erofs"),
	}
	t.Cleanup(func() {
		if err := e.pool.Close(); err != nil {
			t.Error(err)
		}
		if err := e.cgroups.RemoveParent(); err != nil {
			t.Error(err)
		}
	})
	must(t, os.Mkdir(e.bundle.Dir, 0o755))
	must(t, os.Symlink(tools.Path(t, "runsc"), filepath.Join(e.bundle.Dir, "runsc")))
	busybox, err := os.ReadFile(tools.Path(t, "busybox"))
	must(t, err)
	root := filepath.Join(dir, "root")
	for _, d := range []string{"bin", "tmp", "etc", "proc", "sys", "dev"} {
		must(t, os.MkdirAll(filepath.Join(root, d), 0o755))
	}
	must(t, os.Chmod(filepath.Join(root, "tmp"), 0o1777))
	must(t, os.WriteFile(filepath.Join(root, "bin/busybox"), busybox, 0o755))
	for _, name := range strings.Fields("sh head od tr cat ls df dd rm mkdir id hostname nc sleep stat grep mv mkfifo") {
		must(t, os.Symlink("busybox", filepath.Join(root, "bin", name)))
	}
	mkErofs(t, e.rootfs, root)
	initDir := filepath.Join(dir, "init")
	must(t, os.Mkdir(initDir, 0o755))
	must(t, os.WriteFile(filepath.Join(initDir, "guestinit"), []byte(guestScript), 0o755))
	mkErofs(t, e.init, initDir)
	return e
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func mkErofs(t testing.TB, file, dir string) {
	t.Helper()
	cmd := exec.Command(tools.Path(t, "mkfs.erofs"), "--quiet", "-b4096", "-U", "clear", "-Enoinline_data", "-T0", "--mkfs-time", file, dir)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("mkfs.erofs: %v: %s", err, out)
	}
}

func (e *testEnv) open(t testing.TB) *Driver {
	t.Helper()
	l, err := launcher.New(launcher.Options{})
	must(t, err)
	t.Cleanup(func() { _ = l.Close() })
	d, err := New(Options{Root: filepath.Join(e.dir, "runtime"), Launcher: l, Cgroups: e.cgroups})
	must(t, err)
	return d
}

// sandboxDir prepares the folder, FIFOs and network of one run.
func (e *testEnv) sandboxDir(t testing.TB, id string) (dir string, stdio runtime.Stdio, netns string) {
	t.Helper()
	dir = filepath.Join(e.dir, "sandboxes", id)
	must(t, os.MkdirAll(dir, 0o700))
	stdio, err := runtime.MakeFIFOs(dir)
	must(t, err)
	lease, err := e.pool.Acquire(t.Context(), id, network.ModeNone)
	must(t, err)
	g := &guest{in: openFIFO(t, stdio.In), out: openFIFO(t, stdio.Out)}
	e.guests[id] = g
	t.Cleanup(func() {
		_ = lease.Release()
		_ = g.in.Close()
		_ = g.out.Close()
	})
	return dir, stdio, lease.Path()
}

func openFIFO(t testing.TB, path string) *os.File {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR|unix.O_NONBLOCK, 0)
	must(t, err)
	return f
}

// describe is the sandbox of the tests.
func (e *testEnv) describe(netns string) ocispec.Sandbox {
	return ocispec.Sandbox{
		Hostname: "source", Rootfs: e.rootfs, Init: e.init, NetNS: netns,
		MemoryBytes: 128 << 20, LayerBytes: 8 << 20, CPUMillis: 2000,
	}
}

func (e *testEnv) config(t testing.TB, id string, change func(*ocispec.Sandbox)) runtime.Config {
	t.Helper()
	dir, stdio, netns := e.sandboxDir(t, id)
	desc := e.describe(netns)
	if change != nil {
		change(&desc)
	}
	spec, err := ocispec.New(desc)
	must(t, err)
	return runtime.Config{ID: id, Dir: dir, Spec: spec, Bundle: e.bundle, Flags: DefaultFlags(), Stdio: stdio, Cgroup: e.cgroups.Path(id)}
}

func (e *testEnv) restoreConfig(t testing.TB, id string, from runtime.Config, volumes map[string]string) runtime.Config {
	t.Helper()
	dir, stdio, netns := e.sandboxDir(t, id)
	spec, err := ocispec.ForRestore(from.Spec, ocispec.Bindings{Hostname: "fork", NetNS: netns, Init: e.init, Volumes: volumes})
	must(t, err)
	return runtime.Config{ID: id, Dir: dir, Spec: spec, Bundle: e.bundle, Flags: from.Flags, Stdio: stdio, Cgroup: e.cgroups.Path(id)}
}

// ask sends a line to the guest and reads until the answer has the ending.
func (e *testEnv) ask(t testing.TB, id, line, ending string) string {
	t.Helper()
	g := e.guests[id]
	if _, err := g.in.WriteString(line + "\n"); err != nil {
		t.Fatal(err)
	}
	must(t, g.out.SetReadDeadline(time.Now().Add(2*time.Minute)))
	var said bytes.Buffer
	buf := make([]byte, 4096)
	for !strings.Contains(said.String(), ending) || !strings.HasSuffix(said.String(), "\n") {
		n, err := g.out.Read(buf)
		if err != nil {
			t.Fatalf("no answer to %q but %q: %v", line, said.String(), err)
		}
		said.Write(buf[:n])
	}
	return said.String()
}

// sh runs a shell line in the guest and gives its output and status.
func (e *testEnv) sh(t testing.TB, id, line string) (string, int) {
	t.Helper()
	said := e.ask(t, id, "sh "+line, "done ")
	out, code, _ := strings.Cut(said, "done ")
	n, err := strconv.Atoi(strings.TrimSpace(code))
	if err != nil {
		t.Fatalf("answer %q: %v", said, err)
	}
	return out, n
}

func (e *testEnv) count(t testing.TB, id string) runtimetest.Guest {
	t.Helper()
	var g runtimetest.Guest
	said := e.ask(t, id, "count", "\n")
	if _, err := fmt.Sscan(said, &g.Pid, &g.Nonce, &g.Counter); err != nil {
		t.Fatalf("answer %q: %v", said, err)
	}
	return g
}

// leftovers names processes, groups, mounts and files of the runtime under the test's folder.
func (e *testEnv) leftovers(t testing.TB) []string {
	t.Helper()
	var left []string
	ids, err := e.cgroups.List()
	must(t, err)
	for _, id := range ids {
		left = append(left, "group "+id)
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	must(t, err)
	for line := range strings.Lines(string(mounts)) {
		if strings.Contains(line, e.dir) {
			left = append(left, "mount "+line)
		}
	}
	cmdlines, err := filepath.Glob("/proc/[0-9]*/cmdline")
	must(t, err)
	for _, path := range cmdlines {
		// A process that ends meanwhile has no command line any more.
		if data, err := os.ReadFile(path); err == nil && bytes.Contains(data, []byte(e.dir+"/runtime/state")) {
			left = append(left, "process "+path+" "+string(bytes.ReplaceAll(data, []byte{0}, []byte{' '})))
		}
	}
	left = append(left, zombies(t)...)
	for _, dir := range []string{"state", "launch"} {
		entries, err := os.ReadDir(filepath.Join(e.dir, "runtime", dir))
		must(t, err)
		for _, entry := range entries {
			if !strings.HasPrefix(entry.Name(), sparePrefix) {
				left = append(left, dir+"/"+entry.Name())
			}
		}
	}
	return left
}

// zombies names this process's children that have ended and that nobody reaped.
func zombies(t testing.TB) []string {
	t.Helper()
	stats, err := filepath.Glob("/proc/[0-9]*/stat")
	must(t, err)
	var left []string
	for _, path := range stats {
		data, err := os.ReadFile(path)
		if err != nil {
			continue // it is gone
		}
		_, rest, _ := strings.Cut(string(data), ") ")
		if strings.HasPrefix(rest, "Z "+strconv.Itoa(os.Getpid())+" ") {
			left = append(left, "zombie "+string(data))
		}
	}
	return left
}

func bounded(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// deleteAtEnd deletes the sandbox when the test ends, also when it failed, with the driver that is open then.
func (n *node) deleteAtEnd(t *testing.T, id string) {
	t.Helper()
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 3*time.Minute)
		defer cancel()
		if err := n.d.Delete(ctx, id); err != nil {
			t.Error(err)
		}
	})
}
