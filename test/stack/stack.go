// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

// Package stack runs all of Dormouse's real parts on one machine: Redis with
// durable writes, an image registry with TLS, and for each node a containerd and
// an agentd in a network namespace of the node's own.
//
// A stack is a folder. It holds the state of every part, a file for each process
// that says which process it is, and a lock that the living owner holds. It is in
// one of these states:
//
//	owned      the lock is held: a test or a starting devstack is at work
//	kept       not locked, but marked as left running on purpose
//	abandoned  neither: the owner crashed, and the next Up or Sweep ends it
//
// Invariants:
//
//   - The stack is in the index before anything of it exists, and leaves the index
//     after everything of it has been seen to be gone. So a crash at any line
//     leaves a stack that can be found and ended.
//   - A process is ended because this stack recorded it, because it carries the
//     stack's id in its environment, because it is in a control group of the
//     stack, or because it is a sandbox whose state is inside the folder; never
//     for its name.
//   - Nothing listens in the machine's own network namespace.
//   - The folder is removed only when nothing is mounted inside it.
package stack

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/dormouse-run/dormouse/test/fabric"
	"github.com/dormouse-run/dormouse/test/images"
)

// maxDir keeps the longest socket below it within the 108 bytes that the kernel
// allows: runsc's control socket, named after a sandbox, is some 70 deeper.
const maxDir = 36

// Options say what to start. The zero value is one node and an open registry in
// a folder below Base.
type Options struct {
	// Dir is the stack's folder; it must be empty, absent, or an ended stack's.
	Dir string
	// Nodes is how many nodes there are, at least one.
	Nodes int
	// RegistryUser and RegistryPassword close the registry to all others.
	RegistryUser, RegistryPassword string
	// Bin is where the daemons are; the bin folder of this checkout if empty.
	Bin string
	// RedisEnv is added to the environment of Redis.
	RedisEnv []string
	// Logf hears of each step.
	Logf func(format string, args ...any)
}

// record is what stack.json says.
type record struct {
	ID    string `json:"id"`
	Dir   string `json:"dir"`
	Nodes int    `json:"nodes"`
	Bin   string `json:"bin"`
	// RegistryUser is the registry's user, or empty where everyone may use it.
	// The password is in a file of its own, readable by root only.
	RegistryUser string `json:"registry_user,omitempty"`
}

// Stack is a running stack. Its methods may be called from several goroutines.
type Stack struct {
	record
	logf func(format string, args ...any)
	// redisEnv is that of the process that started the stack; whoever opens it later has none.
	redisEnv []string
	lock     *os.File // nil where this process is not the owner

	mu   sync.Mutex
	wait sync.WaitGroup // the goroutines that reap this process's children
}

// New starts a stack for one test and ends it with the test. The parts' logs are
// shown if the test failed.
func New(t testing.TB, opts Options) *Stack {
	t.Helper()
	if opts.Logf == nil {
		opts.Logf = t.Logf
	}
	s, err := Up(t.Context(), opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			s.tailLogs(t.Logf)
		}
		ctx, cancel := context.WithTimeout(context.Background(), 4*time.Minute)
		defer cancel()
		if err := s.Down(ctx); err != nil {
			t.Errorf("ending the stack: %v", err)
		}
	})
	return s
}

// Up ends abandoned stacks and starts a new one: namespaces, Redis, the registry
// and the nodes' containerd. The daemons are started by their own methods. After
// an error nothing is left.
func Up(ctx context.Context, opts Options) (_ *Stack, err error) {
	if opts.Nodes < 1 {
		opts.Nodes = 1
	}
	if opts.Logf == nil {
		opts.Logf = func(string, ...any) {}
	}
	if err := Sweep(ctx, opts.Logf); err != nil {
		return nil, fmt.Errorf("ending abandoned stacks: %w", err)
	}
	s, err := claim(ctx, opts)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			s.tailLogs(opts.Logf)
			err = errors.Join(err, s.Down(context.WithoutCancel(ctx)))
		}
	}()
	if err := fabric.Create(s.ID, s.Nodes); err != nil {
		return nil, err
	}
	if err := errors.Join(s.writeRegistryFiles(opts.RegistryPassword), s.writeIdentities()); err != nil {
		return nil, err
	}
	group, startCtx := errgroup.WithContext(ctx)
	group.Go(func() error { return s.StartRedis(startCtx) })
	group.Go(func() error { return s.StartRegistry(startCtx) })
	for i := 1; i <= s.Nodes; i++ {
		group.Go(func() error { return s.StartContainerd(startCtx, i) })
	}
	if err := group.Wait(); err != nil {
		return nil, err
	}
	return s, nil
}

// claim makes the folder and the index entry of a new stack, and owns it.
func claim(ctx context.Context, opts Options) (*Stack, error) {
	id, err := newID()
	if err != nil {
		return nil, err
	}
	if opts.Dir == "" {
		opts.Dir = filepath.Join(Base(), id)
	}
	dir, err := filepath.Abs(opts.Dir)
	if err != nil {
		return nil, fmt.Errorf("stack folder: %w", err)
	}
	if len(dir) > maxDir {
		return nil, fmt.Errorf("the stack folder %s is too long for the sockets below it: choose one of at most %d bytes", dir, maxDir)
	}
	bin := opts.Bin
	if bin == "" {
		if bin, err = checkoutBin(); err != nil {
			return nil, err
		}
	}
	if err := endPrevious(ctx, dir, opts.Logf); err != nil {
		return nil, err
	}
	s := &Stack{
		record: record{ID: id, Dir: dir, Nodes: opts.Nodes, Bin: bin, RegistryUser: opts.RegistryUser},
		logf:   opts.Logf, redisEnv: opts.RedisEnv,
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("stack folder: %w", err)
	}
	if s.lock, err = lockDir(dir); err != nil {
		return nil, err
	}
	if err := s.register(); err != nil {
		return nil, errors.Join(err, s.release())
	}
	return s, nil
}

