package publish_test

import (
	"bufio"
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"
	"golang.org/x/sys/unix"

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
	server *redistest.Server
	store  *redis.Store
	queue  *publish.Queue
	owner  fence.Owner
	raw    *goredis.Client
	body   []byte
}

func newBenched(b *testing.B, tombstones int, settings ...string) *benched {
	server := redistest.Start(b, settings...)
	w := &benched{B: b, server: server, store: openRedis(b, server.Socket), body: make([]byte, 1024),
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

// opened is what an open loop found, times in ms.
type opened struct {
	p99  float64
	late []time.Duration // how long after it was due each call was begun: the load's own doing
	disk []time.Duration // an append and a sync beside it, in the same folder
}

// open publishes n at a rate, whether the earlier ones are done or not. A time counts from when it was due.
func (w *benched) open(n int, rate float64) opened {
	times, late := make([]time.Duration, n), make([]time.Duration, n)
	var wg sync.WaitGroup
	probed := w.probe()
	began := time.Now()
	for i := range n {
		due := began.Add(time.Duration(float64(i) / rate * float64(time.Second)))
		if wait := time.Until(due); wait > 0 {
			<-time.After(wait)
		}
		late[i] = time.Since(due)
		wg.Go(func() {
			if err := w.publish(); err != nil {
				w.Error(err)
			}
			times[i] = time.Since(due)
		})
	}
	wg.Wait()
	return opened{p99(times), late, probed()}
}

// probe appends 16 KiB to a file beside the server's log every 10 ms, and syncs it, as the server does, until it is asked for the times.
func (w *benched) probe() func() []time.Duration {
	f, err := os.CreateTemp(filepath.Dir(w.server.Socket), "probe")
	if err != nil {
		w.Fatal(err)
	}
	var times []time.Duration
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		tick := time.NewTicker(10 * time.Millisecond)
		defer tick.Stop()
		block := make([]byte, 16<<10)
		for {
			select {
			case <-stop:
				return
			case <-tick.C:
			}
			began := time.Now()
			if _, err := f.Write(block); err != nil {
				w.Error(err)
				return
			}
			if err := unix.Fdatasync(int(f.Fd())); err != nil {
				w.Error(err)
				return
			}
			times = append(times, time.Since(began))
		}
	}()
	return func() []time.Duration {
		close(stop)
		<-done
		if err := errors.Join(f.Close(), os.Remove(f.Name())); err != nil {
			w.Error(err)
		}
		return times
	}
}

// rewrites is how often the server has rewritten its log.
func (w *benched) rewrites() float64 {
	info, err := w.raw.Info(w.Context(), "persistence").Result()
	if err != nil {
		w.Fatal(err)
	}
	_, rest, _ := strings.Cut(info, "aof_rewrites:")
	n, err := strconv.ParseFloat(strings.TrimSpace(strings.SplitN(rest, "\n", 2)[0]), 64)
	if err != nil {
		w.Fatal(err)
	}
	return n
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

// seldom has the server rewrite its log seldom, as operators are told to.
var seldom = []string{"auto-aof-rewrite-min-size", "512mb"}

// BenchmarkPublish measures the queue on a catalog without tombstones and on one with 100,000, and with a server that rewrites its log
// by its own defaults: in turn, and each round in another order, so that what the machine does meanwhile is done to all of them.
func BenchmarkPublish(b *testing.B) {
	if b.N == 1 {
		return // the trial run, which -benchtime Nx makes too
	}
	plain, history, usual := newBenched(b, 0, seldom...), newBenched(b, 100_000, seldom...), newBenched(b, 0)
	for _, w := range []*benched{plain, history, usual} {
		w.closed(2000) // connections and scripts
	}
	const rounds = 7
	n := b.N / 3
	var rates, others, ratios, tails []float64
	for i := range rounds {
		var rate, tail, other float64
		if i%2 == 0 {
			rate, tail = plain.closed(n)
			other, _ = history.closed(n)
		} else {
			other, _ = history.closed(n)
			rate, tail = plain.closed(n)
		}
		rates, others, ratios, tails = append(rates, rate), append(others, other), append(ratios, other/rate), append(tails, tail)
	}
	rate := median(rates)
	var half, fixed, rewriting []float64
	var late, disk []time.Duration
	before := usual.rewrites()
	for i := range rounds {
		order := []int{0, 1, 2}
		for j := range order {
			switch order[(i+j)%3] {
			case 0:
				o := plain.open(n, rate/2)
				half, late, disk = append(half, o.p99), append(late, o.late...), append(disk, o.disk...)
			case 1:
				fixed = append(fixed, plain.open(n/2, 2500).p99)
			case 2:
				rewriting = append(rewriting, usual.open(n, rate/2).p99)
			}
		}
	}
	for name, v := range map[string]float64{
		"commits/s": rate, "p99-ms": median(tails), "with-history": median(ratios), "commits-with-history/s": median(others),
		"open-half-p99-ms": median(half), "open-half-worst-ms": slices.Max(half), "open-2500-p99-ms": median(fixed),
		"rewriting-p99-ms": median(rewriting), "rewriting-worst-ms": slices.Max(rewriting), "rewrites": usual.rewrites() - before,
		"late-p99-ms": p99(late), "disk-p99-ms": p99(disk), "disk-worst-ms": float64(slices.Max(disk).Microseconds()) / 1000,
		"commands": plain.commands(256), "commands-with-history": history.commands(256), // a mark is set once in so many
	} {
		b.ReportMetric(v, name)
	}
	b.ReportMetric(0, "ns/op")
	b.Logf("rates %.0f, with history %.3f; the 99th percentile %.1f ms, at half that load %.1f, the same with rewrites %.1f, at 2500/s %.1f",
		rates, ratios, tails, half, rewriting, fixed)
}
