package guestinit

import (
	"runtime"
	"syscall"
	"unsafe"
)

// A process starts with a fork of init and a list of system calls that the child makes one after another, the last of which is exec. Package
// syscall does the same with sixty more calls, because it takes each signal's handler away by itself. In a sandbox that was idle a call takes
// 18 us, so that those were a quarter of what it takes to run a small program; the kernel can do it in the fork.
//
// # What must hold
//
//   - The child runs in init's memory until it has executed, while the thread that forked stands still. It executes no Go code: vfork is all there is.
//   - No handler of init runs in the child: the fork takes them away (CLONE_CLEAR_SIGHAND). That leaves what is ignored; so init ignores no
//     signal, but has a handler that does nothing. The thread's signal mask is the one that init was started with, as its children's is to be.
//   - What the calls point to is in one object of the heap, which does not move and lives until the child has executed or ended.

const (
	cloneClearHandlers = 0x100000000
	// A session, three for the user, a directory, three descriptors, a terminal, and exec.
	maxSteps = 10
)

// cloneArgs is clone3's: without a stack the child goes on where its parent is.
type cloneArgs struct {
	flags      uint64
	_          [3]uint64
	exitSignal uint64
	_          [3]uint64
}

// step is a system call of the child.
type step struct{ number, a, b, c uintptr }

// child is what a fork needs.
type child struct {
	how        cloneArgs
	steps      [maxSteps]step
	errno      uintptr
	path, dir  *byte
	argv, envp []*byte
	groups     []uint32
}

// vfork makes a child that makes the steps, until one fails: its error is in errno then, and the child has ended. The last step must not return.
func vfork(how *cloneArgs, steps *step, errno *uintptr) (pid uintptr)

func handlers() (handler, restorer uintptr)

// deaf is how init takes a signal that must do nothing.
func deaf() sigaction {
	handler, restorer := handlers()
	return sigaction{handler: handler, flags: saRestorer | saOnStack | saRestart, restorer: restorer}
}

// fork executes a program as the leader of a session, with a terminal as its own if the first descriptor is one and it shall. It must be called by the
// thread that Run locked.
func fork(file string, args []string, attr *syscall.ProcAttr) (pid int, err error) {
	c := &child{how: cloneArgs{flags: syscall.CLONE_VM | syscall.CLONE_VFORK | cloneClearHandlers, exitSignal: uint64(syscall.SIGCHLD)}}
	for _, fd := range attr.Files {
		if fd < uintptr(len(attr.Files)) { // would be closed by an earlier one's copy
			return syscall.ForkExec(file, args, attr)
		}
	}
	if err := c.prepare(file, args, attr); err != nil {
		return 0, err
	}
	got := vfork(&c.how, &c.steps[0], &c.errno)
	if errno := syscall.Errno(-got); got > ^uintptr(4095) {
		if errno == syscall.ENOSYS || errno == syscall.EINVAL || errno == syscall.EPERM { // a kernel or a filter without it
			return syscall.ForkExec(file, args, attr)
		}
		return 0, errno
	}
	runtime.KeepAlive(c)
	if c.errno != 0 {
		var status syscall.WaitStatus
		for {
			if _, err := syscall.Wait4(int(got), &status, 0, nil); err != syscall.EINTR {
				return 0, syscall.Errno(c.errno)
			}
		}
	}
	return int(got), nil
}

func (c *child) prepare(file string, args []string, attr *syscall.ProcAttr) (err error) {
	if c.path, err = syscall.BytePtrFromString(file); err != nil {
		return err
	}
	if c.dir, err = syscall.BytePtrFromString(attr.Dir); err != nil {
		return err
	}
	if c.argv, err = syscall.SlicePtrFromStrings(args); err != nil {
		return err
	}
	if c.envp, err = syscall.SlicePtrFromStrings(attr.Env); err != nil {
		return err
	}
	n := 0
	add := func(number, a, b, cc uintptr) {
		c.steps[n] = step{number, a, b, cc}
		n++
	}
	add(syscall.SYS_SETSID, 0, 0, 0)
	if cred := attr.Sys.Credential; cred != nil {
		c.groups = cred.Groups
		add(syscall.SYS_SETGROUPS, uintptr(len(c.groups)), uintptr(unsafe.Pointer(unsafe.SliceData(c.groups))), 0)
		add(syscall.SYS_SETGID, uintptr(cred.Gid), 0, 0)
		add(syscall.SYS_SETUID, uintptr(cred.Uid), 0, 0)
	}
	add(syscall.SYS_CHDIR, uintptr(unsafe.Pointer(c.dir)), 0, 0)
	for i, fd := range attr.Files {
		add(syscall.SYS_DUP3, fd, uintptr(i), 0)
	}
	if attr.Sys.Setctty {
		add(syscall.SYS_IOCTL, 0, syscall.TIOCSCTTY, 1)
	}
	add(syscall.SYS_EXECVE, uintptr(unsafe.Pointer(c.path)), uintptr(unsafe.Pointer(&c.argv[0])), uintptr(unsafe.Pointer(&c.envp[0])))
	return nil
}
