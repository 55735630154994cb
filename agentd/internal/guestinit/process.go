package guestinit

import (
	"syscall"

	"github.com/dormouse-run/dormouse/agentd/internal/guestwire"
)

const (
	defaultRing   = 256 << 10
	maxRing       = 1 << 20
	minRing       = 4 << 10
	maxIDLength   = 128
	listArgsLimit = 4 << 10
	// A pipe can be made this large; no more of it was there when a process ended.
	pipeMost = 1 << 20
	// More supplementary groups than this are not asked for.
	maxGroups = 64
)

// process is one that was started through the channel.
type process struct {
	id       string
	body     uint64 // hash of the Start that made it
	pid      int
	started  int64
	args     []string
	tags     []guestwire.Tag
	main     bool
	out      [2]outPipe // stdout, stderr
	stdin    inPipe
	size     *guestwire.Terminal // of its terminal; nil without one
	deadline int64               // monotonic; 0 is none
	timedOut bool
	exit     *guestwire.Exit
	waits    []uint32
	queued   bool // in agent.dirty
}

// outPipe is init's end of an output.
type outPipe struct {
	fd   int // -1 once closed
	ring ring
	held bool // not polled: a reader's unread bytes fill the ring
	// awaited is until when the first reader is waited for; 0 is not at all.
	awaited int64
}

func hash(b []byte) uint64 {
	h := uint64(14695981039346656037)
	for _, c := range b {
		h = (h ^ uint64(c)) * 1099511628211
	}
	return h
}

func (a *agent) find(id string) (*process, *failure) {
	if p := a.procs[id]; p != nil {
		return p, nil
	}
	return nil, fail("PROCESS_NOT_FOUND", "the sandbox has no such process; it was never started, or ended long ago").with("process_id", id)
}

func (a *agent) start(m *guestwire.Start) (guestwire.Message, *failure) {
	content := *m
	content.HoldOutput = false
	body := hash(guestwire.Marshal(&content))
	if p := a.procs[m.ProcessID]; p != nil {
		if p.body != body {
			return nil, fail("OPERATION_BODY_MISMATCH", "the process id was used for another command; choose a new one").with("process_id", m.ProcessID)
		}
		info := p.info()
		return &guestwire.Started{Process: &info, Existing: true}, nil
	}
	if err := validStart(m); err != nil {
		return nil, err
	}
	if len(a.byPID) >= maxLive {
		return nil, fail("TOO_MANY", "the sandbox runs as many processes as guest init can own; end some").with("limit", itoa(maxLive))
	}
	p := &process{id: m.ProcessID, body: body, args: m.Args, tags: m.Tags, main: m.Main}
	if err := a.spawn(p, m); err != nil {
		return nil, err
	}
	info := p.info()
	return &guestwire.Started{Process: &info}, nil
}

func validStart(m *guestwire.Start) *failure {
	switch {
	case m.ProcessID == "" || len(m.ProcessID) > maxIDLength:
		return fail("INVALID_FIELD", "a process id has 1 to 128 bytes").with("field", "process_id")
	case len(m.Args) == 0:
		return fail("INVALID_FIELD", "a command is needed").with("field", "args")
	case m.Stdin > guestwire.StdinPipe:
		return fail("NOT_SUPPORTED", "this guest init does not know the kind of input").with("feature", "stdin")
	case m.Terminal != nil && m.Stdin != guestwire.StdinPipe:
		return fail("INVALID_FIELD", "a terminal is the input, too").with("field", "stdin")
	case len(m.Groups) > maxGroups:
		return fail("LIMIT_EXCEEDED", "too many supplementary groups").with("field", "groups")
	case m.Directory != "" && m.Directory[0] != '/':
		return fail("INVALID_FIELD", "the working directory must be an absolute path").with("field", "directory")
	}
	if m.Terminal != nil {
		if err := validTerminal(m.Terminal); err != nil {
			return err
		}
	}
	for _, list := range [][]string{m.Args, m.Environment, {m.Directory}} {
		for _, s := range list {
			if _, _, nul := cut(s, 0); nul {
				return fail("INVALID_FIELD", "arguments, environment and directory must not hold a zero byte").with("field", "args")
			}
		}
	}
	return nil
}

