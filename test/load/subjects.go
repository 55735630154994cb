// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package load

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

const mib = 1 << 20

// runLabel marks everything that a run makes.
const runLabel = "dormouse-load"

// one is a subject and what is known of it.
type one struct {
	index    int
	plan     *Plan
	run      string // the run's id
	image    string
	api      *client.Client
	box      *client.Sandbox
	process  *client.Process
	snapshot *client.Snapshot
	volume   *client.Volume
	last     subject.Answer
	out, err uint64 // the offsets of the program's output
	dead     bool   // a step of it failed
}

func (o *one) name(what string, round int) string {
	return fmt.Sprintf("load-%s-%s-%d-%d", o.run, what, o.index, round)
}

func (o *one) labels() map[string]string { return map[string]string{runLabel: o.run} }

// step does one step and notes what is to be known of it.
func (o *one) step(ctx context.Context, p Phase, round int, e *Event) error {
	switch p {
	case Volumes:
		return o.makeVolume(ctx, e)
	case Create:
		return o.create(ctx, e)
	case Begin:
		return o.begin(ctx)
	case Checkpoint:
		return o.checkpoint(ctx, round, e)
	case Delete:
		e.UID = o.box.UID
		return o.box.Delete(ctx, "")
	case Restore:
		return o.restore(ctx, round, e)
	case Prove:
		return o.prove(ctx)
	case Forget:
		return o.forget(ctx)
	}
	return fmt.Errorf("there is no phase %q", p)
}

func (o *one) makeVolume(ctx context.Context, e *Event) (err error) {
	o.volume, err = o.api.CreateVolume(ctx, &dormousev1.CreateVolumeRequest{Name: o.name("volume", 0), Labels: o.labels()})
	if err == nil {
		e.UID = o.volume.UID
	}
	return err
}

// Where the subject keeps its file, and its volume.
const (
	folder = "/data"
	onto   = "/volume"
)

func (o *one) create(ctx context.Context, e *Event) (err error) {
	payload := int64(o.plan.HeapMiB+o.plan.FileMiB) * mib
	spec := &dormousev1.SandboxSpec{Image: o.image, Resources: &dormousev1.Resources{
		// What one takes that was restored, without its payload, is some 15 MB.
		CpuRequestMillis: 1, MemoryRequestBytes: 16*mib + payload, MemoryLimitBytes: 64*mib + payload,
		DiskLimitBytes: int64(o.plan.FileMiB)*mib + 16*mib,
	}}
	if o.volume != nil {
		spec.Volumes = []*dormousev1.VolumeMount{{VolumeUid: o.volume.UID, Path: onto}}
	}
	o.box, err = o.api.CreateSandbox(ctx, &dormousev1.CreateSandboxRequest{Name: o.name("box", 0), Labels: o.labels(), Spec: spec})
	if err == nil {
		e.UID = o.box.UID
	}
	return err
}

// begin starts the program and takes its first answer.
func (o *one) begin(ctx context.Context) (err error) {
	argv := []string{subject.Path, strconv.Itoa(o.plan.HeapMiB * mib), strconv.Itoa(o.plan.FileMiB * mib), folder}
	if o.volume != nil {
		argv = append(argv, onto)
	}
	o.process, err = o.box.Start(ctx, &dormousev1.ProcessSpec{Argv: argv, Stdin: true, Env: map[string]string{"GOMAXPROCS": "1"}}, "")
	if err != nil {
		return err
	}
	if o.last, err = o.ask(ctx); err != nil {
		return err
	}
	return subject.First(o.last, subject.Want{Heap: int64(o.plan.HeapMiB) * mib, File: int64(o.plan.FileMiB) * mib, Volume: o.volume != nil})
}

func (o *one) checkpoint(ctx context.Context, round int, e *Event) error {
	s, err := o.box.Checkpoint(ctx, &dormousev1.CheckpointSandboxRequest{Name: o.name("snapshot", round), Labels: o.labels()})
	if err != nil {
		return err
	}
	before := o.snapshot
	o.snapshot = s
	e.UID, e.Freeze, e.Bytes = s.UID, milliseconds(s.Last.GetStatus().GetFreeze().AsDuration()), s.Last.GetStatus().GetSizeBytes()
	if before != nil {
		return before.Delete(ctx, "")
	}
	return nil
}

func (o *one) restore(ctx context.Context, round int, e *Event) error {
	box, err := o.snapshot.Restore(ctx, &dormousev1.RestoreSandboxRequest{Name: o.name("box", round), Labels: o.labels()})
	if err != nil {
		return err
	}
	o.box, o.process, e.UID = box, box.Process(o.process.ID), box.UID
	return nil
}

func (o *one) prove(ctx context.Context) error {
	a, err := o.ask(ctx)
	if err != nil {
		return err
	}
	err = subject.Same(o.last, a)
	o.last = a
	return err
}

func (o *one) forget(ctx context.Context) error {
	var err error
	if o.snapshot != nil {
		err = o.snapshot.Delete(ctx, "")
	}
	if o.volume != nil && err == nil {
		err = o.volume.Delete(ctx, "")
	}
	return err
}

// ask has the program answer one question.
func (o *one) ask(ctx context.Context) (subject.Answer, error) {
	token := strconv.FormatInt(time.Now().UnixNano(), 36)
	lines := &lines{token: token, found: make(chan struct{})}
	out := &client.Output{Stdout: lines}
	out.From(o.out, o.err)
	a, err := o.process.Attach(ctx, client.AttachOptions{Output: out, Input: true})
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
	o.out, o.err = out.Offsets()
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
