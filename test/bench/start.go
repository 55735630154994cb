package bench

import (
	"context"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/dormouse-run/dormouse/pkg/client"
	"github.com/dormouse-run/dormouse/pkg/wait"
	barerunsc "github.com/dormouse-run/dormouse/test/bare"

	specs "github.com/opencontainers/runtime-spec/specs-go"
)

const startMemory = 64 * mib

// breath is what the kernel gets to clear away the sandbox before, so that its end does not weigh on the next start.
const breath = 150 * time.Millisecond

// benchStart compares CreateSandbox with runsc run: one at a time, and the rate at several widths.
func benchStart(ctx context.Context, b *bench) ([]Row, error) {
	model, err := b.create(ctx, startMemory, nil)
	if err != nil {
		return nil, err
	}
	floor, err := b.newBare(model.UID)
	if err != nil {
		return nil, err
	}
	spec, err := b.spec(model.UID)
	if err != nil {
		return nil, err
	}
	if err := b.startBoth(ctx, floor, spec, &Sample{}, &Sample{}, &Sample{}); err != nil { // warm
		return nil, err
	}
	var product, answered, started Sample
	for range b.times(40) {
		if err := b.startBoth(ctx, floor, spec, &product, &answered, &started); err != nil {
			return nil, err
		}
	}
	rows := []Row{
		ratio("create to Running, one at a time; bare `runsc run` until guest init answers", product, answered, 1.25),
		ratio("the same; bare until `runsc run -detach` returns", product, started, 0),
	}
	all, err := b.startRates(ctx, floor, spec)
	if err != nil {
		return nil, err
	}
	for _, r := range all {
		rows = append(rows, r.row(fmt.Sprintf("starts per second, %d at a time", r.width)))
	}
	row := best(all).row("starts per second, each at its best width")
	row.AtLeast = 0.85
	return append(rows, row), model.Delete(ctx, "")
}

func rate(v float64) string { return fmt.Sprintf("%.1f/s", v) }

// startBoth starts and removes one sandbox each way.
func (b *bench) startBoth(ctx context.Context, floor *bare, spec *specs.Spec, product, answered, started *Sample) error {
	if err := wait.For(ctx, breath); err != nil {
		return err
	}
	began := time.Now()
	s, err := b.create(ctx, startMemory, nil)
	if err != nil {
		return err
	}
	product.add(time.Since(began))
	if err := s.Delete(ctx, ""); err != nil {
		return err
	}
	x, err := floor.Prepare(spec)
	if err != nil {
		return err
	}
	if err := wait.For(ctx, breath); err != nil {
		return err
	}
	first, second, err := x.Start(ctx)
	if err != nil {
		return err
	}
	started.add(first)
	answered.add(second)
	return x.Remove(ctx)
}

// startRates starts blocks of sandboxes each way in turn, at each width in turn.
func (b *bench) startRates(ctx context.Context, floor *bare, spec *specs.Spec) ([]*rates, error) {
	return b.rates(ctx, "start", contest{
		product: func(ctx context.Context) (*client.Sandbox, error) { return b.create(ctx, startMemory, nil) },
		prepare: func() (*barerunsc.Box, error) { return floor.Prepare(spec) },
		bare: func(ctx context.Context, x *barerunsc.Box) error {
			_, _, err := x.Start(ctx)
			return err
		},
	})
}

// contest is one thing done each way.
type contest struct {
	product func(ctx context.Context) (*client.Sandbox, error)
	prepare func() (*barerunsc.Box, error)
	bare    func(ctx context.Context, x *barerunsc.Box) error
}

// rates are those of both ways at one width, a block each.
type rates struct {
	width         int
	product, bare Sample
	mine, its     cpuUse
}

// row compares the medians.
func (r *rates) row(what string) Row {
	mine, its := r.product.Median(), r.bare.Median()
	return Row{What: what, Product: rate(mine), Bare: rate(its), Value: mine / its, Unit: "x"}
}

// best takes for each way the width at which its median is the highest.
func best(all []*rates) *rates {
	var found rates
	for _, r := range all {
		if r.product.Median() > found.product.Median() {
			found.product = r.product
		}
		if r.bare.Median() > found.bare.Median() {
			found.bare = r.bare
		}
	}
	return &found
}

const (
	rateBlock  = 12 // sandboxes
	rateRounds = 7
)

// rateWidths are how many callers there are at a time.
var rateWidths = []int{2, 3, 4, 6}

// rates makes blocks of sandboxes each way in turn. A round has blocks of all widths, since the machine's speed changes within the minute that
// all take. How far the blocks of a width are apart, what CPU they took, and who, goes into the notes.
func (b *bench) rates(ctx context.Context, what string, c contest) ([]*rates, error) {
	var all []*rates
	for _, width := range rateWidths {
		all = append(all, &rates{width: width, mine: cpuUse{}, its: cpuUse{}})
	}
	rounds := b.times(rateRounds)
	for range rounds {
		for _, r := range all {
			if err := b.productBlock(ctx, r, c); err != nil {
				return nil, err
			}
			if err := b.bareBlock(ctx, r, c); err != nil {
				return nil, err
			}
		}
	}
	for _, r := range all {
		spread := func(s Sample) string {
			return fmt.Sprintf("%s (%.1f to %.1f)", rate(s.Median()), slices.Min(s), slices.Max(s))
		}
		b.note("%d at a time, %d blocks of %d: %s, CPU of a %s: %s; bare: %s, %s", r.width, rounds, rateBlock,
			spread(r.product), what, r.mine.each(rateBlock*rounds), spread(r.bare), r.its.each(rateBlock*rounds))
	}
	return all, nil
}

func (b *bench) productBlock(ctx context.Context, r *rates, c contest) error {
	made := make([]*client.Sandbox, rateBlock)
	if err := wait.For(ctx, breath); err != nil {
		return err
	}
	took, err := b.counted(ctx, r.mine, r.width, rateBlock, func(ctx context.Context, i int) (err error) {
		made[i], err = c.product(ctx)
		return err
	})
	if err != nil {
		return err
	}
	r.product = append(r.product, rateBlock/took.Seconds())
	return deleteAll(ctx, made)
}

func (b *bench) bareBlock(ctx context.Context, r *rates, c contest) (err error) {
	boxes := make([]*barerunsc.Box, rateBlock)
	for i := range boxes {
		if boxes[i], err = c.prepare(); err != nil {
			return err
		}
	}
	if err := wait.For(ctx, breath); err != nil {
		return err
	}
	took, err := b.counted(ctx, r.its, r.width, rateBlock, func(ctx context.Context, i int) error { return c.bare(ctx, boxes[i]) })
	if err != nil {
		return err
	}
	r.bare = append(r.bare, rateBlock/took.Seconds())
	_, err = inParallel(ctx, 4, rateBlock, func(ctx context.Context, i int) error { return boxes[i].Remove(ctx) })
	return err
}

// inParallel does n things, width at a time, and tells how long all took.
func inParallel(ctx context.Context, width, n int, do func(ctx context.Context, i int) error) (time.Duration, error) {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(width)
	began := time.Now()
	for i := range n {
		group.Go(func() error { return do(ctx, i) })
	}
	err := group.Wait()
	return time.Since(began), err
}
