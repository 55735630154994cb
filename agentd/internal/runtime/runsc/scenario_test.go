package runsc

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/dormouse-run/dormouse/agentd/internal/ocispec"
	"github.com/dormouse-run/dormouse/agentd/internal/runtime"
	"github.com/dormouse-run/dormouse/agentd/internal/runtime/runtimetest"
	"github.com/dormouse-run/dormouse/pkg/errs"
)

// node is an environment with one open driver.
type node struct {
	*testEnv
	d *Driver
}

func newNode(t *testing.T) *node {
	t.Helper()
	e := newEnv(t)
	n := &node{testEnv: e, d: e.open(t)}
	t.Cleanup(func() {
		must(t, n.d.Close())
		if left := e.leftovers(t); len(left) > 0 {
			t.Errorf("left behind: %v", left)
		}
	})
	return n
}

func (n *node) start(t *testing.T, change func(*ocispec.Sandbox)) runtime.Config {
	t.Helper()
	cfg := n.config(t, runtimetest.NewID(t), change)
	n.deleteAtEnd(t, cfg.ID)
	_, err := n.d.Start(bounded(t), cfg)
	must(t, err)
	return cfg
}

func (n *node) save(t *testing.T, id string, direct bool) string {
	t.Helper()
	dir := t.TempDir()
	must(t, n.d.Pause(bounded(t), id))
	must(t, n.d.Save(bounded(t), id, runtime.SaveOptions{Dir: dir, Direct: direct}))
	must(t, n.d.Resume(bounded(t), id))
	return dir
}

func (n *node) restore(t *testing.T, from runtime.Config, dir string, volumes map[string]string) (runtime.Config, error) {
	t.Helper()
	cfg := n.restoreConfig(t, runtimetest.NewID(t), from, volumes)
	n.deleteAtEnd(t, cfg.ID)
	_, err := n.d.Restore(bounded(t), cfg, runtime.Image{Dir: dir, Direct: true})
	return cfg, err
}

func (n *node) mustSh(t *testing.T, id, line string) string {
	t.Helper()
	out, code := n.sh(t, id, line)
	if code != 0 {
		t.Fatalf("%q ended with %d: %s", line, code, out)
	}
	return out
}

// The bundle's main of runsc gives back what a save left in its heap when the driver asks for it, and works on.
func TestTrimGivesBackWhatASaveLeft(t *testing.T) {
	n := newNode(t)
	memory := func(id string) uint64 {
		stats, err := n.d.Stats(bounded(t), id)
		must(t, err)
		return stats.MemoryBytes
	}
	first := n.start(t, nil)
	cfg, err := n.restore(t, first, n.save(t, first.ID, true), nil)
	must(t, err)
	must(t, n.d.Trim(cfg.ID)) // what the restore left, which it would trim later by itself
	for range 3 {
		// Each save leaves more than a trim is made for; some may have a collection of their own.
		n.save(t, cfg.ID, true)
		before := memory(cfg.ID)
		must(t, n.d.Trim(cfg.ID))
		for deadline := time.Now().Add(20 * time.Second); time.Now().Before(deadline); <-time.After(20 * time.Millisecond) {
			if memory(cfg.ID) < before-1<<20 {
				n.mustSh(t, cfg.ID, "true")
				return
			}
		}
	}
	t.Error("no trim gave back 1 MiB of what a save left")
}

func TestTrimOfNothing(t *testing.T) {
	n := newNode(t)
	if err := n.d.Trim(runtimetest.NewID(t)); !errs.Has(err, errs.ObjectNotFound) {
		t.Errorf("Trim of an unknown sandbox: %v", err)
	}
	cfg := n.start(t, nil)
	must(t, n.d.Kill(bounded(t), cfg.ID, unix.SIGKILL))
	_, err := n.d.Wait(bounded(t), cfg.ID)
	must(t, err)
	must(t, n.d.Trim(cfg.ID))
}

