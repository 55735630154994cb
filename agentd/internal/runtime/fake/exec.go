package fake

import (
	"context"
	"os"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/dormouse-run/dormouse/agentd/internal/runtime"
	"github.com/dormouse-run/dormouse/pkg/errs"
)

// RunProgram stands for a program: it returns its exit code, and soon after its files were closed.
type RunProgram func(ctx context.Context, args []string, in, out, err *os.File) int

// SetProgram puts a program at a path of every sandbox.
func (h *Host) SetProgram(path string, run RunProgram) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.programs == nil {
		h.programs = make(map[string]RunProgram)
	}
	h.programs[path] = run
}

// Execs counts the programs that run in the sandbox.
func (h *Host) Execs(id string) int {
	h.mu.Lock()
	defer h.mu.Unlock()
	s, ok := h.sandboxes[id]
	if !ok {
		return 0
	}
	return len(s.execs)
}

// Exec implements runtime.Driver.
func (d *Driver) Exec(ctx context.Context, id string, prog runtime.Program) (runtime.Process, error) {
	if err := d.enter(ctx, OpExec, id); err != nil {
		return nil, err
	}
	if len(prog.Args) == 0 {
		return nil, errs.New(errs.InvalidField, "a program needs a path").With("field", "args")
	}
	h := d.host
	h.mu.Lock()
	defer h.mu.Unlock()
	s, ok := h.sandboxes[id]
	if !ok {
		return nil, notFound(id)
	}
	if s.phase != runtime.Running {
		return nil, wrongPhase(id, s.phase)
	}
	run, ok := h.programs[prog.Args[0]]
	if !ok {
		return nil, errs.New(errs.CommandNotFound, "the sandbox has no program %s", prog.Args[0]).With("command", prog.Args[0])
	}
	h.nextPid++
	p := &process{pid: h.nextPid, done: make(chan struct{})}
	for i, fd := range prog.Stdio {
		own, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			p.closeFiles()
			return nil, errs.Wrap(err, errs.InvalidField, "take descriptor %d: %v", fd, err).With("field", "stdio")
		}
		p.files[i] = os.NewFile(uintptr(own), "stdio")
	}
	var runCtx context.Context
	runCtx, p.cancel = context.WithCancel(context.WithoutCancel(ctx))
	if s.execs == nil {
		s.execs = make(map[*process]bool)
	}
	s.execs[p] = true
	go func() {
		code := run(runCtx, prog.Args, p.files[0], p.files[1], p.files[2])
		p.end(code, nil)
		h.mu.Lock()
		defer h.mu.Unlock()
		delete(s.execs, p)
	}()
	return p, nil
}

type process struct {
	pid    int
	files  [3]*os.File
	cancel context.CancelFunc
	once   sync.Once
	done   chan struct{}
	code   int
	err    error
}

func (p *process) closeFiles() {
	for _, f := range p.files {
		if f != nil {
			_ = f.Close()
		}
	}
}

// end ends the program as the first caller says.
func (p *process) end(code int, err error) {
	p.once.Do(func() {
		p.code, p.err = code, err
		p.cancel()
		p.closeFiles()
		close(p.done)
	})
}

// Pid implements runtime.Process.
func (p *process) Pid() int { return p.pid }

// Wait implements runtime.Process.
func (p *process) Wait(ctx context.Context) (int, error) {
	select {
	case <-p.done:
		return p.code, p.err
	case <-ctx.Done():
		return 0, ctx.Err()
	}
}

// Kill implements runtime.Process. Any signal ends the program.
func (p *process) Kill(_ context.Context, sig syscall.Signal) error {
	p.end(128+int(sig), nil)
	return nil
}
