//go:build faults

package app

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

// faults makes an agentd of this build kill itself, as if from outside, at the fault point that the file
// "fault" in its state folder names. The file is removed first, so that the next agentd goes on. A
// release has no such code.
func faults(stateDir string) func(point string) error {
	file := filepath.Join(stateDir, "fault")
	return func(point string) error {
		at, err := os.ReadFile(file)
		if errors.Is(err, fs.ErrNotExist) || strings.TrimSpace(string(at)) != point {
			return nil
		}
		if err := errors.Join(err, os.Remove(file), syscall.Kill(os.Getpid(), syscall.SIGKILL)); err != nil {
			return err
		}
		select {} // the signal is on its way
	}
}
