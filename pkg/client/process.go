package client

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/uid"
	"github.com/dormouse-run/dormouse/pkg/wait"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// inputChunk bounds one message of input.
const inputChunk = 32 << 10

// Process is a handle: a process of a sandbox, kept across restore (under the new sandbox's uid).
type Process struct {
	c       *Client
	Sandbox string
	ID      string
	Last    *dormousev1.Process // nil until it was read
}

// Process gives the handle of a process id without asking the server.
func (s *Sandbox) Process(id string) *Process { return &Process{c: s.c, Sandbox: s.UID, ID: id} }

// Start returns once the program runs. An empty id lets this make one; the same id starts once.
func (s *Sandbox) Start(ctx context.Context, spec *dormousev1.ProcessSpec, id string) (*Process, error) {
	return s.start(ctx, &dormousev1.StartProcessRequest{SandboxUid: s.UID, Spec: spec, ProcessId: operation(id)})
}

// StartHeld is Start of a process that is about to be attached to or followed: until then, for at most 10 s,
// it waits instead of overwriting its output.
func (s *Sandbox) StartHeld(ctx context.Context, spec *dormousev1.ProcessSpec) (*Process, error) {
	return s.start(ctx, &dormousev1.StartProcessRequest{SandboxUid: s.UID, Spec: spec, ProcessId: uid.New(), HoldOutput: true})
}

func (s *Sandbox) start(ctx context.Context, req *dormousev1.StartProcessRequest) (*Process, error) {
	resp, err := retry(ctx, func(ctx context.Context) (*dormousev1.StartProcessResponse, error) {
		return s.c.processes.StartProcess(ctx, req)
	})
	if err != nil {
		return nil, err
	}
	p := s.Process(resp.GetProcess().GetProcessId())
	p.Last = resp.GetProcess()
	return p, nil
}

// Processes lists the processes that guest init knows; with tags, "key=value", those that have all of them.
func (s *Sandbox) Processes(ctx context.Context, tags ...string) ([]*dormousev1.Process, error) {
	resp, err := retry(ctx, func(ctx context.Context) (*dormousev1.ListProcessesResponse, error) {
		return s.c.processes.ListProcesses(ctx, &dormousev1.ListProcessesRequest{SandboxUid: s.UID, Tags: tags})
	})
	return resp.GetProcesses(), err
}

// Main finds the sandbox's own command.
func (s *Sandbox) Main(ctx context.Context) (*Process, error) {
	all, err := s.Processes(ctx)
	if err != nil {
		return nil, err
	}
	for _, p := range all {
		if p.GetMain() {
			h := s.Process(p.GetProcessId())
			h.Last = p
			return h, nil
		}
	}
	return nil, errs.New(errs.ProcessNotFound, "the sandbox was made without a command of its own; name one of its processes")
}

// Wait returns when the process has ended.
func (p *Process) Wait(ctx context.Context) (*dormousev1.ProcessExit, error) {
	resp, err := retry(ctx, func(ctx context.Context) (*dormousev1.WaitProcessResponse, error) {
		return p.c.processes.WaitProcess(ctx, &dormousev1.WaitProcessRequest{SandboxUid: p.Sandbox, ProcessId: p.ID})
	})
	if err != nil {
		return nil, err
	}
	p.Last = resp.GetProcess()
	return p.Last.GetExit(), nil
}

// Refresh reads the process.
func (p *Process) Refresh(ctx context.Context) error {
	resp, err := retry(ctx, func(ctx context.Context) (*dormousev1.GetProcessResponse, error) {
		return p.c.processes.GetProcess(ctx, &dormousev1.GetProcessRequest{SandboxUid: p.Sandbox, ProcessId: p.ID})
	})
	if err != nil {
		return err
	}
	p.Last = resp.GetProcess()
	return nil
}

