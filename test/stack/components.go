// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package stack

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health/grpc_health_v1"

	"github.com/dormouse-run/dormouse/test/fabric"
	"github.com/dormouse-run/dormouse/test/tools"
)

// ---- Redis ------------------------------------------------------------------

// redisConfig makes every acknowledged write durable, and listens on no network.
const redisConfig = `port 0
unixsocket %[1]s/redis.sock
unixsocketperm 700
dir %[1]s
daemonize no
appendonly yes
appendfsync always
aof-use-rdb-preamble yes
auto-aof-rewrite-min-size 512mb
save ""
loglevel notice
`

// StartRedis starts Redis on the data it left, or on none.
func (s *Stack) StartRedis(ctx context.Context) error {
	path, err := tools.Find("redis-server")
	if err != nil {
		return err
	}
	dir := s.path("redis")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("redis: %w", err)
	}
	config := filepath.Join(dir, "redis.conf")
	if err := writeFile(config, fmt.Appendf(nil, redisConfig, dir), 0o600); err != nil {
		return fmt.Errorf("redis: %w", err)
	}
	// A killed server leaves its socket behind, and nobody behind it.
	if !s.Running("redis") {
		if err := os.Remove(s.RedisSocket()); err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("redis: %w", err)
		}
	}
	return s.start(ctx, command{
		name: "redis", netns: s.HubNetns(), path: path, args: []string{config}, env: s.redisEnv, ready: s.pingRedis,
	})
}

// pingRedis is nil when Redis has loaded its data and answers.
func (s *Stack) pingRedis(ctx context.Context) error {
	conn, err := (&net.Dialer{Timeout: time.Second}).DialContext(ctx, "unix", s.RedisSocket())
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(time.Second)); err != nil {
		return err
	}
	if _, err := conn.Write([]byte("PING\r\n")); err != nil {
		return err
	}
	answer := make([]byte, 64)
	n, err := conn.Read(answer)
	if err != nil {
		return err
	}
	if got := answer[:n]; !bytes.Equal(got, []byte("+PONG\r\n")) {
		return fmt.Errorf("answered %q", got)
	}
	return nil
}

// PauseRedis stops Redis in its tracks: connections stay, nothing is answered.
func (s *Stack) PauseRedis() error { return s.signal("redis", unix.SIGSTOP) }

// ResumeRedis lets a paused Redis go on.
func (s *Stack) ResumeRedis() error { return s.signal("redis", unix.SIGCONT) }

// CopyRedis keeps a copy of the data that a killed Redis left, in a folder that it makes.
func (s *Stack) CopyRedis(to string) error {
	return os.CopyFS(to, os.DirFS(s.path("redis", "appendonlydir")))
}

// RewindRedis gives a killed Redis the data of an earlier copy: what it acknowledged since is lost.
func (s *Stack) RewindRedis(from string) error {
	if err := os.RemoveAll(s.path("redis", "appendonlydir")); err != nil {
		return err
	}
	return os.CopyFS(s.path("redis", "appendonlydir"), os.DirFS(from))
}

// KillRedis ends Redis with SIGKILL; its data stays for StartRedis.
func (s *Stack) KillRedis(ctx context.Context) error { return s.stop(ctx, "redis", 0) }

// ---- registry ---------------------------------------------------------------

const registryConfig = `version: 0.1
log:
  level: info
  accesslog:
    disabled: true
storage:
  filesystem:
    rootdirectory: %[1]s/data
  delete:
    enabled: true
http:
  addr: %[2]s
  tls:
    certificate: %[1]s/cert.pem
    key: %[1]s/key.pem
`

const registryAuth = `auth:
  htpasswd:
    realm: dormouse-dev
    path: %[1]s/htpasswd
`

// writeRegistryFiles makes the registry's certificate, passwords and configuration.
func (s *Stack) writeRegistryFiles(password string) error {
	dir := s.path("registry")
	if err := os.MkdirAll(filepath.Join(dir, "data"), 0o700); err != nil {
		return fmt.Errorf("registry: %w", err)
	}
	if err := writeServerCert(dir, fabric.HubAddr); err != nil {
		return fmt.Errorf("registry: %w", err)
	}
	config := fmt.Appendf(nil, registryConfig, dir, s.RegistryHost())
	if s.RegistryUser != "" {
		line, err := htpasswd(s.RegistryUser, password)
		if err != nil {
			return fmt.Errorf("registry: %w", err)
		}
		if err := writeFile(filepath.Join(dir, "htpasswd"), line, 0o600); err != nil {
			return fmt.Errorf("registry: %w", err)
		}
		if err := writeFile(s.RegistryPasswordFile(), []byte(password), 0o600); err != nil {
			return fmt.Errorf("registry: %w", err)
		}
		config = fmt.Appendf(config, registryAuth, dir)
	}
	if err := writeFile(filepath.Join(dir, "config.yml"), config, 0o600); err != nil {
		return fmt.Errorf("registry: %w", err)
	}
	return nil
}

