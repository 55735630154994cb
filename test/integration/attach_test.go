package integration

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/dormouse-run/dormouse/pkg/client"
	"github.com/dormouse-run/dormouse/pkg/errs"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// ticker is a command that says the numbers from 1 on.
const ticker = "i=0; while :; do i=$((i+1)); echo $i; usleep 10000; done"

// A process is attached to while its agentd is killed: its output comes whole and in order, and every byte of
// its input reaches it once. Who comes later has it all again from the offset that it names.
func TestB22Reattach(t *testing.T) {
	w := enter(t)
	spec := w.spec()
	spec.NodeSelector = map[string]string{"zone": "z1"}
	s := w.create(spec)
	p, err := s.Start(w.ctx, &dormousev1.ProcessSpec{Argv: []string{"cat"}, Stdin: true}, "")
	w.ok(err)
	lines := &counter{want: 1, seen: make(chan int, 8192)}
	a, err := p.Attach(w.ctx, client.AttachOptions{Output: &client.Output{Stdout: lines}, Input: true, Hold: true})
	w.ok(err)
	defer a.Close()

	const all = 3000
	written := make(chan error, 1)
	half := make(chan struct{})
	go func() {
		for i := 1; i <= all; i++ {
			if _, err := fmt.Fprintf(a, "%d\n", i); err != nil {
				written <- err
				return
			}
			if i == all/2 {
				close(half)
			}
		}
		a.CloseInput()
		written <- a.Flush(w.ctx)
	}()
	<-half
	w.restartAgentd(1)
	w.ok(<-written)
	exit, err := a.Wait()
	w.ok(err)
	if exit.GetCode() != 0 || lines.wrong != "" || lines.want != all+1 {
		t.Errorf("exit %v, next line %d of %d; %s", exit, lines.want, all, lines.wrong)
	}

	// From an offset, after it has ended.
	var whole bytes.Buffer
	for i := 1; i <= all; i++ {
		fmt.Fprintln(&whole, i)
	}
	from := whole.Len() / 3
	var rest bytes.Buffer
	out := &client.Output{Stdout: &rest}
	out.From(uint64(from), 0)
	late, err := p.Attach(w.ctx, client.AttachOptions{Output: out})
	w.ok(err)
	defer late.Close()
	_, err = late.Wait()
	w.ok(err)
	if !bytes.Equal(rest.Bytes(), whole.Bytes()[from:]) {
		t.Errorf("from %d on there are %d bytes, want %d", from, rest.Len(), whole.Len()-from)
	}
}

// One writes, the newest; who only follows is not disturbed, and what is wrong with a message ends its stream alone.
func TestAttachOneWriter(t *testing.T) {
	w := enter(t)
	s := w.create(w.spec())
	p, err := s.Start(w.ctx, &dormousev1.ProcessSpec{Argv: []string{"cat"}, Terminal: terminal(24, 80)}, "")
	w.ok(err)
	attach := func(input bool) (*client.Attachment, *liner) {
		t.Helper()
		l := &liner{lines: make(chan string, 64)}
		a, err := p.Attach(w.ctx, client.AttachOptions{Output: &client.Output{Stdout: l}, Input: input})
		w.ok(err)
		t.Cleanup(a.Close)
		return a, l
	}
	first, _ := attach(true)
	_, watching := attach(false)
	type2 := func(a *client.Attachment, line string) {
		t.Helper()
		_, err := fmt.Fprintln(a, line)
		w.ok(err)
		w.ok(a.Flush(w.ctx))
		watching.want(w, line, line) // its echo, and cat
	}
	type2(first, "one")
	second, _ := attach(true)
	type2(second, "two")
	_, err = first.Wait()
	w.refused(err, errs.InputTaken)
	second.Resize(40, 100)
	w.await("the size has changed", func() error {
		w.ok(p.Refresh(w.ctx))
		if got := p.Last.GetSpec().GetTerminal(); got.GetRows() != 40 || got.GetCols() != 100 {
			return fmt.Errorf("%v", got)
		}
		return nil
	})
	w.ok(p.Write(w.ctx, []byte("three\n"), false)) // anybody may
	watching.want(w, "three", "three")
	_, err = second.Wait()
	w.refused(err, errs.InputTaken)
	third, _ := attach(true)
	third.Resize(0, 1)
	_, err = third.Wait()
	w.refused(err, errs.InvalidField)
	fourth, _ := attach(true)
	type2(fourth, "four")
	fourth.CloseInput()
	exit, err := fourth.Wait()
	w.ok(err)
	if exit.GetCode() != 0 {
		t.Errorf("exit %v", exit)
	}
	_, err = s.Process("no-such").Attach(w.ctx, client.AttachOptions{})
	w.refused(err, errs.ProcessNotFound)
}

