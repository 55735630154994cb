package main

import (
	"context"
	"fmt"
	"os"
	"strings"
	"syscall"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/dormouse-run/dormouse/pkg/errs"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// RunProcess knows a few programs: echo, exit, sleep (times out),
// hang (until a signal comes), lost (the stream breaks after half of the output).
func (f *fake) RunProcess(r *dormousev1.RunProcessRequest, s grpc.ServerStreamingServer[dormousev1.RunProcessResponse]) error {
	if err := f.note("RunProcess", r); err != nil {
		return err
	}
	p := &dormousev1.Process{ProcessId: r.GetProcessId(), Spec: r.GetSpec(), Pid: 2, StartTime: timestamppb.New(epoch)}
	if err := s.Send(&dormousev1.RunProcessResponse{Event: &dormousev1.RunProcessResponse_Started{Started: p}}); err != nil {
		return err
	}
	say := func(stream dormousev1.OutputStream, text string) error {
		return s.Send(&dormousev1.RunProcessResponse{Event: &dormousev1.RunProcessResponse_Output{Output: &dormousev1.OutputChunk{Stream: stream, Data: []byte(text)}}})
	}
	exit := &dormousev1.ProcessExit{}
	argv := r.GetSpec().GetArgv()
	switch argv[0] {
	case "interrupted": // sends Ctrl-C to the caller, which is this process, then hangs
		if err := syscall.Kill(os.Getpid(), syscall.SIGINT); err != nil {
			return err
		}
		fallthrough
	case "hang": // until a signal comes
		select {
		case n := <-f.signals:
			exit.Code, exit.Signal = 128+n, n
		case <-s.Context().Done():
			return s.Context().Err()
		}
	case "echo":
		if err := say(dormousev1.OutputStream_OUTPUT_STREAM_STDOUT, strings.Join(argv[1:], " ")+"\n"); err != nil {
			return err
		}
	case "exit":
		if _, err := fmt.Sscan(argv[1], &exit.Code); err != nil {
			return err
		}
		if err := say(dormousev1.OutputStream_OUTPUT_STREAM_STDERR, "bye\n"); err != nil {
			return err
		}
	case "sleep":
		exit.Code, exit.Signal, exit.TimedOut = 137, 9, true
	case "lost":
		if err := say(dormousev1.OutputStream_OUTPUT_STREAM_STDOUT, "first half, "); err != nil {
			return err
		}
		return errs.New(errs.NodeAway, "the node went away")
	}
	return s.Send(&dormousev1.RunProcessResponse{Event: &dormousev1.RunProcessResponse_Exit{Exit: exit}})
}

// AttachProcess is at a process that says what it reads, in capitals, and its sizes.
func (f *fake) AttachProcess(s grpc.BidiStreamingServer[dormousev1.AttachProcessRequest, dormousev1.AttachProcessResponse]) error {
	first, err := s.Recv()
	if err != nil {
		return err
	}
	if err := f.note("AttachProcess", first.GetOpen()); err != nil {
		return err
	}
	offset := first.GetOpen().GetStdoutOffset()
	if err := s.Send(&dormousev1.AttachProcessResponse{Event: &dormousev1.AttachProcessResponse_Opened{Opened: &dormousev1.AttachOpened{Process: &dormousev1.Process{}}}}); err != nil {
		return err
	}
	say := func(text string) error {
		c := &dormousev1.OutputChunk{Stream: dormousev1.OutputStream_OUTPUT_STREAM_STDOUT, Offset: offset, Data: []byte(text)}
		offset += uint64(len(text))
		return s.Send(&dormousev1.AttachProcessResponse{Event: &dormousev1.AttachProcessResponse_Output{Output: c}})
	}
	if err := say("ready\n"); err != nil {
		return err
	}
	for {
		m, err := s.Recv()
		if err != nil {
			return err
		}
		if r := m.GetResize(); r != nil {
			if err := say(fmt.Sprintf("size %d %d\n", r.GetRows(), r.GetCols())); err != nil {
				return err
			}
		}
		in := m.GetInput()
		if in == nil {
			continue
		}
		if err := say(strings.ToUpper(string(in.GetData()))); err != nil {
			return err
		}
		ack := &dormousev1.InputState{AcceptedOffset: in.GetOffset() + uint64(len(in.GetData())), Closed: in.GetEof()}
		if err := s.Send(&dormousev1.AttachProcessResponse{Event: &dormousev1.AttachProcessResponse_Input{Input: ack}}); err != nil {
			return err
		}
		if in.GetEof() || strings.Contains(string(in.GetData()), "exit") {
			return s.Send(&dormousev1.AttachProcessResponse{Event: &dormousev1.AttachProcessResponse_Exit{Exit: &dormousev1.ProcessExit{Code: 5}}})
		}
	}
}

func (f *fake) GetProcess(_ context.Context, r *dormousev1.GetProcessRequest) (*dormousev1.GetProcessResponse, error) {
	return &dormousev1.GetProcessResponse{Process: &dormousev1.Process{ProcessId: r.GetProcessId(), StdoutOffset: 40,
		Spec: &dormousev1.ProcessSpec{Terminal: &dormousev1.Terminal{Rows: 24, Cols: 80}}}}, f.note("GetProcess", r)
}

func (f *fake) ResizeTerminal(_ context.Context, r *dormousev1.ResizeTerminalRequest) (*dormousev1.ResizeTerminalResponse, error) {
	return &dormousev1.ResizeTerminalResponse{}, f.note("ResizeTerminal", r)
}

// ReadOutput has the output of "lost", some of it read again.
func (f *fake) ReadOutput(r *dormousev1.ReadOutputRequest, s grpc.ServerStreamingServer[dormousev1.ReadOutputResponse]) error {
	if err := f.note("ReadOutput", r); err != nil {
		return err
	}
	all := "first half, second half\n"
	from := max(int(r.GetStdoutOffset())-3, 0) //nolint:gosec // a test's offset
	if err := s.Send(&dormousev1.ReadOutputResponse{Event: &dormousev1.ReadOutputResponse_Output{Output: &dormousev1.OutputChunk{
		Stream: dormousev1.OutputStream_OUTPUT_STREAM_STDOUT, Offset: uint64(from), Data: []byte(all[from:])}}}); err != nil { //nolint:gosec // not negative
		return err
	}
	if !r.GetFollow() {
		return nil
	}
	return s.Send(&dormousev1.ReadOutputResponse{Event: &dormousev1.ReadOutputResponse_Exit{Exit: &dormousev1.ProcessExit{Code: 3}}})
}

func (f *fake) StartProcess(_ context.Context, r *dormousev1.StartProcessRequest) (*dormousev1.StartProcessResponse, error) {
	return &dormousev1.StartProcessResponse{Process: &dormousev1.Process{ProcessId: r.GetProcessId()}}, f.note("StartProcess", r)
}

func (f *fake) ListProcesses(_ context.Context, r *dormousev1.ListProcessesRequest) (*dormousev1.ListProcessesResponse, error) {
	if err := f.note("ListProcesses", r); err != nil {
		return nil, err
	}
	return &dormousev1.ListProcessesResponse{Processes: []*dormousev1.Process{
		{ProcessId: uidAt(100), Pid: 2, Main: true, Spec: &dormousev1.ProcessSpec{Argv: []string{"python3", "-m\x1b[2J"}}, StartTime: timestamppb.New(epoch)},
		{ProcessId: uidAt(101), Pid: 3, Spec: &dormousev1.ProcessSpec{Argv: []string{"sh"}}, Exit: &dormousev1.ProcessExit{Code: 137, Signal: 9}},
	}}, nil
}

func (f *fake) SignalProcess(_ context.Context, r *dormousev1.SignalProcessRequest) (*dormousev1.SignalProcessResponse, error) {
	err := f.note("SignalProcess", r) // first: whoever hears of the signal looks for the request
	select {
	case f.signals <- r.GetSignal():
	default:
	}
	return &dormousev1.SignalProcessResponse{}, err
}
