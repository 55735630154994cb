package publish_test

import (
	"os/exec"
	"strings"
	"testing"
)

// TestC04_QueueReachesNoRuntime holds that nothing that could do runtime work, and no Redis client, is
// reachable from the queue's code.
func TestC04_QueueReachesNoRuntime(t *testing.T) {
	out, err := exec.CommandContext(t.Context(), "go", "list", "-deps", ".").CombinedOutput()
	if err != nil {
		t.Fatalf("go list: %v\n%s", err, out)
	}
	for dep := range strings.Lines(string(out)) {
		dep = strings.TrimSpace(dep)
		for _, wall := range []string{"redis", "containerd", "gvisor", "grpc", "bbolt", "/agentd/", "os/exec"} {
			if strings.Contains(dep, wall) {
				t.Errorf("the queue reaches %s", dep)
			}
		}
	}
}
