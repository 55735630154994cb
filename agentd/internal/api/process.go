package api

import (
	"cmp"
	"context"
	"errors"
	"io"
	"maps"
	"slices"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/dormouse-run/dormouse/agentd/internal/guest"
	"github.com/dormouse-run/dormouse/agentd/internal/runner"
	"github.com/dormouse-run/dormouse/pkg/errs"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// Defaults are what a process gets where its caller says nothing.
type Defaults struct {
	Env  []string
	User string
	Dir  string
}

// Sandboxes gives the channels to what runs.
type Sandboxes interface {
	// Channel is the open channel of a running sandbox.
	Channel(sandboxUID string) (*guest.Conn, error)
	Defaults(sandboxUID string) (Defaults, error)
	// Final is what was kept of the ended main command of a stopped sandbox.
	Final(sandboxUID string) (runner.Final, error)
}

// Processes implements dormouse.v1.ProcessService.
type Processes struct {
	dormousev1.UnimplementedProcessServiceServer

	Sandboxes Sandboxes

	writers writers
}

// ProcessToProto gives the public form of a process.
func ProcessToProto(p guest.Process) *dormousev1.Process {
	spec := &dormousev1.ProcessSpec{Argv: texts(p.Args), Tags: maps.Clone(p.Tags)}
	if t := p.Terminal; t != nil {
		spec.Terminal = &dormousev1.Terminal{Rows: int32(t.Rows), Cols: int32(t.Columns)}
	}
	return &dormousev1.Process{
		ProcessId: p.ID, Spec: spec, Pid: int32(p.PID),
		StartTime: timestamppb.New(p.StartTime), Exit: exitToProto(p.Exit), StdoutOffset: p.StdoutOffset, StderrOffset: p.StderrOffset, Main: p.Main,
	}
}

func texts(in []string) []string {
	out := make([]string, len(in))
	for i, s := range in {
		out[i] = strings.ToValidUTF8(s, "\ufffd")
	}
	return out
}

func exitToProto(e *guest.Exit) *dormousev1.ProcessExit {
	if e == nil {
		return nil
	}
	return &dormousev1.ProcessExit{Code: int32(e.Code), Signal: int32(e.Signal), TimedOut: e.TimedOut, Time: timestamppb.New(e.Time)}
}

func finalExit(f runner.Final) *dormousev1.ProcessExit {
	return &dormousev1.ProcessExit{Code: f.Exit.Code, Signal: f.Exit.Signal, TimedOut: f.Exit.TimedOut, Time: timestamppb.New(f.Exit.At)}
}

func finalProcess(f runner.Final) *dormousev1.Process {
	return &dormousev1.Process{
		ProcessId: runner.MainID, Spec: &dormousev1.ProcessSpec{Argv: texts(f.Argv)}, Pid: f.Pid, StartTime: timestamppb.New(f.StartTime),
		Exit: finalExit(f), StdoutOffset: f.Stdout.Offset + uint64(len(f.Stdout.Data)), StderrOffset: f.Stderr.Offset + uint64(len(f.Stderr.Data)), Main: true,
	}
}

// ended gives what was kept of the main command, where the channel's failure means that the sandbox
// has stopped: then it has the answer. Otherwise the failure stays.
func (s *Processes) ended(sandboxUID, processID string, failure error) (runner.Final, error) {
	reason := errs.ReasonOf(failure)
	if processID != runner.MainID || reason != errs.WrongPhase && reason != errs.GuestSilent {
		return runner.Final{}, failure
	}
	f, err := s.Sandboxes.Final(sandboxUID)
	if err != nil {
		return runner.Final{}, failure
	}
	return f, nil
}

// StartProcess implements ProcessService.
func (s *Processes) StartProcess(ctx context.Context, req *dormousev1.StartProcessRequest) (*dormousev1.StartProcessResponse, error) {
	_, p, err := s.start(ctx, req.GetSandboxUid(), req.GetProcessId(), req.GetSpec(), req.GetHoldOutput())
	if err != nil {
		return nil, err
	}
	return &dormousev1.StartProcessResponse{Process: ProcessToProto(p)}, nil
}

func (s *Processes) list(ctx context.Context, sandboxUID string) ([]*dormousev1.Process, error) {
	if err := checkUID("sandbox_uid", sandboxUID); err != nil {
		return nil, err
	}
	var all []guest.Process
	conn, err := s.Sandboxes.Channel(sandboxUID)
	if err == nil {
		all, err = conn.List(ctx)
	}
	if err != nil {
		f, err := s.ended(sandboxUID, runner.MainID, err)
		if err != nil {
			return nil, err
		}
		return []*dormousev1.Process{finalProcess(f)}, nil
	}
	out := make([]*dormousev1.Process, len(all))
	for i, p := range all {
		out[i] = ProcessToProto(p)
	}
	return out, nil
}

// ListProcesses implements ProcessService.
func (s *Processes) ListProcesses(ctx context.Context, req *dormousev1.ListProcessesRequest) (*dormousev1.ListProcessesResponse, error) {
	want, err := tagFilter(req.GetTags())
	if err != nil {
		return nil, err
	}
	all, err := s.list(ctx, req.GetSandboxUid())
	if err != nil {
		return nil, err
	}
	all = slices.DeleteFunc(all, func(p *dormousev1.Process) bool { return !hasTags(p.GetSpec().GetTags(), want) })
	return &dormousev1.ListProcessesResponse{Processes: all}, nil
}

func (s *Processes) get(ctx context.Context, sandboxUID, id string) (*dormousev1.Process, error) {
	all, err := s.list(ctx, sandboxUID)
	if err != nil {
		return nil, err
	}
	i := slices.IndexFunc(all, func(p *dormousev1.Process) bool { return p.GetProcessId() == id })
	if i < 0 {
		return nil, errs.New(errs.ProcessNotFound, "sandbox %s has no process %q", sandboxUID, id)
	}
	return all[i], nil
}

// GetProcess implements ProcessService.
func (s *Processes) GetProcess(ctx context.Context, req *dormousev1.GetProcessRequest) (*dormousev1.GetProcessResponse, error) {
	p, err := s.get(ctx, req.GetSandboxUid(), req.GetProcessId())
	if err != nil {
		return nil, err
	}
	return &dormousev1.GetProcessResponse{Process: p}, nil
}

// WaitProcess implements ProcessService.
func (s *Processes) WaitProcess(ctx context.Context, req *dormousev1.WaitProcessRequest) (*dormousev1.WaitProcessResponse, error) {
	if err := checkUID("sandbox_uid", req.GetSandboxUid()); err != nil {
		return nil, err
	}
	conn, err := s.Sandboxes.Channel(req.GetSandboxUid())
	if err == nil {
		_, err = conn.Wait(ctx, req.GetProcessId())
	}
	if err != nil {
		f, err := s.ended(req.GetSandboxUid(), req.GetProcessId(), err)
		if err != nil {
			return nil, err
		}
		return &dormousev1.WaitProcessResponse{Process: finalProcess(f)}, nil
	}
	p, err := s.get(ctx, req.GetSandboxUid(), req.GetProcessId())
	if err != nil {
		return nil, err
	}
	return &dormousev1.WaitProcessResponse{Process: p}, nil
}

func checkSignal(field string, n int32) error {
	if n < 1 || n > 64 {
		return errs.New(errs.InvalidField, "%s: 1 to 64", field).With("field", field)
	}
	return nil
}

// SignalProcess implements ProcessService.
func (s *Processes) SignalProcess(ctx context.Context, req *dormousev1.SignalProcessRequest) (*dormousev1.SignalProcessResponse, error) {
	if err := checkUID("sandbox_uid", req.GetSandboxUid()); err != nil {
		return nil, err
	}
	if err := checkSignal("signal", req.GetSignal()); err != nil {
		return nil, err
	}
	conn, err := s.Sandboxes.Channel(req.GetSandboxUid())
	if err == nil {
		_, err = conn.Signal(ctx, req.GetProcessId(), syscall.Signal(req.GetSignal()), req.GetTree())
	}
	if err != nil {
		return nil, err
	}
	return &dormousev1.SignalProcessResponse{}, nil
}

// ResizeTerminal implements ProcessService.
func (s *Processes) ResizeTerminal(ctx context.Context, req *dormousev1.ResizeTerminalRequest) (*dormousev1.ResizeTerminalResponse, error) {
	size, err := sizeOf("terminal", req.GetTerminal())
	if err := first(checkUID("sandbox_uid", req.GetSandboxUid()), err); err != nil {
		return nil, err
	}
	if size == nil {
		return nil, errs.New(errs.InvalidField, "terminal: give its size").With("field", "terminal")
	}
	conn, err := s.Sandboxes.Channel(req.GetSandboxUid())
	if err != nil {
		return nil, err
	}
	if err := conn.Resize(ctx, req.GetProcessId(), *size); err != nil {
		return nil, err
	}
	return &dormousev1.ResizeTerminalResponse{}, nil
}

// WriteInput implements ProcessService.
func (s *Processes) WriteInput(ctx context.Context, req *dormousev1.WriteInputRequest) (*dormousev1.WriteInputResponse, error) {
	if err := checkUID("sandbox_uid", req.GetSandboxUid()); err != nil {
		return nil, err
	}
	conn, err := s.Sandboxes.Channel(req.GetSandboxUid())
	if err != nil {
		return nil, err
	}
	s.writers.displace(req.GetSandboxUid(), req.GetProcessId())
	if len(req.GetData()) > 0 {
		if _, err := conn.WriteStdin(ctx, req.GetProcessId(), req.GetData()); err != nil {
			return nil, err
		}
	}
	if req.GetEof() {
		if err := conn.CloseStdin(ctx, req.GetProcessId()); err != nil {
			return nil, err
		}
	}
	return &dormousev1.WriteInputResponse{}, nil
}

// reader follows both outputs of a process. emit is called by one goroutine at a time.
type reader struct {
	s          *Processes
	sandboxUID string
	processID  string
	// hold makes the process wait for this reader, as it would for a terminal.
	hold bool
	emit func(*dormousev1.OutputChunk) error

	mu      sync.Mutex
	offsets map[guest.Output]uint64
}

func outputProto(which guest.Output) dormousev1.OutputStream {
	if which == guest.Stderr {
		return dormousev1.OutputStream_OUTPUT_STREAM_STDERR
	}
	return dormousev1.OutputStream_OUTPUT_STREAM_STDOUT
}

func (r *reader) send(which guest.Output, c guest.Chunk) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.offsets[which] = c.Offset + uint64(len(c.Data))
	return r.emit(&dormousev1.OutputChunk{Stream: outputProto(which), Offset: c.Offset, Data: c.Data, GapBytes: c.Gap})
}

