package sessions

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/dormouse-run/dormouse/coordinator/internal/journal"
	"github.com/dormouse-run/dormouse/coordinator/internal/nodeclient"
	"github.com/dormouse-run/dormouse/coordinator/internal/operations"
	"github.com/dormouse-run/dormouse/coordinator/internal/records"
	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/fence"
	"github.com/dormouse-run/dormouse/pkg/wire"
	nodev1 "github.com/dormouse-run/dormouse/proto/dormouse/node/v1"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// maxReports bounds the reports of one session that are being committed at once. Their order does
// not matter: observations are numbered.
// One that finds no room is not acknowledged, so that the node sends it again; waiting here would
// keep heartbeats waiting too.
const maxReports = 256

// helloTimeout is how long a peer may take to say who it is.
const helloTimeout = 10 * time.Second

// session is one stream of one node.
type session struct {
	node    string
	address string
	epoch   fence.Epoch
	term    *term
	ctx     context.Context //nolint:containedctx // the session's life
	cancel  context.CancelCauseFunc
	beat    atomic.Pointer[time.Time] // the last; its monotonic part counts, so that a step of the clock is no silence
	log     *slog.Logger
	feed    *journal.Feed // nil: the journal stays as it is
	has     catalog.Point // what the node's journal reached to when it said hello
	// suspects are what the node's journal alone says is deleted, with when that was seen first. Owned by reconcile.
	suspects map[catalog.Key]time.Time
	// again has a value when the node is to be looked at before its time.
	again chan struct{}

	sendMu sync.Mutex // gRPC wants one sender at a time
	stream nodev1.SessionService_SessionServer
}

// Session implements nodev1.SessionServiceServer. It ends with the term at once, so that the node dials the next leader, even while
// something of it still waits for the catalog: a connection that carries nothing may keep it for longer than a takeover may last.
func (r *Registry) Session(stream nodev1.SessionService_SessionServer) error {
	t, err := r.lead()
	if err != nil {
		return err
	}
	over := make(chan error, 1)
	go func() { // the term waits for it
		defer t.wg.Done()
		over <- r.session(stream, t)
	}()
	select {
	case err := <-over:
		return err
	case <-t.ctx.Done():
		return ended(t.ctx)
	}
}

// session holds a node's session, until the node, the term or a newer session ends it.
func (r *Registry) session(stream nodev1.SessionService_SessionServer, t *term) error {
	name, err := r.cfg.PeerNode(stream.Context())
	if err != nil {
		return err
	}
	hello, err := r.hello(stream, t, name)
	if err != nil {
		return err
	}
	s, err := r.open(stream, t, hello)
	if err != nil {
		return err
	}
	s.log.Info("node is online", "address", hello.GetAddress(), "version", hello.GetVersion(), "boot", hello.GetBootId())
	err = r.serve(s)
	r.leave(s)
	s.log.Warn("node is away", "reason", err)
	return err
}

// hello waits for the first message and checks it.
func (r *Registry) hello(stream nodev1.SessionService_SessionServer, t *term, name string) (*nodev1.Hello, error) {
	type first struct {
		msg *nodev1.SessionRequest
		err error
	}
	got := make(chan first, 1)
	go func() { // ends with the stream, which ends with this call
		msg, err := stream.Recv()
		got <- first{msg, err}
	}()
	timer := time.NewTimer(helloTimeout)
	defer timer.Stop()
	var f first
	select {
	case f = <-got:
	case <-timer.C:
		return nil, errs.New(errs.InvalidField, "a session begins with a hello within %s", helloTimeout).With("field", "hello")
	case <-t.ctx.Done():
		return nil, ended(t.ctx)
	}
	if f.err != nil {
		return nil, f.err
	}
	h := f.msg.GetHello()
	switch {
	case h == nil:
		return nil, errs.New(errs.InvalidField, "a session begins with a hello").With("field", "hello")
	case h.GetNode() != name:
		return nil, errs.New(errs.NotAllowed, "the certificate is of node %s, the hello of node %s", name, h.GetNode())
	case h.GetAddress() == "":
		return nil, errs.New(errs.InvalidField, "hello.address: say where the node serves").With("field", "hello.address")
	case catalog.ValidateNode(name) != nil:
		return nil, catalog.ValidateNode(name)
	}
	if seen := fence.Epoch(h.GetHighestCoordinatorEpoch()); seen > t.epoch {
		r.cfg.OnHigherEpoch(seen)
		return nil, errs.New(errs.NoLeader, "the node has seen coordinator epoch %d, this one has %d; it will lead again with a higher one: dial again", seen, t.epoch)
	}
	if err := r.cfg.Witness(stream.Context(), name, journal.PointOf(h.GetWitness()), journal.PointOf(h.GetWitnessMark()), journal.PointOf(h.GetJournal())); err != nil {
		return nil, err
	}
	return h, nil
}

