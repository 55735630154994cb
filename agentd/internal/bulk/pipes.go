package bulk

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"

	"github.com/dormouse-run/dormouse/pkg/errs"
)

// pipes are a helper's three, in raw descriptors for it and files for us. The two ends of a pipe are open
// file descriptions of their own: what Go does to ours does not reach the sandbox's.
type pipes struct {
	in       *os.File // written
	out, err *os.File // read
	theirs   [3]int
}

func newPipes() (*pipes, error) {
	p := &pipes{theirs: [3]int{-1, -1, -1}}
	for i, own := range []**os.File{&p.in, &p.out, &p.err} {
		var fds [2]int
		err := unix.Pipe2(fds[:], unix.O_CLOEXEC)
		mine := 0
		if err == nil {
			if i == 0 {
				mine = 1
			}
			p.theirs[i] = fds[1-mine]
			// Ours waits in the poller; the sandbox's blocks, as its program sees it.
			if err = unix.SetNonblock(fds[mine], true); err != nil {
				_ = unix.Close(fds[mine])
			}
		}
		if err != nil {
			p.close()
			for _, fd := range p.theirs {
				if fd >= 0 {
					_ = unix.Close(fd)
				}
			}
			return nil, errs.Wrap(err, errs.InternalError, "make the pipes of a transfer: %v", err)
		}
		if i < 2 {
			// Past the machine's limit for all pipes this is refused, and the usual size has to do.
			_, _ = unix.FcntlInt(uintptr(fds[mine]), unix.F_SETPIPE_SZ, pipeBytes)
		}
		*own = os.NewFile(uintptr(fds[mine]), "transfer")
	}
	return p, nil
}

// vectors writes several pieces of memory to a pipe in one call.
type vectors struct{ *os.File }

// WriteVector implements bulkwire.Vector. It consumes the slice.
func (f vectors) WriteVector(parts [][]byte) error {
	raw, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var failed error
	err = raw.Write(func(fd uintptr) bool {
		for len(parts) > 0 {
			n, err := unix.Writev(int(fd), parts)
			switch {
			case errors.Is(err, unix.EINTR):
			case errors.Is(err, unix.EAGAIN):
				return false
			case err != nil:
				failed = os.NewSyscallError("writev", err)
				return true
			}
			parts = after(parts, n)
		}
		return true
	})
	return errors.Join(err, failed)
}

// after gives what is left of the parts without the first n bytes.
func after(parts [][]byte, n int) [][]byte {
	for len(parts) > 0 && n >= len(parts[0]) {
		n -= len(parts[0])
		parts = parts[1:]
	}
	if n > 0 {
		parts[0] = parts[0][n:]
	}
	return parts
}

func (p *pipes) close() {
	for _, f := range []*os.File{p.in, p.out, p.err} {
		if f != nil {
			_ = f.Close()
		}
	}
}

// unread counts the bytes in a pipe.
func unread(f *os.File) int {
	raw, err := f.SyscallConn()
	if err != nil {
		return 0
	}
	n := 0
	_ = raw.Control(func(fd uintptr) {
		if have, err := unix.IoctlGetInt(int(fd), unix.TIOCINQ); err == nil {
			n = have
		}
	})
	return n
}