// All processes of a sandbox, sentry, stubs and gofer, are in the sandbox's group in every hierarchy
// that can limit anything, and in no session of the agent's.
func TestProcessesAreInTheirOwnGroup(t *testing.T) {
	n := newNode(t)
	vol := t.TempDir()
	cfg := n.start(t, func(s *ocispec.Sandbox) { s.Volumes = []ocispec.Volume{{Source: vol, Path: "/data"}} })
	st, hasState, err := n.d.loadState(cfg.ID)
	must(t, err)
	if !hasState || st.GoferPid == 0 {
		t.Fatalf("state %+v, want a gofer", st)
	}
	own, err := unix.Getsid(0)
	must(t, err)
	for _, pid := range []int{st.Sandbox.Pid, st.GoferPid} {
		data, err := os.ReadFile(filepath.Join("/proc", itoa(pid), "cgroup"))
		must(t, err)
		for line := range strings.Lines(strings.TrimSpace(string(data))) {
			if !strings.HasSuffix(strings.TrimSpace(line), ":"+cfg.Cgroup) {
				t.Errorf("process %d: %s is not in %s", pid, strings.TrimSpace(line), cfg.Cgroup)
			}
		}
		sid, err := unix.Getsid(pid)
		must(t, err)
		if sid == own {
			t.Errorf("process %d is in the agent's session", pid)
		}
		links, err := filepath.Glob(filepath.Join("/proc", itoa(pid), "fd", "*"))
		must(t, err)
		for _, link := range links {
			if target, err := os.Readlink(link); err == nil && strings.Contains(target, "runsc-log") {
				t.Errorf("process %d holds the agent's %s", pid, target)
			}
		}
	}
	stats, err := n.d.Stats(bounded(t), cfg.ID)
	must(t, err)
	if want := uint64(128<<20 + 8<<20 + ocispec.SentryMemory); stats.MemoryLimitBytes != want {
		t.Errorf("memory limit %d, want %d", stats.MemoryLimitBytes, want)
	}
}

func itoa(n int) string { b, _ := json.Marshal(n); return string(b) }

// A fork attaches a clone of the volume at the same path from another folder of the host, has another
// hostname, and its open file goes on at its offset.
func TestRestoreWithClonedVolume(t *testing.T) {
	n := newNode(t)
	source, clone := t.TempDir(), t.TempDir()
	cfg := n.start(t, func(s *ocispec.Sandbox) { s.Volumes = []ocispec.Volume{{Source: source, Path: "/data"}} })
	n.mustSh(t, cfg.ID, "exec 9>/data/log; echo before >&9; echo $$ >/private; hostname | grep -q source")
	dir := n.save(t, cfg.ID, true)
	data, err := os.ReadFile(filepath.Join(source, "log"))
	must(t, err)
	must(t, os.WriteFile(filepath.Join(clone, "log"), data, 0o644))
	fork, err := n.restore(t, cfg, dir, map[string]string{"/data": clone})
	must(t, err)
	n.mustSh(t, fork.ID, "echo fork >&9; hostname | grep -q fork; cat /private")
	n.mustSh(t, cfg.ID, "echo source >&9; hostname | grep -q source")
	for folder, want := range map[string]string{source: "before\nsource\n", clone: "before\nfork\n"} {
		got, err := os.ReadFile(filepath.Join(folder, "log"))
		must(t, err)
		if string(got) != want {
			t.Errorf("log is %q, want %q", got, want)
		}
	}
}

// A file that was open at the save and is gone at the restore: the error names it, and nothing is left.
func TestVolumeDiverged(t *testing.T) {
	n := newNode(t)
	vol := t.TempDir()
	cfg := n.start(t, func(s *ocispec.Sandbox) { s.Volumes = []ocispec.Volume{{Source: vol, Path: "/data"}} })
	n.mustSh(t, cfg.ID, "mkdir /data/d; exec 9>/data/d/held; echo x >&9")
	dir := n.save(t, cfg.ID, true)
	must(t, n.d.Delete(bounded(t), cfg.ID))
	must(t, os.Remove(filepath.Join(vol, "d/held")))
	fork, err := n.restore(t, cfg, dir, map[string]string{"/data": vol})
	if !errs.Has(err, errs.VolumeDiverged) {
		t.Fatalf("got %v (%v), want VOLUME_DIVERGED", err, errors.Unwrap(err))
	}
	if p := errs.From(err).Details["path"]; !strings.Contains(p, "held") {
		t.Errorf("the error names the path %q, want d/held: %v", p, errors.Unwrap(err))
	}
	_, err = n.d.State(bounded(t), fork.ID)
	if !errs.Has(err, errs.ObjectNotFound) {
		t.Errorf("the failed restore left %v", err)
	}
}

