package guest

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/dormouse-run/dormouse/agentd/internal/guestwire"
	"github.com/dormouse-run/dormouse/pkg/errs"
)

// TestQuiesce: nothing goes either way between Quiesce and Resume, waits and streams live through
// it, and what was asked meanwhile is done after it.
func TestQuiesce(t *testing.T) {
	c := newSandbox(t).open(t)
	_, err := c.Start(ctx(t), subject("count", "count"))
	must(t, err)
	s, err := c.Output(ctx(t), OutputRequest{Process: "count", Output: Stdout, Follow: UntilExit})
	must(t, err)
	defer s.Close()
	f := &follower{t: t, s: s}
	f.lines(5)

	waited := make(chan error, 1)
	go func() { _, err := c.Wait(context.WithoutCancel(ctx(t)), "count"); waited <- err }()
	for range 3 {
		must(t, c.Quiesce(ctx(t)))
		must(t, c.Drain(ctx(t)))
		short, cancel := context.WithTimeout(ctx(t), 50*time.Millisecond)
		err := c.Ping(short)
		cancel()
		if !errs.Has(err, errs.DeadlineExpired) || !errs.NotStartedFor(err) {
			t.Fatalf("a request in the quiet: %v", err)
		}
		later := make(chan error, 1)
		go func() { later <- c.Ping(ctx(t)) }()
		must(t, c.Drain(ctx(t))) // still nothing in either FIFO
		must(t, c.Resume(ctx(t)))
		must(t, <-later)
		f.lines(20)
	}
	must(t, c.Resume(ctx(t))) // without a quiesce too
	must(t, c.Quiesce(ctx(t)))
	must(t, c.Quiesce(ctx(t)))
	must(t, c.Resume(ctx(t)))
	_, err = c.Signal(ctx(t), "count", 9, false)
	must(t, err)
	must(t, <-waited)
}

// TestQuiesceThatFailsLetsTheChannelGoOn: the sandbox does not answer in time, and later does.
func TestQuiesceThatFailsLetsTheChannelGoOn(t *testing.T) {
	box := newSandbox(t)
	c := box.open(t)
	must(t, box.cmd.Process.Signal(syscall.SIGSTOP))
	for wait := 100 * time.Millisecond; ; wait *= 2 { // until there was the time to ask
		short, cancel := context.WithTimeout(ctx(t), wait)
		err := c.Quiesce(short)
		cancel()
		if errs.Has(err, errs.GuestSilent) {
			break
		}
		if !errs.Has(err, errs.DeadlineExpired) || wait > time.Minute {
			t.Fatalf("quiesce of a stopped sandbox: %v", err)
		}
	}
	must(t, box.cmd.Process.Signal(syscall.SIGCONT))
	must(t, c.Ping(ctx(t)))
	must(t, c.Quiesce(ctx(t)))
	must(t, c.Resume(ctx(t)))
}

