package main

import (
	"bytes"
	"fmt"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dormouse-run/dormouse/pkg/command"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// desk is a terminal with somebody at it, who sees what is on it.
type desk struct {
	t           *testing.T
	master, tty *os.File
	mu          sync.Mutex
	seen        bytes.Buffer
	looked      chan struct{}
	code        chan int
	before      *unix.Termios
	reading     chan struct{}
}

func newDesk(t *testing.T) *desk {
	t.Helper()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	master, err := unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	must(err)
	must(unix.IoctlSetPointerInt(master, unix.TIOCSPTLCK, 0))
	n, err := unix.IoctlGetInt(master, unix.TIOCGPTN)
	must(err)
	tty, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	must(err)
	d := &desk{t: t, master: os.NewFile(uintptr(master), "master"), tty: tty, looked: make(chan struct{}, 1), code: make(chan int, 1), reading: make(chan struct{})}
	must(unix.IoctlSetWinsize(master, unix.TIOCSWINSZ, &unix.Winsize{Row: 33, Col: 101}))
	d.before, err = unix.IoctlGetTermios(master, unix.TCGETS)
	must(err)
	go func() {
		defer close(d.reading)
		buf := make([]byte, 4096)
		for {
			n, err := d.master.Read(buf)
			d.mu.Lock()
			d.seen.Write(buf[:n])
			d.mu.Unlock()
			select {
			case d.looked <- struct{}{}:
			default:
			}
			if err != nil {
				return
			}
		}
	}()
	t.Cleanup(func() {
		_ = d.tty.Close()
		_ = d.master.Close()
		<-d.reading
	})
	return d
}

// run starts a command line on the terminal.
func (d *desk) run(args ...string) {
	app := newApp(streams{in: d.tty, out: d.tty, err: d.tty})
	go func() { d.code <- command.Run(d.t.Context(), app, append([]string{"dormouse"}, args...)) }()
}

func (d *desk) keys(s string) {
	d.t.Helper()
	if _, err := d.master.WriteString(s); err != nil {
		d.t.Fatal(err)
	}
}

// sees waits until something is on the terminal.
func (d *desk) sees(want string) {
	d.t.Helper()
	timeout := time.After(time.Minute)
	for {
		d.mu.Lock()
		got := d.seen.String()
		d.mu.Unlock()
		if strings.Contains(got, want) {
			return
		}
		select {
		case <-d.looked:
		case <-timeout:
			d.t.Fatalf("no %q on the terminal: %q", want, got)
		}
	}
}

func (d *desk) ends(want int) {
	d.t.Helper()
	if code := <-d.code; code != want {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.t.Fatalf("exit code %d, want %d; on the terminal: %q", code, want, d.seen.String())
	}
	after, err := unix.IoctlGetTermios(int(d.tty.Fd()), unix.TCGETS)
	if err != nil || *after != *d.before {
		d.t.Errorf("the terminal is not as it was: %+v %v", after, err)
	}
}

func TestExecOnATerminal(t *testing.T) {
	f := serve(t)
	f.add("box", nil, nil)
	t.Setenv("TERM", "vt220")
	d := newDesk(t)
	d.run("exec", "-it", "-e", "A=b", "box", "--", "sh")
	d.sees("ready")
	if got := asked[*dormousev1.StartProcessRequest](t, f); got.GetSpec().GetTerminal().GetRows() != 33 || got.GetSpec().GetTerminal().GetCols() != 101 ||
		got.GetSpec().GetEnv()["TERM"] != "vt220" || got.GetSpec().GetEnv()["A"] != "b" || !got.GetHoldOutput() {
		t.Errorf("asked %v", got)
	}
	d.keys("ab\x03~.\r") // raw: a Ctrl-C is the command's, and so is ~. within a line
	d.sees("AB\x03~.\r")
	for _, size := range []uint16{50, 60} {
		if err := unix.IoctlSetWinsize(int(d.tty.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: size, Col: 120}); err != nil {
			t.Fatal(err)
		}
		if err := syscall.Kill(os.Getpid(), syscall.SIGWINCH); err != nil {
			t.Fatal(err)
		}
		d.sees(fmt.Sprintf("size %d 120", size))
	}
	d.keys("exit\r")
	d.ends(5)
}

func TestShellIsLeftAndComeBackTo(t *testing.T) {
	f := serve(t)
	f.add("box", nil, nil)
	d := newDesk(t)
	d.run("shell", "box")
	d.sees("ready")
	if got := asked[*dormousev1.StartProcessRequest](t, f); !strings.Contains(got.GetSpec().GetShell(), "/bin/bash") {
		t.Errorf("asked %v", got)
	}
	d.keys("x\r~~y\r~.")
	d.ends(0)
	d.sees("X\r~Y\r")
	d.sees("attach " + uidAt(1))

	d = newDesk(t)
	d.run("attach", "box", uidAt(100))
	d.sees("ready")
	if got := asked[*dormousev1.AttachOpen](t, f); got.GetStdoutOffset() != 40 || !got.GetInput() || !got.GetHold() {
		t.Errorf("asked %v", got)
	}
	d.sees("size 33 101")
	d.keys("exit\r")
	d.ends(5)
}

// A shell whose commands come from a pipe has no terminal, and -t without one has the usual size.
func TestShellWithoutATerminal(t *testing.T) {
	f := serve(t)
	f.add("box", nil, nil)
	if r := dormouseIn(t, "ls\n", "shell", "box"); r.code != 5 || r.out != "ready\nLS\n" {
		t.Errorf("%+v", r)
	}
	if got := asked[*dormousev1.StartProcessRequest](t, f); got.GetSpec().GetTerminal() != nil || !got.GetSpec().GetStdin() {
		t.Errorf("asked %v", got)
	}
	if r := dormouseIn(t, "ls\n", "exec", "-ti", "box", "--", "sh"); r.code != 5 || r.out != "ready\nLS\n" {
		t.Errorf("%+v", r)
	}
	if got := asked[*dormousev1.StartProcessRequest](t, f); got.GetSpec().GetTerminal() == nil {
		t.Errorf("asked %v", got)
	}
	for _, args := range [][]string{{"exec", "-td", "box", "--", "sh"}, {"run", "-it", "reg.example/a:1"}} {
		if r := dormouse(t, args...); r.code != 2 || !strings.Contains(r.err, "-t") {
			t.Errorf("%v: %+v", args, r)
		}
	}
}

func TestEscape(t *testing.T) {
	for in, want := range map[string]struct {
		out  string
		left bool
	}{
		"~.":           {"", true},
		"a~.":          {"a~.", false},
		"a\r~.b":       {"a\r", true},
		"a\n~.":        {"a\n", true},
		"~~.":          {"~.", false},
		"~x~.":         {"~x~.", false},
		"~\r~.":        {"~\r", true},
		"\r~~\r~~\r~.": {"\r~\r~\r", true},
	} {
		for _, whole := range []bool{true, false} { // at once, and key by key
			e := &escape{fresh: true}
			var out []byte
			left := false
			for i := 0; i < len(in) && !left; {
				n := 1
				if whole {
					n = len(in)
				}
				var part []byte
				part, left = e.filter([]byte(in[i : i+n]))
				out = append(out, part...)
				i += n
			}
			if string(out) != want.out || left != want.left {
				t.Errorf("%q (%v): %q %v, want %q %v", in, whole, out, left, want.out, want.left)
			}
		}
	}
}