// spawn resolves everything that a Start names, then forks. On failure nothing is left.
func (a *agent) spawn(p *process, m *guestwire.Start) *failure {
	passwd := a.passwd.read("/etc/passwd", accountFileLimit, wallClock)
	group := a.group.read("/etc/group", accountFileLimit, wallClock)
	acc, ferr := lookupUser(m.User, passwd, group)
	if ferr != nil {
		return ferr
	}
	if ferr := acc.join(m.Groups, group); ferr != nil {
		return ferr
	}
	dir := m.Directory
	if dir == "" {
		dir = "/"
	}
	if !isDirectory(dir) {
		return fail("INVALID_FIELD", "the working directory is not there; make it first, or choose another").with("field", "directory")
	}
	env, path := a.environment(m, acc.home)
	file, ferr := lookupCommand(m.Args[0], dir, path)
	if ferr != nil {
		return ferr
	}
	limit := defaultRing
	if m.OutputBytes != 0 {
		limit = int(min(max(m.OutputBytes, minRing), maxRing))
	}
	sys := &syscall.SysProcAttr{Credential: acc.cred, Setsid: true, Setctty: m.Terminal != nil}
	theirs, files, ferr := a.connect(p, m, acc, limit)
	defer func() {
		for _, fd := range theirs {
			_ = syscall.Close(int(fd))
		}
	}()
	if ferr != nil {
		p.closePipes()
		return ferr
	}
	pid, err := fork(file, m.Args, &syscall.ProcAttr{Dir: dir, Env: env, Files: files, Sys: sys})
	if err != nil {
		p.closePipes()
		return execFailure(err, m.Args[0])
	}
	p.pid, p.started = pid, clock(clockRealtime)
	if m.TimeoutMS != 0 {
		p.deadline = clock(clockMonotonic) + int64(min(m.TimeoutMS, 1<<40))*1_000_000
	}
	a.procs[p.id], a.byPID[pid] = p, p
	awaited := int64(0)
	if m.HoldOutput {
		awaited = clock(clockMonotonic) + holdLimit
	}
	for i := range p.out {
		p.out[i].awaited = awaited
		if p.out[i].fd >= 0 {
			a.watch(p.out[i].fd, syscall.EPOLLIN, func(uint32) { a.readOutput(p, i) })
		}
	}
	a.lookAgain()
	return nil
}

func isDirectory(path string) bool {
	var st syscall.Stat_t
	return path == "/" || syscall.Stat(path, &st) == nil && st.Mode&syscall.S_IFMT == syscall.S_IFDIR
}

// connect makes what the process reads and writes: theirs is to be closed by the caller, files are
// the child's first three descriptors.
func (a *agent) connect(p *process, m *guestwire.Start, acc account, limit int) (theirs, files []uintptr, ferr *failure) {
	if m.Terminal == nil {
		theirs, files, err := a.pipes(p, m.Stdin == guestwire.StdinPipe, limit)
		if err != nil {
			return theirs, nil, execFailure(err, m.Args[0])
		}
		return theirs, files, nil
	}
	fd, err := p.terminal(*m.Terminal, acc.cred, limit)
	if fd >= 0 {
		theirs = []uintptr{uintptr(fd)}
	}
	if err != nil {
		return theirs, nil, terminalFailure(err)
	}
	return theirs, []uintptr{uintptr(fd), uintptr(fd), uintptr(fd)}, nil
}

// environment gives the child's environment and its PATH. What is absent and everybody expects is
// added; the secret environment comes last and goes to the main command only.
func (a *agent) environment(m *guestwire.Start, home string) (env []string, path string) {
	given := m.Environment
	if m.Main {
		given = append(given[:len(given):len(given)], a.secrets...)
	}
	env = append(env, processMark+m.ProcessID)
	for _, kv := range given {
		if !hasPrefix(kv, processMark) {
			env = append(env, kv)
		}
	}
	has := map[string]string{}
	for _, kv := range env {
		k, v, _ := cut(kv, '=')
		has[k] = v
	}
	term := ""
	if m.Terminal != nil {
		term = defaultTerm
	}
	for _, d := range [][2]string{{"PATH", defaultPath}, {"HOME", home}, {"HOSTNAME", a.hostname}, {"TERM", term}} {
		if _, ok := has[d[0]]; !ok && d[1] != "" {
			env = append(env, d[0]+"="+d[1])
			has[d[0]] = d[1]
		}
	}
	return env, has["PATH"]
}

