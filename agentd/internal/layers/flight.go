// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package layers

import (
	"context"
	"slices"
	"sync"
	"time"
)

// reportEvery bounds how often a waiter hears of progress.
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
	changed  chan struct{} // closed and replaced at each change
}

func newFlight() *flight {
	return &flight{done: make(chan struct{}), changed: make(chan struct{}), progress: Progress{Phase: PhaseResolving}}
}

// update changes the progress and wakes those who wait for news.
func (f *flight) update(change func(*Progress)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change(&f.progress)
	close(f.changed)
	f.changed = make(chan struct{})
}

func (f *flight) news() (Progress, <-chan struct{}) {
	f.mu.Lock()
	defer f.mu.Unlock()
	p := f.progress
	p.Layers = slices.Clone(p.Layers)
	return p, f.changed
}

// wait returns when the flight has landed or the caller gives up. Progress is told from the caller's
// goroutine: what is now, and then, at most every so often, what has changed.
func (f *flight) wait(ctx context.Context, tell func(Progress)) (record, error) {
	lull := time.NewTimer(reportEvery)
	defer lull.Stop()
	for {
		var changed <-chan struct{}
		if tell != nil {
			var p Progress
			p, changed = f.news()
			tell(p)
		}
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
				return f.rec, f.err
			case <-pause:
				continue
			case <-news:
			}
			break
		}
	}
}
