package guest

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/dormouse-run/dormouse/pkg/errs"
)

// onTerminal is the command line of the test program, on a terminal.
func onTerminal(id string, args ...string) StartRequest {
	r := subject(id, args...)
	r.Terminal = &Size{Rows: 24, Columns: 80}
	return r
}

func TestTerminal(t *testing.T) {
	s := newSandbox(t)
	c := s.open(t)
	terminals(t, c)
	daemons(t, c)
}

// TestTerminalRunsc: the same in a real sandbox, and terminals outlive a checkpoint and a restore.
func TestTerminalRunsc(t *testing.T) {
	m := newMachine(t)
	box := sandbox{opts: m.start("sandbox-a", "")}
	c := box.open(t)
	terminals(t, c)
	daemons(t, c)

	_, err := c.Start(ctx(t), onTerminal("cat", "cat"))
	must(t, err)
	_, err = c.Start(ctx(t), onTerminal("size", "winch"))
	must(t, err)
	_, err = c.WriteStdin(ctx(t), "cat", []byte("before\nhalf a "))
	must(t, err)
	awaitOutput(t, c, "cat", "before\r\nhalf a before\r\n")
	awaitOutput(t, c, "size", "24 80\r\n")

	img := filepath.Join(m.root, "image")
	must(t, c.Quiesce(ctx(t)))
	m.do(nil, "pause", "sandbox-a")
	must(t, c.Drain(ctx(t)))
	m.do(nil, "checkpoint", "-leave-running", "-direct", "-image-path", img, "sandbox-a")
	must(t, c.Close())
	m.do(nil, "delete", "-force", "sandbox-a")
	box = sandbox{opts: m.start("sandbox-b", img)}
	box.opts.Generation = 2
	c = box.open(t)

	_, err = c.WriteStdin(ctx(t), "cat", []byte("line\n"))
	must(t, err)
	awaitOutput(t, c, "cat", "before\r\nhalf a before\r\nline\r\nhalf a line\r\n")
	must(t, c.Resize(ctx(t), "size", Size{Rows: 10, Columns: 20}))
	awaitOutput(t, c, "size", "24 80\r\n10 20\r\n")
	must(t, c.CloseStdin(ctx(t), "cat"))
	if e, err := c.Wait(ctx(t), "cat"); err != nil || e.Code != 0 {
		t.Fatalf("cat after the restore: %+v %v", e, err)
	}
	if out, _, e := run(t, c, onTerminal("new", "tty")); !strings.HasPrefix(out, "24 80\r\ntrue <nil>") || e.Code != 0 {
		t.Fatalf("a new terminal after the restore: %q %+v", out, e)
	}
}