// TestNewConnAfterAgentdWasKilled: the earlier one's frames are torn in both directions and its
// replies are still in the FIFO.
func TestNewConnAfterAgentdWasKilled(t *testing.T) {
	box := newSandbox(t)
	old := box.open(t)
	r := subject("pour", "pour", "200000")
	_, err := old.Start(ctx(t), r)
	must(t, err)
	_, err = old.Wait(ctx(t), "pour")
	must(t, err)
	must(t, old.Close())

	// As an agentd that asked for output, took half a frame of it, and died in writing another
	// request: the guest waits for 30,000 bytes more, and its own FIFO is full of old frames.
	in, err := os.OpenFile(box.opts.InPath, os.O_RDWR, 0)
	must(t, err)
	defer in.Close()
	out, err := os.OpenFile(box.opts.OutPath, os.O_RDWR, 0)
	must(t, err)
	defer out.Close()
	ask, _ := guestwire.AppendMessage(nil, old.ch, 77, &guestwire.OutputOpen{ProcessID: "pour", Output: guestwire.Stdout, Credit: 1 << 20})
	torn := guestwire.AppendFrame(nil, guestwire.Frame{Type: guestwire.TypeStdinData, Channel: old.ch, Payload: make([]byte, 30_000)})
	_, err = in.Write(append(ask, torn[:100]...))
	must(t, err)
	if _, err := out.Read(make([]byte, 333)); err != nil {
		t.Fatal(err)
	}

	c := box.open(t) // the same generation
	if i := c.Info(); i.PreviousUID != box.opts.SandboxUID || i.PreviousGeneration != 1 || i.Processes != 1 {
		t.Fatalf("info: %+v", i)
	}
	if got := readAll(t, c, "pour", 0); len(got) != 200_000 {
		t.Fatalf("%d bytes", len(got))
	}
	must(t, c.Quiesce(ctx(t)))
	must(t, c.Close())
	// Killed while quiesced: the next hello ends the quiet.
	c = box.open(t, generation(5))
	must(t, c.Ping(ctx(t)))
	must(t, c.Close())

	if _, err := Open(ctx(t), box.opts); !errs.Has(err, errs.Fenced) || errs.From(err).Details["current_epoch"] != "5" {
		t.Fatalf("a lower generation: %v", err)
	}
	other := box.opts
	other.SandboxUID, other.Generation = "another", 5
	if _, err := Open(ctx(t), other); !errs.Has(err, errs.StaleUID) {
		t.Fatalf("another sandbox, same generation: %v", err)
	}
	other.Generation = 6
	c = box.open(t, func(o *Options) { *o = other })
	must(t, c.Ping(ctx(t)))
}

// TestOldChannelHasNoEffect: frames of an earlier generation or key are dropped by the guest.
func TestOldChannelHasNoEffect(t *testing.T) {
	box := newSandbox(t)
	old := box.open(t)
	must(t, old.Close())
	c := box.open(t, generation(2))
	in, err := os.OpenFile(box.opts.InPath, os.O_RDWR, 0)
	must(t, err)
	defer in.Close()
	for _, ch := range []guestwire.Channel{old.ch, {Generation: 2, Key: old.ch.Key}, {Generation: 3, Key: c.ch.Key}} {
		stale, _ := guestwire.AppendMessage(nil, ch, 1, &guestwire.Start{ProcessID: "stale", Args: []string{"subject", "sleep"}})
		_, err := in.Write(stale)
		must(t, err)
	}
	must(t, c.Ping(ctx(t)))
	if list, err := c.List(ctx(t)); err != nil || len(list) != 0 {
		t.Fatalf("a stale request was done: %v %v", list, err)
	}
}

