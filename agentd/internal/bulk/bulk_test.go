package bulk

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/dormouse-run/dormouse/agentd/internal/bulkwire"
	"github.com/dormouse-run/dormouse/agentd/internal/runtime"
	"github.com/dormouse-run/dormouse/agentd/internal/runtime/fake"
	"github.com/dormouse-run/dormouse/agentd/internal/runtime/runtimetest"
	"github.com/dormouse-run/dormouse/pkg/errs"
)

var helperBin string

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "bulk-test-")
	if err != nil {
		panic(err)
	}
	helperBin = filepath.Join(dir, "guestbulk")
	cmd := exec.Command("go", "build", "-trimpath", "-o", helperBin, "github.com/dormouse-run/dormouse/agentd/cmd/guestbulk")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if msg, err := cmd.CombinedOutput(); err != nil {
		panic(string(msg))
	}
	code := m.Run()
	if err := goleak.Find(); err != nil && code == 0 {
		println(err.Error())
		code = 1
	}
	_ = os.RemoveAll(dir)
	os.Exit(code)
}

const limit = 2 * time.Minute

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func within(t testing.TB) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	t.Cleanup(cancel)
	return ctx
}

// world is a fake runtime with one sandbox, in which a helper is a process of this machine.
type world struct {
	*Manager
	host *fake.Host
	d    *fake.Driver
	uid  string
}

// realHelper runs the real helper, as itself and with its own view of this machine.
func realHelper(ctx context.Context, _ []string, in, out, stderr *os.File) int {
	cmd := exec.CommandContext(ctx, helperBin)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = in, out, stderr
	if err := cmd.Start(); err != nil {
		return 127
	}
	// The process has its own; with ours open it would never see the end.
	_, _, _ = in.Close(), out.Close(), stderr.Close()
	_ = cmd.Wait()
	return cmd.ProcessState.ExitCode()
}

func newWorld(t testing.TB, opts Options, run fake.RunProgram) *world {
	t.Helper()
	w := &world{host: fake.NewHost(), uid: runtimetest.NewID(t)}
	w.host.SetProgram("/helper", run)
	w.d = w.host.Open()
	_, err := w.d.Start(t.Context(), runtime.Config{ID: w.uid})
	must(t, err)
	opts.Driver, opts.Helper = w.d, "/helper"
	w.Manager = New(opts)
	t.Cleanup(func() {
		w.Manager.Close()
		must(t, w.d.Delete(context.Background(), w.uid))
		must(t, w.d.Close())
		eventually(t, "no helper is left", func() bool { return w.host.Execs(w.uid) == 0 })
	})
	return w
}

func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	end := time.Now().Add(limit)
	for !ok() {
		if time.Now().After(end) {
			t.Fatalf("never: %s", what)
		}
		time.Sleep(time.Millisecond)
	}
}

// server listens on the loopback and serves each connection with fn.
func server(t *testing.T, network, address string, fn func(net.Conn)) net.Listener {
	t.Helper()
	l, err := net.Listen(network, address)
	must(t, err)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			fn(c)
			_ = c.Close()
		}
	}()
	t.Cleanup(func() {
		_ = l.Close()
		<-done
	})
	return l
}

func echo(c net.Conn) { _, _ = io.Copy(c, c) }

func port(l net.Listener) int { return l.Addr().(*net.TCPAddr).Port }

func TestDialEchoesWithHalfClose(t *testing.T) {
	w := newWorld(t, Options{}, realHelper)
	v4 := server(t, "tcp", "127.0.0.1:0", echo)
	v6 := server(t, "tcp6", "[::1]:0", echo)
	path := filepath.Join(t.TempDir(), "socket")
	server(t, "unix", path, echo)
	for name, dial := range map[string]func() (Conn, error){
		"IPv4": func() (Conn, error) { return w.Dial(within(t), w.uid, port(v4)) },
		"IPv6": func() (Conn, error) { return w.Dial(within(t), w.uid, port(v6)) },
		"unix": func() (Conn, error) { return w.DialSocket(within(t), w.uid, path) },
	} {
		t.Run(name, func(t *testing.T) {
			c, err := dial()
			must(t, err)
			defer c.Close()
			word := make([]byte, 5)
			for range 3 {
				_, err = c.Write([]byte("hello"))
				must(t, err)
				_, err = io.ReadFull(c, word)
				must(t, err)
			}
			// Much, both ways at once, then the half-close, then the rest and the end.
			big := bytes.Repeat([]byte("0123456789abcdef"), 1<<18)
			wrote := make(chan error, 1)
			go func() {
				_, err := c.Write(big)
				wrote <- errors.Join(err, c.CloseWrite())
			}()
			got, err := io.ReadAll(c)
			must(t, err)
			must(t, <-wrote)
			if !bytes.Equal(got, big) {
				t.Fatalf("%d bytes came back of %d, or others", len(got), len(big))
			}
		})
	}
	eventually(t, "the places are free", func() bool { return w.Active(w.uid) == 0 })
}

