package bench

import (
	"context"
	"fmt"
	"os/exec"
	"regexp"
	"strconv"
	"strings"

	"github.com/redis/go-redis/v9"

	"github.com/dormouse-run/dormouse/test/tools"
)

const catalogBody = 1024

// benchCatalog compares the commits of the catalog, each with its fences, references and receipt, with redis-benchmark that runs
// a script of the same writes on a server of the same settings; and measures the memory of a catalog that is in use.
func benchCatalog(ctx context.Context, b *bench) ([]Row, error) {
	n := b.times(20000)
	bare, err := b.scriptRate(ctx, n)
	if err != nil {
		return nil, err
	}
	m, err := publishFigures(ctx, n)
	if err != nil {
		return nil, err
	}
	again, err := b.scriptRate(ctx, n)
	if err != nil {
		return nil, err
	}
	bare = (bare + again) / 2
	rate := m["commits/s"]
	rows := []Row{
		{What: "commits of the catalog, 64 callers, durable default; bare: redis-benchmark, 64 clients, a script of the same writes", Product: fmt.Sprintf("%.0f/s", rate),
			Bare: fmt.Sprintf("%.0f/s", bare), Value: rate / bare, Unit: "x", AtLeast: 0.4},
		{What: "the same", Product: fmt.Sprintf("%.0f/s", rate), Value: rate, Unit: "/s", AtLeast: 5000},
		{What: "the 99th percentile of a commit with 64 callers at once", Product: fmt.Sprintf("%.1f ms", m["p99-ms"]), Value: m["p99-ms"], Unit: "ms"},
		{What: "the 99th percentile at half that load, open loop; bare: of an append of 16 KiB and its sync, beside it", Product: fmt.Sprintf("%.0f/s, worst round %.1f ms", rate/2, m["open-half-worst-ms"]),
			Bare: fmt.Sprintf("%.1f ms, worst %.1f ms", m["disk-p99-ms"], m["disk-worst-ms"]), Value: m["open-half-p99-ms"], Unit: "ms", AtMost: 10},
		{What: "the same with a server that rewrites its log whenever it has doubled, as is Redis's default", Product: fmt.Sprintf("%.0f rewrites, worst round %.1f ms", m["rewrites"], m["rewriting-worst-ms"]), Value: m["rewriting-p99-ms"], Unit: "ms"},
		{What: "the same: how late the load itself was, of 99 of 100 calls", Value: m["late-p99-ms"], Unit: "ms"},
		{What: "the 99th percentile at 2500/s, open loop", Product: "2500/s", Value: m["open-2500-p99-ms"], Unit: "ms", AtMost: 10},
		{What: "commits with 100,000 tombstones; bare: with none, in turn", Product: fmt.Sprintf("%.0f/s", m["commits-with-history/s"]), Bare: fmt.Sprintf("%.0f/s", rate),
			Value: m["with-history"], Unit: "x", AtLeast: 0.9},
		{What: "Redis commands of 256 commits with 100,000 tombstones; bare: with none", Product: fmt.Sprint(m["commands-with-history"]), Bare: fmt.Sprint(m["commands"]),
			Value: m["commands-with-history"] / m["commands"], Unit: "x", AtMost: 1},
	}
	b.note("The percentiles and rates are medians of seven rounds of each, in turn and in changing order. Where nothing else is said the server is set as operators are told to (docs/operating.md).")
	memory, err := b.catalogMemory(ctx)
	return append(rows, memory...), err
}

var reported = regexp.MustCompile(`\s([0-9.]+) ([a-z][a-z0-9/-]+)`)

// publishFigures runs the queue's own benchmark, which may see the inside of the coordinator.
func publishFigures(ctx context.Context, n int) (map[string]float64, error) {
	out, err := exec.CommandContext(ctx, "go", "test", "-run", "^$", "-bench", "Publish", "-benchtime", strconv.Itoa(n)+"x",
		"./coordinator/internal/publish").CombinedOutput()
	m := make(map[string]float64)
	for _, f := range reported.FindAllSubmatch(out, -1) {
		if m[string(f[2])], err = strconv.ParseFloat(string(f[1]), 64); err != nil {
			return nil, err
		}
	}
	if err != nil || m["commits/s"] == 0 {
		return nil, fmt.Errorf("benchmark of the commit queue (run it in the checkout): %w\n%s", err, out)
	}
	return m, nil
}

// sameWrites is what one commit writes, and nothing else: the record, three indexes, the reference, the sequence, the digest, the
// change log and the receipt.
const sameWrites = `
local uid, body, P = ARGV[1], ARGV[2], '{bench}:'
local key = 'acme/snapshot/' .. uid
redis.call('HSET', P .. 'r:' .. key, 'n', '', 'v', '1', 's', '1', 'p', 'Ready', 'o', 'n1', 'i', '', 'x', '', 'r', 'r acme/volume/v\n', 'b', body, 'c', '1790000000000', 'u', '1790000000000')
redis.call('ZADD', P .. 'i:acme/snapshot', 0, uid)
redis.call('ZADD', P .. 'k:snapshot', 0, uid .. '/acme')
redis.call('ZADD', P .. 'o:n1/snapshot', 0, uid .. '/acme')
redis.call('ZADD', P .. 'f:acme/volume/v', 0, key)
local seq = redis.call('INCR', P .. 'seq')
local digest = redis.sha1hex(key .. seq)
redis.call('SET', P .. 'digest', digest)
redis.call('XADD', P .. 'log', 'MAXLEN', '~', '100000', seq .. '-0', 'e', '1', 'i', 'p ' .. key .. ' 1 Ready n1\n', 'h', digest)
redis.call('SET', P .. 'c:acme/' .. uid, 'digest\n' .. seq .. '\n1790000000000\n' .. key .. ' 1\nresult', 'PX', 86400000)
return seq`

// scriptRate has redis-benchmark run the script on the cluster's Redis, which syncs as the catalog's does.
func (b *bench) scriptRate(ctx context.Context, n int) (float64, error) {
	db := redis.NewClient(&redis.Options{Network: "unix", Addr: b.cluster.RedisSocket(), MaxRetries: -1})
	defer func() { _ = db.Close() }()
	sha, err := db.ScriptLoad(ctx, sameWrites).Result()
	if err != nil {
		return 0, err
	}
	program, err := tools.Find("redis-benchmark")
	if err != nil {
		return 0, err
	}
	out, err := exec.CommandContext(ctx, program, "-s", b.cluster.RedisSocket(), "-c", "64", "-n", strconv.Itoa(n), "-r", "1000000000", "--csv",
		"EVALSHA", sha, "1", "{bench}:seq", "01900000-0000-7000-8000-__rand_int__", strings.Repeat("a", catalogBody)).Output()
	if err != nil {
		return 0, fmt.Errorf("redis-benchmark: %w", err)
	}
	lines := strings.Split(strings.TrimSpace(string(out)), "\n")
	fields := strings.Split(lines[len(lines)-1], `","`)
	if len(fields) < 2 {
		return 0, fmt.Errorf("redis-benchmark said %q", out)
	}
	rate, err := strconv.ParseFloat(fields[1], 64)
	keys, kerr := db.Keys(ctx, "{bench}:*").Result()
	if kerr == nil && len(keys) > 0 {
		kerr = db.Unlink(ctx, keys...).Err()
	}
	if err == nil {
		err = kerr
	}
	return rate, err
}
