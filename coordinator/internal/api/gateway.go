package api

import (
	"context"
	"errors"
	"io"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	"github.com/dormouse-run/dormouse/pkg/dataplane"
	"github.com/dormouse-run/dormouse/pkg/errs"
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
		for round := 1; ; round++ {
			cc, up, err := g.open(ctx, full, req)
			if err != nil {
				return nil, err
			}
			resp := out.New().Interface()
			refusal := cc.Invoke(up, full, req, resp)
			if refusal == nil {
				return resp, nil
			}
			if err := g.rouse(ctx, dataplane.SandboxUID(req), round, refusal); err != nil {
				return nil, err
			}
		}
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
		r := &relay{down: down, first: first, clientStreams: desc.ClientStreams, cancel: cancel}
		defer r.end()
		for round := 1; ; round++ {
			cc, up, err := g.open(ctx, full, first)
			if err != nil {
				return g.moved(down.Context(), dataplane.SandboxUID(first), err)
			}
			stream, err := cc.NewStream(up, &desc, full)
			if err != nil {
				return err
			}
			refusal := r.run(stream)
			if refusal == nil || r.begun.Load() {
				return refusal
			}
			if err := g.rouse(ctx, dataplane.SandboxUID(first), round, refusal); err != nil {
				return err
			}
		}
	}
}

// began says what is wrong with a stream that ended before its first message.
func began(err error) error {
	if errors.Is(err, io.EOF) {
		return errs.New(errs.InvalidField, "sandbox_uid: the first message of a stream names the sandbox").With("field", "sandbox_uid")
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
