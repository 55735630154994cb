// Package session keeps the node's session with the coordinator: one stream that the node opens, on
// which it says who it is and what it holds, sends heartbeats, and reports what changed.
//
// # States
//
//	away -> greeting -> in session -> away
//
// Away: no stream; the next attempt comes after a pause that grows and is jittered. Greeting: Hello was
// sent with the whole inventory. In session: Welcome came and its epochs are durable.
//
// # Invariants
//
//   - The session's epoch and the coordinator's are persisted before the session is used. A Welcome of a
//     coordinator below the highest epoch seen is refused.
//   - Reports are level-triggered: a report is due for every record whose observation is above what was
//     acknowledged, whatever was sent before. They are sent again until acknowledged, also after a restart.
//   - What the coordinator sends for the journal is acknowledged once it is durable. A journal that cannot be written is tried
//     again and delays nothing else.
//   - The connection never affects a sandbox.
//
// # Crash points
//
// Nothing is lost with the process but what was sent and not acknowledged, and that is sent again.
package session

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"

	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/fault"
	"github.com/dormouse-run/dormouse/pkg/fence"
	"github.com/dormouse-run/dormouse/pkg/ticket"
	nodev1 "github.com/dormouse-run/dormouse/proto/dormouse/node/v1"
)

// Store is where epochs and acknowledgements are kept.
type Store interface {
	SetSession(coordinator, session fence.Epoch) error
	AckSandbox(uid string, observation uint64) error
}

// Journal keeps what the coordinator sends of the catalog.
type Journal interface {
	Apply(msg *nodev1.Journal) error
}

// Node is what the session tells of.
type Node interface {
	// Hello is everything that the node says of itself, its inventory included.
	Hello(ctx context.Context) (*nodev1.Hello, error)
	Heartbeat(ctx context.Context) (*nodev1.Heartbeat, error)
	// Due gives the observations that are not acknowledged.
	Due(ctx context.Context) ([]*nodev1.SandboxObservation, error)
	// Changed has a value when something may be due.
	Changed() <-chan struct{}
}

// Options of a client.
type Options struct {
	// Conns lead to the coordinators. One of them leads; the others refuse a session, and are passed over.
	Conns []grpc.ClientConnInterface
	Store Store
	Node  Node
	// Journal (may be nil: nothing is kept or acknowledged) is given what the node shall keep.
	Journal Journal
	// TicketKeys (may be nil) is given the keys of tickets, as often as the coordinator tells them.
	TicketKeys func([]ticket.PublicKey)
	Log        *slog.Logger
	// FirstPause and LongestPause bound the pauses between attempts; 200 ms and 10 s by default.
	FirstPause, LongestPause time.Duration
	// Silence is how long a coordinator may be silent at least, however often it asks for heartbeats: one that is busy
	// for a moment is not left, which would cost more than to wait. 10 s by default.
	Silence time.Duration
	// Settle is how long news waits before it is told: 50 ms by default. Most of it is the outcome of a call that the coordinator is
	// just being answered, and records by that; told at the same moment by two ways it would be committed twice.
	Settle time.Duration
}

const (
	defaultHeartbeat = 5 * time.Second
	defaultSettle    = 50 * time.Millisecond
	// missed heartbeats before the stream is given up.
	missed         = 3
	welcomeTimeout = 20 * time.Second
)

// Client keeps the session. Run is its goroutine.
type Client struct {
	Options
	// turn is the coordinator to try; Run's own.
	turn      int
	epoch     atomic.Uint64
	connected atomic.Bool
}

// New makes a client.
func New(opts Options) *Client {
	if opts.FirstPause == 0 {
		opts.FirstPause = 200 * time.Millisecond
	}
	if opts.LongestPause == 0 {
		opts.LongestPause = 10 * time.Second
	}
	if opts.Silence == 0 {
		opts.Silence = 10 * time.Second
	}
	if opts.Settle == 0 {
		opts.Settle = defaultSettle
	}
	if opts.TicketKeys == nil {
		opts.TicketKeys = func([]ticket.PublicKey) {}
	}
	if opts.Log == nil {
		opts.Log = slog.New(slog.DiscardHandler)
	}
	return &Client{Options: opts}
}

// Epoch is that of the last session of this process, 0 before the first. It stays after the stream
// broke, until a new session replaces it: the coordinator may not know yet.
func (c *Client) Epoch() fence.Epoch { return fence.Epoch(c.epoch.Load()) }

// Connected tells whether there is a session now.
func (c *Client) Connected() bool { return c.connected.Load() }

