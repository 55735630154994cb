package redis_test

import (
	"fmt"
	"sync/atomic"
	"testing"

	"go.uber.org/goleak"

	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/catalog/catalogtest"
	"github.com/dormouse-run/dormouse/pkg/catalog/redis"
	"github.com/dormouse-run/dormouse/pkg/catalog/redis/redistest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func open(t testing.TB, o redis.Options) *redis.Store {
	t.Helper()
	s, err := redis.Open(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

func TestConformance(t *testing.T) { redistest.Each(t, conformance) }

func conformance(t *testing.T, p redistest.Program) {
	t.Parallel()
	conformOn(t, p.Start(t))
}

func conformOn(t *testing.T, server *redistest.Server) {
	t.Helper()
	var n atomic.Int64
	catalogtest.Run(t, func(t *testing.T, r catalog.Retention) catalog.Store {
		return open(t, redis.Options{Address: server.Socket, Catalog: fmt.Sprint("test-", n.Add(1)), Retention: r})
	})
}
