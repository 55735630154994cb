package guest

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/fence"
	"github.com/dormouse-run/dormouse/test/tools"
)

// dockerCaps is docker's default set, and CAP_SYS_ADMIN, which guest init keeps from its children.
var dockerCaps = []string{
	"CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FSETID", "CAP_FOWNER", "CAP_MKNOD", "CAP_NET_RAW", "CAP_SETGID", "CAP_SETUID",
	"CAP_SETFCAP", "CAP_SETPCAP", "CAP_NET_BIND_SERVICE", "CAP_SYS_CHROOT", "CAP_KILL", "CAP_AUDIT_WRITE", "CAP_SYS_ADMIN",
}

// machine runs real sandboxes with the runtime, in a state folder of its own.
type machine struct {
	t           *testing.T
	runsc, root string
	spec        specs.Spec
}

func newMachine(t *testing.T) *machine {
	t.Helper()
	m := &machine{t: t, runsc: tools.Path(t, "runsc"), root: t.TempDir()}
	mkfs := tools.Path(t, "mkfs.erofs")
	root := rootfs(t)
	must(t, os.RemoveAll(filepath.Join(root, ".dormouse")))
	bundle := t.TempDir()
	copyFile(t, bins.init, filepath.Join(bundle, "guestinit"))
	image, initImage := filepath.Join(m.root, "root.erofs"), filepath.Join(m.root, "init.erofs")
	for img, dir := range map[string]string{image: root, initImage: bundle} {
		out, err := exec.Command(mkfs, "-b4096", "-U", "clear", "-Enoinline_data", "-T0", "--mkfs-time", img, dir).CombinedOutput()
		if err != nil {
			t.Fatalf("mkfs.erofs: %v: %s", err, out)
		}
	}
	m.spec = specs.Spec{
		Version: "1.2.0", Hostname: "first", Root: &specs.Root{Path: t.TempDir()},
		Process: &specs.Process{
			Args: []string{"/.dormouse/guestinit"}, Cwd: "/", Env: []string{"GOMAXPROCS=1"},
			Capabilities: &specs.LinuxCapabilities{Bounding: dockerCaps, Effective: dockerCaps, Permitted: dockerCaps},
		},
		Mounts: []specs.Mount{
			{Destination: "/proc", Type: "proc", Source: "proc"}, {Destination: "/dev", Type: "tmpfs", Source: "tmpfs"},
			{Destination: "/.dormouse", Type: "erofs", Source: initImage},
		},
		Linux: &specs.Linux{Namespaces: []specs.LinuxNamespace{{Type: "pid"}, {Type: "network"}, {Type: "mount"}, {Type: "uts"}, {Type: "ipc"}}},
		Annotations: map[string]string{
			"dev.gvisor.spec.rootfs.source": image, "dev.gvisor.spec.rootfs.type": "erofs", "dev.gvisor.spec.rootfs.overlay": "memory",
		},
	}
	return m
}

// do runs one runtime command; with FIFOs they become the standard input and output, opened
// read-write by a shell, on descriptions that nobody else has.
func (m *machine) do(fifos *Options, args ...string) {
	m.t.Helper()
	all := append([]string{m.runsc, "-root", filepath.Join(m.root, "state"), "-network", "none", "-ignore-cgroups"}, args...)
	script := `exec "$@" 2>"$LOG"`
	cmd := exec.Command("/bin/sh")
	log := filepath.Join(m.root, "log")
	cmd.Env = append(os.Environ(), "LOG="+log)
	if fifos != nil {
		// A detached sandbox keeps its standard error: it must not be a host file.
		script = `exec "$@" 0<>"$IN" 1<>"$OUT" 2>/dev/null`
		all = append(all[:1:1], append([]string{"-debug-log", log + ".", "-panic-log", log}, all[1:]...)...)
		cmd.Env = append(cmd.Env, "IN="+fifos.InPath, "OUT="+fifos.OutPath)
	}
	cmd.Args = append([]string{"sh", "-c", script, "sh"}, all...)
	if err := cmd.Run(); err != nil {
		msg, _ := os.ReadFile(log)
		m.t.Fatalf("runsc %s: %v: %s", strings.Join(args, " "), err, msg)
	}
}