// open fences the session before, records the node, and welcomes it.
func (r *Registry) open(stream nodev1.SessionService_SessionServer, t *term, h *nodev1.Hello) (*session, error) {
	ctx := stream.Context()
	epoch, err := r.cfg.Store.OpenSession(ctx, t.epoch, h.GetNode(), fence.Epoch(h.GetHighestSessionEpoch()))
	if err != nil {
		return nil, err
	}
	rec, err := r.record(ctx, t, h, epoch)
	if err != nil {
		return nil, err
	}
	s := &session{node: h.GetNode(), address: h.GetAddress(), epoch: epoch, term: t, stream: stream, again: make(chan struct{}, 1),
		log: r.cfg.Log.With("node", h.GetNode(), "session", uint64(epoch), "epoch", uint64(t.epoch))}
	s.ctx, s.cancel = context.WithCancelCause(t.ctx)
	s.has = journal.PointOf(h.GetJournal())
	if t.feeds != nil {
		s.feed = t.feeds.Feed(s.node, func(j *nodev1.Journal) error {
			return s.send(&nodev1.SessionResponse{Message: &nodev1.SessionResponse_Journal{Journal: j}})
		})
	}
	s.alive()
	t.work.Used(s.node, uses(h.GetUses()))
	if err := s.send(&nodev1.SessionResponse{Message: &nodev1.SessionResponse_Welcome{Welcome: &nodev1.Welcome{
		SessionEpoch: uint64(epoch), CoordinatorEpoch: uint64(t.epoch), HeartbeatInterval: durationpb.New(r.cfg.Heartbeat), TicketKeys: r.ticketKeys()}}}); err != nil {
		s.cancel(err)
		return nil, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	n := r.nodes[s.node]
	if n == nil {
		n = new(node)
		r.nodes[s.node] = n
	}
	if old := n.session; old != nil {
		if old.epoch > epoch {
			err := fenced(s, old.epoch)
			s.cancel(err)
			return nil, err
		}
		old.cancel(fenced(old, epoch))
	}
	n.record, n.session, n.allocatable, n.lastBeat, n.problems = *rec, s, rec.Allocatable, time.Now(), nil
	n.notices, n.memory = nil, nil
	n.images, n.journal = h.GetInventory().GetImages(), s.has
	n.held, n.unread = 0, false
	r.news()
	return s, nil
}

func fenced(s *session, by fence.Epoch) error {
	return errs.New(errs.Fenced, "session %d of node %s gave way to session %d", s.epoch, s.node, by).With("node", s.node)
}

// record commits what the node says of itself; what was intended for it stays.
func (r *Registry) record(ctx context.Context, t *term, h *nodev1.Hello, epoch fence.Epoch) (*records.Node, error) {
	var n *records.Node
	_, err := r.cfg.Queue.Publish(ctx, func(ctx context.Context, read catalog.Reader) (catalog.Commit, error) {
		n = &records.Node{Name: h.GetNode()}
		old, err := read.Get(ctx, records.NodeKey(h.GetNode()))
		switch {
		case err == nil:
			if n, err = records.NodeOf(old); err != nil {
				return catalog.Commit{}, err
			}
		case !errs.Has(err, errs.ObjectNotFound):
			return catalog.Commit{}, err
		}
		n.Address, n.DirectAddress, n.Version = h.GetAddress(), h.GetDirectAddress(), h.GetVersion()
		n.Architecture, n.Labels = h.GetArchitecture(), h.GetLabels()
		n.Capacity, n.Allocatable = resources(h.GetCapacity()), resources(h.GetAllocatable())
		n.Networks = wire.NetworkModesFromProto(h.GetNetworkModes())
		n.RuntimeBundles, n.CPUFeatures = h.GetRuntimeBundles(), h.GetCpuFeatures()
		n.SessionEpoch, n.SessionTime = uint64(epoch), time.Now().UTC()
		put, err := n.Put()
		return catalog.Commit{Owner: fence.Owner{Coordinator: t.epoch, Node: n.Name, Session: epoch}, Puts: []catalog.Put{put}}, err
	})
	if errs.Has(err, errs.CatalogRewound) {
		return n, nil // what the node has is needed to repair it; it is recorded with its session after that
	}
	return n, err
}

func resources(p *dormousev1.NodeResources) records.Resources {
	return records.Resources{CPUMillis: p.GetCpuMillis(), MemoryBytes: p.GetMemoryBytes(), DiskBytes: p.GetDiskBytes(), Sandboxes: p.GetSandboxes()}
}

// serve runs the session until the node, the term or a newer session ends it.
func (r *Registry) serve(s *session) error {
	defer s.cancel(nil)
	var owned sync.WaitGroup
	owned.Go(func() { r.reconcile(s) })
	owned.Go(func() { r.watch(s) })
	if s.feed != nil {
		owned.Go(func() {
			if err := s.feed.Run(s.ctx, s.has); s.ctx.Err() == nil {
				s.cancel(errs.From(err))
			}
		})
	}
	received := make(chan error, 1)
	go func() { received <- r.receive(s) }() // ends with the stream, which ends with this call
	var err error
	select {
	case err = <-received:
		if err == nil {
			err = errs.New(errs.NodeAway, "node %s ended its session", s.node).With("node", s.node)
		}
	case <-s.ctx.Done():
		err = ended(s.ctx)
	}
	s.cancel(err)
	owned.Wait()
	return err
}

// ended gives the reason of a context as an error that the node understands.
func ended(ctx context.Context) error {
	cause := context.Cause(ctx)
	var e *errs.Error
	if errors.As(cause, &e) {
		return e
	}
	return errs.Wrap(cause, errs.NoLeader, "the coordinator stopped leading; dial again")
}

// watch ends the session when the heartbeats stop. It looks twice in the time of each and counts, instead of
// measuring: a beat that came while this process itself stood still is yet to be read, and no silence.
func (r *Registry) watch(s *session) {
	ticker := time.NewTicker(max(r.cfg.Heartbeat/2, time.Millisecond))
	defer ticker.Stop()
	last, looks := s.beat.Load(), 0
	for {
		select {
		case <-s.ctx.Done():
			return
		case <-ticker.C:
		}
		beat := s.beat.Load()
		if beat != last {
			last, looks = beat, 0
			continue
		}
		if looks++; looks > 2*r.cfg.Missed {
			silent := time.Since(*beat)
			s.cancel(errs.New(errs.NodeAway, "node %s was silent for %s; dial again", s.node, silent.Round(time.Millisecond)).With("node", s.node))
			return
		}
	}
}

// receive takes messages until the stream ends.
func (r *Registry) receive(s *session) error {
	var reports errgroup.Group
	reports.SetLimit(maxReports)
	defer func() { _ = reports.Wait() }() // its functions return nil
	for {
		msg, err := s.stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		s.alive()
		switch m := msg.GetMessage().(type) {
		case *nodev1.SessionRequest_Heartbeat:
			r.heartbeat(s, m.Heartbeat)
			if err := s.send(&nodev1.SessionResponse{Message: &nodev1.SessionResponse_HeartbeatAck{HeartbeatAck: &nodev1.HeartbeatAck{TicketKeys: r.ticketKeys()}}}); err != nil {
				return err
			}
		case *nodev1.SessionRequest_Report:
			reports.TryGo(func() error {
				r.report(s, m.Report)
				return nil
			})
		case *nodev1.SessionRequest_JournalAck:
			if s.feed != nil {
				r.kept(s, s.feed.Acked(m.JournalAck.GetId()))
			}
		default:
			return errs.New(errs.InvalidField, "after the hello come heartbeats, reports and acknowledgements of the journal").With("field", "message")
		}
	}
}

// kept notes how far a node's journal reaches.
func (r *Registry) kept(s *session, has catalog.Point) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if n := r.nodes[s.node]; n != nil && n.session == s && !has.IsZero() {
		n.journal = has
	}
}

