package guest

import (
	"context"
	"errors"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/dormouse-run/dormouse/agentd/internal/guestwire"
	"github.com/dormouse-run/dormouse/pkg/errs"
)

// StartRequest describes a process. The id is the caller's: the same id and request again return
// the process that there is.
type StartRequest struct {
	ID   string
	Args []string
	// Env is "NAME=value". PATH, HOME and HOSTNAME are added where they are absent.
	Env []string
	// User is "", a name, a uid, name:group or uid:gid, of the image.
	User string
	// Dir is absolute; "" is the root.
	Dir string
	// Stdin keeps a pipe open for WriteStdin; otherwise the process reads the null device.
	Stdin bool
	// Timeout kills the process's tree; 0 is never. It counts the sandbox's time.
	Timeout time.Duration
	Tags    map[string]string
	// Main marks the sandbox's own command, which alone gets the secret environment.
	Main bool
	// OutputBytes is how much of each output the guest keeps; 0 is 256 KiB, at most 1 MiB.
	OutputBytes int
	// HoldOutput makes the process wait, for at most 10 s, when an output has filled what is kept and
	// nobody has opened it yet. It does not count when two requests are compared.
	HoldOutput bool
	// Terminal, if not nil, is what the process runs on instead of pipes: it is the input, and what comes
	// out of it is Stdout; Stderr stays empty.
	Terminal *Size
	// Groups are supplementary ones, names or ids, beside those that the image gives the user.
	Groups []string
}

// Size is a terminal's, in characters.
type Size struct {
	Rows, Columns int
}

func (s *Size) wire() *guestwire.Terminal {
	if s == nil {
		return nil
	}
	// What does not fit becomes what guest init refuses.
	return &guestwire.Terminal{Rows: uint32(max(min(s.Rows, 1<<16), 0)), Columns: uint32(max(min(s.Columns, 1<<16), 0))}
}

// Process is what guest init knows of one.
type Process struct {
	ID        string
	PID       int
	StartTime time.Time
	// Args may be shortened.
	Args []string
	Tags map[string]string
	Main bool
	// Offsets count the bytes ever written.
	StdoutOffset, StderrOffset uint64
	// Exit is nil while it runs.
	Exit *Exit
	// Terminal is the present size of its terminal, if it has one.
	Terminal *Size
}

// Exit is how a process ended.
type Exit struct {
	// Code is 0 to 255, or 128 + Signal.
	Code       int
	Signal     syscall.Signal
	CoreDumped bool
	TimedOut   bool
	Time       time.Time
	// Offsets of the outputs when it ended; everything it wrote itself lies before them.
	StdoutOffset, StderrOffset uint64
}

func utoa(v uint64) string { return strconv.FormatUint(v, 10) }

func exitOf(e *guestwire.Exit) *Exit {
	if e == nil {
		return nil
	}
	out := &Exit{
		Code: int(e.Code & 0xff), Signal: syscall.Signal(e.Signal & 0x7f), CoreDumped: e.CoreDumped, TimedOut: e.TimedOut,
		Time: time.Unix(0, int64(e.TimeUnixNS)), StdoutOffset: e.StdoutOffset, StderrOffset: e.StderrOffset,
	}
	if out.Signal != 0 {
		out.Code = 128 + int(out.Signal)
	}
	return out
}

func processOf(p *guestwire.ProcessInfo) Process {
	out := Process{
		ID: clean(p.ProcessID), PID: int(p.PID & 0x7fffffff), StartTime: time.Unix(0, int64(p.StartTimeUnixNS)), Main: p.Main,
		StdoutOffset: p.StdoutOffset, StderrOffset: p.StderrOffset, Exit: exitOf(p.Exit),
	}
	if t := p.Terminal; t != nil {
		out.Terminal = &Size{Rows: int(t.Rows & 0xffff), Columns: int(t.Columns & 0xffff)}
	}
	for _, a := range p.Args {
		out.Args = append(out.Args, strings.ToValidUTF8(a, "?"))
	}
	for _, t := range p.Tags {
		if out.Tags == nil {
			out.Tags = map[string]string{}
		}
		out.Tags[clean(t.Key)] = clean(t.Value)
	}
	return out
}

