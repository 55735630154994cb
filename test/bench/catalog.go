package bench

import (
	"context"
	"fmt"
	"os/exec"
	"regexp"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
)

const catalogBody = 1024

// benchCatalog compares the commits of the catalog, each with its fences, references and receipt, with
// bare SETs of as many bytes by as many callers on a server of the same settings.
func benchCatalog(ctx context.Context, b *bench) ([]Row, error) {
	n := b.times(20000)
	var commits, tail, sets Sample
	for range 3 {
		rate, p99, err := publishRate(ctx, n)
		if err != nil {
			return nil, err
		}
		commits, tail = append(commits, rate), append(tail, p99)
		if rate, err = b.setRate(ctx, n); err != nil {
			return nil, err
		}
		sets = append(sets, rate)
	}
	return []Row{
		{What: "commits of the catalog, 64 callers, durable default; bare: SET of 1 KiB", Product: fmt.Sprintf("%.0f/s", commits.Median()),
			Bare: fmt.Sprintf("%.0f/s", sets.Median()), Value: commits.Median() / sets.Median(), Unit: "x"},
		{What: "the 99th percentile of a commit", Product: fmt.Sprintf("%.1f ms", tail.Median()), Value: tail.Median(), Unit: "ms"},
	}, nil
}

var reported = regexp.MustCompile(`([0-9.]+) commits/s\s+([0-9.]+) p99-ms`)

// publishRate runs the queue's own benchmark, which may see the inside of the coordinator.
func publishRate(ctx context.Context, n int) (rate, p99 float64, err error) {
	out, err := exec.CommandContext(ctx, "go", "test", "-run", "^$", "-bench", "Publish", "-benchtime", strconv.Itoa(n)+"x",
		"./coordinator/internal/publish").CombinedOutput()
	m := reported.FindSubmatch(out)
	if err != nil || m == nil {
		return 0, 0, fmt.Errorf("benchmark of the commit queue (run it in the checkout): %w\n%s", err, out)
	}
	if rate, err = strconv.ParseFloat(string(m[1]), 64); err == nil {
		p99, err = strconv.ParseFloat(string(m[2]), 64)
	}
	return rate, p99, err
}

// setRate writes keys to the cluster's Redis, which syncs as the catalog's does.
func (b *bench) setRate(ctx context.Context, n int) (float64, error) {
	const callers = 64
	db := redis.NewClient(&redis.Options{Network: "unix", Addr: b.cluster.RedisSocket(), PoolSize: callers, MaxRetries: -1})
	defer func() { _ = db.Close() }()
	body := make([]byte, catalogBody)
	var next atomic.Int64
	took, err := inParallel(ctx, callers, callers, func(ctx context.Context, _ int) error {
		for {
			i := next.Add(1)
			if i > int64(n) {
				return nil
			}
			if err := db.Set(ctx, "bench:"+strconv.FormatInt(i, 10), body, time.Minute).Err(); err != nil {
				return err
			}
		}
	})
	return float64(n) / took.Seconds(), err
}
