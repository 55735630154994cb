package robustness

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"time"
)

// keyPrefix begins the keys of the catalog in the server.
const keyPrefix = "{dormouse}:"

// Options of a run.
type Options struct {
	Seed uint64
	// Operations are recorded at least.
	Operations int64
	// Faults of the run.
	Faults int
	// Only is the kind that they are of, if it is not empty.
	Only string
	// Losses: faults after which something is lost may be among them, not only if they are named.
	Losses bool
	// Binary is the coordinator.
	Binary string
	// Variant is a mutation that the binary has, or empty.
	Variant string
	// Out, if it is not empty, is a folder for what helps to understand a run that found something.
	Out string
	// Patience is how long an operation of unknown outcome is asked for; minutes, if it is zero.
	Patience time.Duration
	// FaultPatience is how long a fault waits for what it needs, and for the system to be back; as Patience.
	FaultPatience time.Duration
	// Limit of the run; minutes, if it is zero.
	Limit time.Duration
	// CheckLimit is how long each part of the history is checked at the most; minutes, if it is zero.
	CheckLimit time.Duration
	// Enough: something wrong is enough, and the rest of the history is not checked.
	Enough bool
}

// runLimit bounds one run, however slow the machine is.
const runLimit = 8 * time.Minute

// checkLimit bounds the check of a part of the history, which takes some milliseconds where nothing is wrong.
const checkLimit = 4 * time.Minute

// Run makes a system, has clients use it while faults strike it, and checks what they were told. The report says what was
// wrong; the error is of a run that could not be made.
func Run(ctx context.Context, o Options) (report *Report, err error) {
	ctx, cancel := context.WithTimeout(ctx, cmp.Or(o.Limit, runLimit))
	defer cancel()
	began := time.Now()
	w, err := newWorld(ctx, o.Binary, o.Variant, nil)
	if err != nil {
		return nil, fmt.Errorf("start the system: %w", err)
	}
	defer func() {
		if o.Out != "" && (err != nil || !report.Good()) {
			err = errors.Join(err, w.keepLogs(o.Out))
		}
		err = errors.Join(err, w.close())
	}()
	t := newTraffic(w, o.Operations)
	t.patience = cmp.Or(o.Patience, patience)
	f := &faults{world: w, traffic: t, patience: cmp.Or(o.FaultPatience, patience)}
	plan := schedule(o.Seed, o.Faults, o.Operations, o.Only, o.Losses)
	failed := drive(ctx, o, t, f, plan)
	if failed == nil || o.Variant != "" { // a variant may leave a system that does not recover, and what it says is what counts
		t.sweep(ctx)
	}
	wrong := w.validate(ctx)
	records, objects, byUID, blamed := t.snapshot()
	c := &checker{records: records, objects: objects, byUID: byUID, windows: f.windows, losses: f.losses, limit: cmp.Or(o.CheckLimit, checkLimit)}
	wrong = append(wrong, blamed...)
	var nonlinear []string
	var steps int
	if len(wrong) == 0 || !o.Enough {
		nonlinear, steps = c.check(cells)
	}
	report = newReport(o, records, f.struck)
	report.Plan, report.Steps, report.Took = plan, steps, time.Since(began)
	report.Wrong = append(wrong, nonlinear...)
	if failed != nil {
		report.Stuck = failed.Error()
	}
	return report, nil
}

// drive has the traffic and the faults go on side by side, and gives what stopped the faults.
func drive(ctx context.Context, o Options, t *traffic, f *faults, plan []planned) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	done := make(chan struct{})
	var group sync.WaitGroup
	for n := range workers {
		rng := rand.New(rand.NewPCG(o.Seed, uint64(100+n)))
		group.Go(func() { t.worker(ctx, n, rng, done) })
	}
	err := f.run(ctx, plan)
	close(done)
	if err != nil {
		cancel()
	}
	group.Wait()
	return err
}

// validate checks what no client can see: that both coordinators live, and that the change log has every sequence once, by
// epochs that only grow.
func (w *world) validate(ctx context.Context) (wrong []string) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute) // also of a run that took too long
	defer cancel()
	for i, c := range w.coord {
		select {
		case <-c.ended():
			wrong = append(wrong, fmt.Sprintf("coordinator %d ended by itself", i))
		default:
		}
	}
	entries, err := w.redis.client.XRange(ctx, keyPrefix+"log", "-", "+").Result()
	if err != nil {
		return append(wrong, fmt.Sprintf("the change log cannot be read: %v", err))
	}
	var seq, epoch uint64
	for _, e := range entries {
		var n uint64
		_, _ = fmt.Sscanf(e.ID, "%d-", &n) // 0 is caught below
		by, _ := strconv.ParseUint(fmt.Sprint(e.Values["e"]), 10, 64)
		if n != seq+1 && seq != 0 && (n < seq || e.Values["i"] != "") {
			wrong = append(wrong, fmt.Sprintf("the change log goes on from sequence %d with %d", seq, n))
		}
		if by < epoch {
			wrong = append(wrong, fmt.Sprintf("commit %d is of coordinator epoch %d, after one of epoch %d", n, by, epoch))
		}
		seq, epoch = n, max(by, epoch)
	}
	return wrong
}

// keepLogs copies what the processes said.
func (w *world) keepLogs(to string) error {
	logs, err := filepath.Glob(w.path("*.log"))
	if err != nil {
		return err
	}
	all := []error{os.MkdirAll(to, 0o755)}
	for _, log := range logs {
		data, err := os.ReadFile(log)
		all = append(all, err, os.WriteFile(filepath.Join(to, filepath.Base(log)), data, 0o600))
	}
	return errors.Join(all...)
}
