// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package stack_test

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/dormouse-run/dormouse/pkg/apikey"
	"github.com/dormouse-run/dormouse/pkg/pki"
	"github.com/dormouse-run/dormouse/test/fabric"
	"github.com/dormouse-run/dormouse/test/images"
	"github.com/dormouse-run/dormouse/test/stack"
)

// crashEnv makes the test binary a program that starts a stack, leaves a trail
// and waits to be killed.
const crashEnv = "DORMOUSE_TEST_CRASH"

func TestMain(m *testing.M) {
	if os.Getenv(crashEnv) != "" {
		if err := leaveTrail(); err != nil {
			fmt.Fprintln(os.Stderr, err)
		}
		os.Exit(1)
	}
	goleak.VerifyTestMain(m)
}

// ownBase gives the test an index of its own, in a short path.
func ownBase(t *testing.T) {
	t.Helper()
	base, err := os.MkdirTemp("/var/tmp", "dms")
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv("DORMOUSE_STACKS", base)
	t.Cleanup(func() {
		if left, err := stack.Indexed(); err != nil || len(left) > 0 {
			t.Errorf("%d stacks are left (%v), so %s is, too", len(left), err, base)
			return
		}
		if err := os.RemoveAll(base); err != nil {
			t.Error(err)
		}
	})
}

// up starts a stack that the test ends itself; if it does not come to that, the
// stack is ended after it. Ending one twice is no error.
func up(t *testing.T, opts stack.Options) *stack.Stack {
	t.Helper()
	opts.Logf = t.Logf
	s, err := stack.Up(t.Context(), opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Down(context.WithoutCancel(t.Context())); err != nil {
			t.Error(err)
		}
	})
	return s
}

func TestStack(t *testing.T) {
	ownBase(t)
	s := up(t, stack.Options{Nodes: 2, RegistryUser: "puller", RegistryPassword: "secret"})

	t.Run("another owner is refused", func(t *testing.T) {
		other, err := stack.Open(s.Dir)
		if err != nil {
			t.Fatal(err)
		}
		if err := other.Down(t.Context()); err == nil {
			t.Error("a stranger ended a stack that is in use")
		}
		if err := stack.Sweep(t.Context(), t.Logf); err != nil {
			t.Error(err)
		}
	})
	t.Run("redis keeps what it acknowledged", func(t *testing.T) { redisKeeps(t, s) })
	t.Run("redis pauses", func(t *testing.T) { redisPauses(t, s) })
	t.Run("registry", func(t *testing.T) { registryServes(t, s) })
	t.Run("nothing listens outside", func(t *testing.T) { nothingListens(t, s) })
	t.Run("identities", func(t *testing.T) { identitiesFit(t, s) })
	t.Run("a node's containerd comes back", func(t *testing.T) {
		if err := s.KillContainerd(t.Context(), 2); err != nil {
			t.Fatal(err)
		}
		if s.Running("containerd2") {
			t.Error("containerd2 still runs")
		}
		if err := s.StartContainerd(t.Context(), 2); err != nil {
			t.Error(err)
		}
	})

	if err := s.Down(t.Context()); err != nil {
		t.Error(err)
	}
	nothingLeft(t, s)
}

