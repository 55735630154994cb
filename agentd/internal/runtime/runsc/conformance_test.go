package runsc

import (
	"context"
	"io"
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

// TestExecHasItsCapabilities: those that were asked for, and no others.
func TestExecHasItsCapabilities(t *testing.T) {
	e := newEnv(t)
	d := e.open(t)
	t.Cleanup(func() { must(t, d.Close()) })
	cfg := e.config(t, runtimetest.NewID(t), nil)
	_, err := d.Start(bounded(t), cfg)
	must(t, err)
	t.Cleanup(func() { must(t, d.Delete(context.WithoutCancel(t.Context()), cfg.ID)) })
	pipes := runtimetest.NewPipes(t)
	p, err := d.Exec(bounded(t), cfg.ID, runtime.Program{
		Args: []string{"/bin/busybox", "grep", "CapEff", "/proc/self/status"}, Capabilities: []string{"CAP_CHOWN", "CAP_SETUID"}, Stdio: pipes.Theirs(),
	})
	pipes.Given()
	must(t, err)
	out, err := io.ReadAll(pipes.Out)
	must(t, err)
	if want := "CapEff:\t0000000000000081\n"; string(out) != want {
		t.Fatalf("%q, want %q", out, want)
	}
	if code, err := p.Wait(bounded(t)); err != nil || code != 0 {
		t.Fatal(code, err)
	}
	if _, err := d.Exec(bounded(t), cfg.ID, runtime.Program{Args: []string{"/x"}, Capabilities: []string{"CAP_OF_LIES"}}); err == nil {
		t.Fatal("a capability that does not exist was taken")
	}
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
		Copy: func(code int) runtime.Program {
			return runtime.Program{Args: []string{"/bin/busybox", "sh", "-c", "cat; exit " + strconv.Itoa(code)}, Env: []string{"PATH=/bin"}}
		},
		Leftovers: func(t *testing.T) []string { return e.leftovers(t) },
	})
}
