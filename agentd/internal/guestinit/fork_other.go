//go:build !amd64

package guestinit

import "syscall"

// deaf is how init takes a signal that must do nothing. A fork by package syscall gives the child the default actions.
func deaf() sigaction { return sigaction{handler: sigIgn} }

// fork executes a program as the leader of a session.
func fork(file string, args []string, attr *syscall.ProcAttr) (pid int, err error) {
	return syscall.ForkExec(file, args, attr)
}
