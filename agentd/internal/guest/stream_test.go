package guest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/dormouse-run/dormouse/pkg/errs"
)

func TestStdin(t *testing.T) {
	c := newSandbox(t).open(t)
	r := subject("cat", "cat")
	r.Stdin, r.OutputBytes = true, 1<<20
	_, err := c.Start(ctx(t), r)
	must(t, err)
	want := bytes.Repeat([]byte("0123456789abcdef"), 50_000) // many windows
	for part := range 4 {
		n := len(want) / 4
		if got, err := c.WriteStdin(ctx(t), "cat", want[part*n:(part+1)*n]); err != nil || got != n {
			t.Fatalf("write: %d of %d, %v", got, n, err)
		}
	}
	must(t, c.CloseStdin(ctx(t), "cat"))
	must(t, c.CloseStdin(ctx(t), "cat"))
	if e, err := c.Wait(ctx(t), "cat"); err != nil || e.Code != 0 || e.StdoutOffset != uint64(len(want)) {
		t.Fatalf("wait: %+v %v", e, err)
	}
	if got := readAll(t, c, "cat", 0); !bytes.Equal(got, want) {
		t.Fatalf("cat gave back %d bytes of %d", len(got), len(want))
	}
	if _, err := c.WriteStdin(ctx(t), "cat", []byte("x")); !errs.Has(err, errs.WrongPhase) {
		t.Fatalf("write after the end: %v", err)
	}

	// A process that does not read: the window is taken, then the caller waits for its ctx alone.
	r = subject("deaf", "sleep")
	r.Stdin = true
	_, err = c.Start(ctx(t), r)
	must(t, err)
	for n, wait := 0, 500*time.Millisecond; n < 64<<10; wait *= 2 { // until there was the time to fill it
		short, cancel := context.WithTimeout(ctx(t), wait)
		more, err := c.WriteStdin(short, "deaf", make([]byte, 1<<20-n))
		cancel()
		if n += more; !errs.Has(err, errs.DeadlineExpired) || n >= 1<<20 || wait > time.Minute {
			t.Fatalf("deaf process: %d %v", n, err)
		}
	}
	must(t, c.Ping(ctx(t)))
	_, err = c.Signal(ctx(t), "deaf", syscall.SIGKILL, false)
	must(t, err)
	_, err = c.Wait(ctx(t), "deaf")
	must(t, err)
	if _, err := c.WriteStdin(ctx(t), "deaf", []byte("x")); !errs.Has(err, errs.WrongPhase) {
		t.Fatalf("write to an ended process: %v", err)
	}
	_, err = c.Start(ctx(t), subject("null", "cat"))
	must(t, err)
	if e, err := c.Wait(ctx(t), "null"); err != nil || e.Code != 0 {
		t.Fatalf("a process without input must read its end: %+v %v", e, err)
	}
	if _, err := c.WriteStdin(ctx(t), "null", []byte("x")); !errs.Has(err, errs.WrongPhase) {
		t.Fatalf("write without a pipe: %v", err)
	}
}

func readAll(t *testing.T, c *Conn, id string, from uint64) []byte {
	t.Helper()
	s, err := c.Output(ctx(t), OutputRequest{Process: id, Output: Stdout, From: from, Follow: UntilExit})
	must(t, err)
	defer s.Close()
	var got []byte
	for {
		chunk, err := s.Next(ctx(t))
		if errors.Is(err, io.EOF) {
			return got
		}
		must(t, err)
		if chunk.Gap != 0 || chunk.Offset != from {
			t.Fatalf("chunk at %d with gap %d, want %d", chunk.Offset, chunk.Gap, from)
		}
		from += uint64(len(chunk.Data))
		got = append(got, chunk.Data...)
	}
}

