package redis

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/fence"
)

// Lead implements catalog.Store.
func (s *Store) Lead(ctx context.Context, c catalog.Claim) (catalog.Lease, bool, error) {
	if err := c.Validate(); err != nil {
		return catalog.Lease{}, false, err
	}
	reply, err := s.eval(ctx, leadScript, []any{string(s.keys), c.Holder, c.TTL.Milliseconds(), dec(uint64(c.Above))})
	if err != nil {
		return catalog.Lease{}, false, err
	}
	row, ok := reply.([]any)
	if !ok || len(row) != 4 {
		return catalog.Lease{}, false, lostReply(fmt.Errorf("a claim's reply of type %T", reply))
	}
	mine, _ := row[0].(int64)
	holder, _ := row[1].(string)
	epoch, _ := row[2].(string)
	left, _ := row[3].(int64)
	n, err := strconv.ParseUint(epoch, 10, 64)
	if err != nil {
		return catalog.Lease{}, false, lostReply(err)
	}
	if mine == 1 {
		s.holder.Store(&c.Holder)
	}
	return catalog.Lease{Holder: holder, Epoch: fence.Epoch(n), Left: time.Duration(left) * time.Millisecond}, mine == 1, nil
}

// sender is whom the lease was granted to through this store last, or nobody.
func (s *Store) sender() string {
	if h := s.holder.Load(); h != nil {
		return *h
	}
	return ""
}

// Leader implements catalog.Store.
func (s *Store) Leader(ctx context.Context) (catalog.Lease, error) {
	p := s.client.TxPipeline()
	epoch := p.HGet(ctx, s.keys.one("leader"), "e")
	holder := p.HGet(ctx, s.keys.one("leader"), "h")
	left := p.PTTL(ctx, s.keys.one("lease"))
	if _, err := p.Exec(ctx); err != nil && !errors.Is(err, goredis.Nil) {
		return catalog.Lease{}, readError(err)
	}
	n, err := epochOf(epoch)
	if err != nil {
		return catalog.Lease{}, err
	}
	return catalog.Lease{Holder: holder.Val(), Epoch: n, Left: max(left.Val(), 0)}, nil
}

// Release implements catalog.Store.
func (s *Store) Release(ctx context.Context, holder string, epoch fence.Epoch) error {
	reply, err := s.eval(ctx, releaseScript, []any{string(s.keys), holder, dec(uint64(epoch))})
	if err != nil {
		return err
	}
	_, err = granted(reply, epoch)
	return err
}

// OpenSession implements catalog.Store.
func (s *Store) OpenSession(ctx context.Context, coordinator fence.Epoch, node string, above fence.Epoch) (fence.Epoch, error) {
	if err := catalog.ValidateNode(node); err != nil {
		return 0, err
	}
	reply, err := s.eval(ctx, sessionScript, []any{string(s.keys), dec(uint64(coordinator)), node, dec(uint64(above)), s.sender()})
	if err != nil {
		return 0, err
	}
	return granted(reply, coordinator)
}

// granted reads {1, epoch}, or {0, epoch in force} for a caller that is fenced.
func granted(reply any, asked fence.Epoch) (fence.Epoch, error) {
	row, ok := reply.([]any)
	if !ok || len(row) != 2 {
		return 0, lostReply(fmt.Errorf("a reply of type %T", reply))
	}
	text, _ := row[1].(string)
	n, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		return 0, lostReply(err)
	}
	if yes, _ := row[0].(int64); yes != 1 {
		return 0, catalog.Refusal(errs.Fenced, "epoch", dec(uint64(asked)), "current_epoch", text)
	}
	return fence.Epoch(n), nil
}

// SessionEpoch implements catalog.Store.
func (s *Store) SessionEpoch(ctx context.Context, node string) (fence.Epoch, error) {
	if err := catalog.ValidateNode(node); err != nil {
		return 0, err
	}
	return epochOf(s.client.HGet(ctx, s.keys.one("sessions"), node))
}
