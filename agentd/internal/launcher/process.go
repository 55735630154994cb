package launcher

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/dormouse-run/dormouse/pkg/errs"
)

// Exit is how a process ended.
type Exit struct {
	// Known is false when the process is gone and the kernel no longer says how it ended: it was
	// nobody's child here and the kernel is older than 6.15.
	Known  bool
	Code   int         // exit code, 128+Signal when a signal ended it
	Signal unix.Signal // 0 for none
}

func exitOf(ws unix.WaitStatus) Exit {
	if ws.Signaled() {
		return Exit{Known: true, Code: 128 + int(ws.Signal()), Signal: ws.Signal()}
	}
	return Exit{Known: true, Code: ws.ExitStatus()}
}

// Process is a process held by a pidfd: it is the same process for as long as the value lives,
// whatever becomes of its number.
type Process struct {
	pid int
	f   *os.File // the pidfd, in the poller: waiting costs a goroutine and no thread

	mu     sync.Mutex
	reaped bool // the number may be another process's
}

func newProcess(pid, pidfd int) (*Process, error) {
	if err := unix.SetNonblock(pidfd, true); err != nil {
		return nil, errs.Wrap(err, errs.InternalError, "prepare the descriptor of process %d: %v", pid, err)
	}
	return &Process{pid: pid, f: os.NewFile(uintptr(pidfd), "pidfd:"+strconv.Itoa(pid))}, nil
}

// Attach takes hold of a running or just ended process of which the start time (StartTime) is known,
// child or not. OBJECT_NOT_FOUND when there is no such process, or another one has its number.
func Attach(pid int, startTime uint64) (*Process, error) {
	gone := errs.New(errs.ObjectNotFound, "there is no process %d of that start time", pid).With("kind", "process")
	fd, err := unix.PidfdOpen(pid, unix.PIDFD_NONBLOCK)
	if errors.Is(err, unix.ESRCH) || errors.Is(err, unix.EINVAL) {
		return nil, gone
	}
	if err != nil {
		return nil, errs.Wrap(err, errs.InternalError, "take hold of process %d: %v", pid, err)
	}
	// Read after the pidfd was opened: if they agree now, the descriptor is of the process meant.
	if now, err := StartTime(pid); err != nil || now != startTime {
		_ = unix.Close(fd)
		return nil, gone
	}
	return newProcess(pid, fd)
}

// Pid is the process's number.
func (p *Process) Pid() int { return p.pid }

// Close lets go of the process and ends every Wait with os.ErrClosed.
func (p *Process) Close() error { return p.f.Close() }

// Signal sends the signal; a process that has ended is not an error. After Close it is os.ErrClosed.
func (p *Process) Signal(sig unix.Signal) error {
	raw, err := p.f.SyscallConn()
	if err != nil {
		return os.ErrClosed
	}
	var sent error
	if err := raw.Control(func(fd uintptr) { sent = unix.PidfdSendSignal(int(fd), sig, nil, 0) }); err != nil {
		return os.ErrClosed // the only way in which Control fails
	}
	if sent != nil && !errors.Is(sent, unix.ESRCH) {
		return fmt.Errorf("signal process %d: %w", p.pid, sent)
	}
	return nil
}

// Wait returns when the process has ended, and reaps it if it is this process's child. One caller at
// a time; after the first success the status of a child is gone.
func (p *Process) Wait(ctx context.Context) (Exit, error) {
	raw, err := p.f.SyscallConn()
	if err != nil {
		return Exit{}, err
	}
	if err := p.f.SetReadDeadline(time.Time{}); err != nil {
		return Exit{}, fmt.Errorf("wait for process %d: %w", p.pid, err)
	}
	stop := context.AfterFunc(ctx, func() { _ = p.f.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	var exit Exit
	err = raw.Read(func(fd uintptr) bool {
		var ended bool
		exit, ended = p.poll(int(fd))
		return ended
	})
	if errors.Is(err, os.ErrDeadlineExceeded) && ctx.Err() != nil {
		return Exit{}, ctx.Err()
	}
	return exit, err
}

// poll tells whether the process has ended, and how.
func (p *Process) poll(fd int) (Exit, bool) {
	fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	if n, err := unix.Poll(fds, 0); err != nil || n == 0 {
		return Exit{}, false
	}
	if ws, ok := p.reap(); ok {
		return exitOf(ws), true
	}
	// Another process's child: while it is a zombie its stat file tells, after that the pidfd does.
	// The parent may reap it between the two looks, never the other way round.
	if status, ok := zombieStatus(p.pid); ok {
		return exitOf(unix.WaitStatus(status)), true
	}
	if status, ok := pidfdStatus(fd); ok {
		return exitOf(unix.WaitStatus(status)), true
	}
	return Exit{}, true
}

// reap takes the status of a child that has ended; false for a process that is no child.
func (p *Process) reap() (ws unix.WaitStatus, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for {
		got, err := unix.Wait4(p.pid, &ws, unix.WNOHANG, nil)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		p.reaped = true // by this call, or by its own parent at any time
		return ws, err == nil && got == p.pid
	}
}

// zombieStatus reads the wait status of a process that has ended and was not reaped.
func zombieStatus(pid int) (uint32, bool) {
	fields, err := stat(pid)
	if err != nil || len(fields) < 50 || (fields[0] != "Z" && fields[0] != "X") {
		return 0, false
	}
	status, err := strconv.ParseUint(fields[49], 10, 32)
	return uint32(status), err == nil
}

// pidfdInfo is the kernel's struct pidfd_info in its first published size.
type pidfdInfo struct {
	mask     uint64
	cgroupID uint64
	ids      [11]uint32
	exitCode int32
}

const (
	pidfdGetInfo  = 0xC000_0000 | unsafe.Sizeof(pidfdInfo{})<<16 | 0xFF<<8 | 11 // _IOWR(0xFF, 11, struct)
	pidfdInfoExit = 1 << 3
)

// pidfdStatus asks a pidfd for the wait status of its reaped process (kernel 6.15 and later).
func pidfdStatus(fd int) (uint32, bool) {
	info := pidfdInfo{mask: pidfdInfoExit}
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), pidfdGetInfo, uintptr(unsafe.Pointer(&info)))
	if errno != 0 || info.mask&pidfdInfoExit == 0 {
		return 0, false
	}
	return uint32(info.exitCode), true
}

// StartTime is when the process started, in clock ticks since boot: with the number, it names a
// process for as long as the machine is up.
func StartTime(pid int) (uint64, error) {
	fields, err := stat(pid)
	if err != nil {
		return 0, err
	}
	if len(fields) < 20 {
		return 0, fmt.Errorf("process %d: its stat file is too short", pid)
	}
	return strconv.ParseUint(fields[19], 10, 64)
}

// Alive tells whether the process of that number and start time runs (a zombie does not).
func Alive(pid int, startTime uint64) bool {
	fields, err := stat(pid)
	if err != nil || len(fields) < 20 || fields[0] == "Z" || fields[0] == "X" {
		return false
	}
	return fields[19] == strconv.FormatUint(startTime, 10)
}

// stat gives the fields of /proc/<pid>/stat from the third (the state) on; the second may hold blanks.
func stat(pid int) ([]string, error) {
	data, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return nil, err
	}
	end := strings.LastIndexByte(string(data), ')')
	if end < 0 {
		return nil, fmt.Errorf("process %d: its stat file has no name", pid)
	}
	return strings.Fields(string(data[end+1:])), nil
}
