package clock

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"time"
)

// BuildFlags are those of a Go program that uses package fault, and whose wall clock a test moves.
func BuildFlags() []string {
	return []string{"-tags", "faults,wallclock", "-ldflags", "-checklinkname=0"}
}

// Set moves the clock of the processes that have mapped the file to the machine's time and the offset, of whole
// seconds.
func Set(file string, offset time.Duration) (err error) {
	f, err := os.OpenFile(file, os.O_WRONLY|os.O_CREATE, 0o600)
	if err != nil {
		return fmt.Errorf("move a clock: %w", err)
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	_, err = f.WriteAt(binary.NativeEndian.AppendUint64(nil, uint64(offset/time.Second)), 0)
	return err
}