func terminals(t *testing.T, c *Conn) {
	t.Helper()
	t.Run("is one", func(t *testing.T) {
		r := onTerminal("tty", "tty")
		r.User, r.Terminal = "worker", &Size{Rows: 7, Columns: 99}
		out, errOut, e := run(t, c, r)
		if want := "7 99\r\ntrue <nil> xterm\r\n<nil> 1000 true\r\n<nil>\r\n"; out != want || errOut != "" || e.Code != 0 {
			t.Fatalf("%q %q %+v, want %q", out, errOut, e, want)
		}
		p, err := c.Get(ctx(t), "tty")
		if err != nil || p.Terminal == nil || *p.Terminal != *r.Terminal {
			t.Fatalf("%+v %v", p, err)
		}
	})
	t.Run("size", func(t *testing.T) {
		_, err := c.Start(ctx(t), onTerminal("winch", "winch"))
		must(t, err)
		awaitOutput(t, c, "winch", "24 80\r\n")
		must(t, c.Resize(ctx(t), "winch", Size{Rows: 50, Columns: 132}))
		awaitOutput(t, c, "winch", "24 80\r\n50 132\r\n")
		for _, bad := range []Size{{}, {Rows: 1}, {Rows: 4097, Columns: 80}, {Rows: -1, Columns: -1}, {Rows: 1 << 32, Columns: 1}} {
			if err := c.Resize(ctx(t), "winch", bad); !errs.Has(err, errs.InvalidField) {
				t.Errorf("%+v: %v", bad, err)
			}
		}
		if _, err := c.Signal(ctx(t), "winch", 9, false); err != nil {
			t.Fatal(err)
		}
		_, err = c.Wait(ctx(t), "winch")
		must(t, err)
		must(t, c.Resize(ctx(t), "winch", Size{Rows: 5, Columns: 5})) // it has ended: nothing happens
	})
	t.Run("without one", func(t *testing.T) {
		run(t, c, subject("plain", "exit", "0"))
		if err := c.Resize(ctx(t), "plain", Size{Rows: 5, Columns: 5}); !errs.Has(err, errs.WrongPhase) {
			t.Error(err)
		}
		if err := c.Resize(ctx(t), "none", Size{Rows: 5, Columns: 5}); !errs.Has(err, errs.ProcessNotFound) {
			t.Error(err)
		}
		r := onTerminal("bad", "tty")
		r.Terminal = &Size{Rows: 0, Columns: 80}
		if _, err := c.Start(ctx(t), r); !errs.Has(err, errs.InvalidField) {
			t.Error(err)
		}
	})
	t.Run("end of input", func(t *testing.T) {
		for typed, want := range map[string]string{
			"": "", "line\n": "line\r\nline\r\n", "part": "partpart", "enter\r": "enter\r\nenter\r\n",
		} {
			id := "eof-" + typed
			id = strings.Map(func(r rune) rune { return max(r, '-') }, id)
			_, err := c.Start(ctx(t), onTerminal(id, "cat"))
			must(t, err)
			_, err = c.WriteStdin(ctx(t), id, []byte(typed))
			must(t, err)
			must(t, c.CloseStdin(ctx(t), id))
			e, err := c.Wait(ctx(t), id)
			if out := string(readAll(t, c, id, 0)); err != nil || e.Code != 0 || out != want {
				t.Errorf("%q: %+v %v, output %q, want %q", typed, e, err, out, want)
			}
			if _, err := c.WriteStdin(ctx(t), id, []byte("more")); !errs.Has(err, errs.WrongPhase) {
				t.Errorf("input after its end: %v", err)
			}
		}
	})
	t.Run("interrupt", func(t *testing.T) {
		_, err := c.Start(ctx(t), onTerminal("intr", "cat"))
		must(t, err)
		_, err = c.WriteStdin(ctx(t), "intr", []byte("x\n"))
		must(t, err)
		awaitOutput(t, c, "intr", "x\r\nx\r\n")
		_, err = c.WriteStdin(ctx(t), "intr", []byte{3})
		must(t, err)
		if e, err := c.Wait(ctx(t), "intr"); err != nil || e.Signal != 2 {
			t.Fatalf("%+v %v", e, err)
		}
	})
	t.Run("exact output", func(t *testing.T) {
		const size = 8 << 20
		var got collector
		var line bytes.Buffer
		for i := 0; line.Len() < size; i++ {
			fmt.Fprintf(&line, "%015d\n", i)
		}
		_, e, err := c.Run(ctx(t), onTerminal("pour-raw", "raw", "pour", utoa(size)), got.sink)
		if err != nil || e.Code != 0 || got.gap != 0 || !bytes.Equal(got.out.Bytes(), line.Bytes()) {
			t.Fatalf("raw: %+v %v, gap %d, %d bytes of %d", e, err, got.gap, got.out.Len(), size)
		}
		got = collector{}
		_, e, err = c.Run(ctx(t), onTerminal("pour-cooked", "pour", "160000"), got.sink)
		if err != nil || e.Code != 0 || !bytes.Equal(got.out.Bytes(), bytes.ReplaceAll(line.Bytes()[:160000], []byte("\n"), []byte("\r\n"))) {
			t.Fatalf("with output processing: %+v %v, %d bytes", e, err, got.out.Len())
		}
	})
	t.Run("exact input", func(t *testing.T) {
		data := bytes.Repeat([]byte("\x00\x03\x04\r\n\xff0123456789"), 64<<10)
		_, err := c.Start(ctx(t), onTerminal("raw-in", "raw", "digest", utoa(uint64(len(data)))))
		must(t, err)
		awaitOutput(t, c, "raw-in", "ready\n")
		_, err = c.WriteStdin(ctx(t), "raw-in", data)
		must(t, err)
		_, err = c.Wait(ctx(t), "raw-in")
		must(t, err)
		sum := sha256.Sum256(data)
		if out := string(readAll(t, c, "raw-in", 0)); out != "ready\n"+hex.EncodeToString(sum[:])+"\n" {
			t.Fatalf("%q", out)
		}
	})
	t.Run("groups", func(t *testing.T) {
		r := subject("groups", "whoami")
		r.User, r.Groups = "worker", []string{"root", "3000"}
		if out, _, _ := run(t, c, r); !strings.HasPrefix(out, "1000 1001 [0 2000 3000] ") {
			t.Fatalf("%q", out)
		}
		r.ID, r.Groups = "groups-2", []string{"nobody-knows"}
		if _, err := c.Start(ctx(t), r); !errs.Has(err, errs.UserNotFound) {
			t.Fatal(err)
		}
	})
}

// daemons: what took a session of its own and lost its parent is still of the tree, for a signal and
// for a timeout (B19).
func daemons(t *testing.T, c *Conn) {
	t.Helper()
	t.Run("daemons", func(t *testing.T) {
		before, _, _ := run(t, c, subject("pids-before", "pids"))
		_, err := c.Start(ctx(t), subject("daemon", "daemon"))
		must(t, err)
		awaitOutput(t, c, "daemon", "<nil>\n<nil>\n")
		if n, err := c.Signal(ctx(t), "daemon", 9, true); err != nil || n != 2 {
			t.Fatalf("%d were killed, %v; want the process and its daemon", n, err)
		}
		for timeout := time.Second; ; timeout *= 2 { // until there was the time to say all
			r := subject("daemon-late-"+timeout.String(), "daemon")
			r.Timeout = timeout
			out, _, e := run(t, c, r)
			if !e.TimedOut || e.Signal != 9 || !strings.HasPrefix("<nil>\n<nil>\n", out) || timeout > time.Minute {
				t.Fatalf("%q %+v", out, e)
			}
			if out == "<nil>\n<nil>\n" {
				break
			}
		}
		for i := 0; ; i++ {
			after, _, _ := run(t, c, subject("pids-after-"+itoa(i), "pids"))
			if after == before {
				return
			}
			if ctx(t).Err() != nil || i > 1000 {
				t.Fatalf("%s processes before, %s after", before, after)
			}
		}
	})
}
