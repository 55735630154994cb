// Command demo shows Dormouse's main job on real parts: an OCI image becomes a sandbox, the sandbox a
// snapshot, and the snapshot the same processes again, and eight copies of them.
//
//	demo --dir DIR [--keep]
//
// It uses the dormouse and agentctl commands as a user would, and fails at the first thing that is
// not as it should be. Without --keep nothing is left, also after an interrupt.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/dormouse-run/dormouse/test/cluster"
	"github.com/dormouse-run/dormouse/test/stack"
)

func main() {
	dir := flag.String("dir", "", "the folder of the cluster; short, since sockets are below it")
	keep := flag.Bool("keep", false, "leave the cluster up and say how to use it")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, *dir, *keep)
	stop()
	if err != nil {
		fmt.Fprintf(os.Stderr, "\ndemo: %v\n", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, dir string, keep bool) (err error) {
	s := newShow(os.Stdout)
	c, err := start(ctx, s, dir)
	if err != nil {
		return err
	}
	kept := false
	defer func() {
		if kept {
			return
		}
		down, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Minute)
		defer cancel()
		if derr := c.Down(down); derr != nil && err == nil {
			err = fmt.Errorf("ending the cluster: %w", derr)
		}
	}()
	for _, kv := range append(c.Env(), "PATH="+c.Bin+":"+os.Getenv("PATH")) {
		key, value, _ := strings.Cut(kv, "=")
		if err := os.Setenv(key, value); err != nil {
			return err
		}
	}
	d := &demo{show: s, cluster: c}
	for _, step := range []func(context.Context) error{
		d.image, d.sandbox, d.restore, d.fork, d.killAgentd, d.clean,
	} {
		if err := step(ctx); err != nil {
			return err
		}
	}
	fmt.Fprintf(s.out, "\n%s in %s\n", s.paint("1;32", "All of it held"), roundMillis(time.Since(s.began)))
	if keep {
		kept = true
		return leave(s, c, d.ref)
	}
	return nil
}

func start(ctx context.Context, s *show, dir string) (*cluster.Cluster, error) {
	s.title("A cluster of real parts: registry, Redis, and on each of two nodes containerd and agentd")
	return cluster.Up(ctx, stack.Options{Dir: dir, Nodes: 2, RegistryUser: "demo", RegistryPassword: cluster.NewPassword(), Logf: s.note})
}

// leave writes the environment for a user's shell and says how to go on.
func leave(s *show, c *cluster.Cluster, image string) error {
	file := filepath.Join(c.Dir, "env")
	text := ""
	for _, kv := range append(c.Env(), "DEMO_IMAGE="+image) {
		text += "export " + kv + "\n"
	}
	text += "export PATH=" + c.Bin + ":$PATH\n"
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		return fmt.Errorf("environment for your shell: %w", err)
	}
	if err := c.Keep(); err != nil {
		return err
	}
	which := "" // DEMO_DIR has to be said again where it is not the Makefile's own
	if dir := os.Getenv("DEMO_DIR"); dir != "" {
		which = " DEMO_DIR=" + dir
	}
	fmt.Fprintf(s.out, `
The cluster is still up. In this checkout:

    eval "$(make -s env%[1]s)"
    SB=$(dormouse create --name first $DEMO_IMAGE)
    dormouse exec $SB -- python3 -c 'print("hello from inside")'
    dormouse checkpoint $SB
    dormouse ls -o wide
    agentctl ls
    make down%[1]s        # ends it
`, which)
	return nil
}
