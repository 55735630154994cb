package runner

import (
	"context"
	"runtime"
	"sync"
	"time"
)

// ends bounds how many runtimes are being ended at a time. Each that ends is a dozen threads and an address space that the kernel takes apart,
// on the CPUs that answer everybody else: with five hundred at once a Get took 136 ms. A few at a time are over just as soon.
//
// It is for the many, not a lock: one that does not end within endsPatience gives its place to the next and goes on without, so that
// sandboxes which the kernel does not let go of hold up no others.
type ends struct{ slots chan struct{} }

const endsPatience = 2 * time.Second

func newEnds() *ends { return &ends{slots: make(chan struct{}, 2*runtime.NumCPU()+2)} }

// enter waits for a place, or for the end of ctx: what is to be ended is then ended without one.
func (e *ends) enter(ctx context.Context) (leave func()) {
	select {
	case e.slots <- struct{}{}:
	case <-ctx.Done():
		return func() {}
	}
	free := sync.OnceFunc(func() { <-e.slots })
	timer := time.AfterFunc(endsPatience, free)
	return func() {
		timer.Stop()
		free()
	}
}
