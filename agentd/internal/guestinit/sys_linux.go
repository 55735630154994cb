package guestinit

import (
	"syscall"
	"unsafe"
)

// System calls that package syscall does not wrap. x/sys is left out for its size.

const (
	clockRealtime  = 0
	clockMonotonic = 1

	pAll     = 0
	wExited  = 0x4
	wNoWait  = 0x01000000
	efdFlags = syscall.O_CLOEXEC | syscall.O_NONBLOCK

	prCapbsetDrop = 24
	prSetDumpable = 4
	capSysAdmin   = 21
	capVersion3   = 0x20080522

	sigIgn     = 1
	saRestorer = 0x04000000
	saOnStack  = 0x08000000
	saRestart  = 0x10000000
)

func clock(id uintptr) int64 {
	var ts syscall.Timespec
	_, _, _ = syscall.RawSyscall(syscall.SYS_CLOCK_GETTIME, id, uintptr(unsafe.Pointer(&ts)), 0)
	return ts.Nano()
}

func wallClock() int64 { return clock(clockRealtime) }

// waitAny blocks until some child has ended and leaves it unreaped.
func waitAny() syscall.Errno {
	var info [128]byte
	_, _, errno := syscall.Syscall6(syscall.SYS_WAITID, pAll, 0, uintptr(unsafe.Pointer(&info)), wExited|wNoWait, 0, 0)
	return errno
}

func eventfd() (int, error) {
	fd, _, errno := syscall.RawSyscall(syscall.SYS_EVENTFD2, 0, efdFlags, 0)
	if errno != 0 {
		return -1, errno
	}
	return int(fd), nil
}

// sigaction is the kernel's.
type sigaction struct{ handler, flags, restorer, mask uintptr }

// ignoreSignals makes init deaf to what processes inside may send it by habit ("kill 1"): with the
// Go runtime's own handlers that would end the sandbox. Children start with the default actions.
func ignoreSignals() {
	action := deaf()
	for _, sig := range []syscall.Signal{
		syscall.SIGHUP, syscall.SIGINT, syscall.SIGQUIT, syscall.SIGTERM, syscall.SIGUSR1, syscall.SIGUSR2,
		syscall.SIGALRM, syscall.SIGPIPE, syscall.SIGTSTP, syscall.SIGTTIN, syscall.SIGTTOU,
	} {
		_, _, _ = syscall.RawSyscall6(syscall.SYS_RT_SIGACTION, uintptr(sig), uintptr(unsafe.Pointer(&action)), 0, 8, 0, 0)
	}
}

// keepAdminFromChildren takes CAP_SYS_ADMIN, which init needs to set the host name after a restore,
// out of what children can have: the calling thread's bounding and inheritable sets. The thread
// that forks must call it; it keeps the capability itself.
func keepAdminFromChildren() {
	header := struct {
		version uint32
		pid     int32
	}{version: capVersion3}
	var data [2]struct{ effective, permitted, inheritable uint32 }
	if _, _, errno := syscall.RawSyscall(syscall.SYS_CAPGET, uintptr(unsafe.Pointer(&header)), uintptr(unsafe.Pointer(&data)), 0); errno == 0 {
		data[0].inheritable &^= 1 << capSysAdmin
		_, _, _ = syscall.RawSyscall(syscall.SYS_CAPSET, uintptr(unsafe.Pointer(&header)), uintptr(unsafe.Pointer(&data)), 0)
	}
	_, _, _ = syscall.RawSyscall6(syscall.SYS_PRCTL, prCapbsetDrop, capSysAdmin, 0, 0, 0, 0)
	// Its memory holds the channel's key and the secret environment.
	_, _, _ = syscall.RawSyscall6(syscall.SYS_PRCTL, prSetDumpable, 0, 0, 0, 0, 0)
}

// read and write retry what a signal interrupted.
func read(fd int, b []byte) (int, error) {
	for {
		n, err := syscall.Read(fd, b)
		if err != syscall.EINTR {
			return max(n, 0), err
		}
	}
}

func write(fd int, b []byte) (int, error) {
	for {
		n, err := syscall.Write(fd, b)
		if err != syscall.EINTR {
			return max(n, 0), err
		}
	}
}

