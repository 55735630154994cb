package redis

import (
	"context"
	"errors"
	"fmt"

	"github.com/google/uuid"
	goredis "github.com/redis/go-redis/v9"

	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/fence"
	"github.com/dormouse-run/dormouse/pkg/mutant"
)

// Seen implements catalog.Store.
func (s *Store) Seen() catalog.Point {
	if p := s.seen.Load(); p != nil {
		return *p
	}
	return catalog.Point{}
}

// saw takes a point that the server gave out together with a proof that it has what was seen before, if it is further in that
// history. What a server of another incarnation gives out counts only after Compare has shown that it goes on from there.
func (s *Store) saw(p catalog.Point) {
	for p.Seq > 0 {
		old := s.seen.Load()
		if old != nil && (old.Incarnation != p.Incarnation || old.Seq >= p.Seq) {
			return
		}
		if s.seen.CompareAndSwap(old, &p) {
			return
		}
	}
}

// goOn takes up another incarnation that has what was seen.
func (s *Store) goOn(ctx context.Context) error {
	h, err := s.History(ctx)
	if err == nil {
		s.incarnation.Store(&h.Head.Incarnation)
		s.seen.Store(&h.Head)
	}
	return err
}

// History implements catalog.Store.
func (s *Store) History(ctx context.Context) (catalog.History, error) {
	h, relation, err := s.history(ctx)
	if goredis.HasErrorPrefix(err, "NOSCRIPT") {
		if err := compareScript.Load(ctx, s.client).Err(); err != nil {
			return catalog.History{}, readError(err)
		}
		h, relation, err = s.history(ctx)
	}
	if err != nil {
		return catalog.History{}, readError(err)
	}
	// A witness does not forget: a server that came back older, and maybe grew past what it lost, teaches it nothing.
	if !relation.Missing() {
		s.saw(h.Head)
	}
	return h, nil
}

// history reads it, and what the point that was seen is to it, at one moment.
func (s *Store) history(ctx context.Context) (catalog.History, catalog.Relation, error) {
	seen := s.Seen()
	p := s.client.TxPipeline()
	relation := p.EvalSha(ctx, compareScript.Hash(), []string{s.keys.one("seq")}, string(s.keys), seen.Incarnation, dec(seen.Seq), seen.Digest)
	inc := p.Get(ctx, s.keys.one("incarnation"))
	seq := p.Get(ctx, s.keys.one("seq"))
	digest := p.Get(ctx, s.keys.one("digest"))
	mark := p.XRevRangeN(ctx, s.keys.one("marks"), "+", "-", 1)
	if _, err := p.Exec(ctx); err != nil && !errors.Is(err, goredis.Nil) {
		return catalog.History{}, "", err
	}
	n, err := number(seq)
	if err != nil {
		return catalog.History{}, "", err
	}
	h := catalog.History{Head: catalog.Point{Incarnation: inc.Val(), Seq: n, Digest: digest.Val()}}
	if len(mark.Val()) > 0 {
		m := mark.Val()[0]
		h.Mark.Incarnation = inc.Val()
		if _, err := fmt.Sscanf(m.ID, "%d-0", &h.Mark.Seq); err != nil {
			return catalog.History{}, "", damaged(err, "marks")
		}
		h.Mark.Digest, _ = m.Values["h"].(string)
	}
	r, _ := relation.Val().(string)
	return h, catalog.Relation(r), nil
}

// Compare implements catalog.Store.
func (s *Store) Compare(ctx context.Context, p catalog.Point) (catalog.Relation, error) {
	if mutant.On(mutant.StaleView) {
		return catalog.Part, nil
	}
	reply, err := s.ask(ctx, compareScript, []any{string(s.keys), p.Incarnation, dec(p.Seq), p.Digest})
	if err != nil {
		return "", readError(err)
	}
	r, _ := reply.(string)
	switch rel := catalog.Relation(r); rel {
	case catalog.Part:
		if p == s.Seen() && !p.IsZero() {
			if h, err := s.History(ctx); err == nil && h.Head.Incarnation != p.Incarnation {
				return rel, s.goOn(ctx)
			}
		}
		return rel, nil
	case catalog.Lost, catalog.Foreign, catalog.Forgotten:
		return rel, nil
	}
	return "", damaged(fmt.Errorf("a comparison gave %v", reply), "history")
}

// Suspend implements catalog.Store.
func (s *Store) Suspend(ctx context.Context, coordinator fence.Epoch, why catalog.Suspension) error {
	if err := why.Validate(); err != nil {
		return err
	}
	w := why.Witness
	reply, err := s.eval(ctx, suspendScript, []any{string(s.keys), dec(uint64(coordinator)), why.By, w.Incarnation, dec(w.Seq), w.Digest})
	if err != nil {
		return err
	}
	_, err = granted(reply, coordinator)
	return err
}

// Resume implements catalog.Store.
func (s *Store) Resume(ctx context.Context, coordinator fence.Epoch) error {
	var back catalog.Point
	if p := s.putBack.Swap(nil); p != nil { // if it is not there, it is put back anew
		back = *p
	}
	reply, err := s.eval(ctx, resumeScript, []any{string(s.keys), dec(uint64(coordinator)), uuid.NewString(), dec(back.Seq), back.Digest})
	if err != nil {
		return err
	}
	if row, ok := reply.([]any); ok && len(row) == 2 {
		switch row[0] {
		case int64(4):
			return catalog.Refusal(errs.CatalogRewound)
		case int64(5): // this resumed it before, or the server lost the suspension, too
			relation, err := s.Compare(ctx, s.Seen())
			if err == nil && relation.Missing() {
				err = catalog.Refusal(errs.CatalogRewound)
			}
			return err
		}
	}
	if err := stepped(reply, coordinator); err != nil {
		return err
	}
	return s.goOn(ctx) // what was lost is settled
}

func decodeSuspension(h map[string]string) (*catalog.Suspension, error) {
	if len(h) == 0 {
		return nil, nil //nolint:nilnil // in service
	}
	var d decoder
	s := &catalog.Suspension{Since: d.time(h["t"]), By: h["b"], Witness: catalog.Point{Incarnation: h["i"], Seq: d.count(h["s"]), Digest: h["d"]}, At: d.count(h["r"]), Restoring: h["x"]}
	if d.err != nil {
		return nil, damaged(d.err, "suspension")
	}
	return s, nil
}

// generation is one process of the server.
type generation struct {
	number uint64
	runID  string
	server string
	over   chan struct{} // closed when another process was met
}

// Generation implements catalog.Store.
func (s *Store) Generation() (uint64, <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.generation.number, s.generation.over
}

// met notes which process a new connection leads to.
func (s *Store) met(runID, server string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.generation.runID == runID {
		return
	}
	old := s.generation
	s.generation = generation{number: old.number + 1, runID: runID, server: server, over: make(chan struct{})}
	if old.over != nil {
		close(old.over)
	}
}

// connected runs on every new connection of the pool for reads, since a server may come back with other settings, or be another.
func (s *Store) connected(ctx context.Context, cn *goredis.Conn) error {
	_, err := s.meet(ctx, cn)
	return connectError(err)
}

// meet reads what the server at the other end is, and refuses one that is not durable.
func (s *Store) meet(ctx context.Context, cn *goredis.Conn) (map[string]string, error) {
	if err := requireDurable(ctx, cn); err != nil {
		return nil, err
	}
	fields, err := infoFields(ctx, cn, "server")
	if err == nil {
		s.met(fields["run_id"], serverName(fields))
	}
	return fields, err
}