// Signal sends a signal to the process, or to its whole tree. It is sent once: a lost reply is an
// error with outcome unknown.
func (p *Process) Signal(ctx context.Context, signal int32, tree bool) error {
	_, err := p.c.processes.SignalProcess(ctx, &dormousev1.SignalProcessRequest{SandboxUid: p.Sandbox, ProcessId: p.ID, Signal: signal, Tree: tree})
	return err
}

// Resize sets the size of the process's terminal.
func (p *Process) Resize(ctx context.Context, rows, cols int) error {
	req := &dormousev1.ResizeTerminalRequest{SandboxUid: p.Sandbox, ProcessId: p.ID,
		Terminal: &dormousev1.Terminal{Rows: int32(min(rows, math.MaxInt32)), Cols: int32(min(cols, math.MaxInt32))}}
	_, err := retry(ctx, func(ctx context.Context) (*dormousev1.ResizeTerminalResponse, error) {
		return p.c.processes.ResizeTerminal(ctx, req)
	})
	return err
}

// Write sends standard input, once; with eof it closes it.
func (p *Process) Write(ctx context.Context, data []byte, eof bool) error {
	_, err := p.c.processes.WriteInput(ctx, &dormousev1.WriteInputRequest{SandboxUid: p.Sandbox, ProcessId: p.ID, Data: data, Eof: eof})
	return err
}

// Output is where a process' output goes. Nil writers discard.
type Output struct {
	Stdout, Stderr io.Writer
	// Gap is told of output that was gone from the ring before it was read.
	Gap func(stream dormousev1.OutputStream, bytes uint64)

	stdout, stderr uint64 // the offsets that come next
}

// From makes the offsets those from which output is read. It goes on from them by itself afterwards.
func (o *Output) From(stdout, stderr uint64) { o.stdout, o.stderr = stdout, stderr }

// Offsets are those at which output goes on. They may be asked for when nothing is reading.
func (o *Output) Offsets() (stdout, stderr uint64) { return o.stdout, o.stderr }

func (o *Output) write(c *dormousev1.OutputChunk) error {
	next, w := &o.stdout, o.Stdout
	if c.GetStream() == dormousev1.OutputStream_OUTPUT_STREAM_STDERR {
		next, w = &o.stderr, o.Stderr
	}
	if gap := c.GetGapBytes(); gap > 0 && o.Gap != nil && c.GetOffset() > *next {
		o.Gap(c.GetStream(), gap)
	}
	data := c.GetData()
	if c.GetOffset() < *next { // seen before a reconnection
		skip := min(*next-c.GetOffset(), uint64(len(data)))
		data = data[skip:]
	}
	*next = max(*next, c.GetOffset()+uint64(len(c.GetData())))
	if w == nil || len(data) == 0 {
		return nil
	}
	if _, err := w.Write(data); err != nil {
		return fmt.Errorf("write the process' output: %w", err)
	}
	return nil
}

// Bounds of taking up a stream again that had output: about as long as an attachment is (attachPatience).
const (
	followAttempts = 32
	followBackoff  = 2 * time.Second
)

// Follow reads output from where Output stands; with follow, until the process has ended. A lost
// stream is taken up again at the same offset.
func (p *Process) Follow(ctx context.Context, out *Output, follow bool) (*dormousev1.ProcessExit, error) {
	backoff := firstBackoff
	for attempt := 1; ; attempt++ {
		before := out.stdout + out.stderr
		exit, err := p.read(ctx, out, follow)
		after := out.stdout + out.stderr
		limit := maxAttempts
		if after > 0 {
			limit = followAttempts
		}
		if err == nil || !again(ctx, err) || attempt >= limit && after == before {
			return exit, err
		}
		if after > before {
			attempt, backoff = 1, firstBackoff
		}
		if wait.For(ctx, backoff) != nil {
			return nil, err
		}
		backoff = min(backoff*3, followBackoff)
	}
}