// TestRingTellsItsGap: nobody reads, the process does not block, and a late reader learns how much
// is gone.
func TestRingTellsItsGap(t *testing.T) {
	c := newSandbox(t).open(t)
	r := subject("pour", "pour", "3000000")
	r.OutputBytes = 64 << 10
	_, err := c.Start(ctx(t), r)
	must(t, err)
	e, err := c.Wait(ctx(t), "pour")
	if err != nil || e.StdoutOffset != 3_000_000 {
		t.Fatalf("wait: %+v %v", e, err)
	}
	s, err := c.Output(ctx(t), OutputRequest{Process: "pour", Output: Stdout, From: 160, Follow: NoFollow})
	must(t, err)
	defer s.Close()
	first, err := s.Next(ctx(t))
	must(t, err)
	if first.Gap != 3_000_000-(64<<10)-160 || first.Offset != 3_000_000-(64<<10) {
		t.Fatalf("first chunk at %d with gap %d", first.Offset, first.Gap)
	}
	if want := fmt.Sprintf("%015d\n", first.Offset/16); !strings.HasPrefix(string(first.Data), want) {
		t.Fatalf("at offset %d: %.16q, want %q", first.Offset, first.Data, want)
	}
	if got := readAll(t, c, "pour", 3_000_000-1600); len(got) != 1600 || !bytes.HasSuffix(got, []byte("187499\n")) {
		t.Fatalf("the end: %d bytes", len(got))
	}
	if s, err := c.Output(ctx(t), OutputRequest{Process: "pour", Output: Stdout, From: 3_000_001}); err == nil {
		defer s.Close()
		if _, err := s.Next(ctx(t)); !errs.Has(err, errs.InvalidField) {
			t.Fatalf("beyond the end: %v", err)
		}
	}
	for most, want := range map[int]int{16: 16, 0: 0, 1 << 20: 64 << 10} {
		if at, data, err := c.Tail(ctx(t), "pour", Stdout, most); err != nil || len(data) != want || at != uint64(3_000_000-want) {
			t.Fatalf("tail of %d: %d bytes at %d, %v", most, len(data), at, err)
		}
	}
	if p, err := c.Get(ctx(t), "pour"); err != nil || p.Exit == nil || p.StdoutOffset != 3_000_000 {
		t.Fatalf("get: %+v %v", p, err)
	}
	must(t, c.Forget(ctx(t), "pour"))
	if _, err := c.Get(ctx(t), "pour"); !errs.Has(err, errs.ProcessNotFound) {
		t.Fatalf("get of a forgotten one: %v", err)
	}
	if _, err := c.Wait(ctx(t), "pour"); !errs.Has(err, errs.ProcessNotFound) {
		t.Fatalf("forgotten: %v", err)
	}
}

// TestSlowReaderSlowsOnlyItself: one stream is not read at all while another gets everything.
func TestSlowReaderSlowsOnlyItself(t *testing.T) {
	c := newSandbox(t).open(t)
	const size = 8_000_000
	slow := subject("slow", "pour", fmt.Sprint(size))
	_, err := c.Start(ctx(t), slow)
	must(t, err)
	stuck, err := c.Output(ctx(t), OutputRequest{Process: "slow", Output: Stdout, Follow: UntilExit})
	must(t, err)
	defer stuck.Close()
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			r := subject(fmt.Sprint("quick", i), "pour", fmt.Sprint(size))
			r.OutputBytes = 16 << 10
			var got collector
			_, e, err := c.Run(ctx(t), r, got.sink)
			if err != nil || got.out.Len() != size || got.gap != 0 || e.StdoutOffset != size {
				t.Errorf("quick: %d bytes, gap %d, %+v, %v", got.out.Len(), got.gap, e, err)
			}
		})
	}
	wg.Wait()
	_, err = c.Wait(ctx(t), "slow")
	must(t, err)
	stuck.mu.Lock()
	held := 0
	for _, k := range stuck.chunks {
		held += len(k.Data)
	}
	stuck.mu.Unlock()
	if held > c.window {
		t.Fatalf("a stream holds %d bytes, more than its window of %d", held, c.window)
	}
	var sum uint64
	for {
		chunk, err := stuck.Next(ctx(t))
		if errors.Is(err, io.EOF) {
			break
		}
		must(t, err)
		sum += uint64(len(chunk.Data)) + chunk.Gap
	}
	if sum != size {
		t.Fatalf("the slow reader saw %d of %d bytes and gaps", sum, size)
	}
}

func TestManyAtOnceAndList(t *testing.T) {
	c := newSandbox(t).open(t)
	var wg sync.WaitGroup
	for i := range 40 {
		wg.Go(func() {
			r := subject(fmt.Sprintf("p%02d", i), "echo", strings.Repeat("x", 3000), fmt.Sprint(i))
			r.Tags = map[string]string{"n": fmt.Sprint(i), "a": "b"}
			var got collector
			if _, e, err := c.Run(ctx(t), r, got.sink); err != nil || e.Code != 0 || !strings.HasSuffix(got.out.String(), fmt.Sprintf(" %d\n", i)) {
				t.Errorf("%d: %+v %v", i, e, err)
			}
		})
	}
	wg.Wait()
	list, err := c.List(ctx(t)) // several frames
	if err != nil || len(list) != 40 {
		t.Fatalf("list: %d %v", len(list), err)
	}
	for _, p := range list {
		if p.Exit == nil || p.Tags["a"] != "b" || p.ID != fmt.Sprintf("p%02s", p.Tags["n"]) || p.PID < 2 {
			t.Fatalf("listed: %+v", p)
		}
	}
	if !slicesSorted(list) {
		t.Fatal("the list is not in the order of starting")
	}
}

func slicesSorted(list []Process) bool {
	for i := 1; i < len(list); i++ {
		if list[i].StartTime.Before(list[i-1].StartTime) {
			return false
		}
	}
	return true
}

