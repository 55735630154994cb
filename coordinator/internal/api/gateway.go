package api

import (
	"context"
	"errors"
	"io"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	"github.com/dormouse-run/dormouse/pkg/dataplane"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/wire"
)

// gateway passes the calls of the data plane (package dataplane) on to the sandbox's node, once it is
// certain that the sandbox is the caller's.
//
// It keeps no state: which node it is comes from the records, so that every replica serves, leader or not, and
// a change of the leader touches no call in progress. It knows no method by name: a method that is
// added to a service of the data plane is passed on without a line here. Streams are passed on message by
// message, so that a slow reader slows the node, not this process's memory: what a stream holds here
// are two windows (nodeclient.StreamWindow) and a message each way.
type gateway struct{ *Server }

// frame is a message of which only the bytes matter.
type frame = wire.Frame

func (g gateway) register(r grpc.ServiceRegistrar) {
	for _, s := range dataplane.Services() {
		sd := &grpc.ServiceDesc{ServiceName: string(s.FullName()), Metadata: s.ParentFile().Path()}
		for i := range s.Methods().Len() {
			m := s.Methods().Get(i)
			full := "/" + sd.ServiceName + "/" + string(m.Name())
			in, out := typeOf(m.Input()), typeOf(m.Output())
			if !m.IsStreamingClient() && !m.IsStreamingServer() {
				sd.Methods = append(sd.Methods, grpc.MethodDesc{MethodName: string(m.Name()), Handler: g.unary(full, in, out)})
				continue
			}
			desc := grpc.StreamDesc{StreamName: string(m.Name()), ServerStreams: m.IsStreamingServer(), ClientStreams: m.IsStreamingClient()}
			desc.Handler = g.stream(full, desc, in)
			sd.Streams = append(sd.Streams, desc)
		}
		r.RegisterService(sd, nil)
	}
}

func typeOf(d protoreflect.MessageDescriptor) protoreflect.MessageType {
	t, err := protoregistry.GlobalTypes.FindMessageByName(d.FullName())
	if err != nil {
		panic(err) // a linked service has its messages linked
	}
	return t
}

// unary passes a unary call on.
func (g gateway) unary(full string, in, out protoreflect.MessageType) grpc.MethodHandler {
	handle := func(ctx context.Context, req any) (any, error) {
		cc, ctx, err := g.open(ctx, full, req)
		if err != nil {
			return nil, err
		}
		resp := out.New().Interface()
		if err := cc.Invoke(ctx, full, req, resp); err != nil {
			return nil, err
		}
		return resp, nil
	}
	return func(srv any, ctx context.Context, decode func(any) error, around grpc.UnaryServerInterceptor) (any, error) {
		req := in.New().Interface()
		if err := decode(req); err != nil {
			return nil, err
		}
		if around == nil {
			return handle(ctx, req)
		}
		return around(ctx, req, &grpc.UnaryServerInfo{Server: srv, FullMethod: full}, handle)
	}
}

// stream passes a stream on, whichever sides stream.
func (g gateway) stream(full string, desc grpc.StreamDesc, in protoreflect.MessageType) grpc.StreamHandler {
	return func(_ any, down grpc.ServerStream) error {
		first := in.New().Interface()
		if err := down.RecvMsg(first); err != nil {
			return began(err)
		}
		ctx, cancel := context.WithCancel(down.Context())
		defer cancel()
		cc, ctx, err := g.open(ctx, full, first)
		if err != nil {
			return g.moved(down.Context(), dataplane.SandboxUID(first), err)
		}
		up, err := cc.NewStream(ctx, &desc, full)
		if err != nil {
			return err
		}
		return relay(down, up, first, desc.ClientStreams, cancel)
	}
}

// began says what is wrong with a stream that ended before its first message.
func began(err error) error {
	if errors.Is(err, io.EOF) {
		return errs.New(errs.InvalidField, "sandbox_uid: the first message of a stream names the sandbox").With("field", "sandbox_uid")
	}
	return err
}

// relay sends the first message up, then passes on what comes from either side until the upper one ends.
func relay(down grpc.ServerStream, up grpc.ClientStream, first proto.Message, clientStreams bool, cancel context.CancelFunc) error {
	if err := sent(up, first); err != nil {
		return err
	}
	if clientStreams {
		// It ends with the stream from below, which gRPC ends when the handler has returned: nobody can wait for
		// it before.
		go func() {
			if passUp(down, up) != nil {
				cancel()
			}
		}()
	} else if err := up.CloseSend(); err != nil {
		return err
	}
	for {
		msg := new(frame)
		err := up.RecvMsg(msg)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if err := down.SendMsg(msg); err != nil {
			return err
		}
	}
}

// passUp passes messages and their end on. An error means that the stream is of no use any more.
func passUp(down grpc.ServerStream, up grpc.ClientStream) error {
	for {
		msg := new(frame)
		err := down.RecvMsg(msg)
		if errors.Is(err, io.EOF) {
			return up.CloseSend()
		}
		if err != nil {
			return err
		}
		if up.SendMsg(msg) != nil {
			return nil // the other direction has the reason
		}
	}
}

// sent sends the first message. If it was not taken, the reason is what is received.
func sent(up grpc.ClientStream, first proto.Message) error {
	err := up.SendMsg(first)
	if errors.Is(err, io.EOF) {
		if got := up.RecvMsg(new(frame)); got != nil && !errors.Is(got, io.EOF) {
			return got
		}
		return errs.New(errs.ReplyLost, "the node ended the stream before it began")
	}
	return err
}

// open gives a connection to the node of the sandbox that the message names, and the context of the
// call on it.
func (g gateway) open(ctx context.Context, full string, m any) (*grpc.ClientConn, context.Context, error) {
	place, err := g.locate(ctx, dataplane.SandboxUID(m))
	if err != nil {
		return nil, nil, err
	}
	verb, _ := dataplane.VerbOf(full)
	cc, err := g.cfg.Streams.Conn(ctx, place, verb.Bulk())
	return cc, metadata.AppendToOutgoingContext(ctx, dataplane.TenantKey, place.Tenant), err
}
