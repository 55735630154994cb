package fake

import (
	"context"
	"errors"
	"io"
	"os"
	"strconv"
	"testing"

	"go.uber.org/goleak"

	"github.com/dormouse-run/dormouse/agentd/internal/runtime"
	"github.com/dormouse-run/dormouse/agentd/internal/runtime/runtimetest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func config(id string) runtime.Config {
	return runtime.Config{ID: id, Bundle: runtime.Bundle{Digest: "sha256:fake"}}
}

func TestConformance(t *testing.T) {
	host := NewHost()
	host.SetProgram("/bin/copy", func(_ context.Context, args []string, in, out, _ *os.File) int {
		if _, err := io.Copy(out, in); err != nil {
			return 1
		}
		code, _ := strconv.Atoi(args[1])
		return code
	})
	runtimetest.Run(t, runtimetest.Harness{
		Open:          func(*testing.T) runtime.Driver { return host.Open() },
		Config:        func(_ *testing.T, id string) runtime.Config { return config(id) },
		RestoreConfig: func(_ *testing.T, id string, _ runtime.Config) runtime.Config { return config(id) },
		Count: func(t *testing.T, cfg runtime.Config) runtimetest.Guest {
			g, ok := host.Count(cfg.ID)
			if !ok {
				t.Fatal("the guest does not run")
			}
			return runtimetest.Guest(g)
		},
		Exit: func(_ *testing.T, cfg runtime.Config, code int) {
			host.Exit(cfg.ID, runtime.Exit{Known: true, Code: code})
		},
		Copy: func(code int) runtime.Program {
			return runtime.Program{Args: []string{"/bin/copy", strconv.Itoa(code)}}
		},
		Leftovers: func(*testing.T) []string { return host.IDs() },
	})
}

func TestHookFailsWithoutEffect(t *testing.T) {
	host := NewHost()
	d := host.Open()
	defer d.Close()
	broken := errors.New("broken")
	host.SetHook(func(_ context.Context, op Op, _ string) error {
		if op == OpStart {
			return broken
		}
		return nil
	})
	if _, err := d.Start(t.Context(), config(runtimetest.NewID(t))); !errors.Is(err, broken) {
		t.Fatal(err)
	}
	if ids := host.IDs(); len(ids) != 0 {
		t.Fatalf("a failed start left %v", ids)
	}
}
