package redis

import (
	"context"
	"errors"
	"slices"
	"strings"

	goredis "github.com/redis/go-redis/v9"

	"github.com/dormouse-run/dormouse/pkg/catalog"
)

// scanBudget is how many index entries one List looks at before it returns a short page.
const scanBudget = 2000

// Get implements catalog.Reader.
func (s *Store) Get(ctx context.Context, key catalog.Key) (catalog.Record, error) {
	if err := key.Validate(); err != nil {
		return catalog.Record{}, err
	}
	h, err := s.client.HGetAll(ctx, s.keys.record(key)).Result()
	if err != nil {
		return catalog.Record{}, readError(err)
	}
	if len(h) == 0 {
		return catalog.Record{}, catalog.NotFound(key.Kind, key.UID)
	}
	return decodeRecord(key, h)
}

// GetByName implements catalog.Reader.
func (s *Store) GetByName(ctx context.Context, tenant string, kind catalog.Kind, name string) (catalog.Record, error) {
	if err := catalog.ValidateScope(tenant, kind); err != nil {
		return catalog.Record{}, err
	}
	index := s.keys.key("n", tenant+"/"+string(kind))
	// The name may move between the two reads. Following it a few times ends with a record that
	// held the name at some instant of the call, or with none.
	for range 3 {
		uid, err := s.client.HGet(ctx, index, name).Result()
		if errors.Is(err, goredis.Nil) {
			return catalog.Record{}, catalog.NotFound(kind, name)
		}
		if err != nil {
			return catalog.Record{}, readError(err)
		}
		key := catalog.Key{Tenant: tenant, Kind: kind, UID: uid}
		many, err := s.fetch(ctx, []catalog.Key{key})
		if err != nil {
			return catalog.Record{}, err
		}
		if r, ok := many[key]; ok && r.Name == name {
			return r, nil
		}
	}
	return catalog.Record{}, catalog.NotFound(kind, name)
}

// GetMany implements catalog.Reader.
func (s *Store) GetMany(ctx context.Context, keys []catalog.Key) (map[catalog.Key]catalog.Record, error) {
	if err := catalog.ValidateKeys(keys); err != nil {
		return nil, err
	}
	return s.fetch(ctx, keys)
}

// Living implements catalog.Reader.
func (s *Store) Living(ctx context.Context, keys []catalog.Key) (map[catalog.Key]bool, error) {
	if err := catalog.ValidateKeys(keys); err != nil {
		return nil, err
	}
	living := make(map[catalog.Key]bool, len(keys))
	if len(keys) == 0 {
		return living, nil
	}
	p := s.client.Pipeline()
	cmds := make([]*goredis.IntCmd, len(keys))
	for i, k := range keys {
		cmds[i] = p.Exists(ctx, s.keys.record(k))
	}
	if _, err := p.Exec(ctx); err != nil {
		return nil, readError(err)
	}
	for i, k := range keys {
		if cmds[i].Val() > 0 {
			living[k] = true
		}
	}
	return living, nil
}

func (s *Store) fetch(ctx context.Context, keys []catalog.Key) (map[catalog.Key]catalog.Record, error) {
	found := make(map[catalog.Key]catalog.Record, len(keys))
	if len(keys) == 0 {
		return found, nil
	}
	p := s.client.Pipeline()
	cmds := make([]*goredis.MapStringStringCmd, len(keys))
	for i, k := range keys {
		cmds[i] = p.HGetAll(ctx, s.keys.record(k))
	}
	if _, err := p.Exec(ctx); err != nil {
		return nil, readError(err)
	}
	for i, k := range keys {
		if h := cmds[i].Val(); len(h) > 0 {
			r, err := decodeRecord(k, h)
			if err != nil {
				return nil, err
			}
			found[k] = r
		}
	}
	return found, nil
}

// index says which zset lists the query, and how its members name a record.
func (s *Store) index(q catalog.Query) (name string, member func(string) (catalog.Key, bool)) {
	if q.Tenant != "" && q.Node == "" {
		return s.keys.key("i", q.Tenant+"/"+string(q.Kind)), func(m string) (catalog.Key, bool) {
			return catalog.Key{Tenant: q.Tenant, Kind: q.Kind, UID: m}, true
		}
	}
	both := func(m string) (catalog.Key, bool) {
		uid, tenant, _ := strings.Cut(m, "/")
		return catalog.Key{Tenant: tenant, Kind: q.Kind, UID: uid}, q.Tenant == "" || q.Tenant == tenant
	}
	if q.Node != "" {
		return s.keys.key("o", q.Node+"/"+string(q.Kind)), both
	}
	return s.keys.key("k", string(q.Kind)), both
}

