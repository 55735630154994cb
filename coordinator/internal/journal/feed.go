package journal

import (
	"context"
	"maps"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/wait"
	nodev1 "github.com/dormouse-run/dormouse/proto/dormouse/node/v1"
)

// change is what the log said last of a record.
type change struct {
	item catalog.ChangedRecord
	seq  uint64
}

// Feed brings one session's node up to date. Its Run is the session's.
type Feed struct {
	m    *Mirror
	node string
	send func(*nodev1.Journal) error
	acks chan uint64

	mu      sync.Mutex
	pending map[catalog.Key]change
	whole   bool
	news    chan struct{} // has a value when there is something to do
	next    uint64
	// buried are the records of any node that the log says were deleted since the last reading of the catalog began; nil while nothing is read.
	buried map[catalog.Key]change
	// complete is what the message on its way completes; zero if none.
	complete catalog.Point
}

// Feed makes the feed of a session whose node has a journal up to a point.
func (m *Mirror) Feed(node string, send func(*nodev1.Journal) error) *Feed {
	return &Feed{m: m, node: node, send: send, acks: make(chan uint64, 4), pending: make(map[catalog.Key]change), news: make(chan struct{}, 1)}
}

// Acked takes the node's acknowledgement, and gives how far its journal reaches now, if that is news. It never waits: a node that
// acknowledges what it was not sent is not heard.
func (f *Feed) Acked(id uint64) (complete catalog.Point) {
	f.mu.Lock()
	if id == f.next {
		complete = f.complete
	}
	f.mu.Unlock()
	select {
	case f.acks <- id:
	default:
	}
	return complete
}

func (f *Feed) note(item catalog.ChangedRecord, seq uint64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.pending[item.Key] = change{item, seq}
	f.wake()
}

// bury notes what was deleted while a message is made.
func (f *Feed) bury(item catalog.ChangedRecord, seq uint64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.buried != nil {
		f.buried[item.Key] = change{item, seq}
	}
}

// reads begins a message: what is read from now on may be deleted before the message has its point.
func (f *Feed) reads() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.buried = make(map[catalog.Key]change)
}

// settle gives the message a point, to which the log was followed, and takes from it what is not so there: what was read and deleted since.
// It would else be put back into a catalog that has the deletion and not the point.
func (f *Feed) settle(msg *nodev1.Journal) catalog.Point {
	f.m.mu.Lock()
	defer f.m.mu.Unlock()
	f.mu.Lock()
	defer f.mu.Unlock()
	for i, e := range msg.GetEntries() {
		k := catalog.Key{Tenant: e.GetTenant(), Kind: catalog.Kind(e.GetKind()), UID: e.GetUid()}
		if c, ok := f.buried[k]; ok && !e.GetDeleted() {
			msg.Entries[i] = deleted(c.item, c.seq)
		}
	}
	f.buried = nil
	return f.m.at
}

func (f *Feed) gap() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.whole = true
	f.wake()
}

func (f *Feed) wake() {
	select {
	case f.news <- struct{}{}:
	default:
	}
}

// Run feeds the node, whose journal reaches to the point, until ctx ends or the node cannot be sent to.
func (f *Feed) Run(ctx context.Context, has catalog.Point) error {
	f.m.mu.Lock()
	f.m.feeds[f] = struct{}{}
	f.m.mu.Unlock()
	defer func() {
		f.m.mu.Lock()
		delete(f.m.feeds, f)
		f.m.mu.Unlock()
	}()
	if err := f.begin(ctx, has); err != nil {
		return err
	}
	idle := time.NewTicker(f.m.o.Idle)
	defer idle.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-f.news:
			// The mirror gathers too, before the feed hears of a change and before it knows a point that has it.
			_ = wait.For(ctx, f.m.o.Pause/2)
		case <-idle.C:
		}
		if err := f.flush(ctx, &has); err != nil {
			if ctx.Err() != nil || errs.Has(err, errs.NodeAway) {
				return err
			}
			f.m.o.Log.Warn("a node's journal is behind; trying again", "node", f.node, "error", err)
			f.wake()
			_ = wait.For(ctx, f.m.o.Pause)
		}
	}
}