// deadPort is a port at which nobody listens, and which nobody else gets either.
func deadPort(t *testing.T) int {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	must(t, err)
	t.Cleanup(func() { must(t, unix.Close(fd)) })
	must(t, unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}))
	at, err := unix.Getsockname(fd)
	must(t, err)
	return at.(*unix.SockaddrInet4).Port
}

func TestDialRefusals(t *testing.T) {
	w := newWorld(t, Options{}, realHelper)
	closed := deadPort(t)
	for name, c := range map[string]struct {
		dial func() (Conn, error)
		want errs.Reason
	}{
		"nobody listens":  {func() (Conn, error) { return w.Dial(within(t), w.uid, closed) }, errs.PortClosed},
		"port 0":          {func() (Conn, error) { return w.Dial(within(t), w.uid, 0) }, errs.InvalidField},
		"port 65536":      {func() (Conn, error) { return w.Dial(within(t), w.uid, 65536) }, errs.InvalidField},
		"no such socket":  {func() (Conn, error) { return w.DialSocket(within(t), w.uid, "/absent/socket") }, errs.FileNotFound},
		"no such sandbox": {func() (Conn, error) { return w.Dial(within(t), runtimetest.NewID(t), 80) }, errs.ObjectNotFound},
		"time was up": {func() (Conn, error) {
			ctx, cancel := context.WithCancel(t.Context())
			cancel()
			return w.Dial(ctx, w.uid, 80)
		}, errs.CallCancelled},
	} {
		if _, err := c.dial(); !errs.Has(err, c.want) && errs.ReasonOf(err) != c.want {
			t.Errorf("%s: got %v, want %s", name, err, c.want)
		}
	}
}

func TestTheServerEndsFirst(t *testing.T) {
	w := newWorld(t, Options{}, realHelper)
	l := server(t, "tcp", "127.0.0.1:0", func(c net.Conn) { _, _ = c.Write([]byte("bye")) })
	c, err := w.Dial(within(t), w.uid, port(l))
	must(t, err)
	defer c.Close()
	got, err := io.ReadAll(c)
	must(t, err)
	if string(got) != "bye" {
		t.Fatalf("%q", got)
	}
}

func TestPlacesAreBounded(t *testing.T) {
	w := newWorld(t, Options{PerSandbox: 2, PerNode: 3}, realHelper)
	l := server(t, "tcp", "127.0.0.1:0", echo)
	other := runtimetest.NewID(t)
	_, err := w.d.Start(t.Context(), runtime.Config{ID: other})
	must(t, err)
	t.Cleanup(func() { must(t, w.d.Delete(context.Background(), other)) })
	first, err := w.Dial(within(t), w.uid, port(l))
	must(t, err)
	_, err = w.Start(within(t), w.uid, bulkwire.Order{Op: bulkwire.Dial, Port: port(l)})
	must(t, err)
	if _, err := w.Dial(within(t), w.uid, port(l)); errs.ReasonOf(err) != errs.TooMany {
		t.Fatalf("got %v, want %s", err, errs.TooMany)
	}
	_, err = w.Start(within(t), other, bulkwire.Order{Op: bulkwire.Dial, Port: port(l)})
	must(t, err)
	if _, err := w.Dial(within(t), other, port(l)); errs.ReasonOf(err) != errs.TooMany {
		t.Fatalf("got %v, want %s", err, errs.TooMany)
	}
	must(t, first.Close())
	eventually(t, "the place is free again", func() bool {
		c, err := w.Dial(within(t), w.uid, port(l))
		return err == nil && c.Close() == nil
	})
}

