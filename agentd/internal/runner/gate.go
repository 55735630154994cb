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
//   - makes, restores and captures: what comes before the turn at the runtime (image, folder, network and spec; the guest's processes and the manifest) is
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

// turns are the turns at the runtime: all, and those of restores among them. A start stands still now and then (the kernel moves it between
// control groups, its sandbox waits for its threads), so two more than there are cores keep the cores busy. A restore reads its memory with all
// the cores there are: with more of them than cores each takes longer, and none is done earlier.
type turns struct{ all, restores chan struct{} }

func newTurns(width, restores int) turns {
	width = max(width, 1)
	if restores < 1 || restores > width {
		restores = width
	}
	return turns{all: make(chan struct{}, width), restores: make(chan struct{}, restores)}
}

// take waits for a turn. A restore that waits for those before it keeps no start from its turn.
func (t turns) take(ctx context.Context, restore bool) (leave func(), err error) {
	wanted := []chan struct{}{t.all}
	if restore {
		wanted = []chan struct{}{t.restores, t.all}
	}
	for i, c := range wanted {
		select {
		case c <- struct{}{}:
		case <-ctx.Done():
			release(wanted[:i])
			return nil, context.Cause(ctx)
		}
	}
	return func() { release(wanted) }, nil
}

func release(taken []chan struct{}) {
	for _, c := range taken {
		<-c
	}
}

// taken tells whether somebody has a turn.
func (t turns) taken() bool { return len(t.all) > 0 }
