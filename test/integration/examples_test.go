package integration

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// The examples do what they say.
func TestExampleOfProcesses(t *testing.T) {
	w := enter(t)
	program := filepath.Join(t.TempDir(), "processes")
	out, err := exec.CommandContext(w.ctx, "go", "build", "-trimpath", "-o", program, "github.com/dormouse-run/dormouse/examples/processes").CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	cmd := exec.CommandContext(w.ctx, program, w.busybox())
	cmd.Env = []string{"DORMOUSE_ADDR=unix://" + w.GRPCSocket(), "DORMOUSE_API_KEY=" + w.key, "HOME=" + t.TempDir(), "PATH=" + os.Getenv("PATH")}
	out, err = cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	lines := &liner{lines: make(chan string, 64)}
	_, _ = lines.Write(out)
	if first := <-lines.lines; len(first) < len("hello from x") {
		t.Errorf("it began with %q", first)
	}
	lines.want(w, "it ended with 3", "before the checkpoint", "after the checkpoint", "1 process has the tag")
}
