package publish_test

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/dormouse-run/dormouse/coordinator/internal/publish"
	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/catalog/catalogtest"
	"github.com/dormouse-run/dormouse/pkg/catalog/redis/redistest"
)

// BenchmarkPublish has 64 callers publish snapshots that refer to one volume, each with a receipt, on
// a real server under the durable default.
func BenchmarkPublish(b *testing.B) {
	server := redistest.Start(b)
	s := openRedis(b, server.Socket)
	owner := lead(b, s)
	q := start(b, publish.Options{Store: s})
	v := catalogtest.Volume("v")
	if _, err := q.Publish(b.Context(), fixed(catalog.Commit{Owner: owner, Puts: []catalog.Put{catalogtest.Create(v)}})); err != nil {
		b.Fatal(err)
	}
	body := make([]byte, 1024)
	for i := range body {
		body[i] = 'a' + byte(i%26)
	}
	const callers = 64
	times := make([][]time.Duration, callers)
	var left atomic.Int64
	left.Store(int64(b.N))
	b.ResetTimer()
	var wg sync.WaitGroup
	for w := range callers {
		wg.Go(func() {
			for left.Add(-1) >= 0 {
				uid := uuid.Must(uuid.NewV7()).String()
				began := time.Now()
				_, err := q.Publish(b.Context(), func(ctx context.Context, read catalog.Reader) (catalog.Commit, error) {
					if _, err := read.Get(ctx, v); err != nil {
						return catalog.Commit{}, err
					}
					put := catalogtest.Create(catalogtest.Snapshot(uid), catalogtest.To(v, catalog.Reference))
					put.Record.Body, put.Record.Node = body, "n1"
					return operation(owner, uid, put), nil
				})
				if err != nil {
					b.Error(err)
					return
				}
				times[w] = append(times[w], time.Since(began))
			}
		})
	}
	wg.Wait()
	b.StopTimer()
	all := slices.Sorted(slices.Values(slices.Concat(times...)))
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "commits/s")
	b.ReportMetric(float64(all[len(all)*99/100].Microseconds())/1000, "p99-ms")
}