func TestRestoreWithAnotherSpecIsIncompatible(t *testing.T) {
	n := newNode(t)
	cfg := n.start(t, nil)
	n.count(t, cfg.ID)
	dir := n.save(t, cfg.ID, true)
	other := n.restoreConfig(t, runtimetest.NewID(t), cfg, nil)
	other.Spec.Process.Args = append(other.Spec.Process.Args, "more")
	_, err := n.d.Restore(bounded(t), other, runtime.Image{Dir: dir})
	if !errs.Has(err, errs.IncompatibleRuntime) {
		t.Fatalf("got %v, want INCOMPATIBLE_RUNTIME", err)
	}
}

func TestDamagedPagesAreSeen(t *testing.T) {
	n := newNode(t)
	cfg := n.start(t, nil)
	n.count(t, cfg.ID)
	dir := n.save(t, cfg.ID, true)
	must(t, os.Truncate(filepath.Join(dir, "checkpoint.img"), 1000))
	_, err := n.restore(t, cfg, dir, nil)
	if !errs.Has(err, errs.ArtefactDamaged) {
		t.Fatalf("got %v (%v), want ARTEFACT_DAMAGED", err, errors.Unwrap(err))
	}
}

// A save that fails for a reason that is not known costs the snapshot too, not the sandbox, and may be tried again.
func TestSaveIntoReadOnlyFolder(t *testing.T) {
	n := newNode(t)
	dir := t.TempDir()
	must(t, unix.Mount("tmpfs", dir, "tmpfs", unix.MS_RDONLY, ""))
	t.Cleanup(func() { must(t, unix.Unmount(dir, 0)) })
	cfg := n.start(t, nil)
	before := n.count(t, cfg.ID)
	must(t, n.d.Pause(bounded(t), cfg.ID))
	err := n.d.Save(bounded(t), cfg.ID, runtime.SaveOptions{Dir: dir})
	if e := errs.From(err); e.Reason != errs.SaveFailed || e.Retry != errs.AfterBackoff || e.Outcome != errs.NotStarted {
		t.Fatalf("got %v (%s, %s), want SAVE_FAILED", err, e.Retry, e.Outcome)
	}
	must(t, n.d.Resume(bounded(t), cfg.ID))
	if after := n.count(t, cfg.ID); after.Nonce != before.Nonce || after.Counter != before.Counter+1 {
		t.Fatalf("the guest is %+v, was %+v", after, before)
	}
}

// A full disk costs the snapshot, not the sandbox, and the space comes back at once, although the sentry
// keeps a file of a failed save open for as long as it lives.
func TestSaveOnFullDisk(t *testing.T) {
	n := newNode(t)
	small := t.TempDir()
	must(t, unix.Mount("tmpfs", small, "tmpfs", 0, "size=1m"))
	t.Cleanup(func() { must(t, unix.Unmount(small, 0)) })
	cfg := n.start(t, nil)
	before := n.count(t, cfg.ID)
	n.mustSh(t, cfg.ID, "head -c 4000000 /dev/urandom >/blob")
	dir := filepath.Join(small, "snapshot")
	must(t, os.Mkdir(dir, 0o700))
	must(t, n.d.Pause(bounded(t), cfg.ID))
	err := n.d.Save(bounded(t), cfg.ID, runtime.SaveOptions{Dir: dir})
	if !errs.Has(err, errs.DiskFull) {
		t.Fatalf("got %v (%v), want DISK_FULL", err, errors.Unwrap(err))
	}
	must(t, n.d.Resume(bounded(t), cfg.ID))
	if after := n.count(t, cfg.ID); after.Nonce != before.Nonce || after.Counter != before.Counter+1 {
		t.Fatalf("the guest is %+v, was %+v", after, before)
	}
	must(t, os.RemoveAll(dir))
	var fs unix.Statfs_t
	must(t, unix.Statfs(small, &fs))
	if fs.Bfree != fs.Blocks {
		t.Errorf("%d of %d blocks are free after the failed save was removed", fs.Bfree, fs.Blocks)
	}
	n.save(t, cfg.ID, true)
}

