package guestinit

import (
	"runtime"
	"syscall"

	"github.com/dormouse-run/dormouse/agentd/internal/guestwire"
)

// Config is what Run is started with.
type Config struct {
	// In and Out are the descriptors of the channel's FIFOs.
	In, Out int
	// Build names this build in Welcome.
	Build string
	// Root is put before the paths of the files that init writes. Only tests set it.
	Root string
}

// Limits that a request or a busy guest cannot exceed.
const (
	maxLive      = 1024      // processes that have not ended
	maxEnded     = 256       // ended processes that are remembered
	maxKept      = 16 << 20  // bytes of output kept of ended processes
	maxStreams   = 2048      // open waits, outputs and inputs
	outHigh      = 256 << 10 // replies waiting; above it no request is read
	outFill      = 64 << 10  // output frames made at a time
	readsPerTurn = 8         // reads of one descriptor before the others have their turn
	retryInput   = 250       // ms until an input FIFO at its end is tried again
)

// agent is guest init. Only the loop's goroutine touches it.
type agent struct {
	cfg  Config
	poll int
	wake int // eventfd: a child has ended
	kick chan struct{}
	seen chan struct{}

	sources map[int32]func(events uint32)
	scratch []byte

	// The channel.
	ch       guestwire.Channel
	uid      string
	prev     guestwire.Welcome // previous uid and generation, for a hello that is sent again
	open     bool
	quiesced bool
	dec      guestwire.Decoder
	asm      guestwire.Assembler
	inOff    bool // not polled: too much to say, or at its end
	inRetry  int64
	out      []byte
	outAt    int
	outArmed bool

	// Processes.
	procs  map[string]*process
	byPID  map[int]*process
	ended  []*process
	ending bool       // a process has closed its outputs: most end right then
	dirty  []*process // have news for a wait or an input stream
	// streams counts waits, outputs and inputs.
	streams int
	outputs []*output
	turn    int

	passwd, group remembered
	null          int // the null device once it was opened; 0 before

	// Identity, as last configured.
	named    string // the uid
	namedGen uint64
	hostname string
	secrets  []string
}

// Run is guest init. It returns only when the loop itself cannot go on.
func Run(cfg Config) error {
	// Children are forked by this thread, whose capability sets are theirs.
	runtime.LockOSThread()
	runtime.GOMAXPROCS(1)
	ignoreSignals()
	keepAdminFromChildren()
	syscall.Umask(0o022)
	_ = syscall.Chdir("/")

	a := &agent{
		cfg: cfg, kick: make(chan struct{}, 1), seen: make(chan struct{}),
		sources: map[int32]func(uint32){}, procs: map[string]*process{}, byPID: map[int]*process{},
	}
	a.dec.Accept = func(f guestwire.Frame) bool {
		return f.Type == guestwire.TypeHello || (a.open && f.Channel == a.ch)
	}
	var err error
	if a.poll, err = syscall.EpollCreate1(syscall.EPOLL_CLOEXEC); err != nil {
		return err
	}
	if a.wake, err = eventfd(); err != nil {
		return err
	}
	for _, fd := range []int{cfg.In, cfg.Out} {
		if err := syscall.SetNonblock(fd, true); err != nil {
			return err
		}
		syscall.CloseOnExec(fd)
	}
	a.watch(cfg.In, syscall.EPOLLIN, func(uint32) { a.readChannel() })
	a.watch(a.wake, syscall.EPOLLIN, func(uint32) { a.reap() })
	go waiter(a.wake, a.kick, a.seen)
	return a.loop()
}

// waiter says on the eventfd that a child has ended, and waits until the loop has reaped. Without
// children it waits for a kick. It lives as long as init.
func waiter(wake int, kick <-chan struct{}, seen <-chan struct{}) {
	one := [8]byte{0: 1}
	for {
		switch waitAny() {
		case 0:
			_, _ = write(wake, one[:])
			<-seen
		case syscall.ECHILD:
			<-kick
		}
	}
}

// lookAgain makes the waiter look for children; it may be called at any time.
func (a *agent) lookAgain() {
	select {
	case a.kick <- struct{}{}:
	default:
	}
}

func (a *agent) loop() error {
	events := make([]syscall.EpollEvent, 32)
	for {
		timeout := 0
		if a.flush() {
			timeout = a.timeout()
		}
		n, err := syscall.EpollWait(a.poll, events, timeout)
		if err != nil && err != syscall.EINTR {
			return err
		}
		for i := range max(n, 0) {
			// A handler may have closed a later event's descriptor.
			if f, ok := a.sources[events[i].Fd]; ok {
				f(events[i].Events)
			}
		}
		if a.ending {
			// Sooner than the waiter says so, and told together with the end of the outputs.
			a.ending = false
			a.collect()
		}
		a.expire()
	}
}

// timeout is how long the loop may sleep, in milliseconds: to the nearest deadline, or for ever.
func (a *agent) timeout() int {
	nearest := a.inRetry
	for _, p := range a.byPID {
		if p.deadline != 0 && (nearest == 0 || p.deadline < nearest) {
			nearest = p.deadline
		}
		for i := range p.out {
			if o := &p.out[i]; o.held && o.awaited != 0 && (nearest == 0 || o.awaited < nearest) {
				nearest = o.awaited
			}
		}
	}
	for _, o := range a.outputs {
		if due := o.moved + holdLimit; o.hold && o.p.out[o.which].held && (nearest == 0 || due < nearest) {
			nearest = due
		}
	}
	if nearest == 0 {
		return -1
	}
	left := (nearest - clock(clockMonotonic) + 999_999) / 1_000_000
	return int(min(max(left, 0), 1<<30))
}

// expire does what is due.
func (a *agent) expire() {
	if a.inRetry == 0 && len(a.byPID) == 0 && len(a.outputs) == 0 {
		return
	}
	now := clock(clockMonotonic)
	if a.inRetry != 0 && now >= a.inRetry {
		a.inRetry, a.inOff = 0, false
		a.watch(a.cfg.In, syscall.EPOLLIN, func(uint32) { a.readChannel() })
	}
	for _, p := range a.byPID {
		if p.deadline != 0 && now >= p.deadline {
			p.deadline, p.timedOut = 0, true
			a.signalTree(p, syscall.SIGKILL)
		}
		for i := range p.out {
			if o := &p.out[i]; o.awaited != 0 && now >= o.awaited {
				o.awaited = 0
				a.release(p, i)
			}
		}
	}
	for _, o := range a.outputs {
		if o.hold && o.p.out[o.which].held && now >= o.moved+holdLimit {
			o.hold = false
			a.release(o.p, o.which)
		}
	}
}

func (a *agent) watch(fd int, events uint32, f func(uint32)) {
	a.sources[int32(fd)] = f
	ev := syscall.EpollEvent{Events: events, Fd: int32(fd)}
	if err := syscall.EpollCtl(a.poll, syscall.EPOLL_CTL_ADD, fd, &ev); err == syscall.EEXIST {
		_ = syscall.EpollCtl(a.poll, syscall.EPOLL_CTL_MOD, fd, &ev)
	}
}

func (a *agent) unwatch(fd int) {
	delete(a.sources, int32(fd))
	_ = syscall.EpollCtl(a.poll, syscall.EPOLL_CTL_DEL, fd, &syscall.EpollEvent{})
}

// buffer is the loop's one read buffer, made when first used.
func (a *agent) buffer() []byte {
	if a.scratch == nil {
		a.scratch = make([]byte, 32<<10)
	}
	return a.scratch
}
