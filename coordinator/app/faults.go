//go:build faults

package app

import (
	"path/filepath"

	"github.com/dormouse-run/dormouse/pkg/fault"
)

// faults arms the fault points of a build for tests by the file "fault" beside the admin socket: a
// coordinator has no folder of its own.
func faults(cfg Config) { fault.Open(filepath.Join(filepath.Dir(cfg.Admin), "fault")) }