// TestFreezeHoldsBytesBack: while frozen nothing is sent and nothing is started; afterwards both go on.
func TestFreezeHoldsBytesBack(t *testing.T) {
	w := newWorld(t, Options{}, realHelper)
	l := server(t, "tcp", "127.0.0.1:0", echo)
	c, err := w.Dial(within(t), w.uid, port(l))
	must(t, err)
	defer c.Close()
	w.Freeze(within(t), w.uid)
	w.Freeze(within(t), w.uid)
	type result struct {
		c   Conn
		err error
	}
	wrote, dialled := make(chan error, 1), make(chan result, 1)
	go func() {
		_, err := c.Write([]byte("late"))
		wrote <- err
	}()
	l2 := server(t, "tcp", "127.0.0.1:0", echo)
	go func() {
		c, err := w.Dial(within(t), w.uid, port(l2))
		dialled <- result{c, err}
	}()
	select {
	case err := <-wrote:
		t.Fatalf("a frozen sandbox was written to: %v", err)
	case r := <-dialled:
		t.Fatalf("a helper was started in a frozen sandbox: %v", r.err)
	case <-time.After(20 * time.Millisecond):
	}
	if n := w.host.Execs(w.uid); n != 1 {
		t.Fatalf("%d helpers", n)
	}
	w.Thaw(w.uid)
	must(t, <-wrote)
	got := make([]byte, 4)
	_, err = io.ReadFull(c, got)
	must(t, err)
	r := <-dialled
	must(t, r.err)
	must(t, r.c.Close())
	w.Thaw(w.uid)
	w.Thaw(runtimetest.NewID(t))
}

func TestFreezeGivesUpOnAStart(t *testing.T) {
	w := newWorld(t, Options{}, realHelper)
	entered, leave := make(chan struct{}), make(chan struct{})
	w.host.SetHook(func(_ context.Context, op fake.Op, _ string) error {
		if op == fake.OpExec {
			close(entered)
			<-leave
		}
		return nil
	})
	done := make(chan error, 1)
	go func() {
		_, err := w.Dial(within(t), w.uid, 1)
		done <- err
	}()
	<-entered
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	w.Freeze(ctx, w.uid)
	w.Thaw(w.uid)
	close(leave)
	if err := <-done; errs.ReasonOf(err) != errs.PortClosed {
		t.Fatalf("got %v, want %s", err, errs.PortClosed)
	}
}

func TestCloseEndsTransfers(t *testing.T) {
	w := newWorld(t, Options{}, realHelper)
	l := server(t, "tcp", "127.0.0.1:0", echo)
	c, err := w.Dial(within(t), w.uid, port(l))
	must(t, err)
	w.Freeze(within(t), w.uid)
	w.Manager.Close()
	if _, err := c.Read(make([]byte, 1)); errs.ReasonOf(err) != errs.ShuttingDown {
		t.Fatalf("got %v, want %s", err, errs.ShuttingDown)
	}
	if _, err := w.Dial(within(t), w.uid, port(l)); errs.ReasonOf(err) != errs.ShuttingDown {
		t.Fatalf("got %v, want %s", err, errs.ShuttingDown)
	}
}

func TestTheSandboxEndsBelowATransfer(t *testing.T) {
	w := newWorld(t, Options{}, realHelper)
	l := server(t, "tcp", "127.0.0.1:0", echo)
	c, err := w.Dial(within(t), w.uid, port(l))
	must(t, err)
	defer c.Close()
	w.host.Exit(w.uid, runtime.Exit{})
	if _, err := io.ReadAll(c); errs.ReasonOf(err) != errs.TransferCut {
		t.Fatalf("got %v, want %s", err, errs.TransferCut)
	}
	if _, err := w.Dial(within(t), w.uid, port(l)); errs.ReasonOf(err) != errs.WrongPhase {
		t.Fatalf("got %v, want %s", err, errs.WrongPhase)
	}
}

