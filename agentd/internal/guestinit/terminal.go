package guestinit

import (
	"syscall"
	"unsafe"

	"github.com/dormouse-run/dormouse/agentd/internal/guestwire"
)

// A process may lead a session on a pseudoterminal instead of having three pipes. Init holds the
// master twice: once to read what comes out, which is the process's stdout, and once to write what
// is typed. The terminal is in the sentry's memory and is saved and restored with it.

const (
	ioctlTCGETS      = 0x5401
	ioctlTIOCSWINSZ  = 0x5414
	ioctlTIOCSPTLCK  = 0x40045431
	ioctlTIOCGPTPEER = 0x5441
	fcntlDupCloexec  = 1030
	localCanonical   = 0x2 // ICANON in c_lflag
	controlEOF       = 4   // VEOF in c_cc
	ctrlD            = 0x04
	maxTerminalSide  = 4096
	defaultTerm      = "xterm"
)

func validTerminal(t *guestwire.Terminal) *failure {
	if t == nil || t.Rows < 1 || t.Rows > maxTerminalSide || t.Columns < 1 || t.Columns > maxTerminalSide {
		return fail("INVALID_FIELD", "a terminal has 1 to 4096 rows and columns").with("field", "terminal")
	}
	return nil
}

func ioctl(fd int, request uintptr, arg unsafe.Pointer) (int, error) {
	n, _, errno := syscall.RawSyscall(syscall.SYS_IOCTL, uintptr(fd), request, uintptr(arg))
	if errno != 0 {
		return -1, errno
	}
	return int(n), nil
}

// terminal makes the process a terminal: its side for the child, which the caller closes, and the
// master for init.
func (p *process) terminal(size guestwire.Terminal, cred *syscall.Credential, limit int) (theirs int, err error) {
	p.stdin.fd, p.out[0].fd, p.out[1].fd = -1, -1, -1
	p.out[0].ring.limit, p.out[1].ring.limit = limit, limit
	master, err := openMaster()
	if err != nil {
		return -1, err
	}
	p.out[0].fd = master
	unlock := int32(0)
	if _, err := ioctl(master, ioctlTIOCSPTLCK, unsafe.Pointer(&unlock)); err != nil {
		return -1, err
	}
	// By descriptor, not by name: the user inside may have put something else in its place.
	n, _, errno := syscall.RawSyscall(syscall.SYS_IOCTL, uintptr(master), ioctlTIOCGPTPEER, syscall.O_RDWR|syscall.O_NOCTTY|syscall.O_CLOEXEC)
	if errno != 0 {
		return -1, errno
	}
	theirs = int(n)
	// The user may open it by its name, too.
	if err := syscall.Fchown(theirs, int(cred.Uid), int(cred.Gid)); err != nil {
		return theirs, err
	}
	if err := setSize(master, size); err != nil {
		return theirs, err
	}
	input, _, errno := syscall.RawSyscall(syscall.SYS_FCNTL, uintptr(master), fcntlDupCloexec, 0)
	if errno != 0 {
		return theirs, errno
	}
	p.stdin.fd, p.stdin.terminal, p.size = int(input), true, &size
	return theirs, nil
}

func openMaster() (fd int, err error) {
	for _, path := range []string{"/dev/pts/ptmx", "/dev/ptmx"} {
		if fd, err = syscall.Open(path, syscall.O_RDWR|syscall.O_NOCTTY|syscall.O_NONBLOCK|syscall.O_CLOEXEC, 0); err == nil {
			return fd, nil
		}
	}
	return -1, err
}

func setSize(fd int, t guestwire.Terminal) error {
	w := [4]uint16{uint16(t.Rows), uint16(t.Columns)}
	_, err := ioctl(fd, ioctlTIOCSWINSZ, unsafe.Pointer(&w))
	return err
}

func (a *agent) resize(m *guestwire.Resize) (guestwire.Message, *failure) {
	p, ferr := a.find(m.ProcessID)
	if ferr != nil {
		return nil, ferr
	}
	if ferr := validTerminal(m.Terminal); ferr != nil {
		return nil, ferr
	}
	if p.size == nil {
		return nil, fail("WRONG_PHASE", "the process has no terminal; start it with one").with("process_id", p.id)
	}
	if fd := max(p.stdin.fd, p.out[0].fd); fd >= 0 && p.exit == nil {
		if err := setSize(fd, *m.Terminal); err != nil {
			return nil, fail("INTERNAL_ERROR", "the terminal does not take the size: "+err.Error())
		}
		p.size = m.Terminal
	}
	return &guestwire.Resized{}, nil
}

// endOfInput is what somebody would type to end the input: the end-of-file character, twice where
// the line it is typed on has begun. A program that reads its terminal raw gets the character.
func (s *inPipe) endOfInput() []byte {
	var termios struct {
		input, output, control, local uint32
		line                          byte
		chars                         [19]byte
		_                             [8]byte
	}
	if _, err := ioctl(s.fd, ioctlTCGETS, unsafe.Pointer(&termios)); err != nil {
		return []byte{ctrlD}
	}
	eof := termios.chars[controlEOF]
	if termios.local&localCanonical != 0 && s.last != 0 && s.last != '\n' && s.last != '\r' {
		return []byte{eof, eof}
	}
	return []byte{eof}
}
