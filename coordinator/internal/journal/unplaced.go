package journal

import (
	"context"
	"maps"
	"slices"
	"strconv"

	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/errs"
)

// Unplaced is the journal of what concerns no node, which no node keeps: what waits for a place or never got one, and traces of such
// that was deleted. The coordinator that leads has it in memory, no further back than nodes keep traces, and knows what it does not have.
type Unplaced struct {
	// After: what was committed up to there is not in it.
	After uint64
	// To is how far the log was followed; zero if it was not.
	To      catalog.Point
	Entries []Entry
}

// Bounds of what is kept in memory: what does not fit is not known, or known without a copy.
const (
	maxUnplaced     = 10_000
	maxUnplacedSize = 16 << 20 // of bodies
)

// unplaced is how the mirror keeps it. It is the mirror's, under its lock.
type unplaced struct {
	after   uint64
	entries map[catalog.Key]Entry
	size    int
}

func (u *unplaced) drop(k catalog.Key) {
	u.size -= len(u.entries[k].Record.Body)
	delete(u.entries, k)
}

func (u *unplaced) keep(e Entry) {
	u.drop(e.Record.Key)
	if u.size+len(e.Record.Body) > maxUnplacedSize {
		e.Bare, e.Record.Body, e.Record.Refs = true, nil, nil
	}
	u.entries[e.Record.Key] = e
	u.size += len(e.Record.Body)
	if len(u.entries) <= maxUnplaced {
		return
	}
	old := slices.SortedFunc(maps.Values(u.entries), func(a, b Entry) int { return int(a.Record.Seq) - int(b.Record.Seq) })
	for _, e := range old[:len(old)/2] {
		u.drop(e.Record.Key)
		u.after = max(u.after, e.Record.Seq)
	}
}

// Unplaced gives what is kept now.
func (m *Mirror) Unplaced() Unplaced {
	m.mu.Lock()
	defer m.mu.Unlock()
	return Unplaced{After: m.loose.after, To: m.at, Entries: slices.Collect(maps.Values(m.loose.entries))}
}

// keep takes note of what changed and concerns no node, with copies of it as it is now. What has changed again by then has none, since the log
// tells of it soon. The point has all the changes.
func (m *Mirror) keep(ctx context.Context, at catalog.Point, changes []catalog.Change) error {
	last := make(map[catalog.Key]Entry)
	nodes := make(map[catalog.Key]string)
	for _, c := range changes {
		for _, item := range c.Items {
			if slices.Contains(Kinds, item.Key.Kind) {
				last[item.Key] = Entry{Record: catalog.Record{Key: item.Key, Revision: item.Revision, Seq: c.Seq}, Deleted: item.Deleted, Bare: !item.Deleted, Point: at}
				nodes[item.Key] = item.Node
			}
		}
	}
	var read []catalog.Key
	for k, e := range last {
		if nodes[k] == "" && !e.Deleted {
			read = append(read, k)
		}
	}
	for chunk := range slices.Chunk(read, catalog.MaxPage) {
		found, err := m.o.Catalog.GetMany(ctx, chunk)
		if err != nil {
			return err
		}
		for k, r := range found {
			if e := last[k]; r.Revision == e.Record.Revision {
				e.Record, e.Bare = r, false
				last[k] = e
			}
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for k, e := range last {
		if m.loose.drop(k); nodes[k] == "" {
			m.loose.keep(e)
		}
	}
	return nil
}

// lookBack begins with what the log has of the last TraceSpan commits up to the point.
func (m *Mirror) lookBack(ctx context.Context, at catalog.Point) error {
	after := at.Seq - min(at.Seq, TraceSpan)
	m.mu.Lock()
	m.loose = unplaced{after: after, entries: make(map[catalog.Key]Entry)}
	m.mu.Unlock()
	for reads := false; after < at.Seq; reads = true {
		changes, err := m.o.Catalog.Changes(ctx, after, catalog.MaxPage, 0)
		if errs.Has(err, errs.ResumeTooOld) {
			// It begins later.
			oldest, parsed := strconv.ParseUint(errs.From(err).Details["oldest"], 10, 64)
			if parsed != nil || oldest <= after+1 {
				return err
			}
			after = oldest - 1
			if !reads { // else it is where a repair took the sequence further
				if err := m.beginning(ctx, at, after); err != nil {
					return err
				}
			}
			continue
		}
		if err != nil {
			return err
		}
		if len(changes) == 0 {
			return nil
		}
		after = changes[len(changes)-1].Seq
		if i := slices.IndexFunc(changes, func(c catalog.Change) bool { return c.Seq > at.Seq }); i >= 0 {
			changes = changes[:i] // it is read again, with its point
		}
		if err := m.keep(ctx, at, changes); err != nil {
			return err
		}
	}
	return nil
}

// beginning finds out why the log begins after a commit. One that begins where the sequence was taken further, with a change of nothing, is that of a
// catalog that was empty before and was rebuilt or restored: what it has of then is what it lives with, and what was deleted before is of no
// journal any more, since nodes get the whole of each new incarnation. Of any other log the beginning was forgotten, and what it said is not known.
func (m *Mirror) beginning(ctx context.Context, at catalog.Point, after uint64) error {
	first, err := m.o.Catalog.Changes(ctx, after, 1, 0)
	if err != nil {
		return err
	}
	if len(first) == 0 || len(first[0].Items) > 0 {
		m.mu.Lock()
		defer m.mu.Unlock()
		m.loose.after = after
		return nil
	}
	for _, kind := range Kinds {
		for q := (catalog.Query{Kind: kind, PageSize: catalog.MaxPage}); ; {
			page, err := m.o.Catalog.List(ctx, q)
			if err != nil {
				return err
			}
			m.mu.Lock()
			for _, r := range page.Records {
				if r.Node == "" && r.Seq <= after { // of the others the log tells
					m.loose.keep(Entry{Record: r, Point: at})
				}
			}
			m.mu.Unlock()
			if q.After = page.Next; page.Next == "" {
				break
			}
		}
	}
	return nil
}
