package redis_test

import (
	"bufio"
	"fmt"
	"io"
	"maps"
	"net"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/catalog/catalogtest"
	"github.com/dormouse-run/dormouse/pkg/catalog/redis"
	"github.com/dormouse-run/dormouse/pkg/catalog/redis/redistest"
)

// bill is what the server did for something: the commands that it ran, those inside scripts too, and the bytes that it took
// and gave.
type bill struct {
	calls   map[string]int64
	in, out int64
}

// billed runs something and gives its bill.
func billed(t *testing.T, client *goredis.Client, run func()) bill {
	t.Helper()
	if err := client.ConfigResetStat(t.Context()).Err(); err != nil {
		t.Fatal(err)
	}
	run()
	info, err := client.Info(t.Context(), "commandstats", "stats").Result()
	if err != nil {
		t.Fatal(err)
	}
	b := bill{calls: make(map[string]int64)}
	for line := range strings.Lines(info) {
		name, rest, _ := strings.Cut(strings.TrimSpace(line), ":")
		switch {
		case name == "total_net_input_bytes":
			b.in, err = strconv.ParseInt(rest, 10, 64)
		case name == "total_net_output_bytes":
			b.out, err = strconv.ParseInt(rest, 10, 64)
		case strings.HasPrefix(name, "cmdstat_") && name != "cmdstat_info" && !strings.Contains(name, "config"):
			n, _, _ := strings.Cut(strings.TrimPrefix(rest, "calls="), ",")
			b.calls[strings.TrimPrefix(name, "cmdstat_")], err = strconv.ParseInt(n, 10, 64)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return b
}

// near allows what numbers with more digits make longer.
func near(a, b int64) bool { return max(a, b)-min(a, b) <= 128+max(a, b)/50 }

// bury makes and deletes n snapshots that refer to a volume, with tombstones.
func bury(t *testing.T, f *catalogtest.Fixture, s catalog.Store, name string, n int, to catalog.Key) {
	t.Helper()
	const each, calls = 250, 20 // commits are large, and a call has several: each is synced once
	var batch []catalog.Commit
	send := func() {
		results, err := s.Commit(t.Context(), batch)
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range results {
			if r.Err != nil {
				t.Fatal(r.Err)
			}
		}
		batch = nil
	}
	for done := 0; done < n; done += each {
		create, remove := catalog.Commit{Owner: f.Owner}, catalog.Commit{Owner: f.Owner}
		for i := done; i < min(done+each, n); i++ {
			key := catalogtest.Snapshot(fmt.Sprintf("%s-%06d", name, i))
			create.Puts = append(create.Puts, catalogtest.Create(key, catalogtest.To(to, catalog.Reference)))
			remove.Deletes = append(remove.Deletes, catalog.Delete{Key: key, ExpectRevision: 1, Tombstone: true, Body: []byte("trace")})
		}
		if batch = append(batch, create, remove); len(batch) == calls {
			send()
		}
	}
	if len(batch) > 0 {
		send()
	}
}

// C10: publishing, listing, deleting, asking what a collector asks, and a pass that forgets tombstones cost the same with none
// and with 100,000 of them: in commands, in bytes and in allocations.
func TestC10_CostIsIndependentOfTombstones(t *testing.T) {
	const many = 100_000
	server := redistest.Start(t)
	f := catalogtest.NewFixture(t, open(t, redis.Options{Address: server.Socket}))
	client := raw(t, server)
	volume := catalogtest.Volume("v")
	f.Must(catalogtest.Create(volume))
	var kept []catalog.Key
	for i := range 100 {
		key := catalogtest.Snapshot(fmt.Sprintf("kept-%03d", i))
		f.Must(catalogtest.Create(key, catalogtest.To(volume, catalog.Reference)))
		kept = append(kept, key)
	}
	round := 0
	steps := map[string]func(){
		"publish": func() {
			round++
			f.Must(catalogtest.Create(catalogtest.Snapshot(fmt.Sprintf("made-%06d", round)), catalogtest.To(volume, catalog.Reference)))
		},
		"delete": func() {
			if r := f.One(catalog.Commit{Deletes: []catalog.Delete{{Key: catalogtest.Snapshot(fmt.Sprintf("made-%06d", round)), ExpectRevision: 1, Tombstone: true}}}); r.Err != nil {
				t.Fatal(r.Err)
			}
		},
		"list": func() {
			page, err := f.List(t.Context(), catalog.Query{Kind: catalog.KindSnapshot, PageSize: len(kept)})
			if err != nil || len(page.Records) != len(kept) {
				t.Fatal(len(page.Records), err)
			}
		},
		"collect": func() {
			have, err := f.GetMany(t.Context(), kept)
			if err != nil || len(have) != len(kept) {
				t.Fatal(len(have), err)
			}
			if _, err := f.Status(t.Context()); err != nil {
				t.Fatal(err)
			}
			if n, err := f.Compact(t.Context(), catalog.MaxPage); err != nil || n != 0 {
				t.Fatal(n, err)
			}
		},
	}
	order := []string{"publish", "list", "collect", "delete"}
	measure := func() (bills map[string]bill, allocs map[string]uint64) {
		bills, allocs = make(map[string]bill), make(map[string]uint64)
		for range 2 { // the first time there are connections and scripts to be made
			for _, name := range order {
				bills[name] = billed(t, client, steps[name])
			}
		}
		const rounds = 20
		var before, after runtime.MemStats
		for range rounds {
			for _, name := range order {
				runtime.ReadMemStats(&before)
				steps[name]()
				runtime.ReadMemStats(&after)
				allocs[name] += (after.Mallocs - before.Mallocs)
			}
		}
		return bills, allocs
	}
	none, allocNone := measure()
	bury(t, f, f.Store, "old", many, volume)
	if st, err := f.Status(t.Context()); err != nil || st.Tombstones < many {
		t.Fatalf("%+v, %v", st, err)
	}
	all, allocAll := measure()
	for _, name := range order {
		a, b := none[name], all[name]
		if !maps.Equal(a.calls, b.calls) {
			t.Errorf("%s: the commands with none and with %d tombstones:\n%v\n%v", name, many, a.calls, b.calls)
		}
		if !near(a.in, b.in) || !near(a.out, b.out) {
			t.Errorf("%s: %d bytes in and %d out with none, %d and %d with %d tombstones", name, a.in, a.out, b.in, b.out, many)
		}
		if x, y := allocNone[name], allocAll[name]; max(x, y)-min(x, y) > max(x, y)/5+500 {
			t.Errorf("%s: %d allocations with none, %d with %d tombstones", name, x, y, many)
		}
	}
}

// tombstoneKeys are the names of what only tombstones are in.
var tombstoneKeys = regexp.MustCompile(`\{dormouse\}:t[ilx]?[":]`)

// spied gives the commands that the server ran meanwhile, those inside scripts too.
func spied(t *testing.T, server *redistest.Server, client *goredis.Client, run func()) (seen []string) {
	t.Helper()
	conn, err := new(net.Dialer).DialContext(t.Context(), "unix", server.Socket)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := io.WriteString(conn, "MONITOR\r\n"); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewReader(conn)
	if ok, err := lines.ReadString('\n'); err != nil || ok != "+OK\r\n" {
		t.Fatal(ok, err)
	}
	run()
	const end = "the-end-of-what-is-looked-at"
	if err := client.Echo(t.Context(), end).Err(); err != nil {
		t.Fatal(err)
	}
	for {
		line, err := lines.ReadString('\n')
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(line, end) {
			return seen
		}
		seen = append(seen, line)
	}
}

// C28: a tombstone has no name and no reference, protects nothing and is in no list; publishing, reading and listing touch
// none; they are forgotten once their time is over, a bounded number at a time, without being read.
func TestC28_TombstonesAreBareAndCompactedUnread(t *testing.T) {
	redistest.Each(t, tombstonesAreBareAndCompactedUnread)
}

func tombstonesAreBareAndCompactedUnread(t *testing.T, p redistest.Program) {
	server := p.Start(t)
	f := catalogtest.NewFixture(t, open(t, redis.Options{Address: server.Socket, Retention: catalog.Retention{Tombstones: time.Hour}}))
	brief := open(t, redis.Options{Address: server.Socket, Retention: catalog.Retention{Tombstones: time.Millisecond}})
	client := raw(t, server)
	volume, other := catalogtest.Volume("v"), catalogtest.Volume("other")
	f.Must(catalogtest.Create(volume), catalogtest.Create(other))
	const expired = catalog.MaxPage + 200
	bury(t, f, brief, "old", expired, volume)
	bury(t, f, f.Store, "young", 1, volume)

	young := catalogtest.Snapshot("young-000000")
	const tombs = "{dormouse}:t:acme/snapshot"
	members, err := client.ZRangeArgs(t.Context(), goredis.ZRangeArgs{Key: tombs, Start: "[" + young.UID, Stop: "+", ByLex: true}).Result()
	if want := regexp.MustCompile(`^young-000000 1 \d+ \d{13} 3600000 trace$`); err != nil || len(members) != 1 || !want.MatchString(members[0]) { // revision, sequence, deleted, life, body
		t.Errorf("a tombstone holds %q, want %s (%v)", members, want, err)
	}
	if h, err := f.Referrers(t.Context(), volume, "", 1); err != nil || h.Count != 0 {
		t.Errorf("tombstones refer to the volume: %+v, %v", h, err)
	}
	if n, err := client.Exists(t.Context(), "{dormouse}:f:"+volume.String(), "{dormouse}:a:"+volume.String()).Result(); err != nil || n != 0 {
		t.Errorf("%d reverse indexes are left: %v", n, err)
	}

	seen := spied(t, server, client, func() {
		f.Must(catalogtest.Create(catalogtest.Snapshot("new"), catalogtest.To(other, catalog.Reference)))
		if _, err := f.Get(t.Context(), catalogtest.Snapshot("new")); err != nil {
			t.Error(err)
		}
		if page, err := f.List(t.Context(), catalog.Query{Kind: catalog.KindSnapshot, PageSize: catalog.MaxPage}); err != nil || len(page.Records) != 1 {
			t.Error(len(page.Records), err)
		}
		if _, err := f.GetMany(t.Context(), []catalog.Key{catalogtest.Snapshot("new"), young}); err != nil {
			t.Error(err)
		}
		if _, err := f.Referrers(t.Context(), other, "", 10); err != nil {
			t.Error(err)
		}
	})
	if len(seen) < 5 {
		t.Errorf("only %d commands were seen", len(seen))
	}
	for _, line := range seen {
		if tombstoneKeys.MatchString(line) {
			t.Errorf("a hot path touches tombstones: %s", line)
		}
	}
	if r := f.One(catalog.Commit{Deletes: []catalog.Delete{{Key: volume, ExpectRevision: 1}}}); r.Err != nil {
		t.Errorf("tombstones protect the volume: %v", r.Err)
	}

	for _, want := range []int{catalog.MaxPage, expired - catalog.MaxPage, 0} {
		b := billed(t, client, func() {
			if n, err := f.Compact(t.Context(), catalog.MaxPage); err != nil || n != want {
				t.Errorf("forgot %d, want %d: %v", n, want, err)
			}
		})
		if b.calls["xrange"] != 1 || b.calls["zremrangebylex"] != int64(want) || b.calls["xtrim"] > 1 {
			t.Errorf("forgetting %d takes %v", want, b.calls)
		}
		for _, read := range []string{"hget", "hgetall", "hmget", "zrange", "zrangebylex", "zscore", "scan", "keys"} {
			if b.calls[read] > 0 {
				t.Errorf("forgetting %d reads with %s", want, read)
			}
		}
	}
	if _, err := f.Tombstone(t.Context(), young); err != nil {
		t.Errorf("a tombstone whose time is not over: %v", err)
	}
	if st, err := f.Status(t.Context()); err != nil || st.Tombstones != 1 {
		t.Errorf("%d tombstones are left: %v", st.Tombstones, err)
	}
	if left, err := client.ZCard(t.Context(), tombs).Result(); err != nil || left != 1 {
		t.Errorf("left: %v, %v", left, err)
	}
}
