package bench

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
)

// daemons are the admin sockets of the cluster's daemons.
func (b *bench) daemons() map[string]string {
	return map[string]string{
		"agentd": filepath.Join(b.cluster.NodeDir(1), "run", "admin.sock"), "coordinator": filepath.Join(b.cluster.Dir, "admin.sock"),
	}
}

// fetch gets a path of an admin socket.
func fetch(ctx context.Context, socket, path string, to io.Writer) error {
	transport := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", socket)
	}}
	defer transport.CloseIdleConnections()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://admin"+path, nil)
	if err != nil {
		return err
	}
	resp, err := transport.RoundTrip(req)
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", path, resp.Status)
	}
	_, err = io.Copy(to, resp.Body)
	return err
}

// keep writes what an admin socket says to a file of the profile folder.
func (b *bench) keep(ctx context.Context, daemon, path, file string) {
	f, err := os.Create(filepath.Join(b.Profile, file))
	if err != nil {
		b.Logf("profile: %v", err)
		return
	}
	defer func() { _ = f.Close() }()
	if err := fetch(ctx, b.daemons()[daemon], path, f); err != nil {
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
