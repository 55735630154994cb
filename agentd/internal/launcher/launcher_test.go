package launcher

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/dormouse-run/dormouse/agentd/internal/cgroup"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/test/tools"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func newLauncher(t *testing.T, opts Options) *Launcher {
	t.Helper()
	l, err := New(opts)
	must(t, err)
	t.Cleanup(func() { must(t, l.Close()) })
	return l
}

// shell runs a script with its output in a pipe, and gives the pipe.
func shell(t *testing.T, script string) (Command, *os.File) {
	t.Helper()
	var p [2]int
	must(t, unix.Pipe2(p[:], unix.O_CLOEXEC))
	r := os.NewFile(uintptr(p[0]), "out")
	t.Cleanup(func() {
		_ = r.Close()
		_ = unix.Close(p[1])
	})
	null, err := unix.Open("/dev/null", unix.O_RDWR|unix.O_CLOEXEC, 0)
	must(t, err)
	t.Cleanup(func() { _ = unix.Close(null) })
	return Command{Path: tools.Path(t, "busybox"), Args: []string{"sh", "-c", script}, Files: []int{null, p[1], p[1]}}, r
}

func readLine(t *testing.T, r *os.File) string {
	t.Helper()
	buf := make([]byte, 64<<10)
	n, err := r.Read(buf)
	must(t, err)
	return strings.TrimSpace(string(buf[:n]))
}

func TestRunGivesTheExit(t *testing.T) {
	l := newLauncher(t, Options{})
	for script, want := range map[string]Exit{
		"exit 0":        {Known: true},
		"exit 7":        {Known: true, Code: 7},
		"kill -TERM $$": {Known: true, Code: 143, Signal: unix.SIGTERM},
	} {
		cmd, _ := shell(t, script)
		got, err := l.Run(t.Context(), cmd)
		must(t, err)
		if got != want {
			t.Errorf("%q: %+v, want %+v", script, got, want)
		}
	}
	if _, err := l.Run(t.Context(), Command{Path: "/no/such/program"}); err == nil {
		t.Error("a missing program ran")
	}
}

// The command has a session of its own, the descriptors that it was given and no other, and no more than
// a PATH in its environment.
func TestWhatACommandInherits(t *testing.T) {
	l := newLauncher(t, Options{})
	t.Setenv("SECRET", "x")
	// As a shell that started the agent might leave one to it.
	fd, err := unix.Dup(1)
	must(t, err)
	defer unix.Close(fd)
	cmd, out := shell(t, `echo "$$ $(cut -d' ' -f6 /proc/$$/stat)"; busybox env`)
	cmd.Args[2] = strings.ReplaceAll(cmd.Args[2], "busybox", cmd.Path)
	_, err = l.Run(t.Context(), cmd)
	must(t, err)
	said := readLine(t, out)
	if f := strings.Fields(said); f[0] != f[1] {
		t.Errorf("process %s is in session %s", f[0], f[1])
	}
	if strings.Contains(said, "SECRET") {
		t.Errorf("the agent's environment is inherited: %s", said)
	}
	l = newLauncher(t, Options{})
	cmd, out = shell(t, "")
	cmd.Args = []string{"ls", "/proc/self/fd"}
	_, err = l.Run(t.Context(), cmd)
	must(t, err)
	// 3 is the folder that ls reads.
	if got := strings.Join(strings.Fields(readLine(t, out)), " "); got != "0 1 2 3" {
		t.Errorf("descriptors %s, want 0 to 2", got)
	}
}

func TestRunKillsWhenTheContextEnds(t *testing.T) {
	l := newLauncher(t, Options{})
	cmd, out := shell(t, "echo $$; exec sleep 1000")
	ctx, cancel := context.WithCancel(t.Context())
	got := make(chan error, 1)
	go func() {
		_, err := l.Run(ctx, cmd)
		got <- err
	}()
	pid, err := strconv.Atoi(readLine(t, out))
	must(t, err)
	cancel()
	if err := <-got; !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	if err := unix.Kill(pid, 0); !errors.Is(err, unix.ESRCH) {
		t.Fatalf("process %d is still there: %v", pid, err)
	}
}

