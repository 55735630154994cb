package runsc

import (
	"strconv"
	"testing"

	"go.uber.org/goleak"

	"github.com/dormouse-run/dormouse/agentd/internal/runtime"
	"github.com/dormouse-run/dormouse/agentd/internal/runtime/runtimetest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestConformance(t *testing.T) {
	e := newEnv(t)
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