func TestIdentity(t *testing.T) {
	box := newSandbox(t)
	c := box.open(t)
	hook := filepath.Join(box.root, "etc/dormouse/on-restore")
	copyFile(t, bins.subject, hook) // ends with 0 or 2: what counts is that it is run
	must(t, os.Symlink("/bin/plain", filepath.Join(box.root, "etc/hosts")))
	id := Identity{
		Hostname: "one", Hosts: []Host{{Address: "10.1.2.3", Names: []string{"one", "one.local"}}},
		DNS: &DNS{Nameservers: []string{"10.0.0.2"}, Searches: []string{"a.example", "b.example"}, Options: []string{"ndots:2"}}, SecretEnv: []string{"TOKEN=s3cret"},
	}
	done, err := c.Configure(ctx(t), id)
	if err != nil || !done.HostnameSet || !done.IdentityChanged || done.HookProcess != "" {
		t.Fatalf("configure: %+v %v", done, err)
	}
	for file, want := range map[string]string{
		"etc/hostname":               "one\n",
		"etc/hosts":                  "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n10.1.2.3\tone one.local\n",
		"etc/resolv.conf":            "nameserver 10.0.0.2\nsearch a.example b.example\noptions ndots:2\n",
		"run/dormouse/identity.json": `{"sandbox_uid":"` + box.opts.SandboxUID + `","hostname":"one","generation":1}` + "\n",
		"bin/plain":                  "no program", // the link was replaced, not followed
	} {
		if got, err := os.ReadFile(filepath.Join(box.root, file)); err != nil || string(got) != want {
			t.Errorf("%s: %q %v", file, got, err)
		}
	}
	r := subject("main", "env")
	r.Main = true
	if out, _, _ := run(t, c, r); !strings.Contains(out, "TOKEN=s3cret\n") || !strings.Contains(out, "HOSTNAME=one\n") {
		t.Errorf("the main command's environment: %q", out)
	}
	if out, _, _ := run(t, c, subject("other", "env")); strings.Contains(out, "s3cret") {
		t.Errorf("another process got the secret: %q", out)
	}
	if done, err := c.Configure(ctx(t), id); err != nil || done.IdentityChanged {
		t.Fatalf("configure again: %+v %v", done, err)
	}
	if _, err := c.Configure(ctx(t), Identity{Hostname: "a\nb"}); !errs.Has(err, errs.InvalidField) {
		t.Fatalf("a host name with a line break: %v", err)
	}
	must(t, c.Close())

	c = box.open(t, func(o *Options) { o.SandboxUID, o.Generation = "restored", 2 })
	done, err = c.Configure(ctx(t), Identity{Hostname: "two"})
	if err != nil || !done.IdentityChanged || done.HookProcess == "" {
		t.Fatalf("after restore: %+v %v", done, err)
	}
	if _, err := c.Wait(ctx(t), done.HookProcess); err != nil {
		t.Fatal(err)
	}
	// The secret survived in memory.
	r.ID = "main-2"
	if out, _, _ := run(t, c, r); !strings.Contains(out, "TOKEN=s3cret\n") || !strings.Contains(out, "HOSTNAME=two\n") {
		t.Errorf("the main command's environment after restore: %q", out)
	}
}

// TestIdentityOfAClaim: the hook of a sandbox that is to be claimed waits until it is, and runs once for a claim, however often the guest is told.
func TestIdentityOfAClaim(t *testing.T) {
	box := newSandbox(t)
	c := box.open(t)
	copyFile(t, bins.subject, filepath.Join(box.root, "etc/dormouse/on-restore"))
	told := func(c *Conn, host string, hook Hook, changed, ran bool) Configured {
		t.Helper()
		done, err := c.Configure(ctx(t), Identity{Hostname: host, Hook: hook})
		if err != nil || done.IdentityChanged != changed || (done.HookProcess != "") != ran {
			t.Fatalf("configure: %+v %v", done, err)
		}
		return done
	}
	told(c, "template", HookAfterRestore, true, false)
	must(t, c.Close())
	c = box.open(t, func(o *Options) { o.SandboxUID, o.Generation = "member", 2 })
	told(c, "member", HookLater, true, false)
	told(c, "member", HookLater, false, false)
	must(t, c.Close())
	c = box.open(t, func(o *Options) { o.SandboxUID, o.Generation = "member", 3 })
	done := told(c, "claimed", HookNow, false, true)
	if _, err := c.Wait(ctx(t), done.HookProcess); err != nil {
		t.Fatal(err)
	}
	told(c, "claimed", HookNow, false, false)
	for file, want := range map[string]string{
		"etc/hostname":               "claimed\n",
		"run/dormouse/identity.json": `{"sandbox_uid":"member","hostname":"claimed","generation":3}` + "\n",
	} {
		if got, err := os.ReadFile(filepath.Join(box.root, file)); err != nil || string(got) != want {
			t.Errorf("%s: %q %v", file, got, err)
		}
	}
	if _, err := c.Configure(ctx(t), Identity{Hook: 3}); !errs.Has(err, errs.InvalidField) {
		t.Fatalf("another time for the hook: %v", err)
	}
}