// Run keeps a session until ctx ends.
func (c *Client) Run(ctx context.Context) {
	pause, passed := c.FirstPause, 0
	for ctx.Err() == nil {
		welcomed, err := c.session(ctx)
		if ctx.Err() != nil {
			return
		}
		if welcomed {
			pause, passed = c.FirstPause, 0
		}
		c.turn = (c.turn + 1) % len(c.Conns)
		if passed++; passed < len(c.Conns) {
			c.Log.DebugContext(ctx, "trying the next coordinator", "error", err)
			continue
		}
		passed = 0
		// Half to one and a half of the pause, so that nodes do not come back all at once.
		wait := pause/2 + rand.N(pause)
		c.Log.WarnContext(ctx, "no session with the coordinator", "error", err, "again_in", wait)
		pause = min(2*pause, c.LongestPause)
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
		}
	}
}

// session is one stream from Hello to its end.
func (c *Client) session(ctx context.Context) (welcomed bool, err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	hello, err := c.Node.Hello(ctx)
	if err != nil {
		return false, fmt.Errorf("take the inventory: %w", err)
	}
	stream, err := nodev1.NewSessionServiceClient(c.Conns[c.turn]).Session(ctx)
	if err != nil {
		return false, err
	}
	if err := stream.Send(&nodev1.SessionRequest{Message: &nodev1.SessionRequest_Hello{Hello: hello}}); err != nil {
		return false, streamError(stream, err)
	}
	welcome, err := awaitWelcome(stream, cancel)
	if err != nil {
		return false, cause(ctx, err)
	}
	coordinator, session := fence.Epoch(welcome.GetCoordinatorEpoch()), fence.Epoch(welcome.GetSessionEpoch())
	if session == 0 {
		return false, errors.New("the coordinator gave no session epoch")
	}
	if err := c.Store.SetSession(coordinator, session); err != nil {
		return false, err
	}
	fault.At("session.epoch.after")
	c.epoch.Store(uint64(session))
	c.TicketKeys(keysOf(welcome.GetTicketKeys()))
	c.connected.Store(true)
	defer c.connected.Store(false)
	c.Log.InfoContext(ctx, "in session with the coordinator", "session_epoch", uint64(session), "coordinator_epoch", uint64(coordinator))

	interval := welcome.GetHeartbeatInterval().AsDuration()
	if interval <= 0 {
		interval = defaultHeartbeat
	}
	s := &live{c: c, stream: stream, interval: interval, sent: make(map[string]uint64), flights: make(map[uint64]flight),
		journal: make(chan *nodev1.Journal, 1), kept: make(chan uint64, 1)}
	return true, cause(ctx, s.run(ctx, cancel))
}

func keysOf(in []*nodev1.TicketKey) []ticket.PublicKey {
	var out []ticket.PublicKey
	for _, k := range in {
		out = append(out, ticket.PublicKey{ID: k.GetId(), Key: k.GetPublic()})
	}
	return out
}

// cause prefers why the context was ended to what the stream made of it.
func cause(ctx context.Context, err error) error {
	if why := context.Cause(ctx); why != nil && err != nil {
		return why
	}
	return err
}

// awaitWelcome bounds the wait for the first answer.
func awaitWelcome(stream nodev1.SessionService_SessionClient, cancel context.CancelCauseFunc) (*nodev1.Welcome, error) {
	timer := time.AfterFunc(welcomeTimeout, func() {
		cancel(errs.New(errs.NoLeader, "the coordinator did not answer the node's hello within %s", welcomeTimeout))
	})
	defer timer.Stop()
	first, err := stream.Recv()
	if err != nil {
		return nil, err
	}
	if first.GetWelcome() == nil {
		return nil, errors.New("the coordinator's first message was no welcome")
	}
	return first.GetWelcome(), nil
}

// streamError is what ended the stream: Send only says EOF.
func streamError(stream nodev1.SessionService_SessionClient, err error) error {
	if _, recv := stream.Recv(); recv != nil {
		return recv
	}
	return err
}

// flight is a report that was sent.
type flight struct {
	uid         string
	observation uint64
}

// live is a session that is going on: one goroutine sends, one receives.
type live struct {
	c        *Client
	stream   nodev1.SessionService_SessionClient
	interval time.Duration

	journal chan *nodev1.Journal // at most one is on its way
	kept    chan uint64          // what is durable and not yet acknowledged

	next uint64
	sent map[string]uint64 // by sandbox: the observation sent last in this interval

	mu      sync.Mutex
	flights map[uint64]flight
	// quiet counts heartbeats since anything was heard. Not the time: what came while this process itself stood still
	// waits to be read, and is no silence.
	quiet int
}

func (s *live) run(ctx context.Context, cancel context.CancelCauseFunc) error {
	received := make(chan error, 1)
	go func() {
		err := s.receive(ctx)
		received <- err
		cancel(err)
	}()
	var keeping sync.WaitGroup
	keeping.Go(func() { s.keep(ctx) })
	err := s.send(ctx)
	cancel(err)
	keeping.Wait()
	return errors.Join(err, <-received)
}

