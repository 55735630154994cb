package bench

import (
	"context"
	"fmt"
	"time"

	"github.com/dormouse-run/dormouse/test/deletion"
)

// benchDeletion deletes 10,000 snapshots at once, kills the coordinator in the middle, and looks what another tenant sees of it. A run in which something
// was not as package deletion says has no figures.
func benchDeletion(ctx context.Context, _ string, opts Options) ([]Row, []string, error) {
	n := max(int(10_000*opts.Scale), 500)
	const nodes = 4
	f, err := deletion.Run(ctx, deletion.Options{Snapshots: n, Nodes: nodes, Rounds: 200, Logf: opts.Logf})
	if err != nil {
		return nil, nil, err
	}
	count := func(what, product string, value int, least, most float64) Row {
		return Row{What: what, Product: product, Value: float64(value), AtLeast: least, AtMost: most}
	}
	rows := []Row{
		count(fmt.Sprintf("removals that one node was asked for at a time, at most, while %d snapshots were deleted", n), fmt.Sprintf("%d nodes, %.0f s", nodes, f.Storm.Seconds()), f.AtNode, 0, deletion.Width),
		count("of these, seen absent on the disk while the record was there still", "", f.Checked, float64(n), 0),
		count("deletions pending at the same time, at most, as the status says; in the middle it said", f.Seen, f.Pending, 0, 0),
		count("pending when the coordinator was killed in the middle, and found by the next one", fmt.Sprintf("%d more were not accepted yet", f.Again), f.After, 0, 0),
		count("deletions that were refused, naming the references", "", f.Refused, 0, 0),
	}
	for _, call := range []struct{ name, what string }{{deletion.Update, "another tenant's update of a sandbox, a commit"},
		{deletion.Checkpoint, "another tenant's checkpoint"}, {deletion.Delete, "another tenant's deletion of one snapshot, in its turn"}} {
		before, during := f.Before[call.name], f.During[call.name]
		rows = append(rows,
			Row{What: call.what + ", meanwhile, median; bare: before", Product: ms(during.P50), Bare: ms(before.P50), Value: factor(during.P50, before.P50), Unit: "x"},
			Row{What: "the same, 99th percentile", Product: ms(during.P99), Bare: ms(before.P99), Value: factor(during.P99, before.P99), Unit: "x", AtMost: 5})
	}
	return append(rows,
		count("tombstones afterwards", "", int(f.Tombstones), 0, 0),
		Row{What: "the coordinator afterwards, resident; bare: before", Product: mb(f.Coordinator[1]), Bare: mb(f.Coordinator[0]), Value: f.Coordinator[1], Unit: "MB", AtMost: coordinatorMost},
		Row{What: "Redis afterwards, resident; bare: before", Product: mb(f.Redis[1]), Bare: mb(f.Redis[0]), Value: f.Redis[1], Unit: "MB"},
	), []string{fmt.Sprintf("%d simulated nodes, %d callers, a commit each for the acceptance and for the end of a deletion; %d snapshots were published in %.0f s.", nodes, deletion.Callers, f.Published, f.Took.Seconds())}, nil
}

func ms(d time.Duration) string { return fmt.Sprintf("%.1f ms", float64(d.Microseconds())/1000) }

func mb(v float64) string { return fmt.Sprintf("%.1f MB", v) }

func factor(a, b time.Duration) float64 { return float64(a) / float64(b) }