// Start runs a process. Its refusals are COMMAND_NOT_FOUND, COMMAND_NOT_RUNNABLE, USER_NOT_FOUND,
// INVALID_FIELD (also: no such directory), LIMIT_EXCEEDED, TOO_MANY and OPERATION_BODY_MISMATCH;
// after each, nothing was started.
func (c *Conn) Start(ctx context.Context, r StartRequest) (Process, error) {
	var reply guestwire.Started
	if err := c.roundTrip(ctx, r.message(), &reply); err != nil {
		return Process{}, err
	}
	return startedAs(&reply, r.ID)
}

// started reads the reply to a start.
func started(res result, id string) (Process, error) {
	var reply guestwire.Started
	if err := res.decode(&reply); err != nil {
		return Process{}, err
	}
	return startedAs(&reply, id)
}

func startedAs(reply *guestwire.Started, id string) (Process, error) {
	if reply.Process == nil || reply.Process.ProcessID != id {
		return Process{}, errs.New(errs.InternalError, "guest init answered for another process")
	}
	return processOf(reply.Process), nil
}

// message is the request as the guest reads it.
func (r StartRequest) message() *guestwire.Start {
	m := &guestwire.Start{
		ProcessID: r.ID, Args: r.Args, Environment: r.Env, User: r.User, Directory: r.Dir,
		TimeoutMS: uint64(max(r.Timeout, 0).Milliseconds()), Main: r.Main, OutputBytes: uint32(min(max(r.OutputBytes, 0), 1<<20)),
		HoldOutput: r.HoldOutput, Terminal: r.Terminal.wire(), Groups: r.Groups,
	}
	if r.Timeout > 0 && m.TimeoutMS == 0 {
		m.TimeoutMS = 1
	}
	if r.Stdin || r.Terminal != nil {
		m.Stdin = guestwire.StdinPipe
	}
	// The order must not change between two Starts of the same request.
	for _, k := range slices.Sorted(maps.Keys(r.Tags)) {
		m.Tags = append(m.Tags, guestwire.Tag{Key: k, Value: r.Tags[k]})
	}
	return m
}

// Wait waits until the process has ended and returns how. Any number may wait.
func (c *Conn) Wait(ctx context.Context, id string) (Exit, error) {
	var reply guestwire.Exited
	if err := c.roundTrip(ctx, &guestwire.Wait{ProcessID: id}, &reply); err != nil {
		return Exit{}, err
	}
	return exitedAs(&reply)
}

// exited reads the reply to a wait.
func exited(res result) (Exit, error) {
	var reply guestwire.Exited
	if err := res.decode(&reply); err != nil {
		return Exit{}, err
	}
	return exitedAs(&reply)
}

func exitedAs(reply *guestwire.Exited) (Exit, error) {
	if reply.Exit == nil {
		return Exit{}, errs.New(errs.InternalError, "guest init answered a wait without an exit")
	}
	return *exitOf(reply.Exit), nil
}

// Signal sends a signal to the process, or to its whole tree, and returns how many got it: none
// when it has ended.
func (c *Conn) Signal(ctx context.Context, id string, sig syscall.Signal, tree bool) (int, error) {
	var reply guestwire.Signaled
	if err := c.roundTrip(ctx, &guestwire.Signal{ProcessID: id, Signal: uint32(sig), Tree: tree}, &reply); err != nil {
		return 0, err
	}
	return int(reply.Sent), nil
}

// Resize sets the size of the process's terminal: WRONG_PHASE when it has none.
func (c *Conn) Resize(ctx context.Context, id string, size Size) error {
	return c.roundTrip(ctx, &guestwire.Resize{ProcessID: id, Terminal: size.wire()}, &guestwire.Resized{})
}

