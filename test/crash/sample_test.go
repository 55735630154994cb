package crash

import (
	"fmt"
	"math/rand/v2"
	"os"
	"regexp"
	"slices"
	"strconv"
	"testing"
)

// seed is that of the environment, or always the same: a sample that differed from day to day would fail on a
// day, not with a change.
func seed(t *testing.T) uint64 {
	t.Helper()
	n := uint64(1)
	if s := os.Getenv("CRASH_SEED"); s != "" {
		var err error
		if n, err = strconv.ParseUint(s, 10, 64); err != nil {
			t.Fatalf("CRASH_SEED: %v", err)
		}
	}
	t.Logf("CRASH_SEED=%d", n)
	return n
}

// chosen picks from a table what the environment asks for: what matches CRASH_POINT, the shard k/n of CRASH_SHARD,
// all with CRASH_ALL, or a sample of this size.
func chosen[T fmt.Stringer](t *testing.T, all []T, sample int) []T {
	t.Helper()
	var k, n int
	point, shard := os.Getenv("CRASH_POINT"), os.Getenv("CRASH_SHARD")
	switch {
	case point != "":
		want := regexp.MustCompile(point)
		all = slices.DeleteFunc(all, func(one T) bool { return !want.MatchString(one.String()) })
		if len(all) == 0 {
			t.Fatalf("CRASH_POINT=%s matches nothing", point)
		}
		return all
	case shard != "":
		if _, err := fmt.Sscanf(shard, "%d/%d", &k, &n); err != nil || k < 1 || k > n {
			t.Fatalf("CRASH_SHARD is %q, not 1/3 or the like", shard)
		}
		from, to := len(all)*(k-1)/n, len(all)*k/n
		return all[from:to]
	case os.Getenv("CRASH_ALL") != "":
		return all
	}
	r := rand.New(rand.NewPCG(seed(t), 0)) //nolint:gosec // it is to be repeated, not to be secret
	r.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	return all[:min(sample, len(all))]
}
