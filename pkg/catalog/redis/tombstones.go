package redis

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/mutant"
)

// Schema is the form that a catalog's keys have. A catalog of an earlier one is brought to it when it is opened, in steps each of
// which leaves a whole catalog; one of a later one is refused.
//
//	1  a tombstone is a hash, in two indexes
//	2  a tombstone is a member of a zset, and in the line of those to be forgotten
const Schema = 2

// migrateStep is how many tombstones one call brings to today's form.
const migrateStep = 500

// adopt brings the catalog to Schema, or refuses it. A coordinator of the version before, which stands by or leads still, may go on
// to write tombstones in its way: Compact brings those along.
func (s *Store) adopt(ctx context.Context) error {
	key := s.keys.one("schema")
	has, err := s.client.Get(ctx, key).Result()
	if err != nil && !errors.Is(err, goredis.Nil) {
		return readError(err)
	}
	if has != "" {
		n, err := strconv.Atoi(has)
		switch {
		case err != nil:
			return damaged(err, "schema")
		case n > Schema:
			return errs.New(errs.NotSupported, "the catalog has schema %d, this coordinator knows %d; run the newer version", n, Schema).With("feature", "catalog schema")
		case n == Schema:
			return nil
		}
	}
	if err := s.migrate(ctx); err != nil {
		return err
	}
	if err := s.writer.Set(ctx, key, Schema, 0).Err(); err != nil {
		return writeError(err)
	}
	return nil
}

// migrate may be repeated and run beside others.
func (s *Store) migrate(ctx context.Context) error {
	for {
		left, err := s.eval(ctx, migrateScript, []any{string(s.keys), migrateStep})
		if err != nil {
			return err
		}
		if n, _ := left.(int64); n == 0 {
			return nil
		}
	}
}

// Compact implements catalog.Store.
func (s *Store) Compact(ctx context.Context, limit int) (int, error) {
	limit, err := catalog.PageSize(limit)
	if err != nil {
		return 0, err
	}
	reply, err := s.eval(ctx, compactScript, []any{string(s.keys), limit})
	if err != nil {
		return 0, err
	}
	row, _ := reply.([]any)
	if len(row) != 2 {
		return 0, lostReply(fmt.Errorf("compaction gave %v", reply))
	}
	if old, _ := row[1].(int64); old > 0 {
		err = s.migrate(ctx)
	}
	n, _ := row[0].(int64)
	return int(n), err
}

// members reads tombstones and the server's time.
func (s *Store) members(ctx context.Context, tenant string, kind catalog.Kind, from, to string, count int) ([]string, time.Time, error) {
	p := s.client.Pipeline()
	found := p.ZRangeArgs(ctx, goredis.ZRangeArgs{Key: s.keys.key("t", tenant+"/"+string(kind)), Start: from, Stop: to, ByLex: true, Count: int64(count)})
	now := p.Time(ctx)
	if _, err := p.Exec(ctx); err != nil {
		return nil, time.Time{}, readError(err)
	}
	return found.Val(), now.Val(), nil
}

// Tombstone implements catalog.Store.
func (s *Store) Tombstone(ctx context.Context, key catalog.Key) (catalog.Tombstone, error) {
	if err := key.Validate(); err != nil {
		return catalog.Tombstone{}, err
	}
	found, now, err := s.members(ctx, key.Tenant, key.Kind, "["+key.UID+" ", "("+key.UID+"!", 1)
	if err != nil {
		return catalog.Tombstone{}, err
	}
	if len(found) == 0 || mutant.On(mutant.NoTombstone) {
		return catalog.Tombstone{}, catalog.NotFound(key.Kind, key.UID)
	}
	t, err := decodeTombstone(key.Tenant, key.Kind, found[0])
	if err == nil && !now.Before(t.Expires) {
		return catalog.Tombstone{}, catalog.NotFound(key.Kind, key.UID)
	}
	return t, err
}

// ListTombstones implements catalog.Store.
func (s *Store) ListTombstones(ctx context.Context, tenant string, kind catalog.Kind, after string, limit int) (catalog.Tombstones, error) {
	size, err := catalog.PageSize(limit)
	if err == nil {
		err = catalog.ValidateScope(tenant, kind)
	}
	if err != nil {
		return catalog.Tombstones{}, err
	}
	from := "-"
	if after != "" {
		from = "[" + after + "!"
	}
	found, now, err := s.members(ctx, tenant, kind, from, "+", size)
	if err != nil {
		return catalog.Tombstones{}, err
	}
	var page catalog.Tombstones
	for _, member := range found {
		t, err := decodeTombstone(tenant, kind, member)
		if err != nil {
			return catalog.Tombstones{}, err
		}
		page.Next = t.Key.UID
		if now.Before(t.Expires) {
			page.Tombstones = append(page.Tombstones, t)
		}
	}
	if len(found) < size {
		page.Next = ""
	}
	return page, nil
}

// decodeTombstone reads a member of t:TENANT/KIND. In the order of bytes a space comes before all that a uid has, and '!' next:
// so members are in the order of their uids.
func decodeTombstone(tenant string, kind catalog.Kind, member string) (catalog.Tombstone, error) {
	fields := strings.SplitN(member, " ", 6)
	key := catalog.Key{Tenant: tenant, Kind: kind, UID: fields[0]}
	if len(fields) != 6 {
		return catalog.Tombstone{}, damaged(fmt.Errorf("%d fields", len(fields)), "tombstone "+key.String())
	}
	var d decoder
	t := catalog.Tombstone{Key: key, Revision: d.count(fields[1]), Seq: d.count(fields[2]), At: d.time(fields[3]), Body: []byte(fields[5])}
	t.Expires = t.At.Add(time.Duration(d.count(fields[4])) * time.Millisecond)
	if d.err != nil {
		return catalog.Tombstone{}, damaged(d.err, "tombstone "+key.String())
	}
	return t, nil
}
