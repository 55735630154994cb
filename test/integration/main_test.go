package integration

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/dormouse-run/dormouse/test/cluster"
	"github.com/dormouse-run/dormouse/test/stack"
)

// shared is the cluster of all tests. The secrets are looked for in everything that it wrote.
var shared struct {
	once     sync.Once
	cluster  *cluster.Cluster
	password string
	err      error
}

func TestMain(m *testing.M) {
	code := m.Run()
	if err := end(code != 0); err != nil {
		fmt.Fprintln(os.Stderr, "ending the cluster:", err)
		code = 1
	}
	if err := goleak.Find(); err != nil {
		fmt.Fprintln(os.Stderr, "goroutines left:", err)
		code = 1
	}
	os.Exit(code)
}

// up gives the cluster; the first call starts it.
func up(t testing.TB) *cluster.Cluster {
	t.Helper()
	shared.once.Do(func() {
		shared.password = cluster.NewPassword()
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
		defer cancel()
		shared.cluster, shared.err = cluster.Up(ctx, stack.Options{Nodes: 2, RegistryUser: "puller", RegistryPassword: shared.password, Logf: t.Logf})
		if shared.err == nil {
			shared.cluster.SetLogf(func(string, ...any) {}) // t is not there for ever
		}
	})
	if shared.err != nil {
		t.Fatal(shared.err)
	}
	return shared.cluster
}

func end(failed bool) error {
	c := shared.cluster
	if c == nil {
		return nil
	}
	if failed {
		keepLogs(c)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	err := c.Client.Close()
	if derr := c.Down(ctx); derr != nil {
		err = derr
	}
	return err
}

// keepLogs copies the daemons' logs to where they outlive the cluster, and says where.
func keepLogs(c *cluster.Cluster) {
	dir, err := os.MkdirTemp("", "dormouse-integration-")
	if err != nil {
		fmt.Fprintln(os.Stderr, "logs:", err)
		return
	}
	files, _ := filepath.Glob(filepath.Join(c.Dir, "logs", "*.log")) // the pattern is valid
	for _, f := range files {
		data, err := os.ReadFile(f)
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, filepath.Base(f)), data, 0o600)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, "logs:", err)
		}
	}
	fmt.Fprintln(os.Stderr, "the daemons' logs are kept in", dir)
}

// turns counts the worlds, so that a test that is run again meets nothing of its own.
var turns atomic.Int64

// tenantOf makes a test's name that of its tenant.
func tenantOf(t testing.TB) string {
	name := strings.ToLower(strings.NewReplacer("/", "-", "_", "-", " ", "-").Replace(t.Name()))
	return fmt.Sprintf("t%d-%s", turns.Add(1), name[:min(len(name), 50)])
}