// TestHostileHelpers: whatever is put in the helper's place ends its own transfer only, with a typed error.
func TestHostileHelpers(t *testing.T) {
	says := func(said ...byte) fake.RunProgram {
		return func(_ context.Context, _ []string, _, out, _ *os.File) int {
			_, _ = out.Write(said)
			return 0
		}
	}
	for name, c := range map[string]struct {
		run  fake.RunProgram
		want errs.Reason
	}{
		"says nothing":        {says(), errs.TransferCut},
		"another kind":        {says('Z', 1, 0, 0, 'x'), errs.TransferCut},
		"a huge frame":        {says('D', 0xff, 0xff, 0xff), errs.TransferCut},
		"a torn frame":        {says('A', 5, 0, 0, '{'), errs.TransferCut},
		"a request":           {says('Q', 0, 0, 0), errs.TransferCut},
		"data first":          {says('D', 1, 0, 0, 'x'), errs.TransferCut},
		"an end first":        {says('E', 0, 0, 0), errs.TransferCut},
		"no reason":           {says('F', 0, 0, 0), errs.TransferCut},
		"a reason of its own": {says(append([]byte{'F', 19, 0, 0}, `{"reason":"GOT_YA"}`...)...), errs.TransferCut},
		"another's reason":    {says(append([]byte{'F', 22, 0, 0}, `{"reason":"NO_LEADER"}`...)...), errs.TransferCut},
		"no JSON":             {says('F', 1, 0, 0, '}'), errs.TransferCut},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, Options{}, c.run)
			if _, err := w.Dial(within(t), w.uid, 80); errs.ReasonOf(err) != c.want {
				t.Fatalf("got %v, want %s", err, c.want)
			}
		})
	}
}

// TestAHelperThatStaysIsKilled: neither a closed pipe nor anything else makes it go.
func TestAHelperThatStaysIsKilled(t *testing.T) {
	w := newWorld(t, Options{}, func(ctx context.Context, _ []string, _, out, _ *os.File) int {
		_, _ = out.Write([]byte{'A', 0, 0, 0})
		<-ctx.Done()
		return 0
	})
	c, err := w.Dial(within(t), w.uid, 80)
	must(t, err)
	must(t, c.Close())
	eventually(t, "the helper is killed", func() bool { return w.host.Execs(w.uid) == 0 && w.Active(w.uid) == 0 })
}

// TestAHelperLeavesWithAgentd: when the pipes are closed, as the kernel does for an agentd that was killed, the
// real helper ends, also while it waits for a server that says nothing.
func TestAHelperLeavesWithAgentd(t *testing.T) {
	stay := make(chan struct{})
	l := server(t, "tcp", "127.0.0.1:0", func(net.Conn) { <-stay })
	defer close(stay)
	for name, part := range map[string]int{"in": 0, "out": 1} {
		t.Run(name, func(t *testing.T) {
			p, err := newPipes()
			must(t, err)
			defer p.close()
			in, out, stderr := os.NewFile(uintptr(p.theirs[0]), "in"), os.NewFile(uintptr(p.theirs[1]), "out"), os.NewFile(uintptr(p.theirs[2]), "err")
			cmd := exec.CommandContext(within(t), helperBin)
			cmd.Stdin, cmd.Stdout, cmd.Stderr = in, out, stderr
			must(t, cmd.Start())
			_, _, _ = in.Close(), out.Close(), stderr.Close()
			must(t, bulkwire.NewWriter(p.in).WriteText(bulkwire.Request, bulkwire.Order{Op: bulkwire.Dial, Port: port(l)}))
			kind, _, err := bulkwire.NewReader(p.out).Next()
			if err != nil || kind != bulkwire.Answer {
				t.Fatal(kind, err)
			}
			must(t, []*os.File{p.in, p.out}[part].Close())
			if err := cmd.Wait(); cmd.ProcessState.ExitCode() != 4 {
				t.Fatalf("the helper ended with %v", err)
			}
		})
	}
}

func TestAnOldBundleHasNoHelper(t *testing.T) {
	w := newWorld(t, Options{}, realHelper)
	m := New(Options{Driver: w.d, Helper: "/absent"})
	defer m.Close()
	if _, err := m.Dial(within(t), w.uid, 80); errs.ReasonOf(err) != errs.NotSupported {
		t.Fatalf("got %v, want %s", err, errs.NotSupported)
	}
	if n := m.Active(w.uid); n != 0 {
		t.Fatal("a place is taken: " + strconv.Itoa(n))
	}
}
