package memory

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"time"

	"github.com/google/uuid"

	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/fence"
)

// history is the chain of digests, and why there are no commits now. All digests are kept, unlike on a server.
type history struct {
	digest    string
	digests   map[uint64]string
	suspended *catalog.Suspension
	began     uint64            // the sequence when it was suspended
	lost      map[string]uint64 // incarnation -> what was seen of it
	ancestors map[string]uint64
	backed    uint64 // the sequence of the backup that is being restored
	restored  string // the backup that was restored last
	over      chan struct{}
}

func newHistory() history {
	return history{digests: make(map[uint64]string), lost: make(map[string]uint64), ancestors: make(map[string]uint64), over: make(chan struct{})}
}

func (h *history) suspension() *catalog.Suspension {
	if h.suspended == nil {
		return nil
	}
	s := *h.suspended
	s.At = h.began
	return &s
}

// admits tells whether a commit, of a repair or not, may be applied now.
func (h *history) admits(repair bool) *errs.Error {
	switch {
	case h.suspended != nil && !repair:
		return catalog.Refusal(errs.CatalogRewound)
	case h.suspended == nil && repair:
		return catalog.Refusal(errs.WrongPhase, "uid", "catalog", "phase", "in service")
	}
	return nil
}

func (h *history) grow(attempt string, now time.Time, c *catalog.Change) {
	sum := sha256.New()
	fmt.Fprintln(sum, h.digest, attempt, now.UnixMilli(), c.Seq, c.Items)
	c.Digest = hex.EncodeToString(sum.Sum(nil)[:20])
	h.digest, h.digests[c.Seq] = c.Digest, c.Digest
}

// Generation implements catalog.Store: there is one.
func (s *Store) Generation() (uint64, <-chan struct{}) { return 1, s.history.over }

// Seen implements catalog.Store.
func (s *Store) Seen() catalog.Point {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.head()
}

func (s *Store) head() catalog.Point {
	return catalog.Point{Incarnation: s.incarnation, Seq: s.seq, Digest: s.history.digest}
}

// History implements catalog.Store.
func (s *Store) History(ctx context.Context) (catalog.History, error) {
	if err := s.enter(ctx); err != nil {
		return catalog.History{}, err
	}
	defer s.mu.Unlock()
	h := catalog.History{Head: s.head()}
	if seq := s.seq - s.seq%catalog.MarkEvery; h.Head.Seq >= catalog.MarkEvery && s.history.digests[seq] != "" {
		h.Mark = catalog.Point{Incarnation: s.incarnation, Seq: seq, Digest: s.history.digests[seq]}
	}
	return h, nil
}

// Compare implements catalog.Store.
func (s *Store) Compare(ctx context.Context, p catalog.Point) (catalog.Relation, error) {
	if err := s.enter(ctx); err != nil {
		return "", err
	}
	defer s.mu.Unlock()
	switch {
	case p.Incarnation == "" || p.Seq == 0:
		return catalog.Part, nil
	case p.Incarnation != s.incarnation:
		upto, ancestor := s.history.ancestors[p.Incarnation]
		switch {
		case !ancestor:
			return catalog.Foreign, nil
		case p.Seq > upto:
			return catalog.Lost, nil
		}
		return catalog.Part, nil
	case p.Seq > s.seq:
		return catalog.Lost, nil
	case s.history.digests[p.Seq] == "" && s.history.suspended != nil && p.Seq > s.history.began:
		return catalog.Lost, nil
	case s.history.digests[p.Seq] == "":
		return catalog.Forgotten, nil
	case s.history.digests[p.Seq] != p.Digest:
		return catalog.Lost, nil
	}
	return catalog.Part, nil
}

// Suspend implements catalog.Store.
func (s *Store) Suspend(ctx context.Context, coordinator fence.Epoch, why catalog.Suspension) error {
	if err := why.Validate(); err != nil {
		return err
	}
	if err := s.enter(ctx); err != nil {
		return err
	}
	defer s.mu.Unlock()
	if e := s.checkOwner(fence.Owner{Coordinator: coordinator}); e != nil {
		return e
	}
	w := why.Witness
	switch h := &s.history; {
	case h.suspended == nil:
		why.Since = s.clock()
		h.suspended, h.began = &why, s.seq
	case h.suspended.Witness.Seq < w.Seq:
		h.suspended.Witness = w
	}
	if w.Incarnation != "" {
		s.history.lost[w.Incarnation] = max(s.history.lost[w.Incarnation], w.Seq)
	}
	if s.seq <= w.Seq {
		s.seq = w.Seq + 1
		skipped := catalog.Change{Seq: s.seq}
		s.history.grow("suspended", s.clock(), &skipped)
		s.log = []catalog.Change{skipped}
	}
	return nil
}

// Resume implements catalog.Store.
func (s *Store) Resume(ctx context.Context, coordinator fence.Epoch) error {
	if err := s.enter(ctx); err != nil {
		return err
	}
	defer s.mu.Unlock()
	if e := s.checkOwner(fence.Owner{Coordinator: coordinator}); e != nil {
		return e
	}
	h := &s.history
	if h.suspended == nil {
		return nil
	}
	if id := h.suspended.Restoring; id != "" {
		return catalog.Unfinished(id)
	}
	h.ancestors[s.incarnation] = s.seq
	for inc, seq := range h.lost {
		h.ancestors[inc] = max(h.ancestors[inc], seq)
	}
	clear(h.lost)
	s.incarnation = uuid.NewString()
	s.seq++
	began := catalog.Change{Seq: s.seq}
	h.grow(s.incarnation, s.clock(), &began)
	s.log = append(s.log, began)
	h.suspended = nil
	close(s.grown)
	s.grown = make(chan struct{})
	return nil
}