func TestSilentGuest(t *testing.T) {
	in, out := mkfifos(t, t.TempDir())
	short, cancel := context.WithTimeout(ctx(t), 150*time.Millisecond)
	defer cancel()
	if _, err := Open(short, Options{InPath: in, OutPath: out, SandboxUID: "u", Generation: 1}); !errs.Has(err, errs.GuestSilent) {
		t.Fatalf("nobody there: %v", err)
	}
	file := filepath.Join(t.TempDir(), "file")
	must(t, os.WriteFile(file, nil, 0o600))
	if _, err := Open(ctx(t), Options{InPath: file, OutPath: out, SandboxUID: "u", Generation: 1}); err == nil {
		t.Fatal("a regular file was taken for a FIFO")
	}
}

func TestCloseEndsCalls(t *testing.T) {
	c := newSandbox(t).open(t)
	_, err := c.Start(ctx(t), subject("s", "sleep"))
	must(t, err)
	s, err := c.Output(ctx(t), OutputRequest{Process: "s", Output: Stdout, Follow: UntilExit})
	must(t, err)
	var wg sync.WaitGroup
	wg.Go(func() {
		if _, err := c.Wait(ctx(t), "s"); !errs.Has(err, errs.GuestSilent) {
			t.Errorf("wait: %v", err)
		}
	})
	wg.Go(func() {
		if _, err := s.Next(ctx(t)); !errs.Has(err, errs.GuestSilent) {
			t.Errorf("next: %v", err)
		}
	})
	must(t, c.Ping(ctx(t)))
	must(t, c.Close())
	must(t, c.Close())
	wg.Wait()
	s.Close()
	if err := c.Ping(ctx(t)); !errs.Has(err, errs.GuestSilent) {
		t.Fatalf("after close: %v", err)
	}
}

// TestHostileGuest speaks to a Conn as a guest that means harm.
func TestHostileGuest(t *testing.T) {
	in, out := mkfifos(t, t.TempDir())
	toGuest, err := os.OpenFile(in, os.O_RDWR, 0)
	must(t, err)
	fromGuest, err := os.OpenFile(out, os.O_RDWR, 0)
	must(t, err)
	var guest sync.WaitGroup
	guest.Go(func() { hostile(toGuest, fromGuest) })
	t.Cleanup(func() { _ = toGuest.Close(); _ = fromGuest.Close(); guest.Wait() })

	c, err := Open(ctx(t), Options{InPath: in, OutPath: out, SandboxUID: "u", Generation: 1, Window: 4096})
	must(t, err)
	t.Cleanup(func() { _ = c.Close() })
	if _, err := c.Start(ctx(t), StartRequest{ID: "x", Args: []string{"a"}}); !errs.Has(err, errs.InternalError) {
		t.Fatalf("an answer for another process: %v", err)
	}
	if _, err := c.Wait(ctx(t), "x"); !errs.Has(err, errs.InternalError) || strings.ContainsAny(err.Error(), "\x1b\n") || len(err.Error()) > 1000 {
		t.Fatalf("a made-up reason with a long text: %q", err)
	}
	s, err := c.Output(ctx(t), OutputRequest{Process: "x", Output: Stdout})
	must(t, err)
	ping := func() {
		t.Helper()
		if err := c.Ping(ctx(t)); !errs.Has(err, errs.InternalError) {
			t.Fatalf("a payload that is no message: %v", err)
		}
	}
	ping() // its answer comes behind all of the output: nothing was read of it, so that no new credit was given
	for err == nil {
		_, err = s.Next(ctx(t))
	}
	if !errs.Has(err, errs.InternalError) {
		t.Fatalf("more output than credit: %v", err)
	}
	s.Close()
	if _, err := c.List(ctx(t)); !errs.Has(err, errs.InternalError) {
		t.Fatalf("a list without an end: %v", err)
	}
	ping()
}

