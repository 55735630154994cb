package redis_test

import (
	"fmt"
	"slices"
	"strconv"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/catalog/catalogtest"
	"github.com/dormouse-run/dormouse/pkg/catalog/redis"
	"github.com/dormouse-run/dormouse/pkg/catalog/redis/redistest"
	"github.com/dormouse-run/dormouse/pkg/errs"
)

// buryOld writes tombstones as the first schema had them.
func buryOld(t *testing.T, client *goredis.Client, at time.Time, life time.Duration, uids ...string) {
	t.Helper()
	p := client.TxPipeline()
	for i, u := range uids {
		key := catalogtest.Snapshot(u).String()
		expires := at.Add(life).UnixMilli()
		p.HSet(t.Context(), "{dormouse}:t:"+key, "v", 3, "s", 100+i, "b", "trace of "+u, "a", at.UnixMilli(), "e", expires)
		p.PExpireAt(t.Context(), "{dormouse}:t:"+key, at.Add(life))
		p.ZAdd(t.Context(), "{dormouse}:ti:acme/snapshot", goredis.Z{Member: u})
		p.ZAdd(t.Context(), "{dormouse}:tx", goredis.Z{Score: float64(expires), Member: key})
	}
	if _, err := p.Exec(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// A catalog of the first schema is brought to today's when it is opened: no tombstone is lost, none gets more time, and what a coordinator of
// the version before writes beside a new one comes along.
func TestSchema_TombstonesOfTheFirstAreBroughtAlong(t *testing.T) {
	redistest.Each(t, tombstonesAreBroughtAlong)
}

func tombstonesAreBroughtAlong(t *testing.T, p redistest.Program) {
	server := p.Start(t)
	client := raw(t, server)
	now := time.Now().Truncate(time.Millisecond).UTC()
	var many []string
	for i := range 1200 {
		many = append(many, fmt.Sprintf("old-%06d", i))
	}
	buryOld(t, client, now, time.Hour, many...)
	s := open(t, redis.Options{Address: server.Socket})
	if st, err := s.Status(t.Context()); err != nil || st.Tombstones != len(many) {
		t.Fatalf("%+v, %v", st, err)
	}
	one, err := s.Tombstone(t.Context(), catalogtest.Snapshot("old-000007"))
	if err != nil || one.Revision != 3 || one.Seq != 107 || string(one.Body) != "trace of old-000007" || !one.At.Equal(now) || !one.Expires.Equal(now.Add(time.Hour)) {
		t.Errorf("%+v, %v", one, err)
	}
	var listed []string
	for after := ""; ; {
		page, err := s.ListTombstones(t.Context(), "acme", catalog.KindSnapshot, after, 500)
		if err != nil {
			t.Fatal(err)
		}
		for _, one := range page.Tombstones {
			listed = append(listed, one.Key.UID)
		}
		if after = page.Next; after == "" {
			break
		}
	}
	if !slices.Equal(listed, many) {
		t.Errorf("%d are listed, of %d", len(listed), len(many))
	}

	// An old one stands beside it, and its clock differs.
	buryOld(t, client, now.Add(-2*time.Hour), time.Hour+time.Minute, "late")
	buryOld(t, client, now, time.Hour, "later")
	if n, err := s.Compact(t.Context(), 500); err != nil || n != 0 {
		t.Errorf("forgot %d, %v", n, err)
	}
	if _, err := s.Tombstone(t.Context(), catalogtest.Snapshot("later")); err != nil {
		t.Error(err)
	}
	if _, err := s.Tombstone(t.Context(), catalogtest.Snapshot("late")); !errs.Has(err, errs.ObjectNotFound) {
		t.Errorf("one whose time is over: %v", err)
	}
	keys, err := client.Keys(t.Context(), "{dormouse}:t*").Result()
	slices.Sort(keys)
	if want := []string{"{dormouse}:t:acme/snapshot", "{dormouse}:tl"}; err != nil || !slices.Equal(keys, want) {
		t.Errorf("left are %q, want %q (%v)", keys, want, err)
	}
}

// A catalog that a later version wrote is refused, not guessed at.
func TestSchema_OfALaterVersionIsRefused(t *testing.T) {
	server := redistest.Start(t)
	client := raw(t, server)
	if err := open(t, redis.Options{Address: server.Socket}).Close(); err != nil {
		t.Fatal(err)
	}
	if has, err := client.Get(t.Context(), "{dormouse}:schema").Result(); err != nil || has != strconv.Itoa(redis.Schema) {
		t.Errorf("schema %q, %v", has, err)
	}
	if err := client.Set(t.Context(), "{dormouse}:schema", redis.Schema+1, 0).Err(); err != nil {
		t.Fatal(err)
	}
	if s, err := redis.Open(t.Context(), redis.Options{Address: server.Socket}); !errs.Has(err, errs.NotSupported) {
		t.Errorf("%v, %v", s, err)
	}
}

// Where the retention was shortened, a tombstone is unseen once its time is over, and forgotten after those that were promised longer.
func TestC28_AShorterRetention(t *testing.T) {
	server := redistest.Start(t)
	long := catalogtest.NewFixture(t, open(t, redis.Options{Address: server.Socket, Retention: catalog.Retention{Tombstones: time.Hour}}))
	brief := open(t, redis.Options{Address: server.Socket, Retention: catalog.Retention{Tombstones: time.Millisecond}})
	volume := catalogtest.Volume("v")
	long.Must(catalogtest.Create(volume))
	bury(t, long, long.Store, "long", 2, volume)
	bury(t, long, brief, "brief", 2, volume)
	catalogtest.Eventually(t, "its time is over", func() bool {
		_, err := brief.Tombstone(t.Context(), catalogtest.Snapshot("brief-000001"))
		return errs.Has(err, errs.ObjectNotFound)
	})
	page, err := brief.ListTombstones(t.Context(), "acme", catalog.KindSnapshot, "", 2)
	if err != nil || len(page.Tombstones) != 0 || page.Next != "brief-000001" {
		t.Errorf("%+v, %v", page, err)
	}
	if page, err = brief.ListTombstones(t.Context(), "acme", catalog.KindSnapshot, page.Next, 3); err != nil || len(page.Tombstones) != 2 || page.Next != "" {
		t.Errorf("%+v, %v", page, err)
	}
	if n, err := brief.Compact(t.Context(), 500); err != nil || n != 0 {
		t.Errorf("forgot %d, %v", n, err)
	}
	if st, err := brief.Status(t.Context()); err != nil || st.Tombstones != 4 {
		t.Errorf("%+v, %v", st, err)
	}
}