func (r *reader) copy(ctx context.Context, conn *guest.Conn, which guest.Output, follow guest.Follow) error {
	r.mu.Lock()
	from := r.offsets[which]
	r.mu.Unlock()
	stream, err := conn.Output(ctx, guest.OutputRequest{Process: r.processID, Output: which, From: from, Follow: follow, Hold: r.hold})
	if err != nil {
		return err
	}
	defer stream.Close()
	for {
		c, err := stream.Next(ctx)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err == nil {
			err = r.send(which, c)
		}
		if err != nil {
			return err
		}
	}
}

// read copies both outputs from their offsets and, with follow, returns the exit after the last byte.
func (r *reader) read(ctx context.Context, conn *guest.Conn, follow bool) (*dormousev1.ProcessExit, error) {
	mode := guest.NoFollow
	if follow {
		mode = guest.UntilExit
	}
	group, gctx := errgroup.WithContext(ctx)
	for _, which := range []guest.Output{guest.Stdout, guest.Stderr} {
		group.Go(func() error { return r.copy(gctx, conn, which, mode) })
	}
	if !follow {
		return nil, group.Wait()
	}
	// Asked for beside the outputs, the exit is there when they end. That it fails does not keep an output from
	// being read as far as it goes.
	waiting, cancel := context.WithCancel(ctx)
	var waiter errgroup.Group
	var exit guest.Exit
	waiter.Go(func() (err error) {
		exit, err = conn.Wait(waiting, r.processID)
		return err
	})
	err := group.Wait()
	if err != nil {
		cancel()
	}
	waitErr := waiter.Wait()
	cancel()
	if err = cmp.Or(err, waitErr); err != nil {
		return nil, err
	}
	return exitToProto(&exit), nil
}