// begin decides how: by the tail, of which it notes what the log has since the point, or by the whole.
func (f *Feed) begin(ctx context.Context, has catalog.Point) error {
	at, err := f.m.reached(ctx, 0) // what comes after is noted, since the feed is known
	if err != nil {
		return err
	}
	if relation, err := f.m.o.Catalog.Compare(ctx, has); err != nil || relation != catalog.Part || has.IsZero() || has.Incarnation != at.Incarnation {
		f.gap()
		return nil
	}
	for after := has.Seq; after < at.Seq; {
		changes, err := f.m.o.Catalog.Changes(ctx, after, catalog.MaxPage, 0)
		if err != nil || len(changes) == 0 {
			f.gap()
			return nil
		}
		for _, c := range changes {
			for _, item := range c.Items {
				if item.Node == f.node {
					f.older(item, c.Seq)
				}
			}
			after = c.Seq
		}
	}
	return nil
}

// older notes what the log said, unless it has said something newer.
func (f *Feed) older(item catalog.ChangedRecord, seq uint64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.pending[item.Key].seq < seq {
		f.pending[item.Key] = change{item, seq}
		f.wake()
	}
}

// flush sends what there is to send. What could not be sent is noted again.
func (f *Feed) flush(ctx context.Context, has *catalog.Point) error {
	f.m.mu.Lock()
	at := f.m.at // all that concerns the node up to here is in what is taken now
	f.mu.Lock()
	pending, whole := f.pending, f.whole
	f.pending, f.whole = make(map[catalog.Key]change), false
	f.mu.Unlock()
	f.m.mu.Unlock()
	var err error
	if whole {
		err = f.sendWhole(ctx, at)
	} else {
		err = f.sendChanges(ctx, pending, at, *has)
	}
	if err == nil {
		*has = at
		return nil
	}
	f.mu.Lock()
	f.whole = f.whole || whole
	f.mu.Unlock()
	for _, c := range pending {
		f.older(c.item, c.seq)
	}
	return err
}

// sendChanges reads the records anew: what the node gets is what they are now, not what they were.
func (f *Feed) sendChanges(ctx context.Context, pending map[catalog.Key]change, at, has catalog.Point) error {
	if at.IsZero() || len(pending) == 0 && at == has {
		return nil
	}
	keys := slices.Collect(maps.Keys(pending))
	for {
		n := min(len(keys), pageSize)
		msg := new(nodev1.Journal)
		var seq uint64
		if n > 0 {
			f.reads()
			found, err := f.m.o.Catalog.GetMany(ctx, keys[:n])
			if err != nil {
				return err
			}
			deletedSince := false
			for _, k := range keys[:n] {
				c := pending[k]
				if _, ok := found[k]; ok && c.item.Deleted {
					return errs.New(errs.StoreUnavailable, "the catalog has %s, which its log says is deleted", k)
				}
				if r, ok := found[k]; ok && r.Node != f.node {
					continue // it is another node's by now, which gets it
				} else if ok {
					msg.Entries, seq = append(msg.Entries, living(r)), max(seq, r.Seq)
				} else {
					msg.Entries, seq = append(msg.Entries, deleted(c.item, c.seq)), max(seq, c.seq)
					deletedSince = deletedSince || !c.item.Deleted
				}
			}
			if deletedSince { // the log says it soon; the point of this message has it
				h, err := f.m.o.Catalog.History(ctx)
				if err != nil {
					return err
				}
				seq = max(seq, h.Head.Seq)
			}
		}
		if keys = keys[n:]; len(keys) == 0 {
			msg.Complete = PointToProto(at)
		}
		if err := f.deliver(ctx, msg, max(seq, at.Seq)); err != nil || len(keys) == 0 {
			return err
		}
	}
}

// pageSize bounds the records of one message; their bodies are mostly of a few KiB.
const pageSize = 64