// A reader that does not read slows only itself: another has everything at once, and the slow one is told how
// much it missed.
func TestAttachSlowReader(t *testing.T) {
	w := enter(t)
	s := w.create(w.spec())
	p, err := s.Start(w.ctx, &dormousev1.ProcessSpec{Shell: "read go; seq 2000000", Stdin: true}, "")
	w.ok(err)
	stuck := &gate{open: make(chan struct{})}
	var missed uint64
	slow, err := p.Attach(w.ctx, client.AttachOptions{Output: &client.Output{Stdout: stuck, Gap: func(_ dormousev1.OutputStream, n uint64) { missed += n }}})
	w.ok(err)
	defer slow.Close()
	lines := &counter{want: 1}
	fast, err := p.Attach(w.ctx, client.AttachOptions{Output: &client.Output{Stdout: lines}, Hold: true, Input: true})
	w.ok(err)
	defer fast.Close()
	_, err = fmt.Fprintln(fast, "go")
	w.ok(err)
	exit, err := fast.Wait()
	w.ok(err)
	if exit.GetCode() != 0 || lines.wrong != "" || lines.want != 2000001 {
		t.Errorf("exit %v, next line %d; %s", exit, lines.want, lines.wrong)
	}
	close(stuck.open)
	_, err = slow.Wait()
	w.ok(err)
	w.ok(p.Refresh(w.ctx))
	if missed == 0 || stuck.n+missed != p.Last.GetStdoutOffset() {
		t.Errorf("the slow reader has %d bytes and missed %d of %d", stuck.n, missed, p.Last.GetStdoutOffset())
	}
}

// gate takes nothing until it is open.
type gate struct {
	open chan struct{}
	n    uint64
}

func (g *gate) Write(b []byte) (int, error) {
	<-g.open
	g.n += uint64(len(b))
	return len(b), nil
}

// A server in the background survives a checkpoint and a restore, and its output keeps flowing: to who was
// attached all the while, and to who attaches to what was restored, from where the other was. Who is attached to
// a sandbox that is gone is told where its processes are.
func TestB02BackgroundServerSurvives(t *testing.T) {
	w := enter(t)
	s := w.create(w.spec())
	p, err := s.Start(w.ctx, &dormousev1.ProcessSpec{Shell: ticker, Tags: map[string]string{"role": "server"}}, "")
	w.ok(err)
	lines := &counter{want: 1, seen: make(chan int, 8192)}
	a, err := p.Attach(w.ctx, client.AttachOptions{Output: &client.Output{Stdout: lines}})
	w.ok(err)
	defer a.Close()
	lines.after(w, 20)
	snap := w.checkpoint(s)
	at := <-lines.seen
	lines.after(w, at+50) // the open stream went on through the checkpoint

	restored, err := snap.Restore(w.ctx, &dormousev1.RestoreSandboxRequest{})
	w.ok(err)
	w.ok(p.Refresh(w.ctx))
	before := p.Last
	q := restored.Process(p.ID)
	w.ok(q.Refresh(w.ctx))
	if q.Last.GetPid() != before.GetPid() || !q.Last.GetStartTime().AsTime().Equal(before.GetStartTime().AsTime()) || q.Last.GetExit() != nil {
		t.Errorf("the process was %v and is %v", before, q.Last)
	}
	again := &counter{want: 1, seen: make(chan int, 8192)}
	b, err := q.Attach(w.ctx, client.AttachOptions{Output: &client.Output{Stdout: again}})
	w.ok(err)
	defer b.Close()
	again.after(w, at+50)

	w.ok(s.Delete(w.ctx, ""))
	_, err = a.Wait()
	var e *errs.Error
	if !errors.As(err, &e) || e.Reason != errs.SandboxMoved || e.Details["new_uid"] != restored.UID {
		t.Errorf("the attachment to the deleted sandbox ended with %v %v, want SANDBOX_MOVED to %s", err, e, restored.UID)
	}
	again.after(w, again.want+20)
	for name, c := range map[string]*counter{"source": lines, "restored": again} {
		if c.wrong != "" {
			t.Errorf("%s: %s", name, c.wrong)
		}
	}
}

