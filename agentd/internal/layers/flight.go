// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package layers

import (
	"context"
	"sync"
	"time"
)

// reportEvery bounds how often a waiter hears of progress within a phase.
const reportEvery = 100 * time.Millisecond

// flight is the one preparation of an image that is under way. It belongs to the Store, not to the callers
// that wait for it: any of them may give up.
type flight struct {
	done chan struct{}
	// Set before done is closed.
	rec record
	err error

	mu       sync.Mutex
	progress Progress
	passed   []Progress    // how each phase before this one ended
	changed  chan struct{} // closed and replaced at each change
	turned   chan struct{} // and at each new phase
}

func newFlight() *flight {
	return &flight{done: make(chan struct{}), changed: make(chan struct{}), turned: make(chan struct{}), progress: Progress{Phase: PhaseResolving}}
}

// update changes the progress and wakes those who wait for news.
func (f *flight) update(change func(*Progress)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	before := f.progress
	change(&f.progress)
	close(f.changed)
	f.changed = make(chan struct{})
	if f.progress.Phase != before.Phase {
		f.passed = append(f.passed, before.clone()) // a new phase changes no layer of the one before
		close(f.turned)
		f.turned = make(chan struct{})
	}
}

// news is what a waiter has not heard who was told of so many phases, how far the flight is now, and what will tell of more.
func (f *flight) news(told int) (passed []Progress, now Progress, changed, turned <-chan struct{}) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.passed[told:], f.progress.clone(), f.changed, f.turned
}

// wait returns when the flight has landed or the caller gives up. Progress is told from the caller's
// goroutine: what is now, and then, at most every so often, what has changed. A new phase is told at once, and none is left out,
// however short it was.
func (f *flight) wait(ctx context.Context, tell func(Progress)) (record, error) {
	told := 0
	say := func() (changed, turned <-chan struct{}) {
		if tell == nil {
			return nil, nil
		}
		passed, now, changed, turned := f.news(told)
		for _, p := range passed {
			tell(p)
		}
		told += len(passed)
		tell(now)
		return changed, turned
	}
	lull := time.NewTimer(reportEvery)
	defer lull.Stop()
	for {
		changed, turned := say()
		lull.Reset(reportEvery)
		for pause := lull.C; ; pause = nil {
			news := changed
			if pause != nil {
				news = nil
			}
			select {
			case <-ctx.Done():
				return record{}, context.Cause(ctx)
			case <-f.done:
				say()
				return f.rec, f.err
			case <-pause:
				continue
			case <-turned:
			case <-news:
			}
			break
		}
	}
}