func (p *Process) read(ctx context.Context, out *Output, follow bool) (*dormousev1.ProcessExit, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := p.c.processes.ReadOutput(ctx, &dormousev1.ReadOutputRequest{
		SandboxUid: p.Sandbox, ProcessId: p.ID, StdoutOffset: out.stdout, StderrOffset: out.stderr, Follow: follow,
	})
	if err != nil {
		return nil, err
	}
	for {
		ev, err := stream.Recv()
		if errors.Is(err, io.EOF) && !follow {
			return nil, nil
		}
		if errors.Is(err, io.EOF) {
			return nil, errs.New(errs.ReplyLost, "the output ended before the process did")
		}
		if err != nil {
			return nil, err
		}
		if c := ev.GetOutput(); c != nil {
			if err := out.write(c); err != nil {
				return nil, err
			}
		} else if ev.GetExit() != nil {
			return ev.GetExit(), nil
		}
	}
}

// Run starts a process, sends it the input (nil: none), follows its output and returns its exit.
// Started (may be nil) is called once it runs. A lost connection is taken up again: the process is
// started once, no output is written twice, and the process has every byte of the input once.
//
// The input is read by a goroutine that ends with the reader or, when the process ends first, at
// the reader's next return.
func (s *Sandbox) Run(ctx context.Context, spec *dormousev1.ProcessSpec, input io.Reader, out *Output, started func(*Process)) (*Process, *dormousev1.ProcessExit, error) {
	spec = proto.CloneOf(spec)
	spec.Stdin = input != nil
	if started == nil {
		started = func(*Process) {}
	}
	if input != nil {
		return s.runWithInput(ctx, spec, input, out, started)
	}
	r := &running{p: s.Process(uid.New()), out: out, started: started}
	exit, err := r.stream(ctx, spec)
	if err == nil || !again(ctx, err) {
		return r.p, exit, err
	}
	if !r.on {
		// It may run or not; starting under the same id makes it run once.
		p, err := s.Start(ctx, spec, r.p.ID)
		if err != nil {
			return r.p, nil, err
		}
		r.begin(p.Last)
	}
	exit, err = r.p.Follow(ctx, out, true)
	return r.p, exit, err
}

func (s *Sandbox) runWithInput(ctx context.Context, spec *dormousev1.ProcessSpec, input io.Reader, out *Output, started func(*Process)) (*Process, *dormousev1.ProcessExit, error) {
	id := uid.New()
	p, err := s.start(ctx, &dormousev1.StartProcessRequest{SandboxUid: s.UID, Spec: spec, ProcessId: id, HoldOutput: true})
	if err != nil {
		return s.Process(id), nil, err
	}
	started(p)
	a, err := p.Attach(ctx, AttachOptions{Output: out, Input: true, Hold: true})
	if err != nil {
		return p, nil, err
	}
	defer a.Close()
	go a.Feed(input)
	exit, err := a.Wait()
	return p, exit, err
}

// running is one Run without input.
type running struct {
	p       *Process
	out     *Output
	started func(*Process)
	on      bool
}

func (r *running) stream(ctx context.Context, spec *dormousev1.ProcessSpec) (*dormousev1.ProcessExit, error) {
	stream, err := r.p.c.processes.RunProcess(ctx, &dormousev1.RunProcessRequest{SandboxUid: r.p.Sandbox, Spec: spec, ProcessId: r.p.ID})
	if err != nil {
		return nil, err
	}
	for {
		ev, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil, errs.New(errs.ReplyLost, "the stream ended before the process did")
		}
		if err != nil {
			return nil, err
		}
		switch {
		case ev.GetStarted() != nil:
			r.begin(ev.GetStarted())
		case ev.GetOutput() != nil:
			if err := r.out.write(ev.GetOutput()); err != nil {
				return nil, err
			}
		case ev.GetExit() != nil:
			return ev.GetExit(), nil
		}
	}
}

// begin takes note that the process runs.
func (r *running) begin(p *dormousev1.Process) {
	if !r.on {
		r.on, r.p.Last = true, p
		r.started(r.p)
	}
}
