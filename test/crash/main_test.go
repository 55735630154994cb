package crash

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/dormouse-run/dormouse/pkg/client"
	"github.com/dormouse-run/dormouse/test/clock"
	"github.com/dormouse-run/dormouse/test/cluster"
	"github.com/dormouse-run/dormouse/test/images"
	"github.com/dormouse-run/dormouse/test/stack"
)

// shared is the cluster of all tests: one node, daemons with fault points.
var shared struct {
	once    sync.Once
	cluster *cluster.Cluster
	bin     string
	ours    bool // bin is of this run, and goes with it
	image   string
	err     error
}

func TestMain(m *testing.M) {
	code := m.Run()
	if err := end(); err != nil {
		fmt.Fprintln(os.Stderr, "ending the cluster:", err)
		code = 1
	}
	if err := goleak.Find(); err != nil {
		fmt.Fprintln(os.Stderr, "goroutines left:", err)
		code = 1
	}
	os.Exit(code)
}

func end() error {
	var err error
	if shared.cluster != nil {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
		defer cancel()
		err = errors.Join(shared.cluster.Client.Close(), shared.cluster.Down(ctx))
	}
	if shared.ours {
		err = errors.Join(err, os.RemoveAll(shared.bin))
	}
	return err
}

// up gives the cluster; the first call starts it.
func up(t testing.TB) *cluster.Cluster {
	t.Helper()
	shared.once.Do(func() { shared.err = start(t) })
	if shared.err != nil {
		t.Fatal(shared.err)
	}
	return shared.cluster
}

func root() string {
	_, file, _, _ := runtime.Caller(0)
	return filepath.Join(filepath.Dir(file), "..", "..")
}

// redisClock is the file that moves the clock of Redis.
func redisClock() string { return filepath.Join(shared.bin, "redis.clock") }

// build puts daemons, bundle and the clock's library into a folder, if it was not done: CRASH_BIN is a folder that several
// runs share.
func build(ctx context.Context, dir string) (shim string, err error) {
	done := filepath.Join(dir, "built")
	if shim, err := os.ReadFile(done); err == nil {
		return string(shim), nil
	}
	args := append([]string{"build", "-trimpath", "-buildvcs=false", "-o", dir + "/"}, clock.BuildFlags()...)
	daemons := exec.CommandContext(ctx, "go", append(args, "./agentd/cmd/agentd", "./coordinator/cmd/coordinator")...)
	daemons.Dir, daemons.Env = root(), append(os.Environ(), "CGO_ENABLED=0")
	bundle := exec.CommandContext(ctx, filepath.Join(root(), "scripts", "bundle.sh"), filepath.Join(dir, "bundle"))
	for _, cmd := range []*exec.Cmd{daemons, bundle} {
		if out, err := cmd.CombinedOutput(); err != nil {
			return "", fmt.Errorf("%s: %w: %s", cmd, err, out)
		}
	}
	if shim, err = clock.BuildShim(ctx, dir); err != nil {
		return "", err
	}
	return shim, os.WriteFile(done, []byte(shim), 0o600)
}

func start(t testing.TB) (err error) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute) // it compiles
	defer cancel()
	if shared.bin = os.Getenv("CRASH_BIN"); shared.bin == "" {
		if shared.bin, err = os.MkdirTemp("", "dm-crash-"); err != nil {
			return err
		}
		shared.ours = true
	}
	shim, err := build(ctx, shared.bin)
	if err == nil {
		err = clock.Set(redisClock(), 0)
	}
	if err != nil {
		return err
	}
	c, err := cluster.Up(ctx, stack.Options{Bin: shared.bin, Logf: t.Logf, RedisEnv: clock.Env(shim, redisClock())})
	if err != nil {
		return err
	}
	c.SetLogf(func(string, ...any) {}) // t is not there for ever
	shared.cluster = c
	if err := patient(ctx, c); err != nil {
		return err
	}
	registry, err := c.Registry()
	if err != nil {
		return err
	}
	digest, err := registry.Push(ctx, "busybox", images.Busybox(t))
	shared.image = registry.Ref("busybox") + "@" + digest
	return err
}

// patient has whoever waits for a node that is being started again wait long enough. Orphans are looked for all the time.
func patient(ctx context.Context, c *cluster.Cluster) error {
	return configure(ctx, c, "heartbeat: 500ms", "heartbeat: 500ms\n    placement_wait: 2m\n    orphans_every: 1s\n    orphan_grace: 100ms")
}

// configure restarts the coordinator with another configuration.
func configure(ctx context.Context, c *cluster.Cluster, is, becomes string) error {
	file := c.CoordinatorConfig()
	data, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	changed := bytes.Replace(data, []byte(is), []byte(becomes), 1)
	if bytes.Equal(changed, data) {
		return fmt.Errorf("the coordinator's configuration says nothing of %q", is)
	}
	if err := errors.Join(os.WriteFile(file, changed, 0o600), c.StopCoordinator(ctx)); err != nil {
		return err
	}
	if err := c.StartCoordinatorReady(ctx); err != nil {
		return err
	}
	return online(ctx, c)
}

// online waits until every node is in session with the coordinator that leads.
func online(ctx context.Context, c *cluster.Cluster) error {
	return poll(ctx, func() error {
		nodes, err := client.Collect(c.Client.ListNodes(ctx))
		if err != nil {
			return err
		}
		for _, n := range nodes {
			if !n.GetOnline() {
				return fmt.Errorf("node %s is not online", n.GetName())
			}
		}
		if len(nodes) != c.Nodes {
			return fmt.Errorf("%d nodes of %d", len(nodes), c.Nodes)
		}
		return nil
	})
}

// poll repeats f until it succeeds or the context ends; then f's error is returned.
func poll(ctx context.Context, f func() error) error {
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		err := f()
		if err == nil {
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return errors.Join(err, context.Cause(ctx))
		}
	}
}
