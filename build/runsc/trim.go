// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"os/signal"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"syscall"
	"time"
)

// A trim gives back what a phase of work left in the sandbox's heap: 8 MiB after a restore, 5 after a save. It is one collection, 5 ms of CPU, and
// there may be a thousand sandboxes; so it is made only
//
//   - once, settleAfter the start: an ordinary start or restore is over then;
//   - when trimSignal asks for it. A save makes too little garbage for a collection of its own, and nothing in here tells that there was one; agentd
//     knows, and knows when the node has the time;
//   - after a collection that the runtime made for itself, in a sandbox that has been quiet since.
//
// There is no timer and no look: an idle sandbox costs nothing.
const (
	settleAfter = 4 * time.Second

	// trimSignal is what asks for a trim. The driver of agentd sends it, also to older builds: a real-time signal that nobody waits for is
	// ignored by Go's runtime, and gVisor forwards none to those inside.
	trimSignal = syscall.Signal(50)

	// quietFor is how long next to nothing must be allocated after a collection, and quiet is what counts as nothing: who is busy would only make
	// the same garbage again.
	quietFor = 2 * time.Second
	quiet    = 256 << 10

	// worth is what a trim must gain at least. It costs by the live heap, so a quarter of that is the least too.
	worth      = 1 << 20
	worthShare = 4
)

type trimmer struct {
	heap
	asked     chan os.Signal
	collected chan struct{}
	free      func()
	settle    time.Duration
	quietFor  time.Duration
}

func newTrimmer() *trimmer {
	t := &trimmer{heap: newHeap(), asked: make(chan os.Signal, 1), collected: make(chan struct{}, 1), free: debug.FreeOSMemory, settle: settleAfter, quietFor: quietFor}
	signal.Notify(t.asked, trimSignal)
	return t
}

// run never ends; the process does.
func (t *trimmer) run() {
	select {
	case <-time.After(t.settle):
	case <-t.asked:
	}
	debug.SetGCPercent(settlePercent)
	t.free()
	t.onCollection()
	for {
		t.once()
	}
}

// once waits for a reason to trim, and does it if there is something to gain.
func (t *trimmer) once() {
	select {
	case <-t.asked:
	case <-t.collected:
		if !t.worthwhile() || !t.staysQuiet() {
			return
		}
	}
	if t.worthwhile() {
		t.free()
	}
}

// staysQuiet waits, and tells whether next to nothing was allocated meanwhile; who asks need not wait.
func (t *trimmer) staysQuiet() bool {
	before := t.value(allocs)
	select {
	case <-time.After(t.quietFor):
	case <-t.asked:
		return true
	}
	t.look()
	return t.value(allocs)-before <= quiet
}

// onCollection has each collection told: an object that nobody holds is gone with the next one.
func (t *trimmer) onCollection() {
	type canary struct{ self *canary }
	runtime.AddCleanup(new(canary), func(t *trimmer) {
		select {
		case t.collected <- struct{}{}:
		default:
		}
		t.onCollection()
	}, t)
}

// heap is what the runtime's own counters say. Reading them stops nobody.
type heap []metrics.Sample

const (
	objects = iota // bytes in objects, dead ones among them
	live           // bytes in those that the last collection found alive
	idle           // bytes without objects that were not given back
	allocs         // bytes ever allocated
)

func newHeap() heap {
	return heap{
		objects: {Name: "/memory/classes/heap/objects:bytes"},
		live:    {Name: "/gc/heap/live:bytes"},
		idle:    {Name: "/memory/classes/heap/free:bytes"},
		allocs:  {Name: "/gc/heap/allocs:bytes"},
	}
}

func (h heap) look() { metrics.Read(h) }

func (h heap) value(i int) uint64 { return h[i].Value.Uint64() }

func (h heap) worthwhile() bool {
	h.look()
	return worthwhile(h.value(objects), h.value(live), h.value(idle))
}

// worthwhile tells whether a trim gains enough, if all that was allocated since the last collection is dead.
func worthwhile(objects, live, idle uint64) bool {
	gain := idle
	if objects > live {
		gain += objects - live
	}
	return gain >= max(worth, live/worthShare)
}
