package redis_test

import (
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/catalog/catalogtest"
	"github.com/dormouse-run/dormouse/pkg/catalog/redis"
	"github.com/dormouse-run/dormouse/pkg/catalog/redis/redistest"
	"github.com/dormouse-run/dormouse/pkg/errs"
)

// raw is a client of the test's own, to look behind the store's back.
func raw(t testing.TB, server *redistest.Server) *goredis.Client {
	t.Helper()
	c := goredis.NewClient(&goredis.Options{Network: "unix", Addr: server.Socket, MaxRetries: -1, ReadTimeout: time.Minute})
	t.Cleanup(func() { c.Close() })
	return c
}

func TestServerThatForgetsIsRefused(t *testing.T) { redistest.Each(t, serverThatForgetsIsRefused) }

func serverThatForgetsIsRefused(t *testing.T, p redistest.Program) {
	for setting, value := range map[string]string{"appendonly": "no", "appendfsync": "everysec", "maxmemory-policy": "allkeys-lru"} {
		t.Run(setting, func(t *testing.T) {
			server := p.Start(t, setting, value)
			_, err := redis.Open(t.Context(), redis.Options{Address: server.Socket})
			if !errs.Has(err, errs.StoreNotDurable) || !strings.Contains(err.Error(), setting) {
				t.Errorf("got %v", err)
			}
		})
	}
}

func TestServerThatComesBackForgetfulIsRefused(t *testing.T) {
	redistest.Each(t, serverThatComesBackForgetfulIsRefused)
}

func serverThatComesBackForgetfulIsRefused(t *testing.T, p redistest.Program) {
	server := p.Start(t)
	f := catalogtest.NewFixture(t, open(t, redis.Options{Address: server.Socket}))
	f.Must(catalogtest.Create(catalogtest.Sandbox("s")))
	if err := raw(t, server).ConfigSet(t.Context(), "appendfsync", "everysec").Err(); err != nil {
		t.Fatal(err)
	}
	// What is connected goes on; a new connection, as after any cut, looks again.
	if err := raw(t, server).Do(t.Context(), "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes").Err(); err != nil {
		t.Fatal(err)
	}
	catalogtest.Eventually(t, "a new connection is refused", func() bool {
		_, err := f.Commit(t.Context(), []catalog.Commit{{Owner: f.Owner}})
		return errs.Has(err, errs.StoreNotDurable) && errs.NotStartedFor(err)
	})
	if _, err := f.Get(t.Context(), catalogtest.Sandbox("s")); !errs.Has(err, errs.StoreNotDurable) {
		t.Errorf("Get: %v", err)
	}
}

func TestUnreachableServer(t *testing.T) {
	_, err := redis.Open(t.Context(), redis.Options{Address: t.TempDir() + "/none", DialTimeout: time.Second})
	if !errs.Has(err, errs.StoreUnavailable) || !errs.NotStartedFor(err) {
		t.Errorf("got %v", err)
	}
	if _, err := redis.Open(t.Context(), redis.Options{Catalog: "a}b"}); !errs.Has(err, errs.InvalidField) {
		t.Errorf("a bad name: %v", err)
	}
}

func TestForgottenScriptsAreLoadedAgain(t *testing.T) {
	redistest.Each(t, forgottenScriptsAreLoadedAgain)
}

func forgottenScriptsAreLoadedAgain(t *testing.T, p redistest.Program) {
	server := p.Start(t)
	f := catalogtest.NewFixture(t, open(t, redis.Options{Address: server.Socket}))
	for i := range 3 {
		if err := raw(t, server).ScriptFlush(t.Context()).Err(); err != nil {
			t.Fatal(err)
		}
		f.Must(catalogtest.Create(catalogtest.Sandbox(fmt.Sprint("s", i))))
	}
}

func TestCatalogsInOneServerAreApart(t *testing.T) { redistest.Each(t, catalogsInOneServerAreApart) }

func catalogsInOneServerAreApart(t *testing.T, p redistest.Program) {
	server := p.Start(t)
	a := catalogtest.NewFixture(t, open(t, redis.Options{Address: server.Socket, Catalog: "a"}))
	b := catalogtest.NewFixture(t, open(t, redis.Options{Address: server.Socket, Catalog: "b"}))
	a.Must(catalogtest.Create(catalogtest.Sandbox("s")))
	b.Gone(catalogtest.Sandbox("s"))
	first, err := a.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	second, err := b.Status(t.Context())
	if err != nil || first.Incarnation == second.Incarnation || first.RunID != second.RunID {
		t.Errorf("%+v, %+v, %v", first, second, err)
	}
	server.Kill(t)
	server.Restart(t)
	again, err := open(t, redis.Options{Address: server.Socket, Catalog: "a"}).Status(t.Context())
	if err != nil || again.Incarnation != first.Incarnation || again.RunID == first.RunID || again.Seq != 1 {
		t.Errorf("after a restart: %+v, %v", again, err)
	}
}

