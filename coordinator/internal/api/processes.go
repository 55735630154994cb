package api

import (
	"context"
	"errors"
	"io"

	"google.golang.org/grpc"

	"github.com/dormouse-run/dormouse/coordinator/internal/records"
	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// processService passes calls on to the sandbox's node, once it is certain that the sandbox is the
// caller's. Streams are passed on message by message, so that a slow reader slows the node, not
// this process's memory.
type processService struct {
	dormousev1.UnimplementedProcessServiceServer
	*Server
}

// nodeOf finds the node of the caller's sandbox.
func (s processService) nodeOf(ctx context.Context, u string) (string, error) {
	rec, err := s.get(ctx, catalog.KindSandbox, "sandbox_uid", u)
	if err != nil {
		return "", err
	}
	sb, err := records.SandboxOf(rec)
	if err != nil {
		return "", err
	}
	switch sb.Status.Phase {
	case sandbox.Running, sandbox.Paused, sandbox.Stopped, sandbox.Starting:
		if sb.Status.Node != "" {
			return sb.Status.Node, nil
		}
	}
	return "", errs.New(errs.WrongPhase, "sandbox %s is %s; it must be Running", u, sb.Status.Phase).With("uid", u).With("phase", string(sb.Status.Phase))
}

// pass sends a unary call on.
func pass[Req interface{ GetSandboxUid() string }, Resp any](ctx context.Context, s processService, req Req,
	f func(dormousev1.ProcessServiceClient, context.Context, Req, ...grpc.CallOption) (Resp, error)) (resp Resp, err error) {
	node, err := s.nodeOf(ctx, req.GetSandboxUid())
	if err != nil {
		return resp, err
	}
	err = s.cfg.Agents.Processes(ctx, node, func(ctx context.Context, c dormousev1.ProcessServiceClient) error {
		resp, err = f(c, ctx, req)
		return err
	})
	return resp, err
}

// passStream sends a streaming call on.
func passStream[Req interface{ GetSandboxUid() string }, Resp any](s processService, req Req, out grpc.ServerStreamingServer[Resp],
	f func(dormousev1.ProcessServiceClient, context.Context, Req, ...grpc.CallOption) (grpc.ServerStreamingClient[Resp], error)) error {
	node, err := s.nodeOf(out.Context(), req.GetSandboxUid())
	if err != nil {
		return err
	}
	return s.cfg.Agents.Processes(out.Context(), node, func(ctx context.Context, c dormousev1.ProcessServiceClient) error {
		in, err := f(c, ctx, req)
		if err != nil {
			return err
		}
		for {
			msg, err := in.Recv()
			if errors.Is(err, io.EOF) {
				return nil
			}
			if err != nil {
				return err
			}
			if err := out.Send(msg); err != nil {
				return err
			}
		}
	})
}

func (s processService) StartProcess(ctx context.Context, req *dormousev1.StartProcessRequest) (*dormousev1.StartProcessResponse, error) {
	return pass(ctx, s, req, dormousev1.ProcessServiceClient.StartProcess)
}

func (s processService) ListProcesses(ctx context.Context, req *dormousev1.ListProcessesRequest) (*dormousev1.ListProcessesResponse, error) {
	return pass(ctx, s, req, dormousev1.ProcessServiceClient.ListProcesses)
}

func (s processService) GetProcess(ctx context.Context, req *dormousev1.GetProcessRequest) (*dormousev1.GetProcessResponse, error) {
	return pass(ctx, s, req, dormousev1.ProcessServiceClient.GetProcess)
}

func (s processService) WaitProcess(ctx context.Context, req *dormousev1.WaitProcessRequest) (*dormousev1.WaitProcessResponse, error) {
	return pass(ctx, s, req, dormousev1.ProcessServiceClient.WaitProcess)
}

func (s processService) SignalProcess(ctx context.Context, req *dormousev1.SignalProcessRequest) (*dormousev1.SignalProcessResponse, error) {
	return pass(ctx, s, req, dormousev1.ProcessServiceClient.SignalProcess)
}

func (s processService) WriteInput(ctx context.Context, req *dormousev1.WriteInputRequest) (*dormousev1.WriteInputResponse, error) {
	return pass(ctx, s, req, dormousev1.ProcessServiceClient.WriteInput)
}

func (s processService) ReadOutput(req *dormousev1.ReadOutputRequest, out grpc.ServerStreamingServer[dormousev1.ReadOutputResponse]) error {
	return passStream(s, req, out, dormousev1.ProcessServiceClient.ReadOutput)
}

func (s processService) RunProcess(req *dormousev1.RunProcessRequest, out grpc.ServerStreamingServer[dormousev1.RunProcessResponse]) error {
	return passStream(s, req, out, dormousev1.ProcessServiceClient.RunProcess)
}
