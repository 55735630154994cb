package integration

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"hash"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/dormouse-run/dormouse/pkg/client"
	"github.com/dormouse-run/dormouse/pkg/errs"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

func terminal(rows, cols int32) *dormousev1.Terminal {
	return &dormousev1.Terminal{Rows: rows, Cols: cols}
}

// A timeout ends all that a command has started, what has become a daemon too, and its caller has what was
// said so far; the sandbox goes on.
func TestB19TimeoutEndsTheTree(t *testing.T) {
	w := enter(t)
	s := w.create(w.spec())
	for timeout := 2 * time.Second; ; timeout *= 2 { // until there was the time to say something
		var out strings.Builder
		_, exit, err := s.Run(w.ctx, &dormousev1.ProcessSpec{Timeout: durationpb.New(timeout),
			Shell: `echo so far; sleep 1001 & (setsid sh -c 'sleep 1002 & sleep 1003' >/dev/null 2>&1 &); exec sleep 1004`}, nil, &client.Output{Stdout: &out}, nil)
		w.ok(err)
		if said := out.String(); !exit.GetTimedOut() || exit.GetSignal() != 9 || said != "so far\n" && said != "" {
			t.Fatalf("exit %v, output %q", exit, said)
		} else if said != "" {
			break
		}
	}
	w.await("the tree is gone", func() error {
		if left := w.sh(s, "ps -o args | grep 'sleep 100[0-9]' | grep -v grep; true"); left != "" {
			return fmt.Errorf("left: %s", left)
		}
		return nil
	})
	if got := w.sh(s, "echo next"); got != "next" {
		t.Errorf("the next command said %q", got)
	}
}

// summer takes output and keeps its digest.
type summer struct {
	hash.Hash
	n int
}

func (s *summer) Write(b []byte) (int, error) {
	s.n += len(b)
	return s.Hash.Write(b)
}

// 64 MiB of output arrive byte for byte, from a pipe, and from a terminal that does not process its output. What
// a terminal makes of line ends by default is what is expected of one.
func TestB20ExactOutput(t *testing.T) {
	w := enter(t)
	s := w.create(w.spec())
	const size = 64 * mib
	// Every byte value, none of it repeated at a period that a lost block would hide.
	w.sh(s, "head -c 65536 /dev/urandom > /tmp/r; i=0; while [ $i -lt 32 ]; do cat /tmp/r; echo $i; i=$((i+1)); done > /tmp/part")
	produce := "cat /tmp/part /tmp/part /tmp/part /tmp/part /tmp/part /tmp/part /tmp/part /tmp/part"
	repeat := "for i in 1 2 3 4; do " + produce + "; done | head -c " + fmt.Sprint(size)
	sum, _, _ := strings.Cut(w.sh(s, repeat+" | sha256sum"), " ")
	for name, spec := range map[string]*dormousev1.ProcessSpec{
		"pipe":     {Shell: repeat},
		"terminal": {Shell: "stty -opost; " + repeat + " | cat", Terminal: terminal(24, 80)}, // cat writes blocks, not lines
	} {
		t.Run(name, func(t *testing.T) {
			w := w.sub(t)
			got := &summer{Hash: sha256.New()}
			_, exit, err := s.Run(w.ctx, spec, nil, &client.Output{Stdout: got, Gap: func(_ dormousev1.OutputStream, n uint64) {
				t.Errorf("a gap of %d bytes", n)
			}}, nil)
			w.ok(err)
			if exit.GetCode() != 0 || got.n != size || hex.EncodeToString(got.Sum(nil)) != sum {
				t.Errorf("exit %v, %d bytes of %d, digest %x, want %s", exit, got.n, size, got.Sum(nil), sum)
			}
		})
	}
	t.Run("line ends", func(t *testing.T) {
		w := w.sub(t)
		var out strings.Builder
		_, _, err := s.Run(w.ctx, &dormousev1.ProcessSpec{Shell: "seq 20000; tty >&2", Terminal: terminal(24, 80)}, nil, &client.Output{Stdout: &out}, nil)
		w.ok(err)
		want := strings.Builder{}
		for i := range 20000 {
			fmt.Fprintf(&want, "%d\r\n", i+1)
		}
		if got, tty, _ := strings.Cut(out.String(), "/dev/"); got != want.String() || !strings.HasPrefix(tty, "pts/") {
			t.Errorf("%d bytes, want %d, then %q", len(got), want.Len(), tty)
		}
	})
}

// A new size reaches the program: it gets SIGWINCH, and stty tells the size.
func TestB21Resize(t *testing.T) {
	w := enter(t)
	s := w.create(w.spec())
	p, err := s.Start(w.ctx, &dormousev1.ProcessSpec{
		Shell:    `trap 'stty size' WINCH; stty size; echo ready; while :; do sleep 0.1; done`,
		Terminal: terminal(30, 90), Tags: map[string]string{"test": "b21"}}, "")
	w.ok(err)
	lines := &liner{lines: make(chan string, 64)}
	reading, stop := context.WithCancel(w.ctx)
	read := make(chan error, 1)
	go func() {
		_, err := p.Follow(reading, &client.Output{Stdout: lines}, true)
		read <- err
	}()
	defer func() {
		stop()
		if err := <-read; err == nil {
			t.Error("the process has ended")
		}
	}()
	lines.want(w, "30 90", "ready")
	w.ok(p.Resize(w.ctx, 31, 91))
	lines.want(w, "31 91")
	w.ok(p.Resize(w.ctx, 4096, 200))
	lines.want(w, "4096 200")
	w.refused(p.Resize(w.ctx, 4097, 1), errs.InvalidField)
	w.refused(p.Resize(w.ctx, 10, 0), errs.InvalidField)

	found, err := s.Processes(w.ctx, "test=b21")
	w.ok(err)
	if len(found) != 1 || found[0].GetProcessId() != p.ID || found[0].GetSpec().GetTerminal().GetRows() != 4096 {
		t.Errorf("by its tag: %v", found)
	}
	found, err = s.Processes(w.ctx, "test=other")
	w.ok(err)
	if len(found) != 0 {
		t.Errorf("by another tag: %v", found)
	}
	_, err = s.Processes(w.ctx, "test")
	w.refused(err, errs.InvalidField)
	plain, err := s.Start(w.ctx, &dormousev1.ProcessSpec{Argv: []string{"sleep", "1000"}}, "")
	w.ok(err)
	w.refused(plain.Resize(w.ctx, 10, 10), errs.WrongPhase)
}

// liner gives a terminal's output line by line.
type liner struct {
	part  string
	lines chan string
}

func (l *liner) Write(b []byte) (int, error) {
	l.part += string(b)
	for {
		line, rest, ok := strings.Cut(l.part, "\n")
		if !ok {
			return len(b), nil
		}
		l.part = rest
		l.lines <- strings.TrimRight(line, "\r")
	}
}

func (l *liner) want(w *world, lines ...string) {
	w.Helper()
	for _, want := range lines {
		select {
		case got := <-l.lines:
			if got != want {
				w.Fatalf("line %q, want %q", got, want)
			}
		case <-w.ctx.Done():
			w.Fatalf("no line %q", want)
		}
	}
}
