package runtime

import (
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/dormouse-run/dormouse/pkg/errs"
)

// MakeFIFOs makes fresh FIFOs for one run of a sandbox in the folder (in, out and err; mode 0600) and
// removes those of an earlier run, whose content must reach nobody. It fails without side effects
// other than these files.
func MakeFIFOs(dir string) (Stdio, error) {
	s := Stdio{In: filepath.Join(dir, "in"), Out: filepath.Join(dir, "out"), Err: filepath.Join(dir, "err")}
	for _, path := range []string{s.In, s.Out, s.Err} {
		if err := os.Remove(path); err != nil && !os.IsNotExist(err) {
			return Stdio{}, errs.Wrap(err, errs.InternalError, "remove the old FIFO %s: %v", path, err)
		}
		if err := unix.Mkfifo(path, 0o600); err != nil {
			return Stdio{}, errs.Wrap(err, errs.InternalError, "make the FIFO %s: %v", path, err)
		}
	}
	return s, nil
}