// A caller that gives up on a save can resume: the resume waits for the save, and the sandbox goes on.
func TestSaveCancelled(t *testing.T) {
	n := newNode(t)
	cfg := n.start(t, nil)
	before := n.count(t, cfg.ID)
	must(t, n.d.Pause(bounded(t), cfg.ID))
	ctx, cancel := context.WithCancel(t.Context())
	dir := t.TempDir()
	saved := make(chan error, 1)
	go func() { saved <- n.d.Save(ctx, cfg.ID, runtime.SaveOptions{Dir: dir}) }()
	for entries, err := os.ReadDir(dir); len(entries) == 0; entries, err = os.ReadDir(dir) {
		must(t, err)
	}
	cancel()
	if err := <-saved; err != nil && !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	must(t, n.d.Resume(bounded(t), cfg.ID))
	if after := n.count(t, cfg.ID); after.Nonce != before.Nonce || after.Counter != before.Counter+1 {
		t.Fatalf("the guest is %+v, was %+v", after, before)
	}
}

// Filling the writable layer, /tmp included, gives ENOSPC and hurts nobody.
func TestLayerIsBounded(t *testing.T) {
	n := newNode(t)
	cfg := n.start(t, nil)
	for _, path := range []string{"/fill", "/tmp/fill"} {
		out, code := n.sh(t, cfg.ID, "dd if=/dev/zero of="+path+" bs=1048576 count=20")
		if code == 0 || !strings.Contains(out, "No space left on device") {
			t.Errorf("filling %s: %d, %s", path, code, out)
		}
		n.mustSh(t, cfg.ID, "rm "+path)
	}
	n.count(t, cfg.ID)
}

// Past its memory limit the sandbox ends, and the exit says why.
func TestOutOfMemoryIsTold(t *testing.T) {
	n := newNode(t)
	cfg := n.start(t, func(s *ocispec.Sandbox) { s.MemoryBytes = 32 << 20 })
	n.count(t, cfg.ID)
	_, err := n.guests[cfg.ID].in.WriteString("sh dd if=/dev/zero of=/dev/null bs=300000000 count=1\n")
	must(t, err)
	exit, err := n.d.Wait(bounded(t), cfg.ID)
	must(t, err)
	if !exit.OOM {
		t.Fatalf("exit %+v, want OOM", exit)
	}
}

// A TCP connection over loopback survives a save and a restore, in both.
func TestLoopbackSurvives(t *testing.T) {
	n := newNode(t)
	cfg := n.start(t, nil)
	n.mustSh(t, cfg.ID, "mkfifo /up; mkfifo /down; exec 7<>/up 8<>/down; >/got; nc -l -p 7000 <&7 >/got & "+
		"while ! nc 127.0.0.1 7000 <&8 >/back; do sleep 0.01; done & "+
		"echo hello >&8; while ! grep -q hello /got; do sleep 0.01; done")
	dir := n.save(t, cfg.ID, true)
	fork, err := n.restore(t, cfg, dir, nil)
	must(t, err)
	for _, id := range []string{cfg.ID, fork.ID} {
		n.mustSh(t, id, "echo again >&8; while ! grep -q again /got; do sleep 0.01; done; echo reply >&7; while ! grep -q reply /back; do sleep 0.01; done")
	}
}

// Records and runsc's own files may be damaged: the sandbox is still listed, and delete removes it.
func TestDeleteWithDamagedRecords(t *testing.T) {
	damage := map[string]func(n *node, id string) error{
		"record torn":    func(n *node, id string) error { return os.WriteFile(n.d.recordPath(id), []byte(`{"ver`), 0o600) },
		"record missing": func(n *node, id string) error { return os.Remove(n.d.recordPath(id)) },
		"state torn":     func(n *node, id string) error { return os.WriteFile(n.d.stateBase(id)+".state", []byte(`{"i`), 0o600) },
		"state missing":  func(n *node, id string) error { return os.Remove(n.d.stateBase(id) + ".state") },
	}
	for name, fn := range damage {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			cfg := n.start(t, nil)
			n.count(t, cfg.ID)
			must(t, n.d.Close())
			must(t, fn(n, cfg.ID))
			n.d = n.open(t)
			list, err := n.d.List(bounded(t))
			must(t, err)
			if len(list) != 1 || list[0].ID != cfg.ID || list[0].Phase == runtime.Stopped {
				t.Fatalf("list %+v, want the one that runs", list)
			}
			must(t, n.d.Delete(bounded(t), cfg.ID))
		})
	}
}

