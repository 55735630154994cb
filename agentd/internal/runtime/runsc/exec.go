package runsc

import (
	"context"
	"errors"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/dormouse-run/dormouse/agentd/internal/runtime"
	"github.com/dormouse-run/dormouse/pkg/errs"
)

// execArgs are the sandbox's own arguments of starting a program.
type execArgs struct {
	Filename         string   `json:"filename"`
	Argv             []string `json:"argv"`
	Envv             []string `json:"envv"`
	WorkingDirectory string   `json:"wd"`
	Capabilities     taskCaps
	GuestFDs         []int
	ContainerID      string
}

type taskCaps struct{ PermittedCaps, EffectiveCaps, BoundingCaps uint64 }

// Exec implements runtime.Driver, through the control socket: no process of the host is needed, and
// it takes a tenth of the time of a runsc command.
func (d *Driver) Exec(ctx context.Context, id string, p runtime.Program) (runtime.Process, error) {
	if err := d.ctx.Err(); err != nil {
		return nil, errs.New(errs.ShuttingDown, "the runtime driver is closed")
	}
	if len(p.Args) == 0 || !strings.HasPrefix(p.Args[0], "/") {
		return nil, errs.New(errs.InvalidField, "a program needs an absolute path").With("field", "args")
	}
	caps, err := capabilityBits(p.Capabilities)
	if err != nil {
		return nil, err
	}
	status, err := d.State(ctx, id)
	if err != nil {
		return nil, err
	}
	if status.Phase != runtime.Running {
		return nil, errs.New(errs.WrongPhase, "exec: sandbox %s is %s", id, status.Phase).With("uid", id).With("phase", string(status.Phase))
	}
	args := execArgs{
		Filename: p.Args[0], Argv: p.Args, Envv: p.Env, WorkingDirectory: "/", ContainerID: id, GuestFDs: []int{0, 1, 2},
		Capabilities: taskCaps{caps, caps, caps},
	}
	bound, cancel := context.WithTimeout(ctx, controlTime)
	defer cancel()
	var pid int32
	err = d.call(bound, id, "containerManager.ExecuteAsync", args, &pid, p.Stdio[:]...)
	if err != nil {
		return nil, d.execFailed(ctx, id, p, err)
	}
	proc := &process{d: d, id: id, pid: pid, done: make(chan struct{})}
	d.wg.Go(proc.await)
	return proc, nil
}

// execFailed says what the failure of an exec was.
func (d *Driver) execFailed(ctx context.Context, id string, p runtime.Program, err error) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	var r *refusal
	var typed *errs.Error
	switch {
	case errors.As(err, &typed):
		return err
	case errors.As(err, &r) && strings.Contains(r.said, "no such file"):
		return errs.Wrap(err, errs.CommandNotFound, "sandbox %s has no program %s", id, p.Args[0]).With("command", p.Args[0])
	case errors.Is(err, context.DeadlineExceeded):
		return errs.Wrap(err, errs.SandboxFailed, "the runtime of sandbox %s did not start a program within %s", id, controlTime).With("step", "exec")
	}
	return errs.Wrap(err, errs.SandboxFailed, "start a program in sandbox %s: %v", id, err).With("step", "exec")
}

// process is a program in a sandbox. Its only goroutine waits for its end, which also makes the sandbox
// forget it.
type process struct {
	d    *Driver
	id   string
	pid  int32
	done chan struct{}
	code int
	err  error
}

func (p *process) await() {
	defer close(p.done)
	var status uint32
	arg := struct {
		PID int32
		CID string
	}{p.pid, p.id}
	err := p.d.call(p.d.ctx, p.id, "containerManager.WaitPID", arg, &status)
	switch {
	case p.d.ctx.Err() != nil:
		p.err = errs.New(errs.ShuttingDown, "the runtime driver is closed; the program goes on until its pipes are closed")
	case err != nil:
		p.err = errs.Wrap(err, errs.SandboxFailed, "sandbox %s ended before its program did", p.id).With("step", "exec")
	default:
		ws := unix.WaitStatus(status)
		if p.code = ws.ExitStatus(); ws.Signaled() {
			p.code = 128 + int(ws.Signal())
		}
	}
}

// Pid implements runtime.Process.
func (p *process) Pid() int { return int(p.pid) }

// Wait implements runtime.Process.
func (p *process) Wait(ctx context.Context) (int, error) {
	select {
	case <-p.done:
		return p.code, p.err
	default:
	}
	select {
	case <-p.done:
		return p.code, p.err
	case <-ctx.Done():
		return 0, ctx.Err()
	}
}

// Kill implements runtime.Process.
func (p *process) Kill(ctx context.Context, sig syscall.Signal) error {
	select {
	case <-p.done:
		return nil
	default:
	}
	bound, cancel := context.WithTimeout(ctx, controlTime)
	defer cancel()
	arg := struct {
		CID   string
		Signo int32
		PID   int32
		Mode  int
	}{p.id, int32(sig), p.pid, 0}
	err := p.d.call(bound, p.id, "containerManager.Signal", arg, &struct{}{})
	var r *refusal
	if err == nil || errors.As(err, &r) && strings.Contains(r.said, "no such process") {
		return nil
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return errs.Wrap(err, errs.SandboxFailed, "signal a program of sandbox %s: %v", p.id, err).With("step", "exec")
}

// capabilityNames are in the order of their bits.
var capabilityNames = strings.Fields(`CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID KILL SETGID SETUID SETPCAP
	LINUX_IMMUTABLE NET_BIND_SERVICE NET_BROADCAST NET_ADMIN NET_RAW IPC_LOCK IPC_OWNER SYS_MODULE SYS_RAWIO SYS_CHROOT
	SYS_PTRACE SYS_PACCT SYS_ADMIN SYS_BOOT SYS_NICE SYS_RESOURCE SYS_TIME SYS_TTY_CONFIG MKNOD LEASE AUDIT_WRITE
	AUDIT_CONTROL SETFCAP MAC_OVERRIDE MAC_ADMIN SYSLOG WAKE_ALARM BLOCK_SUSPEND AUDIT_READ PERFMON BPF CHECKPOINT_RESTORE`)

func capabilityBits(names []string) (uint64, error) {
	var bits uint64
	for _, name := range names {
		i := slices.Index(capabilityNames, strings.TrimPrefix(name, "CAP_"))
		if i < 0 {
			return 0, errs.New(errs.InvalidField, "%q is no capability", name).With("field", "capabilities")
		}
		bits |= 1 << i
	}
	return bits, nil
}