// An orphan's exit status waits for this process, however late it asks.
func TestOrphansExitIsKept(t *testing.T) {
	l := newLauncher(t, Options{})
	cmd, out := shell(t, "(sh -c 'exit 9') & echo $!")
	_, err := l.Run(t.Context(), cmd)
	must(t, err)
	pid, err := strconv.Atoi(readLine(t, out))
	must(t, err)
	ticks, err := StartTime(pid)
	must(t, err)
	for Alive(pid, ticks) {
		must(t, t.Context().Err())
	}
	p, err := Attach(pid, ticks)
	must(t, err)
	defer p.Close()
	exit, err := p.Wait(t.Context())
	must(t, err)
	if !exit.Known || exit.Code != 9 {
		t.Fatalf("exit %+v, want code 9", exit)
	}
}

// A process that is another's child is seen to end, with its status where the kernel keeps it.
func TestAnothersChild(t *testing.T) {
	// The shell stays the parent, and reaps: it is what process 1 is to a sandbox after agentd's restart.
	parent := exec.Command(tools.Path(t, "busybox"), "sh", "-c", "exec 3<&0; (read x <&3; exit 6) & echo $!; wait; read y")
	in, err := parent.StdinPipe()
	must(t, err)
	out, err := parent.StdoutPipe()
	must(t, err)
	must(t, parent.Start())
	defer func() {
		_ = in.Close()
		_ = parent.Wait()
	}()
	buf := make([]byte, 32)
	n, err := out.Read(buf)
	must(t, err)
	pid, err := strconv.Atoi(strings.TrimSpace(string(buf[:n])))
	must(t, err)
	ticks, err := StartTime(pid)
	must(t, err)
	p, err := Attach(pid, ticks)
	must(t, err)
	defer p.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := p.Wait(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("a running process ended: %v", err)
	}
	_, err = in.Write([]byte("end\n"))
	must(t, err)
	exit, err := p.Wait(t.Context())
	must(t, err)
	if exit.Known && exit.Code != 6 {
		t.Fatalf("exit %+v, want code 6 or an unknown one", exit)
	}
	var u unix.Utsname
	must(t, unix.Uname(&u))
	t.Logf("kernel %s: %+v", unix.ByteSliceToString(u.Release[:]), exit)
}

func TestAttachRefusesAnotherProcess(t *testing.T) {
	own, err := StartTime(os.Getpid())
	must(t, err)
	if _, err := Attach(os.Getpid(), own+1); !errs.Has(err, errs.ObjectNotFound) {
		t.Fatalf("attached to a stranger: %v", err)
	}
}

// The command runs in the mount namespace that it was told to, and the agent stays where it is.
func TestMountNamespace(t *testing.T) {
	dir := t.TempDir()
	// It holds a namespace in which the folder has a mount, until its input ends.
	holder := exec.Command("unshare", "--mount", "--propagation", "private", tools.Path(t, "busybox"), "sh", "-c",
		fmt.Sprintf("mount -t tmpfs tmpfs %s && echo there >%s/f && echo ready && read x", dir, dir))
	in, err := holder.StdinPipe()
	must(t, err)
	out, err := holder.StdoutPipe()
	must(t, err)
	must(t, holder.Start())
	defer func() {
		_ = in.Close()
		_ = holder.Wait()
	}()
	if _, err := out.Read(make([]byte, 16)); err != nil {
		t.Fatal(err)
	}
	l := newLauncher(t, Options{MountNS: filepath.Join("/proc", strconv.Itoa(holder.Process.Pid), "ns/mnt")})
	cmd, said := shell(t, "cat "+dir+"/f")
	exit, err := l.Run(t.Context(), cmd)
	must(t, err)
	if got := readLine(t, said); exit.Code != 0 || got != "there" {
		t.Fatalf("%+v, %q", exit, got)
	}
	if _, err := os.Stat(filepath.Join(dir, "f")); !os.IsNotExist(err) {
		t.Fatalf("the agent moved too: %v", err)
	}
	if _, err := New(Options{MountNS: "/no/such/namespace"}); err == nil {
		t.Fatal("a namespace that is not there was accepted")
	}
}

// A command is born in its v2 group.
func TestGroup(t *testing.T) {
	m, err := cgroup.Open(cgroup.Options{Parent: "/dormouse-launcher-" + strconv.Itoa(os.Getpid())})
	must(t, err)
	g := m.Group("one")
	must(t, g.Create(nil))
	t.Cleanup(func() {
		must(t, g.Remove(context.WithoutCancel(t.Context())))
		must(t, m.RemoveParent())
	})
	fd, err := g.OpenV2()
	must(t, err)
	if fd < 0 {
		return // v1 only: the runtime joins by itself
	}
	must(t, unix.Close(fd))
	l := newLauncher(t, Options{})
	cmd, out := shell(t, "cat /proc/self/cgroup")
	cmd.Group = g
	_, err = l.Run(t.Context(), cmd)
	must(t, err)
	if said := readLine(t, out); !strings.Contains(said, "0::"+m.Path("one")) {
		t.Fatalf("groups: %s", said)
	}
}