// pipes makes the three descriptors of the child, of which the caller closes theirs, and keeps init's ends.
func (a *agent) pipes(p *process, stdin bool, limit int) (theirs, files []uintptr, err error) {
	p.stdin.fd, p.out[0].fd, p.out[1].fd = -1, -1, -1
	var fds [2]int
	p.stdin.closed = !stdin
	null := -1
	if !stdin {
		null = a.nullDevice()
	}
	if null >= 0 {
		files = append(files, uintptr(null))
	} else {
		// An image without a null device: a pipe that is at its end reads the same.
		if err := syscall.Pipe2(fds[:], syscall.O_CLOEXEC); err != nil {
			return nil, nil, err
		}
		theirs, files = append(theirs, uintptr(fds[0])), append(files, uintptr(fds[0]))
		if stdin {
			p.stdin.fd = fds[1]
			setNonblock(fds[1], syscall.O_WRONLY)
		} else {
			_ = syscall.Close(fds[1])
		}
	}
	for i := range p.out {
		if err := syscall.Pipe2(fds[:], syscall.O_CLOEXEC); err != nil {
			return theirs, nil, err
		}
		theirs, files, p.out[i].fd = append(theirs, uintptr(fds[1])), append(files, uintptr(fds[1])), fds[0]
		p.out[i].ring.limit = limit
		setNonblock(fds[0], syscall.O_RDONLY)
	}
	return theirs, files, nil
}

// nullDevice is where the processes without an input read from, or -1. Once it was opened it is kept.
func (a *agent) nullDevice() int {
	if a.null == 0 {
		fd, err := openNull()
		if err != nil {
			return -1
		}
		a.null = fd
	}
	return a.null
}

func (p *process) closePipes() {
	for _, fd := range []int{p.stdin.fd, p.out[0].fd, p.out[1].fd} {
		if fd >= 0 {
			_ = syscall.Close(fd)
		}
	}
}

// reap collects every child that has ended, orphans included, and lets the waiter go on.
func (a *agent) reap() {
	var b [8]byte
	if n, _ := read(a.wake, b[:]); n == 0 {
		return
	}
	a.collect()
	a.seen <- struct{}{}
}

// collect reaps what has ended.
func (a *agent) collect() {
	for {
		var ws syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &ws, syscall.WNOHANG, nil)
		if err == syscall.EINTR {
			continue
		}
		if err != nil || pid <= 0 {
			break
		}
		if p := a.byPID[pid]; p != nil && (ws.Exited() || ws.Signaled()) {
			a.finish(p, ws)
		}
	}
}

func (a *agent) finish(p *process, ws syscall.WaitStatus) {
	for i := range p.out {
		// What is left in the pipe must not cost a reader that the process waited for.
		if room := a.room(p, i); room < pipeMost {
			p.out[i].ring.limit += pipeMost - max(room, 0)
		}
		for got := 0; got < pipeMost && p.out[i].fd >= 0; {
			n := a.readOnce(p, i, pipeMost-got)
			if n == 0 {
				break
			}
			got += n
		}
		p.out[i].awaited = 0
		a.release(p, i)
	}
	e := &guestwire.Exit{
		Code: uint32(ws.ExitStatus()) & 0xff, TimedOut: p.timedOut, TimeUnixNS: uint64(clock(clockRealtime)),
		StdoutOffset: p.out[0].ring.end, StderrOffset: p.out[1].ring.end,
	}
	if ws.Signaled() {
		e.Signal, e.Code, e.CoreDumped = uint32(ws.Signal()), 128+uint32(ws.Signal()), ws.CoreDump()
	}
	p.exit, p.deadline = e, 0
	delete(a.byPID, p.pid)
	a.closeStdin(p, true)
	a.news(p)
	a.ended = append(a.ended, p)
	a.shed()
}

