package bench

import (
	"context"
	"os"
	"path/filepath"
	"sync"

	"github.com/dormouse-run/dormouse/test/stack"
)

// daemons are the admin sockets of the cluster's daemons.
func (b *bench) daemons() map[string]string {
	return map[string]string{
		"agentd": filepath.Join(b.cluster.NodeDir(1), "run", "admin.sock"), "coordinator": filepath.Join(b.cluster.Dir, "admin.sock"),
	}
}

// keep writes what an admin socket says to a file of the profile folder.
func (b *bench) keep(ctx context.Context, daemon, path, file string) {
	f, err := os.Create(filepath.Join(b.Profile, file))
	if err != nil {
		b.Logf("profile: %v", err)
		return
	}
	defer func() { _ = f.Close() }()
	if err := stack.FetchAdmin(ctx, b.daemons()[daemon], path, f); err != nil {
		b.Logf("profile %s: %v", file, err)
	}
}

// profile takes the daemons' CPU for a while and, in the end, their heaps and metrics. It does nothing
// unless asked for.
func (b *bench) profile(ctx context.Context, name string) (stop func()) {
	if b.Profile == "" {
		return func() {}
	}
	var group sync.WaitGroup
	for daemon := range b.daemons() {
		group.Go(func() { b.keep(ctx, daemon, "/debug/pprof/profile?seconds=10", name+"-"+daemon+".cpu") })
	}
	return func() {
		group.Wait()
		for daemon := range b.daemons() {
			b.keep(ctx, daemon, "/debug/pprof/heap", name+"-"+daemon+".heap")
			b.keep(ctx, daemon, "/metrics", name+"-"+daemon+".metrics")
		}
	}
}