// Forget drops an ended process with its output and exit; WRONG_PHASE while it runs.
func (c *Conn) Forget(ctx context.Context, id string) error {
	return c.roundTrip(ctx, &guestwire.Forget{ProcessID: id}, &guestwire.Forgotten{})
}

// listing receives the parts of a list and bounds their number and their bytes together.
type listing struct {
	*call
	count, bytes int
}

func (l *listing) deliver(t guestwire.Type, payload []byte) {
	l.count++
	l.bytes += len(payload)
	if l.count < cap(l.ch) && l.bytes <= maxListedBytes {
		l.call.deliver(t, payload)
		return
	}
	l.count = cap(l.ch)
	l.put(result{err: errs.New(errs.InternalError, "guest init lists more processes than it can have")})
}

// List returns the processes that guest init knows, ended ones included, oldest first.
func (c *Conn) List(ctx context.Context) ([]Process, error) {
	// One at a time: what a guest can make this node hold does not grow with who asks.
	select {
	case c.lists <- struct{}{}:
		defer func() { <-c.lists }()
	case <-ctx.Done():
		return nil, notSent(ctx)
	case <-c.done:
		return nil, c.failure()
	}
	// 1,280 processes of at most 4 KiB of arguments each, in parts of 32 KiB or more.
	r := &listing{call: &call{want: guestwire.TypeListed, ch: make(chan result, 512)}}
	stream, err := c.register(r)
	if err != nil {
		return nil, err
	}
	defer c.unregister(stream)
	if err := c.send(ctx, stream, &guestwire.List{}); err != nil {
		return nil, err
	}
	var out []Process
	for {
		select {
		case res := <-r.ch:
			var part guestwire.Listed
			if err := res.decode(&part); err != nil {
				return nil, err
			}
			for i := range part.Processes {
				out = append(out, processOf(&part.Processes[i]))
			}
			if len(out) > maxListed {
				return nil, errs.New(errs.InternalError, "guest init lists more processes than it can have")
			}
			if !part.More {
				slices.SortFunc(out, func(a, b Process) int {
					if n := a.StartTime.Compare(b.StartTime); n != 0 {
						return n
					}
					return strings.Compare(a.ID, b.ID)
				})
				return out, nil
			}
		case <-ctx.Done():
			return nil, errs.From(ctx.Err())
		case <-c.done:
			return nil, c.failure()
		}
	}
}

// Get returns one process; PROCESS_NOT_FOUND when guest init does not know it.
func (c *Conn) Get(ctx context.Context, id string) (Process, error) {
	var reply guestwire.Listed
	if err := c.roundTrip(ctx, &guestwire.List{ProcessID: id}, &reply); err != nil {
		return Process{}, err
	}
	if len(reply.Processes) != 1 || reply.Processes[0].ProcessID != id {
		return Process{}, errs.New(errs.InternalError, "guest init answered for another process")
	}
	return processOf(&reply.Processes[0]), nil
}

// Run starts a process, hands its whole output to sink as it comes and returns how it ended, after all it wrote itself was handed over. The
// process is returned whenever it is known to be started, also with an error; it is not ended by one. The process waits for a sink that is
// slow, but not for one that stands still.
func (c *Conn) Run(ctx context.Context, r StartRequest, sink func(Output, Chunk) error) (Process, Exit, error) {
	run, err := c.StartFollowed(ctx, r)
	if err != nil {
		return Process{}, Exit{}, err
	}
	defer run.Close()
	for {
		which, chunk, err := run.Next(ctx)
		if errors.Is(err, io.EOF) {
			e, err := run.Wait(ctx)
			return run.Process, e, err
		}
		if err == nil {
			err = sink(which, chunk)
		}
		if err != nil {
			return run.Process, Exit{}, err
		}
	}
}
