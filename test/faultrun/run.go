// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package faultrun

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/dormouse-run/dormouse/pkg/client"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/wire"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
	"github.com/dormouse-run/dormouse/test/load/local"
	"github.com/dormouse-run/dormouse/test/load/probe"
)

// Options of a run.
type Options struct {
	// Subjects on three nodes in turn, at least 3.
	Subjects int
	// HeapMiB of random bytes in the memory of each, FileMiB in its private file.
	HeapMiB, FileMiB int
	// Points (may be nil) kills agentd at its crash points and starts it again, and says how many there were.
	Points func(ctx context.Context) (found string, err error)
	Logf   func(format string, args ...any)
}

// Nodes is how many there are; the last is the one that is lost.
const Nodes = 3

const mib = 1 << 20

// patience is the budget of a call, faults included.
const patience = 5 * time.Minute

// one is a subject.
type one struct {
	node    int
	volume  *client.Volume
	box     *client.Sandbox
	program *probe.Probe
	asked   [2]*dormousev1.CheckpointSandboxRequest
	taken   [2]*client.Snapshot
	asLast  [2]probe.State // of the program when it was captured
}

// run is a fault run at work.
type run struct {
	Options
	c        *local.Cluster
	api      *client.Client
	report   *Report
	subjects []*one
	before   *dormousev1.Snapshot // a snapshot that is older than the run
	pids     map[string]int

	mu   sync.Mutex
	step string
}

// Run does it on a cluster that is up and empty. The error is for a run that could not go on; what did not hold is in the report.
func Run(ctx context.Context, c *local.Cluster, opts Options) (_ *Report, err error) {
	if opts.Subjects < Nodes {
		return nil, fmt.Errorf("a fault run needs at least %d subjects, not %d", Nodes, opts.Subjects)
	}
	r := &run{Options: opts, c: c, report: &Report{Began: time.Now().UTC(), Subjects: opts.Subjects, Nodes: Nodes, HeapMiB: opts.HeapMiB, FileMiB: opts.FileMiB}}
	if r.report.Executables, err = c.Parts(); err != nil {
		return nil, err
	}
	reach := c.Reach()
	r.api, err = client.Dial(client.Config{Addr: reach.Addr, APIKeyFile: reach.APIKeyFile}, probe.FailedCalls(r.failed)...)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, r.api.Close()) }()
	for _, step := range []struct {
		name string
		do   func(context.Context) error
	}{
		{"begin", r.begin}, {"first batch", r.firstBatch}, {"replay", r.replay}, {"refused deletions", r.refusedDeletions}, {"volume by name", r.staleVolume},
		{"second batch", r.secondBatch}, {"restore", r.restoreAll}, {"crash points", r.points}, {"end", r.end},
	} {
		r.enter(step.name)
		if err := step.do(ctx); err != nil {
			r.check("-", false, "the run goes on", "%s: %v", step.name, err)
			break
		}
	}
	r.report.TookMS = float64(time.Since(r.report.Began).Milliseconds())
	return r.report, nil
}

func (r *run) enter(name string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.step = name
	r.Logf("%s", name)
}

// check notes how a requirement came out.
func (r *run) check(id string, passed bool, what, format string, args ...any) {
	c := Check{ID: id, What: what, Found: fmt.Sprintf(format, args...), Passed: passed}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.report.Checks = append(r.report.Checks, c)
	word := "ok"
	if !passed {
		word = "FAILED"
	}
	r.Logf("%s %s %s: %s", word, id, what, c.Found)
}

// fault does something to the cluster, and notes it.
func (r *run) fault(what string, do func() error) error {
	at := time.Now()
	err := do()
	r.mu.Lock()
	r.report.Faults = append(r.report.Faults, Fault{At: at.UTC(), What: what, Took: float64(time.Since(at).Microseconds()) / 1000})
	r.mu.Unlock()
	r.Logf("fault: %s", what)
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return nil
}

// all calls fn for every subject at once, and gives what went wrong.
func (r *run) all(ctx context.Context, fn func(ctx context.Context, o *one) error) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	errs := make([]error, len(r.subjects))
	var wg sync.WaitGroup
	for i, o := range r.subjects {
		wg.Go(func() {
			if err := fn(ctx, o); err != nil {
				errs[i] = fmt.Errorf("subject %d: %w", i, err)
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// insist calls again, under the same operation id, as long as the error allows it: the client library gives up long before a coordinator
// is back. Each try is in the report.
func insist[T any](ctx context.Context, call func(ctx context.Context) (T, error)) (T, error) {
	for {
		v, err := call(ctx)
		var e *errs.Error
		if err == nil || !errors.As(err, &e) || e.Retry == errs.Never {
			return v, err
		}
		select {
		case <-time.After(again):
		case <-ctx.Done():
			return v, errors.Join(err, context.Cause(ctx))
		}
	}
}

// again is the pause between two calls of insist.
const again = 200 * time.Millisecond

// count is how many of the subjects went wrong.
func count(err error) int {
	if err == nil {
		return 0
	}
	var many interface{ Unwrap() []error }
	if errors.As(err, &many) {
		return len(many.Unwrap())
	}
	return 1
}

// because is the end of a sentence that says what went wrong, if anything did.
func because(err error) string {
	if err == nil {
		return ""
	}
	return ": " + strings.ReplaceAll(err.Error(), "\n", "; ")
}

// found puts a number of subjects and what went wrong into words.
func (r *run) found(err error) string {
	return fmt.Sprintf("%d of %d%s", len(r.subjects)-count(err), len(r.subjects), because(err))
}

// ---- failed calls (F12) ---------------------------------------------------------

// expected marks calls that are to be refused.
type expected struct{}

func (r *run) failed(ctx context.Context, method string, _ time.Time, err error) {
	if ctx.Err() != nil || ctx.Value(expected{}) != nil {
		return
	}
	e := wire.FromStatus(err)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.report.Attempts = append(r.report.Attempts, Attempt{At: time.Now().UTC(), Step: r.step, Method: method, Reason: string(e.Reason), Outcome: string(e.Outcome), Error: e.Message})
}