// start runs a sandbox with fresh FIFOs, from an image folder if one is given.
func (m *machine) start(id, from string) Options {
	m.t.Helper()
	dir := filepath.Join(m.root, id)
	must(m.t, os.Mkdir(dir, 0o700))
	raw, err := json.Marshal(m.spec)
	must(m.t, err)
	must(m.t, os.WriteFile(filepath.Join(dir, "config.json"), raw, 0o600))
	in, out := mkfifos(m.t, dir)
	o := Options{InPath: in, OutPath: out, SandboxUID: "uid-" + id, Generation: 1}
	m.t.Cleanup(func() { m.do(nil, "delete", "-force", id) })
	if from == "" {
		m.do(&o, "run", "-detach", "-bundle", dir, id)
	} else {
		m.do(&o, "restore", "-detach", "-bundle", dir, "-image-path", from, id)
	}
	return o
}

// TestB17Runsc: in a real sandbox too, the exit code is right 100 times of 100.
func TestB17Runsc(t *testing.T) {
	m := newMachine(t)
	s := sandbox{opts: m.start("sandbox-a", "")}
	c := s.open(t)
	b17(t, c)
	if out, errOut, e := run(t, c, subject("echo", "echo", "hello")); out != "hello\n" || errOut != "err\n" || e.Code != 0 {
		t.Fatalf("run: %q %q %+v", out, errOut, e)
	}
	r := subject("who", "whoami")
	r.User = "worker"
	if out, _, _ := run(t, c, r); !strings.HasPrefix(out, "1000 1001 [2000] / true ") {
		t.Fatalf("whoami: %q", out)
	}
	out, _, _ := run(t, c, subject("caps", "whoami"))
	f := strings.Fields(out)
	// runsc itself takes CAP_NET_RAW away, unless it is told -net-raw.
	if f[len(f)-1] != "00000000a80405fb" {
		t.Fatalf("a root child's bounding set is %s, not docker's", f[len(f)-1])
	}
	if _, err := c.Start(ctx(t), subject("tree", "tree")); err != nil {
		t.Fatal(err)
	}
	awaitOutput(t, c, "tree", "ready\n")
	if n, err := c.Signal(ctx(t), "tree", 9, true); err != nil || n != 3 {
		t.Fatalf("tree: %d %v", n, err)
	}
	awaitEOF(t, c, "tree")
}

// TestRunscCheckpointRestoreKeepsProcesses: the sequence a checkpoint follows, with a process that
// writes all the while, a restore beside the running source, and a second hello to the source.
func TestRunscCheckpointRestoreKeepsProcesses(t *testing.T) {
	m := newMachine(t)
	source := sandbox{opts: m.start("sandbox-a", "")}
	c := source.open(t)
	if _, err := c.Configure(ctx(t), Identity{Hostname: "source", WriteHosts: true}); err != nil {
		t.Fatal(err)
	}
	p, err := c.Start(ctx(t), subject("counter", "count"))
	must(t, err)
	reader, err := c.Output(ctx(t), OutputRequest{Process: "counter", Output: Stdout, Follow: UntilExit})
	must(t, err)
	defer reader.Close()
	f := &follower{t: t, s: reader}
	f.lines(50)

	img := filepath.Join(m.root, "image")
	begun := time.Now()
	must(t, c.Quiesce(ctx(t)))
	m.do(nil, "pause", "sandbox-a")
	must(t, c.Drain(ctx(t)))
	m.do(nil, "checkpoint", "-leave-running", "-direct", "-image-path", img, "sandbox-a")
	m.do(nil, "resume", "sandbox-a")
	must(t, c.Resume(ctx(t)))
	t.Logf("quiesce to resume: %v", time.Since(begun))
	f.lines(50) // the source's stream goes on by itself

	fork := sandbox{opts: m.start("sandbox-b", img)}
	fork.opts.Generation = 2
	fc := fork.open(t)
	if i := fc.Info(); i.PreviousUID != "uid-sandbox-a" || i.PreviousGeneration != 1 || i.Processes != 1 {
		t.Fatalf("the fork remembers %+v", i)
	}
	done, err := fc.Configure(ctx(t), Identity{Hostname: "fork", WriteHosts: true})
	if err != nil || !done.HostnameSet || !done.IdentityChanged {
		t.Fatalf("configure: %+v %v", done, err)
	}
	list, err := fc.List(ctx(t))
	if err != nil || len(list) != 1 || list[0].PID != p.PID || !list[0].StartTime.Equal(p.StartTime) || list[0].Exit != nil {
		t.Fatalf("the fork has %+v, %v; want %+v", list, err, p)
	}
	forkReader, err := fc.Output(ctx(t), OutputRequest{Process: "counter", Output: Stdout, Follow: UntilExit})
	must(t, err)
	defer forkReader.Close()
	ff := &follower{t: t, s: forkReader}
	ff.lines(200) // from the first line on, through the checkpoint, without a gap
	if out, _, _ := run(t, fc, subject("h", "hostname")); out != "fork\n" {
		t.Fatalf("host name: %q", out)
	}
	if out, _, _ := run(t, fc, subject("i", "read", "/run/dormouse/identity.json")); out != `{"sandbox_uid":"uid-sandbox-b","hostname":"fork","generation":2}`+"\n" {
		t.Fatalf("identity: %q", out)
	}
	f.lines(50)
	if out, _, _ := run(t, c, subject("h", "hostname")); out != "source\n" {
		t.Fatalf("the source's host name: %q", out)
	}
}

