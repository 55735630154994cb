package nodeclient

import (
	"context"
	"errors"
	"io"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/dormouse-run/dormouse/coordinator/internal/operations"
	"github.com/dormouse-run/dormouse/pkg/dataplane"
	"github.com/dormouse-run/dormouse/pkg/warm"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// RunProcess starts a process in a sandbox, at most once for its id, and waits for its end; of one that failed it gives the end of what it said. A process
// that was started before, in this call's name or an earlier one's, is waited for.
func (p *Pool) RunProcess(ctx context.Context, node string, c operations.Command, sandboxUID string, proc operations.Process) (end operations.ProcessEnd, err error) {
	_, err = p.call(ctx, node, func(ctx context.Context, _ Session, cc *grpc.ClientConn) error {
		ctx = metadata.AppendToOutgoingContext(ctx, dataplane.TenantKey, c.Tenant)
		client := dormousev1.NewProcessServiceClient(cc)
		_, err := client.StartProcess(ctx, &dormousev1.StartProcessRequest{SandboxUid: sandboxUID, ProcessId: proc.ID, Spec: &dormousev1.ProcessSpec{
			Argv: proc.Argv, Env: proc.Env, User: proc.User, WorkingDir: proc.WorkingDir, Timeout: durationpb.New(proc.Timeout)}})
		if err != nil {
			return err
		}
		got, err := client.WaitProcess(ctx, &dormousev1.WaitProcessRequest{SandboxUid: sandboxUID, ProcessId: proc.ID})
		if err != nil {
			return err
		}
		exit := got.GetProcess().GetExit()
		end = operations.ProcessEnd{Code: int(exit.GetCode()), TimedOut: exit.GetTimedOut()}
		if end.Code != 0 || end.TimedOut {
			end.Tail, err = tail(ctx, client, sandboxUID, got.GetProcess())
		}
		return err
	})
	return end, err
}

// tail is the end of what a process wrote to its output and to its errors, in that order.
func tail(ctx context.Context, client dormousev1.ProcessServiceClient, sandboxUID string, proc *dormousev1.Process) (string, error) {
	from := func(offset uint64) uint64 { return offset - min(offset, warm.MaxTail/2) }
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := client.ReadOutput(ctx, &dormousev1.ReadOutputRequest{SandboxUid: sandboxUID, ProcessId: proc.GetProcessId(),
		StdoutOffset: from(proc.GetStdoutOffset()), StderrOffset: from(proc.GetStderrOffset())})
	if err != nil {
		return "", err
	}
	said := make(map[dormousev1.OutputStream][]byte)
	for {
		msg, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return "", err
		}
		if out := msg.GetOutput(); out != nil {
			said[out.GetStream()] = last(append(said[out.GetStream()], out.GetData()...), warm.MaxTail/2)
		}
	}
	all := append(said[dormousev1.OutputStream_OUTPUT_STREAM_STDOUT], said[dormousev1.OutputStream_OUTPUT_STREAM_STDERR]...)
	return strings.ToValidUTF8(strings.ReplaceAll(string(all), "\x00", ""), "?"), nil
}

func last(b []byte, n int) []byte { return b[max(0, len(b)-n):] }