// rest sends what was kept of the main command's output from where the channel ended.
func (r *reader) rest(f runner.Final) error {
	for which, tail := range map[guest.Output]runner.Tail{guest.Stdout: f.Stdout, guest.Stderr: f.Stderr} {
		from, end := r.offsets[which], tail.Offset+uint64(len(tail.Data))
		c := guest.Chunk{Offset: max(from, tail.Offset)}
		if from < tail.Offset {
			c.Gap = tail.Offset - from
		}
		for c.Offset < end {
			n := min(end-c.Offset, maxChunk)
			at := c.Offset - tail.Offset
			c.Data = tail.Data[at : at+n]
			if err := r.send(which, c); err != nil {
				return err
			}
			c = guest.Chunk{Offset: c.Offset + n}
		}
	}
	return nil
}

const maxChunk = 64 << 10

// Follow copies a process's output from the offsets to emit, from a running sandbox or from what was kept
// of a stopped one. The exit is nil without follow, unless the process has ended with its sandbox.
func (s *Processes) Follow(ctx context.Context, req *dormousev1.ReadOutputRequest, emit func(*dormousev1.OutputChunk) error) (*dormousev1.ProcessExit, error) {
	r := &reader{s: s, sandboxUID: req.GetSandboxUid(), processID: req.GetProcessId(), emit: emit,
		offsets: map[guest.Output]uint64{guest.Stdout: req.GetStdoutOffset(), guest.Stderr: req.GetStderrOffset()}}
	var exit *dormousev1.ProcessExit
	conn, err := s.Sandboxes.Channel(r.sandboxUID)
	if err == nil {
		exit, err = r.read(ctx, conn, req.GetFollow())
	}
	if err == nil {
		return exit, nil
	}
	f, err := s.ended(r.sandboxUID, r.processID, err)
	if err != nil {
		return nil, err
	}
	if err := r.rest(f); err != nil {
		return nil, err
	}
	return finalExit(f), nil
}

// ReadOutput implements ProcessService.
func (s *Processes) ReadOutput(req *dormousev1.ReadOutputRequest, stream grpc.ServerStreamingServer[dormousev1.ReadOutputResponse]) error {
	if err := checkUID("sandbox_uid", req.GetSandboxUid()); err != nil {
		return err
	}
	exit, err := s.Follow(stream.Context(), req, func(c *dormousev1.OutputChunk) error {
		return stream.Send(&dormousev1.ReadOutputResponse{Event: &dormousev1.ReadOutputResponse_Output{Output: c}})
	})
	if err != nil || exit == nil || !req.GetFollow() {
		return err
	}
	return stream.Send(&dormousev1.ReadOutputResponse{Event: &dormousev1.ReadOutputResponse_Exit{Exit: exit}})
}
