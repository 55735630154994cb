package redis

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"

	goredis "github.com/redis/go-redis/v9"

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
	reply, err := s.ask(ctx, deltaScript, []any{string(s.keys), dec(after), size, catalog.DeltaBytes})
	if err != nil {
		return catalog.Delta{}, readError(err)
	}
	d, err := decodeDelta(reply)
	switch {
	case err != nil:
		return catalog.Delta{}, damaged(err, "change log")
	case after > d.Head.Seq || d.Upto == after && d.Head.Seq > after:
		return catalog.Delta{}, catalog.TooOld(after, 0, d.Head.Seq)
	}
	return d, nil
}

func decodeDelta(reply any) (catalog.Delta, error) {
	row, ok := reply.([]any)
	if !ok || len(row) != 5 {
		return catalog.Delta{}, fmt.Errorf("a delta of type %T", reply)
	}
	var text [4]string
	for i := range text {
		text[i], _ = row[i].(string)
	}
	var dec decoder
	d := catalog.Delta{Head: catalog.Point{Incarnation: text[0], Seq: dec.count(text[1]), Digest: text[2]}, Upto: dec.count(text[3])}
	if dec.err != nil {
		return d, dec.err
	}
	records, _ := row[4].([]any)
	for _, r := range records {
		pair, _ := r.([]any)
		if len(pair) != 2 {
			return d, errors.New("a record that is no pair")
		}
		name, _ := pair[0].(string)
		key, err := catalog.ParseKey(name)
		if err != nil {
			return d, err
		}
		flat, _ := pair[1].([]any)
		if len(flat) == 0 {
			d.Gone = append(d.Gone, key)
			continue
		}
		fields := make(map[string]string, len(flat)/2)
		for i := 0; i+1 < len(flat); i += 2 {
			name, _ := flat[i].(string)
			fields[name], _ = flat[i+1].(string)
		}
		rec, err := decodeRecord(key, fields)
		if err != nil {
			return d, err
		}
		d.Records = append(d.Records, rec)
	}
	return d, nil
}

// Ancestors implements catalog.Store.
func (s *Store) Ancestors(ctx context.Context) (map[string]uint64, error) {
	h, err := s.client.HGetAll(ctx, s.keys.one("ancestors")).Result()
	if err != nil {
		return nil, readError(err)
	}
	all := make(map[string]uint64, len(h))
	for inc, upto := range h {
		if all[inc], err = strconv.ParseUint(upto, 10, 64); err != nil {
			return nil, damaged(err, "ancestors")
		}
	}
	return all, nil
}

// BeginRestore implements catalog.Store.
func (s *Store) BeginRestore(ctx context.Context, coordinator fence.Epoch, r catalog.Restore) error {
	if err := r.Validate(); err != nil {
		return err
	}
	kinds := slices.DeleteFunc(catalog.Kinds(), catalog.Kind.ByItself)
	args := []any{string(s.keys), dec(uint64(coordinator)), r.By, r.ID, r.Point.Incarnation, dec(r.Point.Seq), r.Point.Digest, len(kinds)}
	for _, k := range kinds {
		args = append(args, string(k))
	}
	for _, inc := range slices.Sorted(maps.Keys(r.Ancestors)) {
		args = append(args, inc, dec(r.Ancestors[inc]))
	}
	return s.step(ctx, restoreScript, args, coordinator)
}

// EndRestore implements catalog.Store.
func (s *Store) EndRestore(ctx context.Context, coordinator fence.Epoch, id string) error {
	return s.step(ctx, restoredScript, []any{string(s.keys), dec(uint64(coordinator)), id}, coordinator)
}

// step runs a script that takes the catalog from one state to another, and reads why it does not: {2, the backup whose restore is
// unfinished} or {3, a kind of which there are records}.
func (s *Store) step(ctx context.Context, script *goredis.Script, args []any, coordinator fence.Epoch) error {
	reply, err := s.eval(ctx, script, args)
	if err != nil {
		return err
	}
	return stepped(reply, coordinator)
}

// stepped reads the reply to a step.
func stepped(reply any, coordinator fence.Epoch) error {
	if row, ok := reply.([]any); ok && len(row) == 2 {
		why, _ := row[1].(string)
		switch row[0] {
		case int64(2):
			if why == "" {
				return catalog.Refusal(errs.WrongPhase, "uid", "catalog", "phase", "not restoring")
			}
			return catalog.Unfinished(why)
		case int64(3):
			return catalog.NotEmpty(catalog.Kind(why))
		}
	}
	_, err := granted(reply, coordinator)
	return err
}
