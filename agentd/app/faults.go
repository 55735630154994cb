//go:build faults

package app

import (
	"path/filepath"

	"github.com/dormouse-run/dormouse/pkg/fault"
)

// faults arms the fault points of a build for tests by the file "fault" in the state folder. A release has
// no such code.
func faults(stateDir string) func(point string) error {
	fault.Open(filepath.Join(stateDir, "fault"))
	return func(point string) error {
		fault.At(point)
		return nil
	}
}