// folder is a group that only keeps what is written to it.
type folder string

func (f folder) OpenV2() (int, error) {
	return unix.Open(string(f), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
}

func (f folder) written(t *testing.T) string {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(string(f), "cgroup.procs"))
	must(t, err)
	return string(data)
}

// The number of a process is written while it is its own, and not once it may be another's.
func TestPaceIsKeptAsLongAsTheProcessIsThere(t *testing.T) {
	l := newLauncher(t, Options{})
	group := folder(t.TempDir())
	must(t, os.WriteFile(filepath.Join(string(group), "cgroup.procs"), nil, 0o600))
	cmd, _ := shell(t, "read line")
	var in [2]int
	must(t, unix.Pipe2(in[:], unix.O_CLOEXEC))
	cmd.Files[0] = in[0]
	p, err := l.Start(cmd)
	must(t, err)
	defer p.Close()
	must(t, unix.Close(in[0]))
	leave := l.pacer.join(p, group)
	for pid := strconv.Itoa(p.Pid()); strings.Count(group.written(t), pid) < 3; {
		if t.Context().Err() != nil {
			t.Fatal(group.written(t))
		}
	}
	must(t, unix.Close(in[1])) // its end
	_, err = p.Wait(t.Context())
	must(t, err)
	before := group.written(t)
	fd, err := unix.Open(filepath.Join(string(group), "cgroup.procs"), unix.O_WRONLY|unix.O_APPEND|unix.O_CLOEXEC, 0)
	must(t, err)
	defer unix.Close(fd)
	if p.rejoin(fd) {
		t.Error("the number of a reaped process was used")
	}
	leave()
	if after := group.written(t); after != before {
		t.Errorf("written after the process was reaped: %q, then %q", before, after)
	}
	// Where there is no group to speak of, nothing runs.
	l.pacer.join(p, folder(filepath.Join(t.TempDir(), "missing")))()
	l.pacer.join(p, folder(t.TempDir()))()
}

// One command's group is written to for all, and none while there are too many.
func TestPaceIsForFewCommands(t *testing.T) {
	l := newLauncher(t, Options{})
	l.pacer.most = 2
	var all [3]*Process
	var groups [3]folder
	var leave [3]func()
	for i := range all {
		groups[i] = folder(t.TempDir())
		must(t, os.WriteFile(filepath.Join(string(groups[i]), "cgroup.procs"), nil, 0o600))
		cmd, _ := shell(t, "read line")
		var in [2]int
		must(t, unix.Pipe2(in[:], unix.O_CLOEXEC))
		cmd.Files[0] = in[0]
		p, err := l.Start(cmd)
		must(t, err)
		defer func() {
			must(t, unix.Close(in[1]))
			_, err := p.Wait(context.WithoutCancel(t.Context()))
			must(t, errors.Join(err, p.Close()))
		}()
		must(t, unix.Close(in[0]))
		all[i] = p
	}
	writing := func(i int) {
		t.Helper()
		for before := len(groups[i].written(t)); len(groups[i].written(t)) <= before; {
			if t.Context().Err() != nil {
				t.Fatalf("the group of command %d is not written to", i)
			}
		}
	}
	leave[0] = l.pacer.join(all[0], groups[0])
	writing(0)
	leave[1] = l.pacer.join(all[1], groups[1])
	writing(0)
	leave[2] = l.pacer.join(all[2], groups[2])
	l.pacer.mu.Lock()
	if l.pacer.stop != nil {
		t.Error("three are paced, and two are the most")
	}
	l.pacer.mu.Unlock()
	if said := groups[1].written(t) + groups[2].written(t); said != "" {
		t.Errorf("the groups of the others have %q", said)
	}
	leave[0]()
	writing(1)
	leave[1]()
	writing(2)
	leave[2]()
	l.pacer.mu.Lock()
	defer l.pacer.mu.Unlock()
	if l.pacer.stop != nil || len(l.pacer.members) > 0 {
		t.Error("nothing runs, and it is paced")
	}
}
