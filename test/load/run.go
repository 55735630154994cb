// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package load

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/dormouse-run/dormouse/pkg/client"
	"github.com/dormouse-run/dormouse/test/report"
)

// Options of a run.
type Options struct {
	Plan Plan
	// Reach is how the clients reach the cluster.
	Reach Reach
	// Image has the subject's program, by digest.
	Image string
	// Out is the folder of the run; it is made.
	Out string
	// Command starts a client process, which calls Work.
	Command []string
	// Machine (may be nil) is looked at once a second.
	Machine Machine
	// Debt (may be nil) finds what a clean catalog does not show.
	Debt func(ctx context.Context) ([]string, error)
	// Floor (may be nil) does the same work without the product, once the product has done it and nothing of it is left.
	Floor func(ctx context.Context, r *Recorder) error
	// Publications (may be nil) tells which share of the snapshots was published no later than so long after its node had reported it, and how many there were.
	Publications func(ctx context.Context, limit time.Duration) (share float64, count uint64, err error)
	// Logf is told of progress, a line at a time.
	Logf func(format string, args ...any)
}

// publishLimit is what 99 of 100 publications are to take at the most, in a run that loads the coordinator.
const publishLimit = 50 * time.Millisecond

// NewID makes a run's id.
func NewID() string {
	var b [5]byte
	_, _ = rand.Read(b[:]) // never fails, by its contract
	return hex.EncodeToString(b[:])
}

// cleanTime is how long cleaning up may take after an interruption.
const cleanTime = 15 * time.Minute

// Run does what the plan says and writes the folder of the run. The summary says what failed; the error is for a run that could
// not be made. What the run made is deleted in any case, unless the process is killed.
func Run(ctx context.Context, id string, opts Options) (_ Summary, err error) {
	api, err := opts.Reach.dial()
	if err != nil {
		return Summary{}, err
	}
	defer func() { err = errors.Join(err, api.Close()) }()
	r, err := record(id, opts)
	if err != nil {
		return Summary{}, err
	}
	defer func() { err = errors.Join(err, r.close()) }()
	stop := r.watch(opts.Machine)
	reading, end := context.WithCancel(ctx)
	var reader sync.WaitGroup
	reader.Go(func() { r.get(reading, api) })
	worked := work(ctx, r, api, opts)
	end()
	reader.Wait()
	if opts.Publications != nil && worked == nil {
		r.published.Limit = Duration(publishLimit)
		r.published.Share, r.published.Count, worked = opts.Publications(ctx, publishLimit)
	}
	clean, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanTime)
	defer cancel()
	r.debt, err = Clean(clean, api, id, opts.Logf)
	if err == nil && opts.Debt != nil {
		var more []string
		more, err = opts.Debt(clean)
		r.debt = append(r.debt, more...)
	}
	stop()
	if err == nil && worked == nil && opts.Floor != nil {
		worked = opts.Floor(ctx, r)
	}
	s := r.summary()
	s.Interrupted = worked != nil
	return s, errors.Join(worked, err, writeReport(opts.Out, s))
}

// work drives the client processes through the phases.
func work(ctx context.Context, r *Recorder, api *client.Client, opts Options) (err error) {
	crew, err := hire(ctx, r, opts)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, crew.dismiss()) }()
	for _, c := range phases(opts.Plan) {
		if err := ctx.Err(); err != nil {
			return context.Cause(ctx)
		}
		if c.Phase == Delete && c.Round == 0 {
			if err := r.audit(ctx, api); err != nil {
				return err
			}
		}
		if err := crew.phase(ctx, c); err != nil {
			return err
		}
	}
	return nil
}

// phases of a plan, in order.
func phases(p Plan) []command {
	var all []command
	if p.Volume {
		all = append(all, command{Volumes, 0})
	}
	all = append(all, command{Create, 0})
	if !p.Simulated {
		all = append(all, command{Begin, 0})
	}
	for i := 1; i <= p.Rounds; i++ {
		all = append(all, command{Checkpoint, i}, command{Delete, i}, command{Restore, i})
		if !p.Simulated {
			all = append(all, command{Prove, i})
		}
	}
	return append(all, command{Delete, 0}, command{Forget, 0})
}

// Identity is what is kept of a run from its first moment on, so that it can be cleaned up.
type Identity struct {
	ID    string    `json:"id"`
	Began time.Time `json:"began"`
	Addr  string    `json:"addr"`
	Plan  Plan      `json:"plan"`
}

func record(id string, opts Options) (*Recorder, error) {
	if err := os.MkdirAll(opts.Out, 0o700); err != nil {
		return nil, err
	}
	if _, err := os.Stat(filepath.Join(opts.Out, "run.json")); err == nil {
		return nil, fmt.Errorf("there is a run in %s already; give another folder", opts.Out)
	}
	who := Identity{ID: id, Began: time.Now().UTC(), Addr: opts.Reach.Addr, Plan: opts.Plan}
	if err := report.WriteJSON(filepath.Join(opts.Out, "run.json"), who); err != nil {
		return nil, err
	}
	return newRecorder(who, opts)
}
