package runsc

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/dormouse-run/dormouse/agentd/internal/runtime"
	"github.com/dormouse-run/dormouse/agentd/internal/runtime/runtimetest"
)

func TestConformance(t *testing.T) {
	runConformance(t, newEnv(t))
}

// Where v1 is mounted, nothing depends on a v2 hierarchy beside it.
func TestConformanceWithoutV2(t *testing.T) {
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	must(t, err)
	var v1 strings.Builder
	for line := range strings.Lines(string(mounts)) {
		if strings.Contains(line, " - cgroup ") {
			v1.WriteString(line)
		}
	}
	if v1.Len() == 0 {
		// This machine has v2 only, and TestConformance ran on it.
		return
	}
	file := filepath.Join(t.TempDir(), "mountinfo")
	must(t, os.WriteFile(file, []byte(v1.String()), 0o600))
	runConformance(t, newEnvOn(t, file))
}

func runConformance(t *testing.T, e *testEnv) {
	runtimetest.Run(t, runtimetest.Harness{
		Open:   func(t *testing.T) runtime.Driver { return e.open(t) },
		Config: func(t *testing.T, id string) runtime.Config { return e.config(t, id, nil) },
		RestoreConfig: func(t *testing.T, id string, from runtime.Config) runtime.Config {
			return e.restoreConfig(t, id, from, nil)
		},
		Count: func(t *testing.T, cfg runtime.Config) runtimetest.Guest { return e.count(t, cfg.ID) },
		Exit: func(t *testing.T, cfg runtime.Config, code int) {
			if _, err := e.guests[cfg.ID].in.WriteString("exit " + strconv.Itoa(code) + "\n"); err != nil {
				t.Fatal(err)
			}
		},
		Leftovers: func(t *testing.T) []string { return e.leftovers(t) },
	})
}