// endPrevious makes room in dir: an abandoned stack there is ended, and any other
// content is somebody's, so it is refused.
func endPrevious(ctx context.Context, dir string, logf func(string, ...any)) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) || err == nil && len(entries) == 0 {
		return nil
	}
	if err != nil {
		return fmt.Errorf("stack folder: %w", err)
	}
	old, err := Open(dir)
	if err != nil {
		return fmt.Errorf("%s is not empty and holds no stack: choose another folder (%w)", dir, err)
	}
	if old.kept() {
		return fmt.Errorf("a stack is up in %s: end it first (devstack down --dir %s)", dir, dir)
	}
	old.logf = logf
	return old.Down(ctx)
}

// Open finds the stack in dir, to look at it, to work on its parts or to end it.
// Processes started through it are recorded like the others.
func Open(dir string) (*Stack, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, fmt.Errorf("stack folder: %w", err)
	}
	data, err := os.ReadFile(filepath.Join(dir, "stack.json"))
	if err != nil {
		return nil, fmt.Errorf("no stack in %s: %w", dir, err)
	}
	s := &Stack{logf: func(string, ...any) {}}
	if err := json.Unmarshal(data, &s.record); err != nil {
		return nil, fmt.Errorf("the stack in %s: %w", dir, err)
	}
	if s.ID == "" || s.Dir != dir {
		return nil, fmt.Errorf("the stack in %s says it is %q in %s: was the folder moved?", dir, s.ID, s.Dir)
	}
	return s, nil
}

// SetLogf says who hears of each step from now on.
func (s *Stack) SetLogf(logf func(format string, args ...any)) { s.logf = logf }

// Keep marks the stack as left running on purpose and gives up its ownership:
// this process may end, and only Down ends the stack.
func (s *Stack) Keep() error {
	if err := os.WriteFile(s.path("keep"), nil, 0o600); err != nil {
		return fmt.Errorf("keeping the stack: %w", err)
	}
	return s.release()
}

func (s *Stack) kept() bool {
	_, err := os.Stat(s.path("keep"))
	return err == nil
}

// ---- where things are -------------------------------------------------------

func (s *Stack) path(elem ...string) string {
	return filepath.Join(append([]string{s.Dir}, elem...)...)
}

// NodeDir is where all state of node i is.
func (s *Stack) NodeDir(i int) string { return s.path(fmt.Sprintf("n%d", i)) }

// LayersDir is where the nodes keep images as EROFS files: one folder for all of
// them, because an image has the same path on every node, and these share a disk.
func (s *Stack) LayersDir() string { return s.path("layers") }

// RedisSocket is the unix socket of Redis.
func (s *Stack) RedisSocket() string { return s.path("redis", "redis.sock") }

// ContainerdSocket is the unix socket of the containerd of node i.
func (s *Stack) ContainerdSocket(i int) string {
	return filepath.Join(s.NodeDir(i), "containerd", "containerd.sock")
}

// RegistryHost is the registry as references name it, from inside the fabric.
func (s *Stack) RegistryHost() string { return fabric.HubAddr + ":5000" }

// RegistryCA is the file with the certificate that signs the registry's own.
func (s *Stack) RegistryCA() string { return s.path("registry", "ca.pem") }

// Registry is the registry as a place to push to, from any namespace.
func (s *Stack) Registry() (images.Registry, error) {
	ca, err := os.ReadFile(s.RegistryCA())
	if err != nil {
		return images.Registry{}, fmt.Errorf("registry: %w", err)
	}
	r := images.Registry{Host: s.RegistryHost(), CA: ca, User: s.RegistryUser, Dial: fabric.Dialer(s.HubNetns())}
	if s.RegistryUser != "" {
		secret, err := os.ReadFile(s.RegistryPasswordFile())
		if err != nil {
			return images.Registry{}, fmt.Errorf("registry: %w", err)
		}
		r.Password = string(secret)
	}
	return r, nil
}

// RegistryPasswordFile is the root-only file with the password of the registry's user.
func (s *Stack) RegistryPasswordFile() string { return s.path("registry", "password") }

// HubNetns is the network namespace of the hub.
func (s *Stack) HubNetns() string { return fabric.HubPath(s.ID) }

// NodeNetns is the network namespace of node i.
func (s *Stack) NodeNetns(i int) string { return fabric.NodePath(s.ID, i) }

// CgroupParent is the control group below which node i puts its sandboxes, in
// every hierarchy.
func (s *Stack) CgroupParent(i int) string { return fmt.Sprintf("/%s%d", s.cgroupPrefix(), i) }

func (s *Stack) cgroupPrefix() string { return "dormouse/" + s.ID + "-n" }

// Log is the file that collects what a process says.
func (s *Stack) Log(name string) string { return s.path("logs", name+".log") }

func newID() (string, error) {
	var b [4]byte
	if _, err := rand.Read(b[:]); err != nil {
		return "", fmt.Errorf("stack id: %w", err)
	}
	return hex.EncodeToString(b[:]), nil
}