// TestRunscChainOfRestores: each sandbox is restored from a checkpoint of the one before, while one
// process writes as fast as it can and another waits for its input.
func TestRunscChainOfRestores(t *testing.T) {
	m := newMachine(t)
	box := sandbox{opts: m.start("sandbox-0", "")}
	c := box.open(t)
	r := subject("cat", "cat")
	r.Stdin = true
	_, err := c.Start(ctx(t), r)
	must(t, err)
	_, err = c.Start(ctx(t), subject("pour", "pour", "1000000000000"))
	must(t, err)
	wait := subject("late", "sleep")
	wait.Timeout = 3 * time.Second
	_, err = c.Start(ctx(t), wait)
	must(t, err)
	want := ""
	for i := 1; i <= 3; i++ {
		line := "generation " + itoa(i) + "\n"
		_, err := c.WriteStdin(ctx(t), "cat", []byte(line))
		must(t, err)
		want += line
		awaitOutput(t, c, "cat", want)
		busy, err := c.Output(ctx(t), OutputRequest{Process: "pour", Output: Stdout, From: FromEnd, Follow: UntilExit})
		must(t, err)
		_, err = busy.Next(ctx(t))
		must(t, err)

		id, img := "sandbox-"+itoa(i-1), filepath.Join(m.root, "image-"+itoa(i))
		must(t, c.Quiesce(ctx(t)))
		m.do(nil, "pause", id)
		must(t, c.Drain(ctx(t)))
		m.do(nil, "checkpoint", "-leave-running", "-direct", "-image-path", img, id)
		must(t, c.Close())
		m.do(nil, "delete", "-force", id)

		box = sandbox{opts: m.start("sandbox-"+itoa(i), img)}
		if i == 1 {
			if _, err := Open(ctx(t), box.opts); !errs.Has(err, errs.StaleUID) || errs.From(err).Details["current_epoch"] != "1" {
				t.Fatalf("a generation that is not above the snapshot's: %v", err)
			}
		}
		box.opts.Generation = fence.Epoch(i + 1)
		c = box.open(t)
		busy, err = c.Output(ctx(t), OutputRequest{Process: "pour", Output: Stdout, From: FromEnd, Follow: UntilExit})
		must(t, err)
		before, err := busy.Next(ctx(t))
		must(t, err)
		after, err := busy.Next(ctx(t))
		if err != nil || after.Offset <= before.Offset {
			t.Fatalf("restore %d: the busy process does not go on: %d, %d, %v", i, before.Offset, after.Offset, err)
		}
		busy.Close()
	}
	must(t, c.CloseStdin(ctx(t), "cat"))
	if e, err := c.Wait(ctx(t), "cat"); err != nil || e.Code != 0 {
		t.Fatalf("cat: %+v %v", e, err)
	}
	if e, err := c.Wait(ctx(t), "late"); err != nil || !e.TimedOut {
		t.Fatalf("the timeout after restores: %+v %v", e, err)
	}
}

// follower reads "pid n" lines and holds them to one pid and to consecutive numbers and offsets.
type follower struct {
	t      *testing.T
	s      *OutputStream
	offset uint64
	rest   string
	next   int
	pid    string
}

func (f *follower) lines(n int) {
	f.t.Helper()
	for until := f.next + n; f.next < until; {
		chunk, err := f.s.Next(ctx(f.t))
		if err != nil || chunk.Offset != f.offset || chunk.Gap != 0 {
			f.t.Fatalf("after line %d: chunk at %d (want %d), gap %d, %v", f.next, chunk.Offset, f.offset, chunk.Gap, err)
		}
		f.offset += uint64(len(chunk.Data))
		f.rest += string(chunk.Data)
		for {
			line, rest, ok := strings.Cut(f.rest, "\n")
			if !ok {
				break
			}
			f.rest = rest
			pid, num, _ := strings.Cut(line, " ")
			if f.pid == "" {
				f.pid = pid
			}
			if pid != f.pid || num != itoa(f.next) {
				f.t.Fatalf("got line %q, want %s %d", line, f.pid, f.next)
			}
			f.next++
		}
	}
}

func itoa(n int) string { return utoa(uint64(n)) }
