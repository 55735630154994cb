package journal

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/wait"
)

// Kinds are those whose records are kept by the nodes that they concern.
var Kinds = []catalog.Kind{catalog.KindNode, catalog.KindVolume, catalog.KindSnapshot, catalog.KindTemplate, catalog.KindPool, catalog.KindSandbox, catalog.KindOperation}

// Catalog is what a mirror reads.
type Catalog interface {
	catalog.Reader
	History(ctx context.Context) (catalog.History, error)
	Status(ctx context.Context) (catalog.Status, error)
	Compare(ctx context.Context, p catalog.Point) (catalog.Relation, error)
	Changes(ctx context.Context, after uint64, limit int, block time.Duration) ([]catalog.Change, error)
}

// Options of a mirror.
type Options struct {
	Catalog Catalog
	Log     *slog.Logger
	// OnLost is told of a point that the log was followed to and that the catalog does not have any more.
	OnLost func(catalog.Point)
	// Pause is how long changes are gathered before they are sent; 250 ms if zero.
	Pause time.Duration
	// Idle is how often a node learns how far the catalog is though nothing of its own changed; 2 s if zero.
	Idle time.Duration
}

// Mirror follows the change log for all feeds. Run is its goroutine.
type Mirror struct {
	o Options

	mu    sync.Mutex
	feeds map[*Feed]struct{}
	at    catalog.Point // how far the log was followed; zero at first and after a gap
	loose unplaced      // up to there
	moved chan struct{} // closed and replaced when at moves
}

// New makes a mirror.
func New(o Options) *Mirror {
	if o.Pause <= 0 {
		o.Pause = 250 * time.Millisecond
	}
	if o.Idle <= 0 {
		o.Idle = 2 * time.Second
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	return &Mirror{o: o, feeds: make(map[*Feed]struct{}), moved: make(chan struct{})}
}

// Run follows the log until ctx ends.
func (m *Mirror) Run(ctx context.Context) {
	for ctx.Err() == nil {
		at, err := m.follow(ctx)
		if ctx.Err() != nil {
			return
		}
		// What nodes have is not given up for what a store says that came back older.
		switch relation, err := m.o.Catalog.Compare(ctx, at); {
		case err != nil:
			_ = wait.For(ctx, m.o.Pause)
			continue
		case relation.Missing():
			m.o.OnLost(at)
			return
		}
		m.lose()
		m.o.Log.Warn("the change log is followed anew; nodes get all that concerns them", "reason", err)
		_ = wait.For(ctx, m.o.Pause)
	}
}

// follow hands on what changes, from now on, until the log has a gap or cannot be read.
func (m *Mirror) follow(ctx context.Context) (at catalog.Point, err error) {
	h, err := m.o.Catalog.History(ctx)
	if err != nil {
		return at, err
	}
	// A catalog that is suspended has a head above what it lost, which nobody has followed it to.
	st, err := m.o.Catalog.Status(ctx)
	if err == nil && st.Suspended != nil {
		err = catalog.Refusal(errs.CatalogRewound)
	}
	if err != nil {
		return at, err
	}
	at = h.Head
	if err := m.lookBack(ctx, at); err != nil {
		return at, err
	}
	m.advance(at, nil)
	for {
		changes, err := m.o.Catalog.Changes(ctx, at.Seq, catalog.MaxPage, time.Second)
		switch {
		case errs.Has(err, errs.ResumeTooOld):
			return at, err
		case err != nil:
			if ctx.Err() != nil {
				return at, ctx.Err()
			}
			m.o.Log.Warn("the change log cannot be read; trying again", "error", err)
			_ = wait.For(ctx, m.o.Pause)
			continue
		case len(changes) == 0:
			continue
		}
		last := changes[len(changes)-1]
		next := at
		next.Seq, next.Digest = last.Seq, last.Digest
		if err := m.keep(ctx, next, changes); err != nil {
			m.o.Log.Warn("what changed cannot be read; trying again", "error", err)
			_ = wait.For(ctx, m.o.Pause)
			continue
		}
		at = next
		m.advance(at, changes)
	}
}

// advance gives each feed the changes that concern its node.
func (m *Mirror) advance(at catalog.Point, changes []catalog.Change) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.at = at
	close(m.moved)
	m.moved = make(chan struct{})
	for _, c := range changes {
		for _, item := range c.Items {
			if item.Node == "" {
				continue
			}
			for f := range m.feeds {
				if f.node == item.Node {
					f.note(item, c.Seq)
				}
				if item.Deleted {
					f.bury(item, c.Seq)
				}
			}
		}
	}
}

// lose makes every feed begin with the whole again.
func (m *Mirror) lose() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.at = catalog.Point{}
	for f := range m.feeds {
		f.gap()
	}
}

// place gives how far the log was followed, and a channel that is closed when it was followed further.
func (m *Mirror) place() (catalog.Point, <-chan struct{}) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.at, m.moved
}

// reached waits until the log was followed up to the sequence, and gives the point.
func (m *Mirror) reached(ctx context.Context, seq uint64) (catalog.Point, error) {
	for {
		at, moved := m.place()
		if !at.IsZero() && at.Seq >= seq {
			return at, nil
		}
		select {
		case <-moved:
		case <-ctx.Done():
			return catalog.Point{}, ctx.Err()
		}
	}
}