// readFile reads a regular file up to a limit. The image says what is at path: it must not be able
// to make init wait.
func readFile(path string, limit int) ([]byte, error) {
	fd, err := syscall.Open(path, syscall.O_RDONLY|syscall.O_NONBLOCK|syscall.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer func() { _ = syscall.Close(fd) }()
	var st syscall.Stat_t
	if err := syscall.Fstat(fd, &st); err != nil || st.Mode&syscall.S_IFMT != syscall.S_IFREG {
		return nil, syscall.EINVAL
	}
	var out []byte
	buf := make([]byte, 4096)
	for len(out) < limit {
		n, err := read(fd, buf)
		if err != nil {
			return nil, err
		}
		if n == 0 {
			break
		}
		out = append(out, buf[:n]...)
	}
	return out, nil
}

// remembered is a file that is read again when it is another, or has changed.
type remembered struct {
	is      identity
	content []byte
}

// identity tells one content of a file from another.
type identity struct {
	dev, ino          uint64
	size              int64
	modified, changed int64
}

func identityOf(st *syscall.Stat_t) identity {
	return identity{dev: st.Dev, ino: st.Ino, size: st.Size, modified: st.Mtim.Nano(), changed: st.Ctim.Nano()}
}

// settled is how long, in nanoseconds, a file must not have changed before its times tell of the next change: a kernel's clock for them may
// stand still for some milliseconds.
const settled = 2_000_000_000

// read gives the content of a regular file, up to the limit, and nothing where there is none. It costs one system call while the file stays.
// now is the wall clock.
func (r *remembered) read(path string, limit int, now func() int64) []byte {
	var st syscall.Stat_t
	if err := syscall.Stat(path, &st); err != nil {
		*r = remembered{}
		return nil
	}
	if r.is == identityOf(&st) && r.content != nil {
		return r.content
	}
	*r = remembered{}
	content, err := readFile(path, limit)
	if err != nil {
		return nil
	}
	var after syscall.Stat_t
	if err := syscall.Stat(path, &after); err == nil && identityOf(&after) == identityOf(&st) && len(content) <= rememberMost &&
		now()-max(st.Mtim.Nano(), st.Ctim.Nano()) > settled {
		r.is, r.content = identityOf(&st), content
	}
	return content
}

// rememberMost bounds what is kept of a file.
const rememberMost = 16 << 10

// replaceFile writes a file beside path and renames it there, so that a symbolic link in the image
// is replaced and never followed, and a reader sees the old content or the new.
func replaceFile(dir, name, content string, mode uint32) error {
	if err := mkdirAll(dir); err != nil {
		return err
	}
	tmp := dir + "/.dormouse-" + name
	_ = syscall.Unlink(tmp)
	fd, err := syscall.Open(tmp, syscall.O_WRONLY|syscall.O_CREAT|syscall.O_EXCL|syscall.O_CLOEXEC, mode)
	if err != nil {
		return err
	}
	for b := []byte(content); len(b) > 0 && err == nil; {
		var n int
		n, err = write(fd, b)
		b = b[n:]
	}
	if cerr := syscall.Close(fd); err == nil {
		err = cerr
	}
	if err == nil {
		err = syscall.Rename(tmp, dir+"/"+name)
	}
	if err != nil {
		_ = syscall.Unlink(tmp)
	}
	return err
}

// setNonblock sets the flag of a pipe's end that is open in this mode and has no other flag.
func setNonblock(fd, mode int) {
	_, _, _ = syscall.RawSyscall(syscall.SYS_FCNTL, uintptr(fd), syscall.F_SETFL, uintptr(mode|syscall.O_NONBLOCK))
}

// openNull opens the null device, if that is what the image has there.
func openNull() (int, error) {
	fd, err := syscall.Open("/dev/null", syscall.O_RDONLY|syscall.O_NONBLOCK|syscall.O_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	var st syscall.Stat_t
	if err := syscall.Fstat(fd, &st); err != nil || st.Mode&syscall.S_IFMT != syscall.S_IFCHR {
		_ = syscall.Close(fd)
		return -1, syscall.ENODEV
	}
	_ = syscall.SetNonblock(fd, false)
	return fd, nil
}

func mkdirAll(dir string) error {
	for i := 1; i <= len(dir); i++ {
		if i == len(dir) || dir[i] == '/' {
			if err := syscall.Mkdir(dir[:i], 0o755); err != nil && err != syscall.EEXIST {
				return err
			}
		}
	}
	return nil
}

func itoa(v uint64) string {
	var b [20]byte
	i := len(b)
	for {
		i--
		b[i] = byte('0' + v%10)
		if v /= 10; v == 0 {
			return string(b[i:])
		}
	}
}

// atoi reads a decimal number of at most 31 bits.
func atoi(s string) (int, bool) {
	if s == "" || len(s) > 10 {
		return 0, false
	}
	v := 0
	for i := range len(s) {
		if s[i] < '0' || s[i] > '9' {
			return 0, false
		}
		v = v*10 + int(s[i]-'0')
	}
	return v, v < 1<<31
}
