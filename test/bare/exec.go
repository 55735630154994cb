package bare

import (
	"os"
	"os/exec"
	"syscall"
)

// forkExec starts the command with exactly these descriptors.
func forkExec(cmd *exec.Cmd, files []uintptr) (*os.Process, error) {
	pid, err := syscall.ForkExec(cmd.Path, cmd.Args, &syscall.ProcAttr{
		Dir: cmd.Dir, Env: cmd.Env, Files: files, Sys: cmd.SysProcAttr,
	})
	if err != nil {
		return nil, err
	}
	return os.FindProcess(pid)
}
