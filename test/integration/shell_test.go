package integration

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// desk is a command on a terminal with somebody at it.
type desk struct {
	w      *world
	master *os.File
	cmd    *exec.Cmd
	mu     sync.Mutex
	seen   bytes.Buffer
	read   chan struct{}
}

// sit starts the command of the tenant on a terminal of its own.
func (w *world) sit(args ...string) *desk {
	w.Helper()
	fd, err := unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	w.ok(err)
	d := &desk{w: w, master: os.NewFile(uintptr(fd), "master"), read: make(chan struct{})}
	w.ok(unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0))
	n, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	w.ok(err)
	tty, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	w.ok(err)
	w.ok(unix.IoctlSetWinsize(int(tty.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: 33, Col: 101}))
	d.cmd = exec.CommandContext(w.ctx, filepath.Join(w.Bin, "dormouse"), args...)
	d.cmd.Env = []string{"DORMOUSE_ADDR=unix://" + w.GRPCSocket(), "DORMOUSE_API_KEY=" + w.key, "HOME=" + w.TempDir(), "TERM=vt100"}
	d.cmd.Stdin, d.cmd.Stdout, d.cmd.Stderr = tty, tty, tty
	d.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	err = d.cmd.Start()
	_ = tty.Close()
	w.ok(err)
	w.Cleanup(func() {
		_ = d.cmd.Process.Kill() // where the test has not seen its end
		_ = d.cmd.Wait()
		_ = d.master.Close()
	})
	go func() {
		defer close(d.read)
		buf := make([]byte, 4096)
		for {
			n, err := d.master.Read(buf)
			d.mu.Lock()
			d.seen.Write(buf[:n])
			d.mu.Unlock()
			if err != nil {
				return
			}
		}
	}()
	return d
}

func (d *desk) keys(s string) {
	d.w.Helper()
	_, err := d.master.WriteString(s)
	d.w.ok(err)
}

func (d *desk) text() string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.seen.String()
}

// sees waits until something is on the terminal, and types again and again until then.
func (d *desk) sees(want, typing string) {
	d.w.Helper()
	ctx, cancel := context.WithTimeout(d.w.ctx, time.Minute)
	defer cancel()
	d.w.ok(poll(ctx, func() error {
		if text := d.text(); !strings.Contains(text, want) {
			_, err := d.master.WriteString(typing)
			return errors.Join(err, fmt.Errorf("no %q on the terminal: %q", want, text))
		}
		return nil
	}))
}

func (d *desk) ends(code int) {
	d.w.Helper()
	err := d.cmd.Wait()
	_ = d.master.Close()
	<-d.read
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) || d.cmd.ProcessState.ExitCode() != code {
		d.w.Fatalf("%v, exit code %d, want %d; on the terminal: %q", err, d.cmd.ProcessState.ExitCode(), code, d.text())
	}
}

// The commands of docs/processes.md, at a terminal and without one.
func TestProcessesAtTheCommandLine(t *testing.T) {
	w := enter(t)
	s := w.create(w.spec())

	shell := w.sit("shell", s.UID)
	shell.sees("33 101", "stty size\r")
	w.ok(unix.IoctlSetWinsize(int(shell.master.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: 40, Col: 120}))
	shell.sees("40 120", "stty size\r")
	// The child says so itself: before it is the terminal's foreground, a Ctrl-C is the shell's.
	shell.keys("sh -c \"echo run''ning; exec sleep 1000\"\r")
	shell.sees("running", "")
	shell.keys("\x03") // ends what runs in the shell
	shell.keys("echo $TERM $?\r")
	shell.sees("vt100 130", "")
	shell.keys("exit 7\r")
	shell.ends(7)

	left := w.sit("exec", "-it", "--tag", "job=edit", s.UID, "--", "sh", "-c", "echo begin; cat")
	left.sees("begin", "")
	left.keys("one\r")
	left.sees("one\r\none\r\n", "")
	left.keys("~.")
	left.ends(0)
	id := w.said(0, "ps", "-q", "--tag", "job=edit", s.UID)
	id = strings.TrimSpace(id)
	back := w.sit("attach", s.UID, id)
	back.keys("two\r")
	back.sees("two\r\ntwo\r\n", "")
	if strings.Contains(back.text(), "begin") {
		t.Errorf("what was before is shown again: %q", back.text())
	}
	back.keys("\x04")
	back.ends(0)
	if got := w.said(0, "logs", s.UID, id); got != "begin\r\none\r\none\r\ntwo\r\ntwo\r\n" {
		t.Errorf("logs: %q", got)
	}
	if got := w.said(0, "logs", "--since-offset", "7", s.UID, id); !strings.HasPrefix(got, "one\r\none") {
		t.Errorf("logs from an offset: %q", got)
	}

	w.said(3, "exec", s.UID, "--", "sh", "-c", "exit 3")
	w.said(124, "exec", "--timeout", "1s", s.UID, "--", "sleep", "1000")
	sleeper := strings.TrimSpace(w.said(0, "exec", "-d", s.UID, "--", "sh", "-c", "sleep 1001 & sleep 1002"))
	w.said(0, "kill", "-s", "KILL", "--tree", s.UID, sleeper)
	w.await("it was killed", func() error {
		if got := w.said(0, "ps", s.UID); !strings.Contains(got, "killed by SIGKILL") {
			return errors.New(got)
		}
		return nil
	})
}

// said runs the command and gives its output.
func (w *world) said(code int, args ...string) string {
	w.Helper()
	out, got := w.dormouse(args...)
	if got != code {
		w.Fatalf("dormouse %v: exit code %d, want %d: %s", args, got, code, out)
	}
	return out
}
