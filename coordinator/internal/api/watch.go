package api

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/dormouse-run/dormouse/coordinator/internal/auth"
	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/uid"
)

// hub follows the change log once for all watches, so that a thousand of them need one blocked call
// to the store. It tells that there is news; each watch then reads its own part. While nobody waits it reads nothing: a look at the
// log for each commit is a good part of what a commit costs.
type hub struct {
	store  Store
	log    *slog.Logger
	wanted chan struct{} // has a value when somebody has begun to wait

	mu      sync.Mutex
	waiting int
	seq     uint64
	news    chan struct{} // closed and replaced when seq grows
	done    chan struct{} // closed when run has ended
}

func newHub(store Store, log *slog.Logger) *hub {
	return &hub{store: store, log: log, wanted: make(chan struct{}, 1), news: make(chan struct{}), done: make(chan struct{})}
}

const (
	followBlock = 2 * time.Second
	followRetry = 500 * time.Millisecond
)

func (h *hub) run(ctx context.Context) {
	defer close(h.done)
	for {
		select {
		case <-h.wanted:
		case <-ctx.Done():
			return
		}
		for h.awaited() && ctx.Err() == nil {
			err := h.follow(ctx)
			if err == nil || ctx.Err() != nil {
				break
			}
			h.log.Warn("the change log cannot be read; watches stand still", "error", err)
			timer := time.NewTimer(followRetry)
			select {
			case <-timer.C:
			case <-ctx.Done():
				timer.Stop()
			}
		}
	}
}

func (h *hub) awaited() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.waiting > 0
}

// follow reads until something fails, or nobody waits any more. It starts from the store's sequence, and tells watches of
// whatever they missed.
func (h *hub) follow(ctx context.Context) error {
	seq, err := h.store.Seq(ctx)
	if err != nil {
		return err
	}
	for {
		h.tell(seq)
		if !h.awaited() {
			return nil // who comes now says so
		}
		changes, err := h.store.Changes(ctx, seq, catalog.MaxPage, followBlock)
		if err != nil {
			return err
		}
		if n := len(changes); n > 0 {
			seq = changes[n-1].Seq
		}
	}
}

func (h *hub) tell(seq uint64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if seq != h.seq {
		h.seq = seq
		close(h.news)
		h.news = make(chan struct{})
	}
}

// wait returns when there may be something after the sequence.
func (h *hub) wait(ctx context.Context, after uint64) error {
	h.mu.Lock()
	h.waiting++
	h.mu.Unlock()
	defer func() {
		h.mu.Lock()
		h.waiting--
		h.mu.Unlock()
	}()
	select {
	case h.wanted <- struct{}{}:
	default:
	}
	for {
		h.mu.Lock()
		seq, news := h.seq, h.news
		h.mu.Unlock()
		if seq > after {
			return nil
		}
		select {
		case <-news:
		case <-h.done:
			return errs.New(errs.ShuttingDown, "this coordinator is stopping; watch on from the last sequence")
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// watched is a change of one object. rec is nil when it was deleted.
type watched struct {
	seq uint64
	uid string
	rec *catalog.Record
}

// watch sends the changes of a kind in the caller's tenant until the caller leaves. An object that changed
// several times may be sent once, as it is.
func (s *Server) watch(ctx context.Context, kind catalog.Kind, after uint64, only string, send func(watched) error) error {
	id, err := auth.From(ctx)
	if err != nil {
		return err
	}
	if only != "" {
		if err := uid.Check(only); err != nil {
			return errs.New(errs.InvalidField, "uid: %v", err).With("field", "uid")
		}
	}
	if after == 0 {
		if after, err = s.cfg.Store.Seq(ctx); err != nil {
			return err
		}
	}
	for {
		changes, err := s.cfg.Store.Changes(ctx, after, 256, 0)
		if err != nil {
			return err
		}
		if len(changes) == 0 {
			if err := s.hub.wait(ctx, after); err != nil {
				return err
			}
			continue
		}
		after = changes[len(changes)-1].Seq
		if err := s.sendChanges(ctx, id.Tenant, kind, only, changes, send); err != nil {
			return err
		}
	}
}

func (s *Server) sendChanges(ctx context.Context, tenant string, kind catalog.Kind, only string, changes []catalog.Change, send func(watched) error) error {
	var keys []catalog.Key
	last := make(map[catalog.Key]uint64)
	for _, c := range changes {
		for _, item := range c.Items {
			if item.Key.Tenant != tenant || item.Key.Kind != kind || only != "" && item.Key.UID != only {
				continue
			}
			if _, seen := last[item.Key]; !seen {
				keys = append(keys, item.Key)
			}
			last[item.Key] = c.Seq
		}
	}
	for len(keys) > 0 {
		n := min(len(keys), 100)
		recs, err := s.cfg.Store.GetMany(ctx, keys[:n])
		if err != nil {
			return err
		}
		for _, key := range keys[:n] {
			w := watched{seq: last[key], uid: key.UID}
			if rec, ok := recs[key]; ok {
				w.rec = &rec
			}
			if err := send(w); err != nil {
				return err
			}
		}
		keys = keys[n:]
	}
	return nil
}