// List implements catalog.Reader.
func (s *Store) List(ctx context.Context, q catalog.Query) (catalog.Page, error) {
	size, err := q.Validate()
	if err != nil {
		return catalog.Page{}, err
	}
	index, keyOf := s.index(q)
	var page catalog.Page
	after, bytes := q.After, 0
	for scanned := 0; scanned < scanBudget; {
		// In small steps, so that little is read in vain when bodies are large.
		step := min(size-len(page.Records), 50)
		if len(q.Phases) > 0 {
			step = 100
		}
		members, err := s.after(ctx, index, after, step)
		if err != nil {
			return catalog.Page{}, err
		}
		found, err := s.candidates(ctx, members, keyOf, q.Phases)
		if err != nil {
			return catalog.Page{}, err
		}
		for i, m := range members {
			key, _ := keyOf(m)
			r, ok := found[key]
			// What changed since the index was read no longer belongs here.
			if !ok || !q.Matches(&r) {
				continue
			}
			page.Records = append(page.Records, r)
			bytes += len(r.Body)
			if len(page.Records) == size || bytes >= catalog.MaxPageBytes/2 {
				if last := i == len(members)-1 && len(members) < step; !last {
					page.Next = m
				}
				return page, nil
			}
		}
		if len(members) < step {
			return page, nil
		}
		scanned += len(members)
		after = members[len(members)-1]
	}
	page.Next = after
	return page, nil
}

// candidates fetches the records of the members, those in other phases left out.
func (s *Store) candidates(ctx context.Context, members []string, keyOf func(string) (catalog.Key, bool), phases []string) (map[catalog.Key]catalog.Record, error) {
	keys := make([]catalog.Key, 0, len(members))
	for _, m := range members {
		if k, ok := keyOf(m); ok {
			keys = append(keys, k)
		}
	}
	keys, err := s.inPhases(ctx, keys, phases)
	if err != nil {
		return nil, err
	}
	return s.fetch(ctx, keys)
}

func (s *Store) after(ctx context.Context, index, after string, count int) ([]string, error) {
	members, err := s.client.ZRangeArgs(ctx, namesAfter(index, after, count)).Result()
	if err != nil {
		return nil, readError(err)
	}
	return members, nil
}

// namesAfter is the range of an index that follows a name.
func namesAfter(index, after string, count int) goredis.ZRangeArgs {
	lower := "-"
	if after != "" {
		lower = "(" + after
	}
	return goredis.ZRangeArgs{Key: index, Start: lower, Stop: "+", ByLex: true, Count: int64(count)}
}

func (s *Store) inPhases(ctx context.Context, keys []catalog.Key, phases []string) ([]catalog.Key, error) {
	if len(phases) == 0 || len(keys) == 0 {
		return keys, nil
	}
	p := s.client.Pipeline()
	cmds := make([]*goredis.StringCmd, len(keys))
	for i, k := range keys {
		cmds[i] = p.HGet(ctx, s.keys.record(k), "p")
	}
	if _, err := p.Exec(ctx); err != nil && !errors.Is(err, goredis.Nil) {
		return nil, readError(err)
	}
	kept := keys[:0]
	for i, k := range keys {
		if cmds[i].Err() == nil && slices.Contains(phases, cmds[i].Val()) {
			kept = append(kept, k)
		}
	}
	return kept, nil
}

// Referrers implements catalog.Reader.
func (s *Store) Referrers(ctx context.Context, target catalog.Key, after string, limit int) (catalog.Holders, error) {
	size, err := catalog.PageSize(limit)
	if err == nil {
		err = target.Validate()
	}
	if err != nil {
		return catalog.Holders{}, err
	}
	// In one step, so that the page, its modes and the count are of one moment: holders come and go.
	// Attachments are all shared, or one that is exclusive; so all scores are the same, and the range
	// by name that gives the page's holders gives their attachments too.
	refs, attached := s.keys.key("f", target.String()), s.keys.key("a", target.String())
	p := s.client.TxPipeline()
	named := p.ZRangeArgs(ctx, namesAfter(refs, after, size))
	count := p.ZCard(ctx, refs)
	attaching := p.ZRangeArgs(ctx, namesAfter(attached, after, size))
	exclusive := p.ZRangeByScore(ctx, attached, &goredis.ZRangeBy{Min: "2", Max: "2", Count: 1})
	if _, err := p.Exec(ctx); err != nil {
		return catalog.Holders{}, readError(err)
	}
	members := named.Val()
	page := catalog.Holders{Count: int(count.Val())}
	for _, m := range members {
		key, err := catalog.ParseKey(m)
		if err != nil {
			return catalog.Holders{}, damaged(err, "index of references to "+target.String())
		}
		mode := catalog.Reference
		switch {
		case slices.Contains(exclusive.Val(), m):
			mode = catalog.Exclusive
		case slices.Contains(attaching.Val(), m):
			mode = catalog.Shared
		}
		page.Holders = append(page.Holders, catalog.Holder{Key: key, Mode: mode})
	}
	if len(members) == size {
		page.Next = members[size-1]
	}
	return page, nil
}

// Receipt implements catalog.Reader.
func (s *Store) Receipt(ctx context.Context, tenant, id string) (catalog.Receipt, bool, error) {
	raw, err := s.client.Get(ctx, s.keys.key("c", tenant+"/"+id)).Result()
	if errors.Is(err, goredis.Nil) {
		return catalog.Receipt{}, false, nil
	}
	if err != nil {
		return catalog.Receipt{}, false, readError(err)
	}
	receipt, err := decodeReceipt(tenant, id, raw)
	return receipt, err == nil, err
}
