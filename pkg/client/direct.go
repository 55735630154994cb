package client

import (
	"context"
	"errors"
	"io"
	"net"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/metadata"

	"github.com/dormouse-run/dormouse/pkg/dataplane"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/pki"
	"github.com/dormouse-run/dormouse/pkg/ticket"
	"github.com/dormouse-run/dormouse/pkg/wire"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// plane is the connection of the data plane's clients. Each call goes to the sandbox's node itself, with a
// ticket, or through the coordinator, and its caller need not know which:
//
//   - A stream asks for a ticket and looks for the node. What is not reached within directWait is passed over, and
//     tried in the background for the streams that come.
//   - A call that is no stream is not worth that: it takes the way that a stream has opened, if there is one.
//   - What the node refuses before it began (the ticket, the sandbox that is not there or does not run) is asked
//     of the coordinator, whose answer counts.
type plane struct {
	cc       *grpc.ClientConn
	tickets  dormousev1.TicketServiceClient
	direct   bool
	dialNode func(ctx context.Context, network, address string) (net.Conn, error)

	mu     sync.Mutex
	closed bool
	ways   map[string]*way              // by sandbox
	nodes  map[nodeKey]*grpc.ClientConn // kept until Close
}

type nodeKey struct{ node, address, ca string }

// way is how a sandbox is reached for a time. Without a conn it is through the coordinator.
type way struct {
	conn   *grpc.ClientConn
	ticket string
	until  time.Time
}

const (
	// directWait is how long a stream waits for a connection to its node.
	directWait = 250 * time.Millisecond
	// notDirect is how long a sandbox whose node serves no clients, or of which no ticket is given, is left alone.
	notDirect = time.Minute
	// margin is left of a ticket's life.
	margin  = 5 * time.Second
	maxWays = 4096
)

func newPlane(cc *grpc.ClientConn) *plane {
	return &plane{cc: cc, tickets: dormousev1.NewTicketServiceClient(cc), ways: make(map[string]*way), nodes: make(map[nodeKey]*grpc.ClientConn)}
}

func (p *plane) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
	for _, cc := range p.nodes {
		_ = cc.Close() // its only error is that it was closed already
	}
}

// Invoke implements grpc.ClientConnInterface.
func (p *plane) Invoke(ctx context.Context, method string, req, reply any, opts ...grpc.CallOption) error {
	u := dataplane.SandboxUID(req)
	if w := p.known(u); w != nil && w.ready() {
		err := w.conn.Invoke(w.show(ctx), method, req, reply, opts...)
		if !p.refused(u, w, err) {
			return err
		}
	}
	return p.cc.Invoke(ctx, method, req, reply, opts...)
}

// NewStream implements grpc.ClientConnInterface. The stream opens with its first message, which says
// whose node it goes to.
func (p *plane) NewStream(ctx context.Context, desc *grpc.StreamDesc, method string, opts ...grpc.CallOption) (grpc.ClientStream, error) {
	if !p.direct {
		return p.cc.NewStream(ctx, desc, method, opts...)
	}
	return &routed{plane: p, ctx: ctx, desc: desc, method: method, opts: opts, opened: make(chan struct{})}, nil
}

// known gives the way to a sandbox that is in force.
func (p *plane) known(u string) *way {
	p.mu.Lock()
	defer p.mu.Unlock()
	if w := p.ways[u]; w != nil && time.Now().Before(w.until) {
		return w
	}
	return nil
}

func (w *way) ready() bool { return w.conn != nil && w.conn.GetState() == connectivity.Ready }

// show adds the ticket to a call.
func (w *way) show(ctx context.Context) context.Context {
	return metadata.AppendToOutgoingContext(ctx, "authorization", ticket.Scheme+w.ticket)
}

// refused tells whether the node would not have the call, so that the coordinator is to be asked. A way
// on which something went wrong is not taken again.
func (p *plane) refused(u string, w *way, err error) bool {
	e := errs.From(err)
	if err == nil {
		return false
	}
	no := false
	switch e.Reason {
	case errs.TicketInvalid, errs.CredentialsMissing, errs.CredentialsInvalid, errs.NotAllowed, errs.WrongPhase, errs.SandboxPaused, errs.NodeAway, errs.ShuttingDown:
		no = e.Outcome == errs.NotStarted
	case errs.ObjectNotFound:
		no = e.Details["kind"] == "sandbox"
	}
	if no || e.Reason == errs.ReplyLost {
		p.mu.Lock()
		defer p.mu.Unlock()
		if p.ways[u] == w {
			delete(p.ways, u)
		}
	}
	return no
}

// find gives the way to a sandbox for a stream, or nil: through the coordinator.
func (p *plane) find(ctx context.Context, u string) *way {
	w := p.known(u)
	if w == nil {
		w = p.ask(ctx, u)
		p.mu.Lock()
		if len(p.ways) >= maxWays {
			clear(p.ways)
		}
		p.ways[u] = w
		p.mu.Unlock()
	}
	if w.conn == nil {
		return nil
	}
	waiting, cancel := context.WithTimeout(ctx, directWait)
	defer cancel()
	for {
		switch state := w.conn.GetState(); state {
		case connectivity.Ready:
			return w
		case connectivity.TransientFailure, connectivity.Shutdown:
			return nil
		case connectivity.Idle:
			w.conn.Connect()
			fallthrough
		case connectivity.Connecting:
			if !w.conn.WaitForStateChange(waiting, state) {
				return nil
			}
		}
	}
}