// hostile answers every request with what should not be.
func hostile(toGuest, fromGuest *os.File) {
	var dec guestwire.Decoder
	var asm guestwire.Assembler
	for {
		n, err := toGuest.Read(dec.Space())
		if err != nil {
			return
		}
		dec.Filled(n)
		for f, ok := dec.Next(); ok; f, ok = dec.Next() {
			if _, whole := asm.Add(f); !whole {
				continue
			}
			say := func(m guestwire.Message) {
				b, _ := guestwire.AppendMessage(nil, f.Channel, f.Stream, m)
				_, _ = fromGuest.Write(b)
			}
			// Noise, frames for streams that nobody opened, and types that do not exist.
			_, _ = fromGuest.WriteString("\xd3M\x9c\xd3M\x9csgarbage")
			noise, _ := guestwire.AppendMessage(nil, f.Channel, 0xfffffff0, &guestwire.OutputData{Data: make([]byte, 3000)})
			noise = guestwire.AppendFrame(noise, guestwire.Frame{Type: 999, Stream: f.Stream, Channel: f.Channel, Payload: []byte("?")})
			_, _ = fromGuest.Write(noise)
			switch f.Type {
			case guestwire.TypeHello:
				say(&guestwire.Welcome{Version: 1, Build: strings.Repeat("\x1b[31m", 5000), Capabilities: make([]string, 1000)})
			case guestwire.TypeStart:
				say(&guestwire.Started{Process: &guestwire.ProcessInfo{ProcessID: "y"}})
			case guestwire.TypeWait:
				say(&guestwire.Error{Reason: "STORE_NOT_DURABLE", Message: strings.Repeat("\x1b[2J\n", 5000), DetailKey: strings.Repeat("k", 9999)})
			case guestwire.TypeOutputOpen:
				for range 100 {
					say(&guestwire.OutputData{Gap: 1, Data: make([]byte, 1000)})
				}
			case guestwire.TypeList:
				for range 600 {
					say(&guestwire.Listed{More: true, Processes: make([]guestwire.ProcessInfo, 100)})
				}
			case guestwire.TypePing:
				_, _ = fromGuest.Write(guestwire.AppendFrame(nil, guestwire.Frame{Type: guestwire.TypePong, Stream: f.Stream, Channel: f.Channel, Payload: []byte{0xff}}))
			}
		}
	}
}

// FuzzReceivers feeds every receiver with frames that a hostile guest may send it.
func FuzzReceivers(f *testing.F) {
	for _, m := range []guestwire.Message{
		&guestwire.OutputData{Offset: 1, Data: []byte("x")}, &guestwire.OutputEnd{Offset: 9, Gap: 1}, &guestwire.StdinState{AcceptedOffset: 1 << 63},
		&guestwire.Listed{More: true, Processes: []guestwire.ProcessInfo{{ProcessID: "p", Exit: &guestwire.Exit{Signal: 9}}}}, &guestwire.Error{Reason: "FENCED", DetailKey: "k"},
		&guestwire.Rejected{Reason: "x"}, &guestwire.Welcome{Version: 1}, &guestwire.Exited{},
	} {
		f.Add(uint16(m.Type()), guestwire.Marshal(m))
	}
	f.Fuzz(func(t *testing.T, typ uint16, payload []byte) {
		c := &Conn{window: 4096, receivers: map[uint32]receiver{}, credits: map[uint32]uint32{}, poke: make(chan struct{}, 1)}
		s := &OutputStream{c: c, ready: make(chan struct{}, 1), allowed: 4096}
		in := &input{ready: make(chan struct{}, 1)}
		k := newCall(guestwire.Type(typ))
		for range 3 {
			s.deliver(guestwire.Type(typ), payload)
			in.deliver(guestwire.Type(typ), payload)
			k.deliver(guestwire.Type(typ), payload)
		}
		done, cancel := context.WithCancel(t.Context())
		cancel()
		for {
			chunk, err := s.Next(done)
			if err != nil {
				break
			}
			if len(chunk.Data) > 4096 {
				t.Fatalf("a chunk of %d bytes", len(chunk.Data))
			}
		}
		res := <-k.ch
		var w guestwire.Welcome
		var l guestwire.Listed
		if err := res.decode(&w); err != nil {
			var e *errs.Error
			if !errors.As(err, &e) || len(e.Message) > 2*maxText {
				t.Fatalf("error %v", err)
			}
		}
		if res.decode(&l) == nil {
			for i := range l.Processes {
				processOf(&l.Processes[i])
			}
		}
	})
}