func TestServerWithoutMemoryRefusesWhole(t *testing.T) {
	redistest.Each(t, serverWithoutMemoryRefusesWhole)
}

func serverWithoutMemoryRefusesWhole(t *testing.T, p redistest.Program) {
	server := p.Start(t)
	f := catalogtest.NewFixture(t, open(t, redis.Options{Address: server.Socket}))
	f.Must(catalogtest.Create(catalogtest.Sandbox("a")))
	set := func(limit string) {
		t.Helper()
		if err := raw(t, server).ConfigSet(t.Context(), "maxmemory", limit).Err(); err != nil {
			t.Fatal(err)
		}
	}
	set("1")
	batch := []catalog.Commit{
		{Owner: f.Owner, Puts: []catalog.Put{catalogtest.Create(catalogtest.Sandbox("b"))}},
		{Owner: f.Owner, Puts: []catalog.Put{catalogtest.Create(catalogtest.Sandbox("c"))}},
	}
	if _, err := f.Commit(t.Context(), batch); !errs.Has(err, errs.StoreUnavailable) || !errs.NotStartedFor(err) {
		t.Errorf("got %v", err)
	}
	if st, err := f.Status(t.Context()); err != nil || st.Seq != 1 {
		t.Errorf("status %+v, %v", st, err)
	}
	set("0")
	f.Gone(catalogtest.Sandbox("b"))
	f.Must(catalogtest.Create(catalogtest.Sandbox("b")))
}

// TestAcknowledgedSurvivesSIGKILL kills the server under load. What was acknowledged is there; what was
// lost on the way is there exactly when its receipt says so.
func TestAcknowledgedSurvivesSIGKILL(t *testing.T) { redistest.Each(t, acknowledgedSurvivesSIGKILL) }

func acknowledgedSurvivesSIGKILL(t *testing.T, p redistest.Program) {
	server := p.Start(t)
	f := catalogtest.NewFixture(t, open(t, redis.Options{Address: server.Socket}))
	f.Must(catalogtest.Create(catalogtest.Volume("v")))
	const writers = 8
	acked, unknown := make([][]string, writers), make([]string, writers)
	enough := make(chan struct{}, 10000)
	var wg sync.WaitGroup
	for w := range writers {
		wg.Go(func() {
			for i := 0; ; i++ {
				uid := fmt.Sprintf("p-%d-%d", w, i)
				put := catalogtest.Create(catalogtest.Snapshot(uid), catalogtest.To(catalogtest.Volume("v"), catalog.Reference))
				results, err := f.Commit(t.Context(), []catalog.Commit{{ID: uid, Tenant: "acme", Attempt: uid, Owner: f.Owner, Puts: []catalog.Put{put}}})
				if err != nil {
					if !errs.NotStartedFor(err) {
						unknown[w] = uid
					}
					return
				}
				if results[0].Err != nil {
					t.Error(results[0].Err)
					return
				}
				acked[w] = append(acked[w], uid)
				enough <- struct{}{}
			}
		})
	}
	for range 300 {
		<-enough
	}
	server.Kill(t)
	wg.Wait()
	server.Restart(t)
	total := 0
	for w := range writers {
		total += len(acked[w])
		for _, uid := range acked[w] {
			f.Read(catalogtest.Snapshot(uid))
		}
		uid := unknown[w]
		if uid == "" {
			continue
		}
		_, applied, err := f.Settle(t.Context(), "acme", uid, uid)
		if err != nil {
			t.Fatal(err)
		}
		if applied {
			total++
			f.Read(catalogtest.Snapshot(uid))
		} else {
			f.Gone(catalogtest.Snapshot(uid))
		}
	}
	h, err := f.Referrers(t.Context(), catalogtest.Volume("v"), "", 0)
	seq, err2 := f.Seq(t.Context())
	if err != nil || err2 != nil || h.Count != total || seq != uint64(total)+1 {
		t.Errorf("%d applied, %d references, sequence %d (%v, %v)", total, h.Count, seq, err, err2)
	}
}
