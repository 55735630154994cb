package app_test

import (
	"context"
	"errors"
	"fmt"
	"io"

	"google.golang.org/grpc"

	"github.com/dormouse-run/dormouse/pkg/errs"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// StartProcess starts nothing; what is attached to then is an echo.
func (n *fakeNode) StartProcess(_ context.Context, req *dormousev1.StartProcessRequest) (*dormousev1.StartProcessResponse, error) {
	if req.GetSpec().GetArgv()[0] == "missing" {
		return nil, errs.New(errs.CommandNotFound, "no such command").With("command", "missing")
	}
	id := req.GetProcessId()
	if id == "" {
		id = "started"
	}
	return &dormousev1.StartProcessResponse{Process: &dormousev1.Process{ProcessId: id, Spec: req.GetSpec()}}, nil
}

// AttachProcess is at an echo. It says what it was asked for on stderr, tells of a gap first where an offset is asked for, and ends with
// its input, or with a signal. The process "greedy" takes no input before it is told to, and says nothing; "flood" never stops talking. "late" is refused after its first input, "caught" once it
// has been opened, if the sandbox was just paused.
func (n *fakeNode) AttachProcess(stream grpc.BidiStreamingServer[dormousev1.AttachProcessRequest, dormousev1.AttachProcessResponse]) error {
	m, err := stream.Recv()
	if err != nil {
		return err
	}
	n.came.Add(1)
	n.there.Add(1)
	defer n.there.Add(-1)
	open := m.GetOpen()
	if open.GetProcessId() == "late" && n.yawns.Load() > 0 { // it refuses when it has taken input, too
		if _, err := stream.Recv(); err != nil {
			return err
		}
	}
	if open.GetProcessId() != "caught" {
		if err := n.awake(open.GetSandboxUid()); err != nil {
			return err
		}
	}
	send := func(r *dormousev1.AttachProcessResponse) error { return stream.Send(r) }
	say := func(to dormousev1.OutputStream, offset, gap uint64, text []byte) error {
		return send(&dormousev1.AttachProcessResponse{Event: &dormousev1.AttachProcessResponse_Output{Output: &dormousev1.OutputChunk{Stream: to, Offset: offset, GapBytes: gap, Data: text}}})
	}
	if open.GetProcessId() == "absent" {
		return errs.New(errs.ProcessNotFound, "there is no process absent")
	}
	at := uint64(0)
	if open.GetResume() {
		at = 3
	}
	err = send(&dormousev1.AttachProcessResponse{Event: &dormousev1.AttachProcessResponse_Opened{Opened: &dormousev1.AttachOpened{
		Process: &dormousev1.Process{ProcessId: open.GetProcessId()}, InputOffset: at}}})
	if err == nil && open.GetStdoutOffset() > 0 {
		err = say(dormousev1.OutputStream_OUTPUT_STREAM_STDOUT, open.GetStdoutOffset()+5, 5, []byte("after"))
	}
	for err == nil && open.GetProcessId() == "flood" {
		err = say(dormousev1.OutputStream_OUTPUT_STREAM_STDOUT, 0, 0, make([]byte, 32<<10))
	}
	if open.GetProcessId() == "caught" {
		err = errors.Join(err, n.awake(open.GetSandboxUid()))
	}
	acked, fed := at, false
	for err == nil {
		if m, err = stream.Recv(); errors.Is(err, io.EOF) {
			return nil
		}
		in := m.GetInput()
		switch {
		case err != nil:
		case m.GetResize() != nil:
			err = say(dormousev1.OutputStream_OUTPUT_STREAM_STDERR, 0, 0, fmt.Appendf(nil, "%d by %d", m.GetResize().GetRows(), m.GetResize().GetCols()))
		case m.GetSignal() != nil:
			return send(&dormousev1.AttachProcessResponse{Event: &dormousev1.AttachProcessResponse_Exit{Exit: &dormousev1.ProcessExit{Code: 128 + m.GetSignal().GetSignal(), Signal: m.GetSignal().GetSignal()}}})
		case in.GetOffset() != at:
			return errs.New(errs.InvalidField, "input.offset: %d, not %d", in.GetOffset(), at)
		case len(in.GetData()) > 64<<10:
			return errs.New(errs.LimitExceeded, "input.data: too much")
		case open.GetProcessId() == "greedy":
			at += uint64(len(in.GetData()))
			if at-acked > 256<<10 {
				return errs.New(errs.LimitExceeded, "input: too far ahead")
			}
			if at+uint64(len(in.GetData())) > 256<<10 { // no more comes before
				if !fed {
					select {
					case <-n.feed:
						fed = true
					case <-stream.Context().Done():
						return stream.Context().Err()
					}
				}
				acked = at
				err = send(&dormousev1.AttachProcessResponse{Event: &dormousev1.AttachProcessResponse_Input{Input: &dormousev1.InputState{AcceptedOffset: acked}}})
			}
		default:
			at += uint64(len(in.GetData()))
			err = say(dormousev1.OutputStream_OUTPUT_STREAM_STDOUT, at, 0, in.GetData())
			if err == nil {
				err = send(&dormousev1.AttachProcessResponse{Event: &dormousev1.AttachProcessResponse_Input{Input: &dormousev1.InputState{AcceptedOffset: at, Closed: in.GetEof()}}})
			}
			if err == nil && in.GetEof() {
				return send(&dormousev1.AttachProcessResponse{Event: &dormousev1.AttachProcessResponse_Exit{Exit: &dormousev1.ProcessExit{Code: 7}}})
			}
		}
	}
	return err
}