func redisKeeps(t *testing.T, s *stack.Stack) {
	client := redis.NewClient(&redis.Options{Network: "unix", Addr: s.RedisSocket()})
	defer client.Close()
	if err := client.Set(t.Context(), "k", "v", 0).Err(); err != nil {
		t.Fatal(err)
	}
	if err := s.KillRedis(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := s.StartRedis(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got, err := client.Get(t.Context(), "k").Result(); err != nil || got != "v" {
		t.Errorf("after SIGKILL: %q, %v; want v", got, err)
	}
}

func redisPauses(t *testing.T, s *stack.Stack) {
	client := redis.NewClient(&redis.Options{
		Network: "unix", Addr: s.RedisSocket(), MaxRetries: -1, ContextTimeoutEnabled: true, ReadTimeout: time.Minute,
	})
	defer client.Close()
	if err := s.PauseRedis(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if err := client.Ping(ctx).Err(); err == nil {
		t.Error("a paused redis answered")
	}
	if err := s.ResumeRedis(); err != nil {
		t.Fatal(err)
	}
	if err := client.Ping(t.Context()).Err(); err != nil {
		t.Errorf("after it was resumed: %v", err)
	}
}

func registryServes(t *testing.T, s *stack.Stack) {
	to, err := s.Registry()
	if err != nil {
		t.Fatal(err)
	}
	image, err := images.FromEntries(images.Config{}, []images.Entry{images.File("hello", "world", 0o644)})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := to.Push(t.Context(), "test/hello:1", image); err != nil {
		t.Error(err)
	}
	from := to
	from.Dial = fabric.Dialer(s.NodeNetns(2))
	if _, err := from.Push(t.Context(), "test/hello:2", image); err != nil {
		t.Errorf("from node 2: %v", err)
	}
	to.Password = "wrong"
	if _, err := to.Push(t.Context(), "test/hello:3", image); err == nil {
		t.Error("a wrong password was accepted")
	}
}

// identitiesFit checks what the daemons will check of each other.
func identitiesFit(t *testing.T, s *stack.Stack) {
	for want, files := range map[pki.Identity]pki.Files{
		{Role: pki.RoleCoordinator, Name: "coordinator-1"}: s.CoordinatorTLS(),
		{Role: pki.RoleNode, Name: stack.NodeName(2)}:      s.NodeTLS(2),
	} {
		pair, err := tls.LoadX509KeyPair(files.Cert, files.Key)
		if err != nil {
			t.Errorf("%s: %v", want, err)
			continue
		}
		if got, err := pki.IdentityOf(pair.Leaf); err != nil || got != want {
			t.Errorf("identity = %s, %v; want %s", got, err, want)
		}
	}
	keyring, err := apikey.OpenKeyring(s.APIKeys(), nil)
	if err != nil {
		t.Fatal(err)
	}
	operator, err := s.APIKey()
	if err != nil {
		t.Fatal(err)
	}
	user, err := s.NewAPIKey("other")
	if err != nil {
		t.Fatal(err)
	}
	for key, tenant := range map[string]string{operator: stack.Tenant, user: "other"} {
		if e, err := keyring.Check(key); err != nil || e.Tenant != tenant {
			t.Errorf("key of tenant %q, %v; want %s", e.Tenant, err, tenant)
		}
	}
}

// nothingListens checks that what shares the machine's own network namespace has
// no TCP listener. (That a dial fails would prove nothing: on some machines the
// way out accepts every connection.)
func nothingListens(t *testing.T, s *stack.Stack) {
	own, err := os.Readlink("/proc/self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	listening := map[string]bool{}
	for _, file := range []string{"/proc/self/net/tcp", "/proc/self/net/tcp6"} {
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(data)) {
			if f := strings.Fields(line); len(f) > 9 && f[3] == "0A" {
				listening["socket:["+f[9]+"]"] = true
			}
		}
	}
	for _, name := range []string{"redis", "registry", "containerd1", "containerd2"} {
		pid := s.PID(name)
		netns, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/net", pid))
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if netns != own {
			continue
		}
		fds, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
		if err != nil {
			t.Fatal(err)
		}
		for _, fd := range fds {
			if target, err := os.Readlink(fd); err == nil && listening[target] {
				t.Errorf("%s listens in the machine's own network namespace", name)
			}
		}
	}
}

// nothingLeft fails the test for each trace of an ended stack.
func nothingLeft(t *testing.T, s *stack.Stack) {
	t.Helper()
	if _, err := os.Stat(s.Dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the folder %s: %v", s.Dir, err)
	}
	if names, err := fabric.List(s.ID); err != nil || len(names) > 0 {
		t.Errorf("namespaces: %q, %v", names, err)
	}
	environs, err := filepath.Glob("/proc/[0-9]*/environ")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range environs {
		if data, err := os.ReadFile(file); err == nil && strings.Contains(string(data), "DORMOUSE_STACK="+s.ID) {
			t.Errorf("a process is left: %s", file)
		}
	}
	if mounts, err := os.ReadFile("/proc/self/mountinfo"); err != nil || strings.Contains(string(mounts), s.Dir) {
		t.Errorf("mounts are left, or unknown: %v", err)
	}
	if groups, err := filepath.Glob("/sys/fs/cgroup/*/dormouse/" + s.ID + "*"); err != nil || len(groups) > 0 {
		t.Errorf("control groups: %q, %v", groups, err)
	}
	all, err := stack.Indexed()
	if err != nil {
		t.Fatal(err)
	}
	for _, other := range all {
		if other.ID == s.ID {
			t.Error("it is still in the index")
		}
	}
}

// The next Up ends what a killed owner left: processes, a control group with
// someone in it, a mount, namespaces, the folder.
func TestAbandonedStackIsEnded(t *testing.T) {
	ownBase(t)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	owner := exec.Command(self)
	owner.Env = append(os.Environ(), crashEnv+"=1")
	owner.Stderr = os.Stderr
	out, err := owner.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := owner.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(out)
	lines.Scan()
	dir := lines.Text()
	if err := owner.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = owner.Wait() // killed, as it says
	left, err := stack.Open(dir)
	if err != nil {
		t.Fatalf("the owner's stack %q: %v", dir, err)
	}
	if !left.Running("redis") {
		t.Error("the parts died with their owner; this test wants them left")
	}

	next := stack.New(t, stack.Options{})
	nothingLeft(t, left)
	if !next.Running("redis") {
		t.Error("the next stack is not up")
	}
}

// A kept stack survives a sweep and its owner, and can be ended by anyone.
func TestKeptStack(t *testing.T) {
	ownBase(t)
	s := up(t, stack.Options{})
	if err := s.Keep(); err != nil {
		t.Fatal(err)
	}
	if err := stack.Sweep(t.Context(), t.Logf); err != nil {
		t.Error(err)
	}
	again, err := stack.Open(s.Dir)
	if err != nil {
		t.Fatal(err)
	}
	if !again.Running("redis") || !again.Running("containerd1") {
		t.Error("a sweep ended a kept stack")
	}
	if _, err := stack.Up(t.Context(), stack.Options{Dir: s.Dir}); err == nil {
		t.Error("a second stack was started in the folder of a kept one")
	}
	if err := again.Down(t.Context()); err != nil {
		t.Error(err)
	}
	nothingLeft(t, s)
}

// leaveTrail is the crashing owner.
func leaveTrail() error {
	s, err := stack.Up(context.Background(), stack.Options{})
	if err != nil {
		return err
	}
	group := "/sys/fs/cgroup/pids" + s.CgroupParent(1) + "/sandbox"
	if err := os.MkdirAll(group, 0o755); err != nil {
		return err
	}
	// Somebody of whom only the control group knows.
	stray := exec.Command("sleep", "1000")
	stray.Env = []string{}
	if err := stray.Start(); err != nil {
		return err
	}
	if err := os.WriteFile(group+"/cgroup.procs", fmt.Append(nil, stray.Process.Pid), 0o644); err != nil {
		return err
	}
	at := filepath.Join(s.NodeDir(1), "mounted")
	if err := os.Mkdir(at, 0o700); err != nil {
		return err
	}
	if err := unix.Mount("none", at, "tmpfs", 0, ""); err != nil {
		return err
	}
	fmt.Println(s.Dir)
	select {}
}

// A stack that cannot be started says what is missing and leaves nothing.
func TestUpFailsCleanly(t *testing.T) {
	ownBase(t)
	t.Setenv("DORMOUSE_CACHE", t.TempDir())
	dir := filepath.Join(stack.Base(), "s")
	if _, err := stack.Up(t.Context(), stack.Options{Dir: dir}); err == nil || !strings.Contains(err.Error(), "scripts/tools.sh") {
		t.Errorf("without tools: %v; want an error that names the command to run", err)
	}
	if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the folder: %v", err)
	}
	if all, err := stack.Indexed(); err != nil || len(all) > 0 {
		t.Errorf("index: %d stacks, %v", len(all), err)
	}

	foreign := filepath.Join(stack.Base(), "foreign")
	if err := os.MkdirAll(foreign, 0o700); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(foreign, "somebody's")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := stack.Up(t.Context(), stack.Options{Dir: foreign}); err == nil {
		t.Error("a folder with other content was taken")
	}
	if _, err := os.Stat(file); err != nil {
		t.Errorf("the file that was there: %v", err)
	}
}