// shed keeps what ended processes cost within bounds: the oldest are forgotten, and before that
// lose their output. The main command is never forgotten.
func (a *agent) shed() {
	for i := 0; len(a.ended) > maxEnded && i < len(a.ended); {
		if a.ended[i].main {
			i++
			continue
		}
		a.drop(a.ended[i])
	}
	kept := 0
	for _, p := range a.ended {
		kept += len(p.out[0].ring.buf) + len(p.out[1].ring.buf)
	}
	for _, p := range a.ended {
		if kept <= maxKept {
			return
		}
		for i := range p.out {
			kept -= len(p.out[i].ring.buf)
			p.out[i].ring.clear()
		}
	}
}

// drop forgets an ended process.
func (a *agent) drop(p *process) {
	for i, e := range a.ended {
		if e == p {
			a.ended = append(a.ended[:i], a.ended[i+1:]...)
			break
		}
	}
	for i := range p.out {
		a.closeOutput(p, i)
	}
	// Waits are answered with the exit that is still in hand; outputs end where they are.
	a.news(p)
	delete(a.procs, p.id)
}

func (a *agent) news(p *process) {
	if !p.queued {
		p.queued = true
		a.dirty = append(a.dirty, p)
	}
}

// tell answers the waits and reports the inputs of processes that have news.
func (a *agent) tell() {
	for _, p := range a.dirty {
		p.queued = false
		if p.exit != nil {
			for _, w := range p.waits {
				a.streams--
				a.send(w, &guestwire.Exited{Exit: p.exit})
			}
			p.waits = nil
		}
		if p.stdin.stream != 0 {
			a.send(p.stdin.stream, p.stdin.state())
			if a.procs[p.id] != p {
				p.stdin.stream = 0
				a.streams--
			}
		}
	}
	a.dirty = a.dirty[:0]
}

func (a *agent) wait(stream uint32, m *guestwire.Wait) (guestwire.Message, *failure) {
	p, err := a.find(m.ProcessID)
	if err != nil {
		return nil, err
	}
	if p.exit != nil {
		return &guestwire.Exited{Exit: p.exit}, nil
	}
	if err := a.takeStream(stream); err != nil {
		return nil, err
	}
	p.waits = append(p.waits, stream)
	return nil, nil
}

func (a *agent) forget(m *guestwire.Forget) (guestwire.Message, *failure) {
	p, err := a.find(m.ProcessID)
	if err != nil {
		return nil, err
	}
	if p.exit == nil {
		return nil, fail("WRONG_PHASE", "the process runs; end it first").with("process_id", p.id)
	}
	a.drop(p)
	return &guestwire.Forgotten{}, nil
}

func (p *process) info() guestwire.ProcessInfo {
	left := listArgsLimit
	var args []string
	for _, s := range p.args {
		if len(s) > left {
			s = s[:left]
		}
		args = append(args, s)
		if left -= len(s) + 8; left <= 0 {
			break
		}
	}
	return guestwire.ProcessInfo{
		ProcessID: p.id, PID: uint32(p.pid), StartTimeUnixNS: uint64(p.started), Args: args, Tags: p.tags, Main: p.main,
		StdoutOffset: p.out[0].ring.end, StderrOffset: p.out[1].ring.end, Exit: p.exit,
		Terminal: p.size,
	}
}

// list answers in parts of one frame's size or a little more.
func (a *agent) list(stream uint32, m *guestwire.List) (guestwire.Message, *failure) {
	part := &guestwire.Listed{}
	if m.ProcessID != "" {
		p, err := a.find(m.ProcessID)
		if err != nil {
			return nil, err
		}
		part.Processes = append(part.Processes, p.info())
		return part, nil
	}
	size := 0
	for _, p := range a.procs {
		info := p.info()
		part.Processes = append(part.Processes, info)
		if size += 256 + info.Weight(); size >= guestwire.MaxPayload {
			part.More = true
			a.send(stream, part)
			part, size = &guestwire.Listed{}, 0
		}
	}
	return part, nil
}
