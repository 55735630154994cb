package launcher

import (
	"runtime"
	"slices"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// pace is how often the kernel's lock on groups is touched while a command runs: well within the grace
// period after which it grows cold, some 10 ms.
const pace = 4 * time.Millisecond

// pacer spares commands in groups the waiting of whoever changes groups. A change of a process's
// group takes a lock of the whole kernel, and the first who takes it waits for an RCU grace period, 5 to
// 20 ms in which nothing else happens; who follows within another one does not wait. The runtime's
// command changes its groups twice in a start, once at its beginning and once at its end.
//
// So a command is moved into the group in which it is, again and again: that takes the lock and
// changes nothing. It begins at the command's birth, so that the one wait passes while the command
// loads, and it ends with the command, so that the kernel's other forks have their quick way back.
//
// One command is moved for all that run. While there are more of them than CPUs, none is: what one waits
// for is the others' time, and moving costs some.
//
// It only saves time: what fails is passed over, and without a v2 group there is nothing to do.
type pacer struct {
	most int // commands for which it is worth it

	mu      sync.Mutex
	members []*paced
	stop    chan struct{} // ends the goroutine; nil while there is none
	done    chan struct{} // closed by it
}

func newPacer() *pacer { return &pacer{most: runtime.NumCPU()} }

// paced is a command that runs.
type paced struct {
	p     *Process
	mu    sync.Mutex // held while procs is written to
	procs int        // of its group; -1 once it has left
}

// join adds a command. The function that it gives takes it out, and waits for what is done to it.
func (c *pacer) join(p *Process, group Group) (leave func()) {
	dir, err := group.OpenV2()
	if err != nil || dir < 0 {
		return func() {}
	}
	procs, err := unix.Openat(dir, "cgroup.procs", unix.O_WRONLY|unix.O_CLOEXEC, 0)
	_ = unix.Close(dir) // only looked through
	if err != nil {
		return func() {}
	}
	m := &paced{p: p, procs: procs}
	c.change(func() { c.members = append(c.members, m) })
	return func() {
		c.change(func() { c.members = slices.DeleteFunc(c.members, func(o *paced) bool { return o == m }) })
		m.mu.Lock()
		defer m.mu.Unlock()
		_ = unix.Close(m.procs) // nothing is buffered
		m.procs = -1
	}
}

// change changes the members, and starts or ends the goroutine when it is to run or not any more.
func (c *pacer) change(how func()) {
	c.mu.Lock()
	how()
	worth := len(c.members) > 0 && len(c.members) <= c.most
	var ended chan struct{}
	switch {
	case worth && c.stop == nil:
		c.stop, c.done = make(chan struct{}), make(chan struct{})
		go c.run(c.stop, c.done)
	case !worth && c.stop != nil:
		close(c.stop)
		c.stop, ended = nil, c.done
	}
	c.mu.Unlock()
	if ended != nil {
		<-ended
	}
}

func (c *pacer) run(stop <-chan struct{}, done chan<- struct{}) {
	defer close(done)
	tick := time.NewTicker(pace)
	defer tick.Stop()
	for {
		c.mu.Lock()
		members := slices.Clone(c.members)
		c.mu.Unlock()
		for _, m := range members {
			if m.rejoin() {
				break
			}
		}
		select {
		case <-tick.C:
		case <-stop:
			return
		}
	}
}

// rejoin moves the process into the group that it is in. false: it has been reaped, and its number may
// be another's by now, or it has left; nothing was written.
func (m *paced) rejoin() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.procs >= 0 && m.p.rejoin(m.procs)
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
