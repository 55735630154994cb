package session

import (
	"context"
	"net"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/fence"
	nodev1 "github.com/dormouse-run/dormouse/proto/dormouse/node/v1"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// site is the node and its records.
type site struct {
	mu          sync.Mutex
	highest     fence.Epoch
	session     fence.Epoch
	observation uint64
	acked       uint64
	changed     chan struct{}
}

func (s *site) SetSession(coordinator, session fence.Epoch) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if coordinator < s.highest {
		return errs.New(errs.Fenced, "an old coordinator")
	}
	s.highest, s.session = coordinator, session
	return nil
}

func (s *site) AckSandbox(_ string, observation uint64) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.acked = max(s.acked, observation)
	return nil
}

func (s *site) Hello(context.Context) (*nodev1.Hello, error) {
	return &nodev1.Hello{Node: "n1"}, nil
}
func (s *site) Heartbeat(context.Context) (*nodev1.Heartbeat, error) {
	return &nodev1.Heartbeat{}, nil
}
func (s *site) Due(context.Context) ([]*nodev1.SandboxObservation, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.observation <= s.acked {
		return nil, nil
	}
	return []*nodev1.SandboxObservation{{Uid: "box", Observation: s.observation}}, nil
}
func (s *site) Changed() <-chan struct{} { return s.changed }

func (s *site) observe() {
	s.mu.Lock()
	s.observation++
	s.mu.Unlock()
	s.changed <- struct{}{}
}

// script is a coordinator that does what the test says.
type script struct {
	nodev1.UnimplementedSessionServiceServer
	serve func(n int, stream nodev1.SessionService_SessionServer) error
	mu    sync.Mutex
	n     int
}

func (s *script) Session(stream nodev1.SessionService_SessionServer) error {
	s.mu.Lock()
	s.n++
	n := s.n
	s.mu.Unlock()
	if _, err := stream.Recv(); err != nil {
		return err
	}
	return s.serve(n, stream)
}

func welcome(coordinator, session uint64) *nodev1.SessionResponse {
	return &nodev1.SessionResponse{Message: &nodev1.SessionResponse_Welcome{Welcome: &nodev1.Welcome{
		CoordinatorEpoch: coordinator, SessionEpoch: session, HeartbeatInterval: durationpb.New(10 * time.Millisecond)}}}
}

func run(t *testing.T, s *site, serve func(n int, stream nodev1.SessionService_SessionServer) error, change ...func(*Options)) *Client {
	t.Helper()
	l := bufconn.Listen(1 << 20)
	server := grpc.NewServer()
	nodev1.RegisterSessionServiceServer(server, &script{serve: serve})
	var group sync.WaitGroup
	group.Go(func() { _ = server.Serve(l) })
	conn, err := grpc.NewClient("passthrough:///bufconn", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return l.DialContext(ctx) }))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	opts := Options{Conns: []grpc.ClientConnInterface{refusing{}, conn}, Store: s, Node: s, FirstPause: time.Millisecond, LongestPause: 5 * time.Millisecond, Silence: time.Hour}
	for _, f := range change {
		f(&opts)
	}
	c := New(opts)
	group.Go(func() { c.Run(ctx) })
	t.Cleanup(func() {
		cancel()
		server.Stop()
		conn.Close()
		group.Wait()
	})
	return c
}

func eventually(t *testing.T, what string, cond func() bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for !cond() {
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatalf("never: %s", what)
		}
	}
}

func drain(stream nodev1.SessionService_SessionServer, on func(*nodev1.SessionRequest) error) error {
	for {
		msg, err := stream.Recv()
		if err != nil {
			return err
		}
		if err := on(msg); err != nil {
			return err
		}
	}
}

