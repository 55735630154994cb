// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

// Package probe runs the subject (package subject) in a sandbox through the public API, and has it prove itself.
package probe

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/dormouse-run/dormouse/pkg/client"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
	"github.com/dormouse-run/dormouse/test/load/subject"
)

// Folder is where a subject keeps its private file, and Volume where its volume is, in the subject's image.
const (
	Folder = "/data"
	Volume = "/volume"
)

// Probe is the subject's program in a sandbox. One goroutine uses it at a time.
type Probe struct {
	// Last is its last answer.
	Last subject.Answer

	want     subject.Want
	process  *client.Process
	out, err uint64 // the offsets of its output
}

// Resources are what a sandbox with a subject asks for. One that was restored takes some 15 MB without its payload; its file is in the
// sandbox's memory, as all that it writes.
func Resources(want subject.Want) *dormousev1.Resources {
	payload := want.Heap + want.File
	return &dormousev1.Resources{CpuRequestMillis: 1, MemoryRequestBytes: 16<<20 + payload, MemoryLimitBytes: 64<<20 + payload, DiskLimitBytes: 16<<20 + payload}
}

// Begin starts the program in a sandbox and takes its first answer.
func Begin(ctx context.Context, box *client.Sandbox, want subject.Want) (*Probe, error) {
	argv := []string{subject.Path, strconv.FormatInt(want.Heap, 10), strconv.FormatInt(want.File, 10), Folder}
	if want.Volume {
		argv = append(argv, Volume)
	}
	p := &Probe{want: want}
	var err error
	p.process, err = box.Start(ctx, &dormousev1.ProcessSpec{Argv: argv, Stdin: true, Env: map[string]string{"GOMAXPROCS": "1"}}, "")
	if err != nil {
		return nil, err
	}
	if p.Last, err = p.ask(ctx); err != nil {
		return nil, err
	}
	return p, subject.First(p.Last, want)
}

// State is how far a program had come.
type State struct {
	last     subject.Answer
	out, err uint64
}

// State of the program now; nobody may be asking it.
func (p *Probe) State() State { return State{p.Last, p.out, p.err} }

// Resume makes it the program of a sandbox that was restored from a snapshot which was taken in that state.
func (p *Probe) Resume(box *client.Sandbox, s State) {
	p.In(box)
	p.Last, p.out, p.err = s.last, s.out, s.err
}

// In makes it the program of another sandbox, which was restored from the one before.
func (p *Probe) In(box *client.Sandbox) { p.process = box.Process(p.process.ID) }

// Prove asks the program once more: it must be the one that answered before, and have lost nothing.
func (p *Probe) Prove(ctx context.Context) error {
	a, err := p.ask(ctx)
	if err != nil {
		return err
	}
	err = subject.Same(p.Last, a)
	p.Last = a
	return err
}

// ask has the program answer one question.
func (p *Probe) ask(ctx context.Context) (subject.Answer, error) {
	token := strconv.FormatInt(time.Now().UnixNano(), 36)
	lines := &lines{token: token, found: make(chan struct{})}
	out := &client.Output{Stdout: lines}
	out.From(p.out, p.err)
	a, err := p.process.Attach(ctx, client.AttachOptions{Output: out, Input: true})
	if err != nil {
		return subject.Answer{}, err
	}
	_, err = a.Write([]byte(token + "\n"))
	if err == nil {
		select {
		case <-lines.found:
		case <-a.Done():
			var exit *dormousev1.ProcessExit
			if exit, err = a.Wait(); err == nil {
				err = fmt.Errorf("the program ended with %v", exit)
			}
		case <-ctx.Done():
			err = context.Cause(ctx)
		}
	}
	a.Close()
	p.out, p.err = out.Offsets()
	if line, ok := lines.answer(); ok {
		return subject.Parse(line)
	}
	return subject.Answer{}, errors.Join(err, lines.failed())
}

// lines finds the answer to one question in what the program writes.
type lines struct {
	token string
	found chan struct{} // closed once the answer, or a failure, is there

	mu   sync.Mutex
	buf  strings.Builder
	line string
}

// Write implements io.Writer.
func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.buf.Write(p)
	if l.line != "" {
		return len(p), nil
	}
	text := l.buf.String()
	for {
		line, rest, whole := strings.Cut(text, "\n")
		if !whole {
			return len(p), nil
		}
		if strings.HasPrefix(line, "answer "+l.token+" ") || strings.HasPrefix(line, "failed ") {
			l.line = line
			close(l.found)
			return len(p), nil
		}
		text = rest
	}
}

func (l *lines) answer() (string, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.line, l.line != ""
}

func (l *lines) failed() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return fmt.Errorf("no answer to %s in %.300q", l.token, l.buf.String())
}