// journalRetry is how long a journal that could not be written is left alone.
const journalRetry = 5 * time.Second

// keep writes what comes for the journal.
func (s *live) keep(ctx context.Context) {
	for {
		var msg *nodev1.Journal
		select {
		case msg = <-s.journal:
		case <-ctx.Done():
			return
		}
		for {
			err := s.c.Journal.Apply(msg)
			if err == nil {
				break
			}
			s.c.Log.WarnContext(ctx, "the journal was not written; trying again", "error", err, "again_in", journalRetry)
			timer := time.NewTimer(journalRetry)
			select {
			case <-timer.C:
			case <-ctx.Done():
				timer.Stop()
				return
			}
		}
		select {
		case s.kept <- msg.GetId():
		case <-ctx.Done():
			return
		}
	}
}

func (s *live) send(ctx context.Context) error {
	tick := time.NewTicker(s.interval)
	defer tick.Stop()
	if err := s.reports(ctx); err != nil {
		return err
	}
	var settled <-chan time.Time // while there is news
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-s.c.Node.Changed():
			if settled == nil {
				settled = time.After(s.c.Settle)
			}
			continue
		case <-settled:
			settled = nil
		case id := <-s.kept:
			if err := s.stream.Send(&nodev1.SessionRequest{Message: &nodev1.SessionRequest_JournalAck{JournalAck: &nodev1.JournalAck{Id: id}}}); err != nil {
				return err
			}
			continue
		case <-tick.C:
			if n := s.unheard(); n > missed && time.Duration(n)*s.interval > s.c.Silence {
				return errs.New(errs.NoLeader, "the coordinator has been silent for %d heartbeats", n)
			}
			beat, err := s.c.Node.Heartbeat(ctx)
			if err != nil {
				return err
			}
			if err := s.stream.Send(&nodev1.SessionRequest{Message: &nodev1.SessionRequest_Heartbeat{Heartbeat: beat}}); err != nil {
				return err
			}
			// What is still due was not heard, or its acknowledgement was lost: it goes again.
			clear(s.sent)
		}
		if err := s.reports(ctx); err != nil {
			return err
		}
	}
}

// unheard counts one more heartbeat, and gives how many there were since anything was heard.
func (s *live) unheard() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.quiet++
	return s.quiet
}

// reports sends what is due and was not sent in this interval.
func (s *live) reports(ctx context.Context) error {
	due, err := s.c.Node.Due(ctx)
	if err != nil {
		return err
	}
	for _, o := range due {
		if s.sent[o.GetUid()] >= o.GetObservation() {
			continue
		}
		id := s.flightOf(flight{o.GetUid(), o.GetObservation()})
		if err := s.stream.Send(&nodev1.SessionRequest{Message: &nodev1.SessionRequest_Report{Report: &nodev1.Report{Id: id, Sandbox: o}}}); err != nil {
			return err
		}
		s.sent[o.GetUid()] = o.GetObservation()
	}
	return nil
}

// flightOf gives the id of a report: the same when it is sent again, a new one, in place of the
// sandbox's earlier one, when there is news.
func (s *live) flightOf(f flight) uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	for id, old := range s.flights {
		if old == f {
			return id
		}
		if old.uid == f.uid {
			delete(s.flights, id)
		}
	}
	s.next++
	s.flights[s.next] = f
	return s.next
}

func (s *live) receive(ctx context.Context) error {
	for {
		msg, err := s.stream.Recv()
		if err != nil {
			return err
		}
		s.mu.Lock()
		s.quiet = 0
		s.mu.Unlock()
		if ack := msg.GetHeartbeatAck(); ack != nil {
			s.c.TicketKeys(keysOf(ack.GetTicketKeys()))
		}
		if j := msg.GetJournal(); j != nil && s.c.Journal != nil {
			select {
			case s.journal <- j:
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		if ack := msg.GetReportAck(); ack != nil {
			if err := s.acknowledged(ctx, ack); err != nil {
				return err
			}
		}
	}
}

// acknowledged keeps that a report was taken. One that the coordinator will never take is done too: what
// becomes of the sandbox is settled by the next inventory.
func (s *live) acknowledged(ctx context.Context, ack *nodev1.ReportAck) error {
	s.mu.Lock()
	f, ok := s.flights[ack.GetId()]
	delete(s.flights, ack.GetId())
	s.mu.Unlock()
	if !ok {
		return nil
	}
	if e := ack.GetError(); e != nil {
		s.c.Log.WarnContext(ctx, "the coordinator refused a report", "sandbox", f.uid, "reason", e.GetReason())
	}
	return s.c.Store.AckSandbox(f.uid, f.observation)
}
