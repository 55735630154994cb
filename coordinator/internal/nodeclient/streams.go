package nodeclient

import (
	"context"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/connectivity"

	"github.com/dormouse-run/dormouse/coordinator/internal/dial"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/wire"
)

// Place is where a sandbox is.
type Place struct {
	Tenant, SandboxUID string
	Node               string
	// Address is where the node serves the coordinator. Direct is where it serves clients with
	// tickets; empty where it does not.
	Address, Direct string
}

// What one stream that is passed on may hold in this process, each way: a window that was sent and not read
// yet. Connections' own windows are refilled as bytes arrive, so that a stream that nobody reads
// stops only itself.
const (
	StreamWindow = 256 << 10
	ConnWindow   = 4 << 20
)

const connectTime = 5 * time.Second

// Streams keeps the connections of the data plane. They belong to no session and no term: a node that has
// lost its coordinator goes on serving, and a coordinator that no longer leads goes on passing on.
// Each node has one connection for what people type and read, and one for bytes in bulk. Close it.
type Streams struct {
	tls TLS

	mu     sync.Mutex
	closed bool
	conns  map[streamKey]*conn
}

type streamKey struct {
	node string
	bulk bool
}

// NewStreams makes an empty one.
func NewStreams(t TLS) *Streams { return &Streams{tls: t, conns: make(map[streamKey]*conn)} }

// Close ends all connections.
func (s *Streams) Close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	for _, c := range s.conns {
		_ = c.cc.Close() // its only error is that it was closed already
	}
	s.conns = nil
}

// Conn gives a connection to the place's node that is ready. NODE_AWAY: it cannot be reached, and nothing was sent.
func (s *Streams) Conn(ctx context.Context, p Place, bulk bool) (*grpc.ClientConn, error) {
	cc, err := s.dial(p, bulk)
	if err != nil {
		return nil, err
	}
	waiting, cancel := context.WithTimeout(ctx, connectTime)
	defer cancel()
	for {
		switch state := cc.GetState(); state {
		case connectivity.Ready:
			return cc, nil
		case connectivity.TransientFailure, connectivity.Shutdown:
			return nil, unreachable(p.Node)
		case connectivity.Idle:
			cc.Connect()
			fallthrough
		case connectivity.Connecting:
			if !cc.WaitForStateChange(waiting, state) {
				if err := ctx.Err(); err != nil {
					return nil, err
				}
				return nil, unreachable(p.Node)
			}
		}
	}
}

func unreachable(node string) error {
	return errs.New(errs.NodeAway, "node %s cannot be reached; wait until it is back", node).With("node", node)
}

func (s *Streams) dial(p Place, bulk bool) (*grpc.ClientConn, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, errs.New(errs.ShuttingDown, "the coordinator is stopping")
	}
	key := streamKey{p.Node, bulk}
	if c := s.conns[key]; c != nil {
		if c.address == p.Address {
			return c.cc, nil
		}
		_ = c.cc.Close() // its only error is that it was closed already
		delete(s.conns, key)
	}
	opts := append(wire.DialOptions(),
		grpc.WithTransportCredentials(wire.TLS(s.tls(p.Node))), grpc.WithDisableRetry(),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessage), grpc.MaxCallSendMsgSize(maxMessage)),
		grpc.WithStaticStreamWindowSize(StreamWindow), grpc.WithStaticConnWindowSize(ConnWindow), grpc.WithIdleTimeout(0), dial.Option())
	cc, err := grpc.NewClient(dial.Target(p.Address), opts...)
	if err != nil {
		return nil, errs.Wrap(err, errs.NodeAway, "node %s told an address that cannot be used", p.Node).With("node", p.Node)
	}
	s.conns[key] = &conn{p.Address, cc}
	return cc, nil
}