// TestOrphansAreReaped: children left behind become init's, and are gone once they end.
func TestOrphansAreReaped(t *testing.T) {
	c := newSandbox(t).open(t)
	for i := range 20 {
		id := fmt.Sprint("orphan", i)
		if _, _, e := run(t, c, subject(id, "orphan")); e.Code != 0 {
			t.Fatalf("%+v", e)
		}
		if n, err := c.Signal(ctx(t), id, syscall.SIGKILL, true); err != nil || n != 1 {
			t.Fatalf("the orphan is of the tree: %d %v", n, err)
		}
		awaitEOF(t, c, id)
	}
	must(t, c.Ping(ctx(t)))
	deadline := ctx(t)
	for {
		out, _, _ := run(t, c, subject(fmt.Sprint("ps", time.Now().UnixNano()), "pids"))
		if out == "2\n" {
			return
		}
		if deadline.Err() != nil {
			t.Fatalf("%s processes are left, want init and the one that asks", strings.TrimSpace(out))
		}
	}
}

// TestOneWriterAtATime: who names itself writes from where it was, learns that another has written
// since, and is not held up by one that is stuck.
func TestOneWriterAtATime(t *testing.T) {
	s := newSandbox(t)
	c := s.open(t)
	r := subject("cat", "cat")
	r.Stdin = true
	_, err := c.Start(ctx(t), r)
	must(t, err)
	const first, second = 11, 22
	at := func(want InputState, got InputState, err error) {
		t.Helper()
		if err != nil || got != want {
			t.Fatalf("%+v %v, want %+v", got, err, want)
		}
	}
	got, err := c.OpenStdin(ctx(t), "cat", first, false)
	at(InputState{}, got, err)
	got, err = c.WriteStdinAt(ctx(t), "cat", first, 0, []byte("one "), false)
	at(InputState{Accepted: 4}, got, err)
	if _, err := c.WriteStdinAt(ctx(t), "cat", first, 3, []byte("x"), false); !errs.Has(err, errs.InvalidField) {
		t.Fatalf("a piece that does not go on: %v", err)
	}
	// Another agentd: the writer is still the same.
	must(t, c.Close())
	c = s.open(t)
	got, err = c.OpenStdin(ctx(t), "cat", first, true)
	at(InputState{Accepted: 4}, got, err)
	if _, err := c.OpenStdin(ctx(t), "cat", second, true); !errs.Has(err, errs.InputTaken) {
		t.Fatalf("one that never wrote goes on: %v", err)
	}
	got, err = c.WriteStdinAt(ctx(t), "cat", first, 4, []byte("two "), false)
	at(InputState{Accepted: 8}, got, err)
	got, err = c.OpenStdin(ctx(t), "cat", second, false)
	at(InputState{Accepted: 8}, got, err)
	if _, err := c.WriteStdinAt(ctx(t), "cat", first, 8, []byte("lost"), false); !errs.Has(err, errs.InputTaken) {
		t.Fatalf("the first writes on: %v", err)
	}
	if n, err := c.WriteStdin(ctx(t), "cat", []byte("anybody ")); err != nil || n != 8 {
		t.Fatalf("%d %v", n, err)
	}
	if _, err := c.WriteStdinAt(ctx(t), "cat", second, 8, []byte("lost"), false); !errs.Has(err, errs.InputTaken) {
		t.Fatalf("the second writes on: %v", err)
	}
	got, err = c.OpenStdin(ctx(t), "cat", second, false)
	at(InputState{Accepted: 16}, got, err)
	got, err = c.WriteStdinAt(ctx(t), "cat", second, 16, []byte("end"), true)
	at(InputState{Accepted: 19, Closed: true}, got, err)
	got, err = c.WriteStdinAt(ctx(t), "cat", second, 19, []byte("more"), true)
	at(InputState{Accepted: 19, Closed: true}, got, err)
	if out := readAll(t, c, "cat", 0); string(out) != "one two anybody end" {
		t.Fatalf("%q", out)
	}

	// One that is stuck lets go, and what the guest took of it counts.
	r = subject("deaf", "sleep")
	r.Stdin = true
	_, err = c.Start(ctx(t), r)
	must(t, err)
	_, err = c.OpenStdin(ctx(t), "deaf", first, false)
	must(t, err)
	stuck, cancel := context.WithCancel(ctx(t))
	ended := make(chan error, 1)
	go func() {
		_, err := c.WriteStdinAt(stuck, "deaf", first, 0, make([]byte, 1<<20), false)
		ended <- err
	}()
	waiting := make(chan error, 1)
	go func() {
		_, err := c.OpenStdin(context.WithoutCancel(stuck), "deaf", second, false)
		waiting <- err
	}()
	cancel()
	if err := <-ended; err == nil {
		t.Fatal("the write of 1 MiB to who does not read has ended")
	}
	must(t, <-waiting)
}