// What is attached stands still with a paused sandbox and goes on with it, over a new agentd too.
func TestAttachOverAPause(t *testing.T) {
	w := enter(t)
	spec := w.spec()
	spec.NodeSelector = map[string]string{"zone": "z1"}
	s := w.create(spec)
	p, err := s.Start(w.ctx, &dormousev1.ProcessSpec{Shell: ticker}, "")
	w.ok(err)
	lines := &counter{want: 1, seen: make(chan int, 8192)}
	a, err := p.Attach(w.ctx, client.AttachOptions{Output: &client.Output{Stdout: lines}})
	w.ok(err)
	defer a.Close()
	lines.after(w, 5)
	for _, restart := range []bool{false, true} {
		w.ok(s.Pause(w.ctx, ""))
		_, err = p.Attach(w.ctx, client.AttachOptions{})
		w.refused(err, errs.SandboxPaused)
		if restart {
			w.restartAgentd(1)
		}
		at := lines.last(w)
		w.ok(s.Resume(w.ctx, ""))
		lines.after(w, at+20)
	}
	if lines.wrong != "" {
		t.Error(lines.wrong)
	}
}

// last is the newest line that was seen.
func (c *counter) last(w *world) int {
	w.Helper()
	n := 0
	for {
		select {
		case n = <-c.seen:
		default:
			return n
		}
	}
}

// after waits for a line past n.
func (c *counter) after(w *world, n int) {
	w.Helper()
	for got := 0; got <= n; {
		select {
		case got = <-c.seen:
		case <-w.ctx.Done():
			w.Fatalf("no line after %d", n)
		}
	}
}

// A process that prints heavily, with and without anybody who reads, goes on after a restore.
func TestB03HeavyOutputAfterRestore(t *testing.T) {
	w := enter(t)
	s := w.create(w.spec())
	unread, err := s.Start(w.ctx, &dormousev1.ProcessSpec{Argv: []string{"yes"}}, "")
	w.ok(err)
	read, err := s.Start(w.ctx, &dormousev1.ProcessSpec{Shell: "yes | cat", Terminal: terminal(24, 80)}, "")
	w.ok(err)
	reading, stop := context.WithCancel(w.ctx)
	defer stop()
	a, err := read.Attach(reading, client.AttachOptions{Hold: true})
	w.ok(err)
	defer a.Close()
	snap := w.checkpoint(s)
	stop()
	w.ok(s.Delete(w.ctx, "")) // so that the machine is the restored one's
	restored, err := snap.Restore(w.ctx, &dormousev1.RestoreSandboxRequest{})
	w.ok(err)
	for _, id := range []string{unread.ID, read.ID} {
		p := restored.Process(id)
		w.ok(p.Refresh(w.ctx))
		// More than all buffers on the way hold.
		enough := p.Last.GetStdoutOffset() + mib
		w.await("output goes on", func() error {
			if err := p.Refresh(w.ctx); err != nil {
				return err
			}
			if p.Last.GetExit() != nil || p.Last.GetStdoutOffset() < enough {
				return fmt.Errorf("it is at %d of %d, exit %v", p.Last.GetStdoutOffset(), enough, p.Last.GetExit())
			}
			return nil
		})
	}
	out := &prefix{most: 1 << 16}
	o := &client.Output{Stdout: out}
	p := restored.Process(unread.ID)
	w.ok(p.Refresh(w.ctx))
	o.From(p.Last.GetStdoutOffset()&^1, 0)
	_, err = p.Follow(w.ctx, o, false)
	w.ok(err)
	if got := strings.ReplaceAll(out.String(), "y\n", ""); got != "" {
		t.Errorf("the output of yes holds %q", got)
	}
	for _, id := range []string{unread.ID, read.ID} {
		w.ok(restored.Process(id).Signal(w.ctx, 9, true))
		exit, err := restored.Process(id).Wait(w.ctx)
		w.ok(err)
		if exit.GetSignal() != 9 {
			t.Errorf("exit %v", exit)
		}
	}
}

// prefix keeps the first bytes.
type prefix struct {
	strings.Builder
	most int
}

func (p *prefix) Write(b []byte) (int, error) {
	p.Builder.Write(b[:min(len(b), p.most-p.Len())])
	return len(b), nil
}