// alive notes that the node was heard.
func (s *session) alive() {
	now := time.Now()
	s.beat.Store(&now)
}

// uses reads what a node tells of the use of its sandboxes.
func uses(all []*nodev1.SandboxUse) []operations.Use {
	out := make([]operations.Use, 0, len(all))
	for _, u := range all {
		out = append(out, operations.Use{UID: u.GetUid(), UnusedFor: max(u.GetUnusedFor().AsDuration(), 0)})
	}
	return out
}

// ticketKeys are what nodes verify tickets with.
func (r *Registry) ticketKeys() []*nodev1.TicketKey {
	var all []*nodev1.TicketKey
	for _, k := range r.cfg.TicketKeys() {
		all = append(all, &nodev1.TicketKey{Id: k.ID, Public: k.Key})
	}
	return all
}

func (r *Registry) heartbeat(s *session, h *nodev1.Heartbeat) {
	s.term.work.Used(s.node, uses(h.GetUses()))
	r.mu.Lock()
	defer r.mu.Unlock()
	n := r.nodes[s.node]
	if n == nil || n.session != s {
		return
	}
	if len(n.problems) > 0 && len(h.GetProblems()) == 0 {
		r.news()
	}
	n.lastBeat, n.problems, n.images = time.Now(), h.GetProblems(), h.GetImages()
	n.notices, n.memory = h.GetNotices(), h.GetMemory()
	if h.GetAllocatable() != nil {
		n.allocatable = resources(h.GetAllocatable())
	}
}