// TraceSpan is how many commits back a whole tells what was deleted.
const TraceSpan = 20_000

// traces gives what the log says was deleted of the node's, up to the point.
func (f *Feed) traces(ctx context.Context, at catalog.Point) (all []*nodev1.JournalEntry, err error) {
	after := at.Seq - min(at.Seq, TraceSpan)
	for after < at.Seq {
		changes, err := f.m.o.Catalog.Changes(ctx, after, catalog.MaxPage, 0)
		if errs.Has(err, errs.ResumeTooOld) {
			// It begins later.
			oldest, parsed := strconv.ParseUint(errs.From(err).Details["oldest"], 10, 64)
			if parsed != nil || oldest <= after+1 {
				return nil, err
			}
			after = oldest - 1
			continue
		}
		if err != nil || len(changes) == 0 {
			return all, err
		}
		for _, c := range changes {
			for _, item := range c.Items {
				if item.Deleted && item.Node == f.node && c.Seq <= at.Seq {
					all = append(all, deleted(item, c.Seq))
				}
			}
			after = c.Seq
		}
	}
	return all, nil
}

// sendWhole sends every record that concerns the node, and the traces of what did.
func (f *Feed) sendWhole(ctx context.Context, at catalog.Point) error {
	if at.IsZero() {
		return errs.New(errs.StoreUnavailable, "the change log is not followed yet")
	}
	traces, err := f.traces(ctx, at)
	if err != nil {
		return err
	}
	begins := true
	for chunk := range slices.Chunk(traces, 8*pageSize) {
		if err := f.deliver(ctx, &nodev1.Journal{WholeBegins: begins, Entries: chunk}, at.Seq); err != nil {
			return err
		}
		begins = false
	}
	for i, kind := range Kinds {
		q := catalog.Query{Kind: kind, Node: f.node, PageSize: pageSize}
		for {
			f.reads()
			page, err := f.m.o.Catalog.List(ctx, q)
			if err != nil {
				return err
			}
			msg := &nodev1.Journal{WholeBegins: begins, WholeEnds: page.Next == "" && i == len(Kinds)-1}
			if msg.GetWholeEnds() {
				msg.Complete = PointToProto(at)
			}
			seq := at.Seq
			for _, r := range page.Records {
				msg.Entries, seq = append(msg.Entries, living(r)), max(seq, r.Seq)
			}
			if err := f.deliver(ctx, msg, seq); err != nil {
				return err
			}
			begins = false
			if q.After = page.Next; page.Next == "" {
				break
			}
		}
	}
	return nil
}

// deliver sends a message with a point that has its entries, and waits until the node made it durable.
func (f *Feed) deliver(ctx context.Context, msg *nodev1.Journal, seq uint64) error {
	if _, err := f.m.reached(ctx, seq); err != nil {
		return err
	}
	at := f.settle(msg)
	if at.IsZero() || at.Seq < seq {
		return errs.New(errs.StoreUnavailable, "the change log is followed anew")
	}
	// What was read is of a catalog that has what the log said; else it came back older meanwhile, and the node is not told.
	switch relation, err := f.m.o.Catalog.Compare(ctx, at); {
	case err != nil:
		return err
	case relation != catalog.Part:
		return errs.New(errs.StoreUnavailable, "the catalog does not have commit %d, to which its log was followed", at.Seq)
	}
	f.mu.Lock()
	f.next++
	msg.Id, msg.Point, f.complete = f.next, PointToProto(at), PointOf(msg.GetComplete())
	f.mu.Unlock()
	h, err := f.m.o.Catalog.History(ctx)
	if err != nil {
		return err
	}
	if h.Mark.Incarnation == at.Incarnation && h.Mark.Seq <= at.Seq {
		msg.Mark = PointToProto(h.Mark)
	}
	if err := f.send(msg); err != nil {
		return errs.Wrap(err, errs.NodeAway, "node %s cannot be sent to", f.node).With("node", f.node)
	}
	for {
		select {
		case id := <-f.acks:
			if id == msg.GetId() {
				return nil
			}
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
