// Package launcher starts the runtime's processes so that what they leave behind pins nothing of the
// node agent's and outlives it.
//
// A command runs
//
//   - in the host's mount namespace (that of process 1) where the agent's own differs, so that the
//     mounts of an agent's pod are not held by its sandboxes;
//   - in the sandbox's v2 control group from its first instruction on (package cgroup says how v1 is joined);
//   - in a session of its own, without a parent-death signal;
//   - with exactly the descriptors it is given, each an open file description that Go never touched
//     (os.File and exec.Cmd switch descriptions to blocking, which hangs a later checkpoint);
//   - with an environment that holds no more than a PATH.
//
// A command in a group that is run to its end (Run) has the kernel's lock on groups kept warm for it (pace.go).
//
// There is no helper process. The command is forked from an OS thread that entered the namespace and
// that ends with the launch; the group is entered by the fork itself.
//
// # Whose child a sandbox is
//
// The runtime's command forks the sandbox and ends, so the kernel gives the sandbox a new parent. The
// launcher makes the agent that parent (a child subreaper), because only then the exit status waits
// for the agent, however early the sandbox ended. When the agent dies, process 1 or a nearer subreaper
// inherits the sandbox, and a later agent watches it through a pidfd (Attach).
package launcher

import (
	"context"
	"errors"
	"io/fs"
	"math"
	"os"
	"runtime"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/dormouse-run/dormouse/pkg/errs"
)

// Group is a control group to start in; package cgroup has it.
type Group interface {
	// OpenV2 opens the group's v2 folder, -1 for none. The caller closes it.
	OpenV2() (int, error)
}

// Command is a process to start.
type Command struct {
	Path string
	Args []string // without the program's name
	Dir  string   // working folder, "/" by default
	// Files are raw descriptors that become 0, 1, 2, ... They stay open here, and the caller closes
	// them. -1 leaves a number closed.
	Files []int
	// Group is nil for a command that stays in the agent's group.
	Group Group
}

// Launcher starts commands. It holds a descriptor of the host's mount namespace, or none when the
// agent is in it. Safe for concurrent use.
type Launcher struct {
	mountNS int // -1: the agent's own is the host's
	pacer   *pacer
}

// Options of a launcher.
type Options struct {
	// MountNS is the path of the mount namespace that commands run in. Empty: that of process 1 where
	// it can be read, else the agent's own, which is the same on a host where the agent is not in a
	// container. An agent in a container names /proc/1/ns/mnt, so that it fails where it has not the
	// rights to enter it.
	MountNS string
}

// New makes a launcher, makes this process a child subreaper and closes what it inherited to its own
// commands: a descriptor, and a lock on it, that the agent's starter left open goes no further. Close
// releases the launcher.
func New(opts Options) (*Launcher, error) {
	if err := unix.CloseRange(3, math.MaxInt32, unix.CLOSE_RANGE_CLOEXEC); err != nil {
		return nil, errs.Wrap(err, errs.InternalError, "keep inherited descriptors from sandboxes: %v", err)
	}
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return nil, errs.Wrap(err, errs.InternalError, "become the parent of orphaned sandboxes: %v", err)
	}
	path := opts.MountNS
	if path == "" {
		path = "/proc/1/ns/mnt"
	}
	l := &Launcher{mountNS: -1, pacer: newPacer()}
	there, err := os.Readlink(path)
	if errors.Is(err, fs.ErrPermission) && opts.MountNS == "" {
		return l, nil
	}
	if err != nil {
		return nil, errs.Wrap(err, errs.InternalError, "read the mount namespace for sandboxes, %s; agentd needs the host's process namespace and the rights of root in it: %v", path, err)
	}
	own, err := os.Readlink("/proc/self/ns/mnt")
	if err != nil {
		return nil, errs.Wrap(err, errs.InternalError, "read the own mount namespace: %v", err)
	}
	if own == there {
		return l, nil
	}
	l.mountNS, err = unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, errs.Wrap(err, errs.InternalError, "open the mount namespace for sandboxes, %s: %v", path, err)
	}
	return l, nil
}

// Close releases the launcher's descriptor. What it started goes on.
func (l *Launcher) Close() error {
	if l.mountNS < 0 {
		return nil
	}
	return unix.Close(l.mountNS)
}

// Start starts the command and returns when it executes (or could not). The process is the caller's to
// wait for. When Start fails nothing runs.
func (l *Launcher) Start(cmd Command) (*Process, error) {
	type result struct {
		p   *Process
		err error
	}
	done := make(chan result, 1)
	go func() {
		// Never unlocked: the thread ends with this goroutine, and with it its namespace.
		runtime.LockOSThread()
		p, err := l.startOnThread(cmd)
		done <- result{p, err}
	}()
	r := <-done
	return r.p, r.err
}

func (l *Launcher) startOnThread(cmd Command) (*Process, error) {
	if l.mountNS >= 0 {
		// A thread that shares its root and working folder with others may not change namespace.
		if err := unix.Unshare(unix.CLONE_FS); err != nil {
			return nil, errs.Wrap(err, errs.InternalError, "unshare the launch thread's file system state: %v", err)
		}
		if err := unix.Setns(l.mountNS, unix.CLONE_NEWNS); err != nil {
			return nil, errs.Wrap(err, errs.InternalError, "enter the host's mount namespace: %v", err)
		}
	}
	pidfd := -1
	attr := &syscall.ProcAttr{
		Dir:   cmd.Dir,
		Env:   []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
		Files: make([]uintptr, len(cmd.Files)),
		Sys:   &syscall.SysProcAttr{Setsid: true, PidFD: &pidfd},
	}
	if attr.Dir == "" {
		attr.Dir = "/"
	}
	for i, fd := range cmd.Files {
		attr.Files[i] = uintptr(fd)
	}
	if cmd.Group != nil {
		fd, err := cmd.Group.OpenV2()
		if err != nil {
			return nil, err
		}
		if fd >= 0 {
			defer unix.Close(fd)
			attr.Sys.UseCgroupFD, attr.Sys.CgroupFD = true, fd
		}
	}
	pid, err := syscall.ForkExec(cmd.Path, append([]string{cmd.Path}, cmd.Args...), attr)
	if err != nil {
		return nil, errs.Wrap(err, errs.InternalError, "start %s: %v", cmd.Path, err)
	}
	return newProcess(pid, pidfd)
}

// Run starts the command and waits for it, not for what it forked. When ctx ends first the command
// is killed, and Run returns ctx's error once it is gone.
func (l *Launcher) Run(ctx context.Context, cmd Command) (Exit, error) {
	if err := ctx.Err(); err != nil {
		return Exit{}, err
	}
	p, err := l.Start(cmd)
	if err != nil {
		return Exit{}, err
	}
	defer p.Close()
	if cmd.Group != nil {
		defer l.pacer.join(p, cmd.Group)()
	}
	exit, err := p.Wait(ctx)
	if err == nil || !errors.Is(err, ctx.Err()) {
		return exit, err
	}
	if killErr := p.Signal(unix.SIGKILL); killErr != nil {
		return Exit{}, errors.Join(err, killErr)
	}
	// A killed process ends unless the kernel is stuck, and then there is nothing better to do.
	if _, waitErr := p.Wait(context.WithoutCancel(ctx)); waitErr != nil {
		return Exit{}, errors.Join(err, waitErr)
	}
	return Exit{}, err
}
