package bench

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/dormouse-run/dormouse/test/load"
	"github.com/dormouse-run/dormouse/test/load/local"
)

// apart are the benchmarks with a cluster of their own.
var apart = map[string]func(ctx context.Context, name string, opts Options) ([]Row, []string, error){
	"load-node": benchLoad, "load-fleet": benchLoad, "deletion": benchDeletion,
}

// loads are the load runs whose figures are benchmarks too: the plan of each.
var loads = map[string]string{"load-node": "node", "load-fleet": "fleet"}

// benchLoad runs a plan for one round and gives its figures. A run in which something failed has none.
func benchLoad(ctx context.Context, name string, opts Options) (rows []Row, notes []string, err error) {
	plan, err := load.ReadPlan(loads[name])
	if err != nil {
		return nil, nil, err
	}
	plan.Rounds = 1
	plan.Subjects = max(int(float64(plan.Subjects)*opts.Scale), 1)
	out, err := os.MkdirTemp("", "dormouse-bench-")
	if err != nil {
		return nil, nil, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(out)) }()
	l, err := local.Up(ctx, plan, opts.Logf)
	if err != nil {
		return nil, nil, err
	}
	l.SetLogf(func(string, ...any) {})
	defer func() { err = errors.Join(err, l.End(ctx)) }()
	run := load.Options{Plan: plan, Reach: l.Reach(), Image: l.Image, Out: filepath.Join(out, "run"), Command: []string{filepath.Join(l.Bin, "dormouse-load"), "worker"},
		Machine: l, Debt: l.Debt, Logf: func(string, ...any) {}}
	if plan.Floor == "disk" {
		run.Floor = l.DiskFloor
	}
	if plan.Simulated {
		run.Publications = l.Within
	}
	s, err := load.Run(ctx, load.NewID(), run)
	if err != nil {
		return nil, nil, err
	}
	if why := s.Failed(); len(why) > 0 {
		return nil, nil, errors.New(strings.Join(why, "; "))
	}
	return s.Figures, []string{fmt.Sprintf("%s: %d subjects of %d MiB heap and %d MiB file, one round of those of `make %s`.", name, plan.Subjects, plan.HeapMiB, plan.FileMiB, name)}, nil
}
