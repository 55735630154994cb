package redis_test

import (
	"strings"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/catalog/catalogtest"
	"github.com/dormouse-run/dormouse/pkg/catalog/redis"
	"github.com/dormouse-run/dormouse/pkg/catalog/redis/redistest"
)

// A server whose clock was set back by an hour has every lease live an hour longer. The holder shortens its own
// when it renews; one that has died must not leave the catalog without a leader for that long.
func TestLeaseOfASetBackClock(t *testing.T) { redistest.Each(t, leaseOfASetBackClock) }

func leaseOfASetBackClock(t *testing.T, p redistest.Program) {
	server := p.Start(t)
	s := open(t, redis.Options{Address: server.Socket, Catalog: "back"})
	raw := goredis.NewClient(&goredis.Options{Network: "unix", Addr: server.Socket, ReadTimeout: time.Minute})
	t.Cleanup(func() { _ = raw.Close() })
	const ttl = 300 * time.Millisecond
	mine, won, err := s.Lead(t.Context(), catalog.Claim{Holder: "dead", TTL: ttl})
	if err != nil || !won {
		t.Fatal(won, err)
	}
	keys, err := raw.Keys(t.Context(), "*leader").Result() // the lease itself may have run out by now
	if err != nil || len(keys) != 1 {
		t.Fatal(keys, err)
	}
	// What the key's life becomes when the clock goes back.
	if err := raw.Set(t.Context(), strings.TrimSuffix(keys[0], "leader")+"lease", "dead", time.Hour).Err(); err != nil {
		t.Fatal(err)
	}
	var lease catalog.Lease
	catalogtest.Eventually(t, "another leads", func() bool {
		lease, won, err = s.Lead(t.Context(), catalog.Claim{Holder: "next", TTL: time.Minute})
		if err == nil && !won && lease.Left > ttl {
			t.Fatalf("the lease has %s left, of %s", lease.Left, ttl)
		}
		return err == nil && won
	})
	if lease.Epoch <= mine.Epoch {
		t.Errorf("epoch %d after %d", lease.Epoch, mine.Epoch)
	}
	// A lease that is longer than a rival's own is not cut to it.
	lease, won, err = s.Lead(t.Context(), catalog.Claim{Holder: "rival", TTL: ttl})
	if err != nil || won || lease.Left <= ttl {
		t.Errorf("a rival with shorter leases: %+v %v %v", lease, won, err)
	}
}
