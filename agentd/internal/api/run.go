package api

import (
	"context"
	"errors"
	"io"
	"time"

	"google.golang.org/grpc"

	"github.com/dormouse-run/dormouse/agentd/internal/guest"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// startedHold is how long RunProcess keeps back that the process was started, so that it is told together with what comes next. Most
// commands have said something or ended by then; to tell of each stage would take the processor from the command itself, in
// every process on the way to the client.
const startedHold = 5 * time.Millisecond

// RunProcess implements ProcessService. Its output has no gap while the caller gets on.
func (s *Processes) RunProcess(req *dormousev1.RunProcessRequest, stream grpc.ServerStreamingServer[dormousev1.RunProcessResponse]) error {
	ctx := stream.Context()
	conn, start, err := s.prepare(req.GetSandboxUid(), req.GetProcessId(), req.GetSpec())
	if err != nil {
		return err
	}
	run, err := conn.StartFollowed(ctx, start)
	if err != nil {
		return err
	}
	defer run.Close()
	which, chunk, err := soon(ctx, run)
	started := &dormousev1.RunProcessResponse_Started{Started: ProcessToProto(run.Process)}
	if err := stream.Send(&dormousev1.RunProcessResponse{Event: started}); err != nil {
		return err
	}
	if errors.Is(err, errNothingYet) {
		which, chunk, err = run.Next(ctx)
	}
	for ; err == nil; which, chunk, err = run.Next(ctx) {
		out := &dormousev1.RunProcessResponse_Output{Output: &dormousev1.OutputChunk{Stream: outputProto(which), Offset: chunk.Offset, Data: chunk.Data, GapBytes: chunk.Gap}}
		if err := stream.Send(&dormousev1.RunProcessResponse{Event: out}); err != nil {
			return err
		}
	}
	if !errors.Is(err, io.EOF) {
		return err
	}
	exit, err := run.Wait(ctx)
	if err != nil {
		return err
	}
	return stream.Send(&dormousev1.RunProcessResponse{Event: &dormousev1.RunProcessResponse_Exit{Exit: exitToProto(&exit)}})
}

var errNothingYet = errors.New("the process has said nothing yet")

// soon is Next for at most startedHold.
func soon(ctx context.Context, run *guest.Running) (guest.Output, guest.Chunk, error) {
	held, cancel := context.WithTimeout(ctx, startedHold)
	defer cancel()
	which, chunk, err := run.Next(held)
	if err != nil && held.Err() != nil && ctx.Err() == nil {
		err = errNothingYet // or an error that comes again
	}
	return which, chunk, err
}
