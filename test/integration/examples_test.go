package integration

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// The examples do what they say: each is built as a user's program would be, and run on the cluster as a
// user of a tenant.
func TestExamples(t *testing.T) {
	wants := map[string]string{ // what they say; ... is any text of a line
		"files": "written: 29 bytes\ntwinkle, twinkle, little bat\nthere is bat.txt\nmoved away: FILE_NOT_FOUND /work/out/poem.txt\n",
		"images": "pulled 1 layers as one file\nthe sandbox has that image: true\n" +
			"from nowhere: UNAVAILABLE REGISTRY_UNREACHABLE\n",
		"processes": "hello from ...\nit ended with 3\nbefore the checkpoint\nafter the checkpoint\n1 process has the tag\n",
		"sandboxes": "found by its name: true\nthe second change: CONFLICT STALE_REVISION\nhibernated: SANDBOX_PHASE_HIBERNATED\n" +
			"still running: true\nnot waited for: DEADLINE_EXCEEDED\nended by signal 15\n",
		"snapshots": "treacle\ntreacle\ntreacle\nno such snapshot: NOT_FOUND retry never\n",
		"warm":      "set up: 1 command\nready: 2\nalice has treacle\ndormouse has treacle\nan empty pool: RESOURCE_EXHAUSTED POOL_EMPTY\n",
		"web":       "channel 1: hello dormouse\nit ended with 3\nthe page: hello from inside\n",
		"volumes":   "the writer ended with 0\na second writer: ALREADY_ATTACHED by the first: true\n42\n",
	}
	w := enter(t)
	dir := t.TempDir()
	if out, err := exec.CommandContext(w.ctx, "go", "build", "-trimpath", "-o", dir, "github.com/dormouse-run/dormouse/examples/...").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	programs, err := os.ReadDir(dir)
	w.ok(err)
	for _, p := range programs {
		t.Run(p.Name(), func(t *testing.T) {
			w := w.sub(t)
			want, ok := wants[p.Name()]
			if !ok {
				t.Fatal("nothing says what it should print")
			}
			var stderr bytes.Buffer
			cmd := exec.CommandContext(w.ctx, filepath.Join(dir, p.Name()), w.busybox())
			cmd.Env = []string{"DORMOUSE_ADDR=unix://" + w.GRPCSocket(), "DORMOUSE_REST=unix://" + w.RESTSocket(), "DORMOUSE_API_KEY=" + w.key, "HOME=" + t.TempDir()}
			cmd.Stderr = &stderr
			out, err := cmd.Output()
			if err != nil {
				t.Fatalf("%v: %s%s", err, out, stderr.String())
			}
			if !alike(string(out), want) {
				t.Errorf("it said\n%swhich is not\n%s%s", out, want, stderr.String())
			}
		})
	}
	if len(programs) != len(wants) {
		t.Errorf("%d programs, of which %d were expected", len(programs), len(wants))
	}
}

// alike compares line by line; what ends with "..." in want need only begin so.
func alike(got, want string) bool {
	g, w := strings.Split(got, "\n"), strings.Split(want, "\n")
	if len(g) != len(w) {
		return false
	}
	for i, line := range w {
		if begin, ok := strings.CutSuffix(line, "..."); ok && strings.HasPrefix(g[i], begin) {
			continue
		}
		if g[i] != line {
			return false
		}
	}
	return true
}
