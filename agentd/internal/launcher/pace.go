package launcher

import (
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// pace is how often the kernel's lock on groups is touched while a command runs: well within the grace
// period after which it grows cold, some 10 ms.
const pace = 4 * time.Millisecond

// keepPace spares a command in a group the waiting of whoever changes groups. A change of a process's
// group takes a lock of the whole kernel, and the first who takes it waits for an RCU grace period, 5 to
// 20 ms in which nothing else happens; who follows within another one does not wait. The runtime's
// command changes its groups twice in a start, once at its beginning and once at its end.
//
// So the command is moved into the group in which it is, again and again: that takes the lock and
// changes nothing. It begins at the command's birth, so that the one wait passes while the command
// loads, and it ends with the command, so that the kernel's other forks have their quick way back.
//
// It only saves time: what fails is passed over, and without a v2 group there is nothing to do.
// The returned function ends it and waits for its goroutine.
func (p *Process) keepPace(group Group) (stop func()) {
	dir, err := group.OpenV2()
	if err != nil || dir < 0 {
		return func() {}
	}
	procs, err := unix.Openat(dir, "cgroup.procs", unix.O_WRONLY|unix.O_CLOEXEC, 0)
	_ = unix.Close(dir) // only looked through
	if err != nil {
		return func() {}
	}
	ended := make(chan struct{})
	var owned sync.WaitGroup
	owned.Go(func() {
		defer func() { _ = unix.Close(procs) }() // nothing is buffered
		tick := time.NewTicker(pace)
		defer tick.Stop()
		for p.rejoin(procs) {
			select {
			case <-tick.C:
			case <-ended:
				return
			}
		}
	})
	return func() {
		close(ended)
		owned.Wait()
	}
}

// rejoin moves the process into the group that it is in. false: it has been reaped, and its number may
// be another's by now; nothing was written.
func (p *Process) rejoin(procs int) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.reaped {
		return false
	}
	_, _ = unix.Write(procs, strconv.AppendInt(nil, int64(p.pid), 10)) // one that has ended cannot be moved
	return true
}
