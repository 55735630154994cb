// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package stack_test

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/dormouse-run/dormouse/test/stack"
	"github.com/dormouse-run/dormouse/test/tools"
)

// A sandbox outlives whoever started it, but not the stack: neither the sandbox
// whose state says where it is, nor one whose state was lost.
func TestSandboxesEndWithTheStack(t *testing.T) {
	ownBase(t)
	s := up(t, stack.Options{})
	root := filepath.Join(s.NodeDir(1), "agentd", "runsc")
	first, second := runSandbox(t, s, root, "sandbox-1"), runSandbox(t, s, root, "sandbox-2")
	states, err := filepath.Glob(filepath.Join(root, "sandbox-2*.state"))
	if err != nil || len(states) != 1 {
		t.Fatalf("states of the second sandbox: %q, %v", states, err)
	}
	if err := os.Remove(states[0]); err != nil {
		t.Fatal(err)
	}
	if err := s.Down(t.Context()); err != nil {
		t.Error(err)
	}
	for _, pid := range []string{first, second} {
		// A zombie has ended; whoever inherited it collects it when it likes.
		status, err := os.ReadFile("/proc/" + pid + "/status")
		if err == nil && !strings.Contains(string(status), "State:\tZ") {
			t.Errorf("the sandbox process %s is left", pid)
		}
	}
	nothingLeft(t, s)
}

// runSandbox starts busybox in gVisor and returns the pid of the sandbox.
func runSandbox(t *testing.T, s *stack.Stack, root, id string) string {
	t.Helper()
	bundle := filepath.Join(s.NodeDir(1), id)
	bin := filepath.Join(bundle, "rootfs", "bin")
	if err := os.MkdirAll(bin, 0o755); err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(tools.Path(t, "busybox"))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(bin, "busybox"), data, 0o755); err != nil {
		t.Fatal(err)
	}
	spec, err := json.Marshal(specs.Spec{
		Version: specs.Version,
		Root:    &specs.Root{Path: "rootfs", Readonly: true},
		Process: &specs.Process{Args: []string{"/bin/busybox", "sleep", "1000"}, Cwd: "/"},
		Linux:   &specs.Linux{Namespaces: []specs.LinuxNamespace{{Type: specs.PIDNamespace}, {Type: specs.MountNamespace}}},
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(bundle, "config.json"), spec, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(root, 0o700); err != nil {
		t.Fatal(err)
	}
	pidFile := filepath.Join(bundle, "pid")
	// A file, not a pipe: the sandbox keeps what it is given open, so a pipe would
	// not end.
	said, err := os.Create(filepath.Join(bundle, "log"))
	if err != nil {
		t.Fatal(err)
	}
	defer said.Close()
	run := exec.CommandContext(t.Context(), tools.Path(t, "runsc"), "--root", root, "--network=none", "--ignore-cgroups",
		"run", "-detach", "-bundle", bundle, "-pid-file", pidFile, id)
	run.Stdout, run.Stderr = said, said
	if err := run.Run(); err != nil {
		out, _ := os.ReadFile(said.Name())
		t.Fatalf("runsc run: %v\n%s", err, out)
	}
	pid, err := os.ReadFile(pidFile)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := strconv.Atoi(strings.TrimSpace(string(pid))); err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(pid))
}