// ask gets a ticket.
func (p *plane) ask(ctx context.Context, u string) *way {
	resp, err := p.tickets.IssueTicket(ctx, &dormousev1.IssueTicketRequest{SandboxUid: u})
	switch {
	case errs.Has(err, errs.NotSupported) || err == nil && resp.GetAddress() == "":
		return &way{until: time.Now().Add(notDirect)}
	case err != nil:
		return &way{} // the call itself will say why
	}
	conn, err := p.node(nodeKey{resp.GetNode(), resp.GetAddress(), resp.GetCaPem()})
	if err != nil {
		return &way{until: time.Now().Add(notDirect)}
	}
	return &way{conn: conn, ticket: resp.GetTicket(), until: time.Now().Add(resp.GetLife().AsDuration() - margin)}
}

// node gives the connection to a node, which connects when it is wanted.
func (p *plane) node(key nodeKey) (*grpc.ClientConn, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil, errs.New(errs.ShuttingDown, "the client is closed")
	}
	if cc := p.nodes[key]; cc != nil {
		return cc, nil
	}
	tls, err := pki.ClientOf([]byte(key.ca), pki.RoleNode, key.node)
	if err != nil {
		return nil, err
	}
	opts := append(wire.DialOptions(), grpc.WithTransportCredentials(wire.TLS(tls)), grpc.WithDisableRetry(),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessage)), grpc.WithDisableServiceConfig())
	if p.dialNode != nil {
		opts = append(opts, grpc.WithContextDialer(func(ctx context.Context, address string) (net.Conn, error) { return p.dialNode(ctx, "tcp", address) }))
	}
	cc, err := grpc.NewClient("passthrough:///"+key.address, opts...)
	if err == nil {
		p.nodes[key] = cc
	}
	return cc, err
}

// routed is a stream that opens with its first message.
type routed struct {
	plane  *plane
	ctx    context.Context //nolint:containedctx // the stream's own, as gRPC's streams have it
	desc   *grpc.StreamDesc
	method string
	opts   []grpc.CallOption

	once   sync.Once
	opened chan struct{} // closed once one of the following is set
	stream grpc.ClientStream
	err    error
}

// open chooses the way and sends the first message.
func (s *routed) open(first any) error {
	u := dataplane.SandboxUID(first)
	if w := s.plane.find(s.ctx, u); w != nil {
		stream, err := s.begin(w, first)
		if err == nil {
			s.stream = stream
			return nil
		}
		if !s.plane.refused(u, w, err) {
			return err
		}
	}
	stream, err := s.plane.cc.NewStream(s.ctx, s.desc, s.method, s.opts...)
	if err != nil {
		return err
	}
	s.stream = stream
	return stream.SendMsg(first)
}

// begin opens the stream at the node and waits until the node has let it in.
func (s *routed) begin(w *way, first any) (grpc.ClientStream, error) {
	stream, err := w.conn.NewStream(w.show(s.ctx), s.desc, s.method, s.opts...)
	if err != nil {
		return nil, err
	}
	if err := stream.SendMsg(first); err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	header, err := stream.Header()
	if err == nil && len(header.Get(dataplane.AdmittedKey)) == 0 {
		// It ended before it was let in; what is received is why.
		if err = stream.RecvMsg(new(dormousev1.Error)); err == nil || errors.Is(err, io.EOF) {
			err = errs.New(errs.ReplyLost, "the node ended the stream before it began")
		}
	}
	return stream, err
}

// opening waits for the first message's way.
func (s *routed) opening() (grpc.ClientStream, error) {
	select {
	case <-s.opened:
		return s.stream, s.err
	case <-s.ctx.Done():
		return nil, errs.From(s.ctx.Err())
	}
}

// SendMsg implements grpc.ClientStream, as the following do.
func (s *routed) SendMsg(m any) error {
	first := false
	s.once.Do(func() {
		first = true
		s.err = s.open(m)
		close(s.opened)
	})
	if first {
		return s.err
	}
	stream, err := s.opening()
	if err != nil {
		return err
	}
	return stream.SendMsg(m)
}

// RecvMsg waits for the stream's first message to be sent.
func (s *routed) RecvMsg(m any) error {
	stream, err := s.opening()
	if err != nil {
		return err
	}
	return stream.RecvMsg(m)
}

// CloseSend ends the client's side.
func (s *routed) CloseSend() error {
	stream, err := s.opening()
	if err != nil {
		return err
	}
	return stream.CloseSend()
}

// Header gives the server's headers.
func (s *routed) Header() (metadata.MD, error) {
	stream, err := s.opening()
	if err != nil {
		return nil, err
	}
	return stream.Header()
}

// Trailer gives what came with the end.
func (s *routed) Trailer() metadata.MD {
	stream, err := s.opening()
	if err != nil {
		return nil
	}
	return stream.Trailer()
}

// Context is the stream's.
func (s *routed) Context() context.Context { return s.ctx }