// The numbers in a dead sandbox's state file may be a stranger's by now. Nobody signals the stranger.
func TestDeleteSparesAStrangerWithThePid(t *testing.T) {
	n := newNode(t)
	cfg := n.start(t, nil)
	must(t, n.d.Kill(bounded(t), cfg.ID, syscall.SIGKILL))
	_, err := n.d.Wait(bounded(t), cfg.ID)
	must(t, err)
	// This test process plays the stranger; it would not live to see the end.
	data, err := os.ReadFile(n.d.stateBase(cfg.ID) + ".state")
	must(t, err)
	var state map[string]any
	must(t, json.Unmarshal(data, &state))
	state["goferPid"] = os.Getpid()
	state["sandbox"].(map[string]any)["pid"] = os.Getpid()
	data, err = json.Marshal(state)
	must(t, err)
	must(t, os.WriteFile(n.d.stateBase(cfg.ID)+".state", data, 0o600))
	must(t, n.d.Delete(bounded(t), cfg.ID))
}

// A signal reaches init, whose own end it then is.
func TestKillSignalsInit(t *testing.T) {
	n := newNode(t)
	cfg := n.start(t, nil)
	n.mustSh(t, cfg.ID, "trap 'exit 21' TERM")
	must(t, n.d.Kill(bounded(t), cfg.ID, syscall.SIGTERM))
	exit, err := n.d.Wait(bounded(t), cfg.ID)
	must(t, err)
	if !exit.Known || exit.Code != 21 || exit.Signal != 0 {
		t.Fatalf("exit %+v, want code 21", exit)
	}
}

// A sentry that does not answer any more holds up nobody who looks, and is deleted all the same.
func TestHungSandbox(t *testing.T) {
	n := newNode(t)
	cfg := n.start(t, nil)
	n.count(t, cfg.ID)
	st, err := n.d.State(bounded(t), cfg.ID)
	must(t, err)
	must(t, unix.Kill(st.Pid, unix.SIGSTOP))
	short, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := n.d.Pause(short, cfg.ID); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("got %v, want the deadline", err)
	}
	if _, err := n.d.State(bounded(t), cfg.ID); err != nil {
		t.Error(err)
	}
	if _, err := n.d.Stats(bounded(t), cfg.ID); err != nil {
		t.Error(err)
	}
	if list, err := n.d.List(bounded(t)); err != nil || len(list) != 1 {
		t.Errorf("list %v, %v", list, err)
	}
	must(t, n.d.Delete(bounded(t), cfg.ID))
}

// A start that cannot work leaves nothing and says why.
func TestFailedStarts(t *testing.T) {
	n := newNode(t)
	cases := map[string]struct {
		change func(*runtime.Config)
		want   errs.Reason
	}{
		"no program": {func(c *runtime.Config) { c.Spec.Process.Args = []string{"/no/such"} }, errs.SandboxFailed},
		"no image":   {func(c *runtime.Config) { c.Spec.Annotations["dev.gvisor.spec.rootfs.source"] = "/no/such.erofs" }, errs.SandboxFailed},
		"no volume": {func(c *runtime.Config) {
			c.Spec.Mounts = append(c.Spec.Mounts, specs.Mount{Destination: "/v", Type: "bind", Source: "/no/such"})
		}, errs.SandboxFailed},
		"no bundle":     {func(c *runtime.Config) { c.Bundle.Dir = "/no/such" }, errs.IncompatibleRuntime},
		"no fifo":       {func(c *runtime.Config) { c.Stdio.In = "/dev/null" }, errs.InvalidField},
		"foreign group": {func(c *runtime.Config) { c.Cgroup = "/elsewhere/x" }, errs.InvalidField},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			cfg := n.config(t, runtimetest.NewID(t), nil)
			c.change(&cfg)
			_, err := n.d.Start(bounded(t), cfg)
			if !errs.Has(err, c.want) {
				t.Fatalf("got %v (%v), want %s", err, errors.Unwrap(err), c.want)
			}
			if left := n.leftovers(t); len(left) > 0 {
				t.Fatalf("left behind: %v", left)
			}
		})
	}
}