// report commits and acknowledges. Without an acknowledgement the node sends it again.
func (r *Registry) report(s *session, rep *nodev1.Report) {
	ack := &nodev1.ReportAck{Id: rep.GetId()}
	o, err := nodeclient.Observation(rep.GetSandbox())
	if err == nil {
		o.Session = s.epoch
		err = s.term.work.Observe(s.ctx, s.node, o)
	}
	if err != nil {
		env := errs.From(err)
		switch env.Code {
		case errs.NotFound, errs.Conflict, errs.InvalidArgument:
			if env.Reason == errs.StaleRevision || env.Reason == errs.AttemptVoid {
				return
			}
			ack.Error = wire.ErrorToProto(env)
		default:
			if s.ctx.Err() == nil {
				s.log.Warn("a report was not recorded; the node will send it again", "sandbox", rep.GetSandbox().GetUid(), "error", err)
			}
			return
		}
	}
	// A failure to send ends the stream, which receive sees.
	_ = s.send(&nodev1.SessionResponse{Message: &nodev1.SessionResponse_ReportAck{ReportAck: ack}})
}

func (s *session) send(m *nodev1.SessionResponse) error {
	s.sendMu.Lock()
	defer s.sendMu.Unlock()
	return s.stream.Send(m)
}

// leave marks the node away, unless a newer session has it.
func (r *Registry) leave(s *session) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if n := r.nodes[s.node]; n != nil && n.session == s {
		n.session, n.images = nil, nil
	}
}
