package guest

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/dormouse-run/dormouse/pkg/fence"
)

// bins holds what the tests run: guest init, and a static Go program that does what it is told.
var bins struct{ dir, init, subject string }

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "guest-test-")
	if err != nil {
		panic(err)
	}
	bins.dir, bins.init, bins.subject = dir, filepath.Join(dir, "guestinit"), filepath.Join(dir, "subject")
	for out, pkg := range map[string]string{
		bins.init: "github.com/dormouse-run/dormouse/agentd/cmd/guestinit", bins.subject: "./testdata/subject",
	} {
		cmd := exec.Command("go", "build", "-trimpath", "-o", out, pkg)
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if msg, err := cmd.CombinedOutput(); err != nil {
			_ = os.RemoveAll(dir)
			panic("build " + pkg + ": " + string(msg))
		}
	}
	code := m.Run()
	if code == 0 {
		if err := goleak.Find(); err != nil {
			println(err.Error())
			code = 1
		}
	}
	_ = os.RemoveAll(dir)
	os.Exit(code)
}

// sandbox is a guest init that runs as PID 1 of namespaces of its own, on a root folder.
type sandbox struct {
	root string
	opts Options
	cmd  *exec.Cmd
}

func mkfifos(t *testing.T, dir string) (in, out string) {
	t.Helper()
	in, out = filepath.Join(dir, "in"), filepath.Join(dir, "out")
	for _, p := range []string{in, out} {
		if err := unix.Mkfifo(p, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return in, out
}

// rootfs makes a small root with the two programs, accounts and a /proc.
func rootfs(t *testing.T) string {
	t.Helper()
	root := t.TempDir()
	for _, d := range []string{"bin", "etc", "proc", "dev/pts", "tmp", ".dormouse", "run", "etc/dormouse"} {
		must(t, os.MkdirAll(filepath.Join(root, d), 0o755))
	}
	must(t, os.Chmod(root, 0o755))
	copyFile(t, bins.init, filepath.Join(root, ".dormouse/guestinit"))
	for _, name := range []string{"subject"} {
		copyFile(t, bins.subject, filepath.Join(root, "bin", name))
	}
	must(t, os.WriteFile(filepath.Join(root, "bin/plain"), []byte("no program"), 0o644))
	must(t, os.WriteFile(filepath.Join(root, "bin/script"), []byte("#!/bin/absent\n"), 0o755))
	must(t, os.WriteFile(filepath.Join(root, "bin/garbage"), []byte("\x00\x01\x02"), 0o755))
	must(t, os.WriteFile(filepath.Join(root, "etc/passwd"), []byte("root:x:0:0::/root:/bin/sh\nworker:x:1000:1001::/home/worker:/bin/sh\n"), 0o644))
	must(t, os.WriteFile(filepath.Join(root, "etc/group"), []byte("root:x:0:\nworkers:x:1001:\nextra:x:2000:other,worker\n"), 0o644))
	return root
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func copyFile(t *testing.T, from, to string) {
	t.Helper()
	data, err := os.ReadFile(from)
	must(t, err)
	must(t, os.WriteFile(to, data, 0o755))
}

// newSandbox starts guest init in namespaces of its own and cleans up after the test.
func newSandbox(t *testing.T) *sandbox {
	t.Helper()
	s := &sandbox{root: rootfs(t)}
	in, out := mkfifos(t, t.TempDir())
	s.opts = Options{InPath: in, OutPath: out, SandboxUID: "0197-test-" + t.Name(), Generation: 1}
	for name, dev := range map[string]uint64{"dev/null": unix.Mkdev(1, 3), "dev/tty": unix.Mkdev(5, 0)} {
		must(t, unix.Mknod(filepath.Join(s.root, name), unix.S_IFCHR|0o666, int(dev)))
		must(t, os.Chmod(filepath.Join(s.root, name), 0o666))
	}
	must(t, syscall.Mount("proc", filepath.Join(s.root, "proc"), "proc", 0, ""))
	t.Cleanup(func() { _ = syscall.Unmount(filepath.Join(s.root, "proc"), syscall.MNT_DETACH) })

	stdin, err := os.OpenFile(in, os.O_RDWR, 0)
	must(t, err)
	stdout, err := os.OpenFile(out, os.O_RDWR, 0)
	must(t, err)
	// The program itself mounts the namespace's own /proc: see testdata/subject.
	s.cmd = exec.Command("/bin/subject", "enter", "/.dormouse/guestinit")
	s.cmd.Stdin, s.cmd.Stdout, s.cmd.Stderr = stdin, stdout, os.Stderr
	s.cmd.Env = []string{"GOMAXPROCS=1"}
	s.cmd.Dir = "/"
	s.cmd.SysProcAttr = &syscall.SysProcAttr{
		Chroot: s.root, Cloneflags: syscall.CLONE_NEWPID | syscall.CLONE_NEWUTS | syscall.CLONE_NEWNS | syscall.CLONE_NEWIPC,
	}
	must(t, s.cmd.Start())
	_, _ = stdin.Close(), stdout.Close()
	t.Cleanup(func() {
		_ = s.cmd.Process.Kill()
		_ = s.cmd.Wait()
	})
	return s
}

// open says hello; the generation is the sandbox's unless given.
func (s *sandbox) open(t *testing.T, change ...func(*Options)) *Conn {
	t.Helper()
	o := s.opts
	for _, f := range change {
		f(&o)
	}
	c, err := Open(ctx(t), o)
	if err != nil {
		t.Fatalf("open: %v", err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func generation(g fence.Epoch) func(*Options) { return func(o *Options) { o.Generation = g } }

func ctx(t *testing.T) context.Context {
	t.Helper()
	c, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	t.Cleanup(cancel)
	return c
}

// collector gathers what Run hands over.
type collector struct {
	mu       sync.Mutex
	out, err bytes.Buffer
	gap      uint64
}

func (c *collector) sink(which Output, chunk Chunk) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.gap += chunk.Gap
	if which == Stdout {
		c.out.Write(chunk.Data)
	} else {
		c.err.Write(chunk.Data)
	}
	return nil
}

func run(t *testing.T, c *Conn, r StartRequest) (string, string, Exit) {
	t.Helper()
	var got collector
	_, e, err := c.Run(ctx(t), r, got.sink)
	if err != nil {
		t.Fatalf("run %q: %v", r.Args, err)
	}
	return got.out.String(), got.err.String(), e
}

// subject is the command line of the test program.
func subject(id string, args ...string) StartRequest {
	return StartRequest{ID: id, Args: append([]string{"subject"}, args...)}
}
