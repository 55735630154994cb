package memory

import (
	"context"
	"maps"
	"slices"

	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/fence"
)

// Delta implements catalog.Store.
func (s *Store) Delta(ctx context.Context, after uint64, limit int) (catalog.Delta, error) {
	size, err := catalog.PageSize(limit)
	if err != nil {
		return catalog.Delta{}, err
	}
	if err := s.enter(ctx); err != nil {
		return catalog.Delta{}, err
	}
	defer s.mu.Unlock()
	oldest := s.seq - uint64(len(s.log)) + 1
	if after > s.seq || after+1 < oldest {
		return catalog.Delta{}, catalog.TooOld(after, oldest, s.seq)
	}
	d := catalog.Delta{Head: s.head(), Upto: after}
	seen, bytes := make(map[catalog.Key]bool), 0
	for _, c := range s.log[after+1-oldest:] {
		for _, item := range c.Items {
			if seen[item.Key] {
				continue
			}
			seen[item.Key] = true
			if r, ok := s.records[item.Key]; ok {
				d.Records, bytes = append(d.Records, clone(r)), bytes+len(r.Body)
			} else {
				d.Gone = append(d.Gone, item.Key)
			}
		}
		d.Upto = c.Seq
		if d.Upto-after == uint64(size) || bytes >= catalog.DeltaBytes {
			break
		}
	}
	return d, nil
}

// Ancestors implements catalog.Store.
func (s *Store) Ancestors(ctx context.Context) (map[string]uint64, error) {
	if err := s.enter(ctx); err != nil {
		return nil, err
	}
	defer s.mu.Unlock()
	return maps.Clone(s.history.ancestors), nil
}

// BeginRestore implements catalog.Store.
func (s *Store) BeginRestore(ctx context.Context, coordinator fence.Epoch, r catalog.Restore) error {
	if err := r.Validate(); err != nil {
		return err
	}
	if err := s.enter(ctx); err != nil {
		return err
	}
	defer s.mu.Unlock()
	if e := s.checkOwner(fence.Owner{Coordinator: coordinator}); e != nil {
		return e
	}
	h := &s.history
	if h.suspended != nil && h.suspended.Restoring != "" {
		if h.suspended.Restoring == r.ID {
			return nil
		}
		return catalog.Unfinished(h.suspended.Restoring)
	}
	if h.suspended != nil && h.restored == r.ID {
		return nil
	}
	for _, kind := range slices.DeleteFunc(catalog.Kinds(), catalog.Kind.ByItself) {
		for k := range s.records {
			if k.Kind == kind {
				return catalog.NotEmpty(kind)
			}
		}
	}
	switch {
	case h.suspended == nil:
		h.suspended, h.began = &catalog.Suspension{Since: s.clock(), By: r.By, Witness: r.Point}, s.seq
	case h.suspended.Witness.Seq < r.Point.Seq:
		h.suspended.Witness = r.Point
	}
	h.suspended.Restoring, h.backed = r.ID, r.Point.Seq
	s.adopt(r.Point.Incarnation, r.Point.Seq)
	for inc, upto := range r.Ancestors {
		s.adopt(inc, upto)
	}
	if s.seq <= r.Point.Seq {
		s.seq = r.Point.Seq + 1
		skipped := catalog.Change{Seq: s.seq}
		h.grow("restoring", s.clock(), &skipped)
		s.log = []catalog.Change{skipped}
	}
	return nil
}

// adopt makes another incarnation an ancestor, up to a sequence.
func (s *Store) adopt(inc string, upto uint64) {
	if has, ok := s.history.ancestors[inc]; inc != s.incarnation && (!ok || has < upto) {
		s.history.ancestors[inc] = upto
	}
}

// EndRestore implements catalog.Store.
func (s *Store) EndRestore(ctx context.Context, coordinator fence.Epoch, id string) error {
	if err := s.enter(ctx); err != nil {
		return err
	}
	defer s.mu.Unlock()
	if e := s.checkOwner(fence.Owner{Coordinator: coordinator}); e != nil {
		return e
	}
	h := &s.history
	restoring := ""
	if h.suspended != nil {
		restoring = h.suspended.Restoring
	}
	switch {
	case restoring == id && id != "":
		h.suspended.Restoring, h.began, h.restored = "", h.backed, id
		return nil
	case restoring != "":
		return catalog.Unfinished(restoring)
	case h.restored == id && id != "":
		return nil
	}
	return catalog.Refusal(errs.WrongPhase, "uid", "catalog", "phase", "not restoring")
}
