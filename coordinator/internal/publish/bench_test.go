package publish_test

import (
	"bufio"
	"context"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/dormouse-run/dormouse/coordinator/internal/publish"
	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/catalog/catalogtest"
	"github.com/dormouse-run/dormouse/pkg/catalog/redis"
	"github.com/dormouse-run/dormouse/pkg/catalog/redis/redistest"
	"github.com/dormouse-run/dormouse/pkg/fence"
	"github.com/dormouse-run/dormouse/pkg/uid"
)

// benched is a catalog on a real server under the durable default, with a queue before it.
type benched struct {
	*testing.B
	store *redis.Store
	queue *publish.Queue
	owner fence.Owner
	raw   *goredis.Client
	body  []byte
}

func newBenched(b *testing.B, tombstones int) *benched {
	server := redistest.Start(b)
	w := &benched{B: b, store: openRedis(b, server.Socket), body: make([]byte, 1024),
		raw: goredis.NewClient(&goredis.Options{Network: "unix", Addr: server.Socket, MaxRetries: -1})}
	b.Cleanup(func() { _ = w.raw.Close() })
	w.owner, w.queue = lead(b, w.store), start(b, publish.Options{Store: w.store})
	for i := range w.body {
		w.body[i] = 'a' + byte(i%26)
	}
	if _, err := w.queue.Publish(b.Context(), fixed(catalog.Commit{Owner: w.owner, Puts: []catalog.Put{catalogtest.Create(catalogtest.Volume("v"))}})); err != nil {
		b.Fatal(err)
	}
	const each = 250
	for i := 0; i < tombstones; i += each {
		create, remove := catalog.Commit{Owner: w.owner}, catalog.Commit{Owner: w.owner}
		for range each {
			key := catalogtest.Snapshot(uid.New())
			create.Puts = append(create.Puts, catalogtest.Create(key))
			remove.Deletes = append(remove.Deletes, catalog.Delete{Key: key, ExpectRevision: 1, Tombstone: true})
		}
		results, err := w.store.Commit(b.Context(), []catalog.Commit{create, remove})
		if err != nil || results[0].Err != nil || results[1].Err != nil {
			b.Fatal(results, err)
		}
	}
	return w
}

// publish makes a snapshot that refers to the volume: a read, a reference, a receipt and 1 KiB of body.
func (w *benched) publish() error {
	id := uid.New()
	_, err := w.queue.Publish(w.Context(), func(ctx context.Context, read catalog.Reader) (catalog.Commit, error) {
		if _, err := read.Get(ctx, catalogtest.Volume("v")); err != nil {
			return catalog.Commit{}, err
		}
		put := catalogtest.Create(catalogtest.Snapshot(id), catalogtest.To(catalogtest.Volume("v"), catalog.Reference))
		put.Record.Body, put.Record.Node = w.body, "n1"
		return operation(w.owner, id, put), nil
	})
	return err
}

func p99(times ...[]time.Duration) float64 {
	all := slices.Sorted(slices.Values(slices.Concat(times...)))
	return float64(all[len(all)*99/100].Microseconds()) / 1000
}

// closed has 64 callers publish n in all, each the next one when the last one is done.
func (w *benched) closed(n int) (rate, p99ms float64) {
	const callers = 64
	times := make([][]time.Duration, callers)
	var left atomic.Int64
	left.Store(int64(n))
	began := time.Now()
	var wg sync.WaitGroup
	for c := range callers {
		wg.Go(func() {
			for left.Add(-1) >= 0 {
				one := time.Now()
				if err := w.publish(); err != nil {
					w.Error(err)
					return
				}
				times[c] = append(times[c], time.Since(one))
			}
		})
	}
	wg.Wait()
	return float64(n) / time.Since(began).Seconds(), p99(times...)
}

// open publishes n at a rate, whether the earlier ones are done or not. A time counts from when it was due.
func (w *benched) open(n int, rate float64) (p99ms float64) {
	times := make([]time.Duration, n)
	began := time.Now()
	var wg sync.WaitGroup
	for i := range n {
		due := began.Add(time.Duration(float64(i) / rate * float64(time.Second)))
		if wait := time.Until(due); wait > 0 {
			<-time.After(wait)
		}
		wg.Go(func() {
			if err := w.publish(); err != nil {
				w.Error(err)
			}
			times[i] = time.Since(due)
		})
	}
	wg.Wait()
	return p99(times)
}

// commands counts what the server runs for n commits of one caller.
func (w *benched) commands(n int) (total float64) {
	if err := w.raw.ConfigResetStat(w.Context()).Err(); err != nil {
		w.Fatal(err)
	}
	for range n {
		if err := w.publish(); err != nil {
			w.Fatal(err)
		}
	}
	info, err := w.raw.Info(w.Context(), "commandstats").Result()
	if err != nil {
		w.Fatal(err)
	}
	for lines := bufio.NewScanner(strings.NewReader(info)); lines.Scan(); {
		name, rest, ok := strings.Cut(lines.Text(), ":calls=")
		if !ok || name == "cmdstat_info" || strings.Contains(name, "config") {
			continue
		}
		count, _, _ := strings.Cut(rest, ",")
		calls, err := strconv.ParseFloat(count, 64)
		if err != nil {
			w.Fatal(err)
		}
		total += calls
	}
	return total
}

func median(values []float64) float64 { return slices.Sorted(slices.Values(values))[len(values)/2] }

// BenchmarkPublish measures the queue on a catalog without tombstones and on one with 100,000, in turn.
func BenchmarkPublish(b *testing.B) {
	if b.N == 1 {
		return // the trial run, which -benchtime Nx makes too
	}
	plain, history := newBenched(b, 0), newBenched(b, 100_000)
	plain.closed(2000) // connections and scripts
	history.closed(2000)
	var rates, ratios, tails, half, fixed []float64
	for range 3 {
		rate, tail := plain.closed(b.N)
		other, _ := history.closed(b.N)
		rates, ratios, tails = append(rates, rate), append(ratios, other/rate), append(tails, tail)
		half, fixed = append(half, plain.open(b.N/4, rate/2)), append(fixed, plain.open(b.N/4, 2500))
	}
	rate := median(rates)
	for name, v := range map[string]float64{
		"commits/s": rate, "p99-ms": median(tails), "with-history": median(ratios),
		"open-half-p99-ms": median(half), "open-2500-p99-ms": median(fixed),
		"commands": plain.commands(200), "commands-with-history": history.commands(200),
	} {
		b.ReportMetric(v, name)
	}
	b.ReportMetric(0, "ns/op")
	b.Logf("rates %.0f, with history %.3f; the 99th percentile %.1f ms, at half that load %.1f, at 2500/s %.1f", rates, ratios, tails, half, fixed)
}