// StartRegistry starts the registry on the images it has.
func (s *Stack) StartRegistry(ctx context.Context) error {
	path, err := tools.Find("registry")
	if err != nil {
		return err
	}
	return s.start(ctx, command{
		name: "registry", netns: s.HubNetns(), path: path,
		args:  []string{"serve", s.path("registry", "config.yml")},
		env:   []string{"OTEL_TRACES_EXPORTER=none"},
		ready: s.pingRegistry,
	})
}

// KillRegistry ends the registry with SIGKILL; its images stay.
func (s *Stack) KillRegistry(ctx context.Context) error { return s.stop(ctx, "registry", 0) }

func (s *Stack) pingRegistry(ctx context.Context) error {
	ca, err := os.ReadFile(s.RegistryCA())
	if err != nil {
		return err
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(ca)
	transport := &http.Transport{
		DialContext:       fabric.Dialer(s.HubNetns()),
		TLSClientConfig:   &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12},
		DisableKeepAlives: true,
	}
	defer transport.CloseIdleConnections()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://"+s.RegistryHost()+"/v2/", nil)
	if err != nil {
		return err
	}
	resp, err := (&http.Client{Transport: transport, Timeout: 2 * time.Second}).Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	want := http.StatusOK
	if s.RegistryUser != "" {
		want = http.StatusUnauthorized
	}
	if resp.StatusCode != want {
		return fmt.Errorf("answered %s, want %d", resp.Status, want)
	}
	return nil
}

// ---- containerd -------------------------------------------------------------

// containerdConfig is containerd for images only. Tasks, CRI and what comes with
// them are off: Dormouse drives runsc itself, and CRI would listen on the network.
const containerdConfig = `version = 3
root = "%[1]s/root"
state = "%[1]s/state"
temp = "%[1]s/tmp"
imports = []
disabled_plugins = [
  "io.containerd.cri.v1.images",
  "io.containerd.cri.v1.runtime",
  "io.containerd.grpc.v1.cri",
  "io.containerd.grpc.v1.sandbox-controllers",
  "io.containerd.grpc.v1.sandboxes",
  "io.containerd.grpc.v1.tasks",
  "io.containerd.internal.v1.opt",
  "io.containerd.image-verifier.v1.bindir",
  "io.containerd.internal.v1.restart",
  "io.containerd.internal.v1.tracing",
  "io.containerd.monitor.container.v1.restart",
  "io.containerd.monitor.task.v1.cgroups",
  "io.containerd.nri.v1.nri",
  "io.containerd.podsandbox.controller.v1.podsandbox",
  "io.containerd.runtime.v2.task",
  "io.containerd.sandbox.controller.v1.shim",
  "io.containerd.sandbox.store.v1.local",
  "io.containerd.service.v1.tasks-service",
  "io.containerd.shim.v1.manager",
  "io.containerd.snapshotter.v1.blockfile",
  "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.devmapper",
  "io.containerd.snapshotter.v1.zfs",
  "io.containerd.tracing.processor.v1.otlp",
]

[grpc]
  address = "%[1]s/containerd.sock"

[ttrpc]
  address = "%[1]s/containerd.sock.ttrpc"
`

// ContainerdNamespace is the namespace the node's agentd uses.
const ContainerdNamespace = "dormouse"

// StartContainerd starts the containerd of node i on the images it has. It is in
// the machine's own network namespace, for it has no network to speak of: agentd
// does the pulling.
func (s *Stack) StartContainerd(ctx context.Context, i int) error {
	path, err := tools.Find("containerd")
	if err != nil {
		return err
	}
	dir := filepath.Join(s.NodeDir(i), "containerd")
	if err := os.MkdirAll(filepath.Join(dir, "tmp"), 0o700); err != nil {
		return fmt.Errorf("containerd: %w", err)
	}
	config := filepath.Join(dir, "config.toml")
	if err := writeFile(config, fmt.Appendf(nil, containerdConfig, dir), 0o600); err != nil {
		return fmt.Errorf("containerd: %w", err)
	}
	return s.start(ctx, command{
		name: containerdName(i), path: path, args: []string{"--config", config},
		env:   []string{"OTEL_SDK_DISABLED=true"},
		ready: func(ctx context.Context) error { return pingContainerd(ctx, s.ContainerdSocket(i)) },
	})
}

// KillContainerd ends the containerd of node i with SIGKILL; its images stay.
func (s *Stack) KillContainerd(ctx context.Context, i int) error {
	return s.stop(ctx, containerdName(i), 0)
}

func containerdName(i int) string { return fmt.Sprintf("containerd%d", i) }

func pingContainerd(ctx context.Context, socket string) error {
	conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	resp, err := grpc_health_v1.NewHealthClient(conn).Check(ctx, &grpc_health_v1.HealthCheckRequest{})
	if err != nil {
		return err
	}
	if resp.Status != grpc_health_v1.HealthCheckResponse_SERVING {
		return fmt.Errorf("is %s", resp.Status)
	}
	return nil
}
