package runner

import (
	"context"
	"runtime"
	"sync"
	"time"
)

// gate bounds how many are at something at a time, in the order in which they came: what many do at once takes each of them longer and ends no
// sooner, and the first are done only when nearly all are.
//
// It is for the many, not a lock: one that is not through within gatePatience gives its place to the next and goes on without, so that sandboxes
// that hang, or wait for an image, hold up no others.
//
//   - ends: each sandbox that ends is a dozen threads and an address space that the kernel takes apart, on the CPUs that answer everybody
//     else: with five hundred at once a Get took 136 ms.
//   - makes and captures: what comes before the turn at the runtime (image, folder, network and spec; the guest's processes and the manifest) is
//     done for those whose turn is next, and not for all that wait at the expense of the one that has it.
type gate struct{ slots chan struct{} }

const gatePatience = 2 * time.Second

// ahead is how many prepare while others have their turn at the runtime.
const ahead = 2

func newGate(width int) *gate { return &gate{slots: make(chan struct{}, width)} }

func newEnds() *gate { return newGate(2*runtime.NumCPU() + 2) }

// enter waits for a place, or for the end of ctx: then there is none, and leave does nothing.
func (g *gate) enter(ctx context.Context) (leave func()) {
	select {
	case g.slots <- struct{}{}:
	case <-ctx.Done():
		return func() {}
	}
	free := sync.OnceFunc(func() { <-g.slots })
	timer := time.AfterFunc(gatePatience, free)
	return func() {
		timer.Stop()
		free()
	}
}

// enterTimed is enter that tells how long it took.
func (n *Node) enterTimed(ctx context.Context, g *gate) (leave func(), waited time.Duration) {
	asked := n.Now()
	leave = g.enter(ctx)
	return leave, n.Now().Sub(asked)
}
