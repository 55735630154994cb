package api

import (
	"errors"
	"io"
	"strconv"

	"google.golang.org/grpc"

	"github.com/dormouse-run/dormouse/pkg/errs"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

const (
	// forwardChunk is what is read from inside at once, and maxForward what a client may send at once.
	forwardChunk = 64 << 10
	maxForward   = 256 << 10
)

// Forwards implements dormouse.v1.PortService.
type Forwards struct {
	dormousev1.UnimplementedPortServiceServer

	Ports Ports
}

// ForwardPort implements PortService.
func (s *Forwards) ForwardPort(stream grpc.BidiStreamingServer[dormousev1.ForwardPortRequest, dormousev1.ForwardPortResponse]) error {
	first, err := stream.Recv()
	if errors.Is(err, io.EOF) || err == nil && first.GetOpen() == nil {
		return errs.New(errs.InvalidField, "open: the first message says which sandbox and port").With("field", "open")
	}
	if err != nil {
		return err
	}
	open := first.GetOpen()
	if err := checkUID("open.sandbox_uid", open.GetSandboxUid()); err != nil {
		return err
	}
	if p := open.GetPort(); p < 1 || p > 65535 {
		return errs.New(errs.InvalidField, "open.port: %d is no port; use 1 to 65535", p).With("field", "open.port").With("got", strconv.Itoa(int(p)))
	}
	conn, err := s.Ports.DialPort(stream.Context(), open.GetSandboxUid(), int(open.GetPort()))
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }() // both directions are over
	if err := stream.Send(&dormousev1.ForwardPortResponse{Message: &dormousev1.ForwardPortResponse_Opened{Opened: &dormousev1.ForwardOpened{}}}); err != nil {
		return err
	}
	// It ends with the stream, which gRPC ends when this handler has returned; nobody can wait for it before.
	inward := make(chan error, 1)
	go func() { inward <- forwardIn(stream, conn) }()
	if err := forwardOut(stream, conn, inward); err != nil {
		return err
	}
	select {
	case err := <-inward:
		return err
	case <-stream.Context().Done():
		return stream.Context().Err()
	}
}

// forwardIn writes what the client sends, then closes that half. What the server inside no longer reads is lost,
// as on any connection; its own half goes on.
func forwardIn(stream grpc.BidiStreamingServer[dormousev1.ForwardPortRequest, dormousev1.ForwardPortResponse], conn PortConn) error {
	for {
		msg, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			_ = conn.CloseWrite() // a broken connection is seen by who reads it
			return nil
		}
		if err == nil && msg.GetOpen() != nil {
			err = errs.New(errs.InvalidField, "open: the connection is open").With("field", "open")
		}
		if n := len(msg.GetData()); n > maxForward {
			err = errs.New(errs.LimitExceeded, "data: %d bytes; at most %d at once", n, maxForward).With("field", "data").With("limit", strconv.Itoa(maxForward))
		}
		if err != nil {
			_ = conn.Close() // it has an end either way
			return err
		}
		if _, err := conn.Write(msg.GetData()); err != nil {
			return nil
		}
	}
}

// forwardOut sends what comes from inside, and its end. The client's fault, if it has one, is the reason.
func forwardOut(stream grpc.BidiStreamingServer[dormousev1.ForwardPortRequest, dormousev1.ForwardPortResponse], conn PortConn, inward chan error) error {
	for {
		buf := make([]byte, forwardChunk) // not used again: the message keeps it while it is sent
		n, err := conn.Read(buf)
		if n > 0 {
			if err := stream.Send(&dormousev1.ForwardPortResponse{Message: &dormousev1.ForwardPortResponse_Data{Data: buf[:n]}}); err != nil {
				return err
			}
		}
		if errors.Is(err, io.EOF) {
			return stream.Send(&dormousev1.ForwardPortResponse{Message: &dormousev1.ForwardPortResponse_End{End: &dormousev1.ForwardEnd{}}})
		}
		if err != nil {
			select {
			case fault := <-inward:
				if fault != nil {
					return fault
				}
			default:
			}
			return err
		}
	}
}
