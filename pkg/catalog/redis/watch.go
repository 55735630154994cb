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
	"github.com/dormouse-run/dormouse/pkg/fence"
)

// pollSlice bounds one blocking read, since a context's cancellation does not interrupt it.
const pollSlice = 500 * time.Millisecond

// Changes implements catalog.Store.
func (s *Store) Changes(ctx context.Context, after uint64, limit int, block time.Duration) ([]catalog.Change, error) {
	size, err := catalog.PageSize(limit)
	if err != nil {
		return nil, err
	}
	seq, err := s.Seq(ctx)
	if err != nil {
		return nil, err
	}
	if after > seq {
		return nil, catalog.TooOld(after, 0, seq)
	}
	for wait := block; ; wait -= pollSlice {
		if err := ctx.Err(); err != nil {
			return nil, readError(err)
		}
		a := &goredis.XReadArgs{Streams: []string{s.keys.one("log"), dec(after) + "-0"}, Count: int64(size), Block: -1}
		if wait > 0 {
			a.Block = max(min(wait, pollSlice), time.Millisecond)
		}
		streams, err := s.client.XRead(ctx, a).Result()
		if err != nil && !errors.Is(err, goredis.Nil) {
			return nil, readError(err)
		}
		if err == nil {
			return decodeChanges(after, seq, streams[0].Messages)
		}
		if seq > after {
			return nil, catalog.TooOld(after, seq+1, seq) // the commits are there, their log is not
		}
		if wait <= pollSlice {
			return nil, nil
		}
	}
}

func decodeChanges(after, seq uint64, messages []goredis.XMessage) ([]catalog.Change, error) {
	changes := make([]catalog.Change, 0, len(messages))
	for _, m := range messages {
		id, _, _ := strings.Cut(m.ID, "-")
		n, err := strconv.ParseUint(id, 10, 64)
		if err != nil {
			return nil, damaged(err, "change log")
		}
		if n != after+1+uint64(len(changes)) {
			if len(changes) > 0 {
				return changes, nil // a repair took the sequence further; who goes on from here is told
			}
			return nil, catalog.TooOld(after, n, max(seq, n))
		}
		c := catalog.Change{Seq: n}
		c.Digest, _ = m.Values["h"].(string)
		items, _ := m.Values["i"].(string)
		for line := range strings.Lines(items) {
			item, err := decodeItem(strings.TrimSuffix(line, "\n"))
			if err != nil {
				return nil, damaged(err, "change log")
			}
			c.Items = append(c.Items, item)
		}
		changes = append(changes, c)
	}
	return changes, nil
}

// decodeItem reads "p KEY revision phase node", or the same with d.
func decodeItem(line string) (catalog.ChangedRecord, error) {
	f := strings.Split(line, " ")
	if len(f) != 5 {
		return catalog.ChangedRecord{}, fmt.Errorf("a change of %d fields", len(f))
	}
	key, err := catalog.ParseKey(f[1])
	if err != nil {
		return catalog.ChangedRecord{}, err
	}
	d := decoder{}
	c := catalog.ChangedRecord{Key: key, Revision: d.count(f[2]), Phase: f[3], Node: f[4], Deleted: f[0] == "d"}
	return c, d.err
}

// Seq implements catalog.Store.
func (s *Store) Seq(ctx context.Context) (uint64, error) {
	return number(s.client.Get(ctx, s.keys.one("seq")))
}

// number reads a counter; one that is not there yet is 0.
func number(cmd *goredis.StringCmd) (uint64, error) {
	n, err := cmd.Uint64()
	if err != nil && !errors.Is(err, goredis.Nil) {
		return 0, readError(err)
	}
	return n, nil
}

func epochOf(cmd *goredis.StringCmd) (fence.Epoch, error) {
	n, err := number(cmd)
	return fence.Epoch(n), err
}