func TestEpochsAreDurableBeforeTheSessionIsUsed(t *testing.T) {
	s := &site{changed: make(chan struct{}, 1), highest: 5}
	c := run(t, s, func(n int, stream nodev1.SessionService_SessionServer) error {
		// The first coordinator is an old one.
		coordinator := uint64(6)
		if n == 1 {
			coordinator = 4
		}
		if err := stream.Send(welcome(coordinator, uint64(n))); err != nil {
			return err
		}
		return drain(stream, func(*nodev1.SessionRequest) error { return nil })
	})
	eventually(t, "in session", c.Connected)
	if c.Epoch() != 2 || s.session != 2 || s.highest != 6 {
		t.Fatalf("epoch %d, kept %d of coordinator %d", c.Epoch(), s.session, s.highest)
	}
}

// TestReportsAreSentUntilAcknowledged: the coordinator loses the first reports, then the stream, and
// acknowledges at last.
func TestReportsAreSentUntilAcknowledged(t *testing.T) {
	s := &site{changed: make(chan struct{}, 1)}
	var mu sync.Mutex
	var ids []uint64
	c := run(t, s, func(n int, stream nodev1.SessionService_SessionServer) error {
		if err := stream.Send(welcome(1, uint64(n))); err != nil {
			return err
		}
		return drain(stream, func(msg *nodev1.SessionRequest) error {
			r := msg.GetReport()
			if r == nil {
				return stream.Send(&nodev1.SessionResponse{Message: &nodev1.SessionResponse_HeartbeatAck{HeartbeatAck: &nodev1.HeartbeatAck{}}})
			}
			mu.Lock()
			ids = append(ids, r.GetId())
			count := len(ids)
			mu.Unlock()
			switch {
			case count == 3:
				return errs.New(errs.NoLeader, "going away")
			case count < 5:
				return nil
			}
			return stream.Send(&nodev1.SessionResponse{Message: &nodev1.SessionResponse_ReportAck{ReportAck: &nodev1.ReportAck{Id: r.GetId()}}})
		})
	})
	eventually(t, "in session", c.Connected)
	s.observe()
	eventually(t, "acknowledged", func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.acked == 1
	})
	mu.Lock()
	defer mu.Unlock()
	if ids[0] != ids[1] || len(ids) < 5 {
		t.Fatalf("the reports had ids %v", ids)
	}
	if c.Epoch() < 2 {
		t.Fatal("the stream was not opened again")
	}
}

func TestARefusedReportIsDone(t *testing.T) {
	s := &site{changed: make(chan struct{}, 1), observation: 7}
	run(t, s, func(n int, stream nodev1.SessionService_SessionServer) error {
		if err := stream.Send(welcome(1, uint64(n))); err != nil {
			return err
		}
		return drain(stream, func(msg *nodev1.SessionRequest) error {
			return stream.Send(&nodev1.SessionResponse{Message: &nodev1.SessionResponse_ReportAck{ReportAck: &nodev1.ReportAck{
				Id: msg.GetReport().GetId(), Error: &dormousev1.Error{Reason: "OBJECT_NOT_FOUND"}}}})
		})
	})
	eventually(t, "it is not sent for ever", func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.acked == 7
	})
}

func TestASilentCoordinatorIsLeft(t *testing.T) {
	s := &site{changed: make(chan struct{}, 1)}
	c := run(t, s, func(n int, stream nodev1.SessionService_SessionServer) error {
		if err := stream.Send(welcome(1, uint64(n))); err != nil {
			return err
		}
		<-stream.Context().Done()
		return stream.Context().Err()
	}, func(o *Options) { o.Silence = time.Millisecond })
	eventually(t, "a new session", func() bool { return c.Epoch() >= 3 })
}

// refusing is a coordinator that does not lead: each client passes it over.
type refusing struct{}

func (refusing) Invoke(context.Context, string, any, any, ...grpc.CallOption) error {
	return errs.New(errs.NoLeader, "not this one")
}

func (refusing) NewStream(context.Context, *grpc.StreamDesc, string, ...grpc.CallOption) (grpc.ClientStream, error) {
	return nil, errs.New(errs.NoLeader, "not this one")
}
