package bench

import (
	"context"
	"fmt"
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
	best := map[bool]float64{}
	for _, width := range []int{2, 3, 4} {
		mine, its, err := b.startRates(ctx, floor, spec, width)
		if err != nil {
			return nil, err
		}
		best[true], best[false] = max(best[true], mine), max(best[false], its)
		rows = append(rows, Row{What: fmt.Sprintf("starts per second, %d at a time", width), Product: rate(mine), Bare: rate(its), Value: mine / its, Unit: "x"})
	}
	rows = append(rows, Row{What: "starts per second, each at its best width", Product: rate(best[true]), Bare: rate(best[false]),
		Value: best[true] / best[false], Unit: "x", AtLeast: 0.85})
	return rows, model.Delete(ctx, "")
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

// startRates starts blocks of sandboxes each way in turn and gives the median rates.
func (b *bench) startRates(ctx context.Context, floor *bare, spec *specs.Spec, width int) (product, its float64, err error) {
	return b.rates(ctx, "start", width, contest{
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

// rates makes blocks of sandboxes each way in turn and gives the median rates. What CPU they took, and who, goes into the notes.
func (b *bench) rates(ctx context.Context, what string, width int, c contest) (product, its float64, err error) {
	const block = 12
	var ours, theirs Sample
	mine, bare := cpuUse{}, cpuUse{}
	rounds := b.times(5)
	for range rounds {
		made := make([]*client.Sandbox, block)
		if err := wait.For(ctx, breath); err != nil {
			return 0, 0, err
		}
		took, err := b.counted(ctx, mine, width, block, func(ctx context.Context, i int) (err error) {
			made[i], err = c.product(ctx)
			return err
		})
		if err != nil {
			return 0, 0, err
		}
		ours = append(ours, block/took.Seconds())
		if err := deleteAll(ctx, made); err != nil {
			return 0, 0, err
		}
		boxes := make([]*barerunsc.Box, block)
		for i := range boxes {
			if boxes[i], err = c.prepare(); err != nil {
				return 0, 0, err
			}
		}
		if err := wait.For(ctx, breath); err != nil {
			return 0, 0, err
		}
		took, err = b.counted(ctx, bare, width, block, func(ctx context.Context, i int) error { return c.bare(ctx, boxes[i]) })
		if err != nil {
			return 0, 0, err
		}
		theirs = append(theirs, block/took.Seconds())
		if _, err := inParallel(ctx, 4, block, func(ctx context.Context, i int) error { return boxes[i].Remove(ctx) }); err != nil {
			return 0, 0, err
		}
	}
	b.note("%d at a time, CPU of a %s: %s; bare: %s", width, what, mine.each(block*rounds), bare.each(block*rounds))
	return ours.Median(), theirs.Median(), nil
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
