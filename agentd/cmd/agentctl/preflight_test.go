package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/dormouse-run/dormouse/agentd/app"
)

// TestPreflight: without an agentd, from the configuration; what is missing is said, and the exit code says that something is.
func TestPreflight(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "agentd.yaml")
	text := "state_dir: " + dir + "/state\nlimits: {sandboxes: 3}\nsnapshot: {direct: false}\nbundle: {dir: " + dir + "/none}\nlayers: {root: " + dir + "/layers, mkfs: " + dir + "/mkfs.erofs}\n"
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	code, out, errOut := agentctl(t, "preflight", "--config", file, "-o", "json")
	var report app.Report
	if err := json.Unmarshal([]byte(out), &report); err != nil {
		t.Fatalf("%v: %s %s", err, out, errOut)
	}
	if code != 1 || report.Wanted != 3 || report.Sandboxes != 0 {
		t.Errorf("exit code %d, %+v", code, report)
	}
	found := make(map[string]string)
	for _, c := range report.Checks {
		found[c.Name] = string(c.Verdict)
	}
	if found["bundle.dir"] != "refuse" || found["layers.mkfs"] != "refuse" || found["rights"] != "ok" || found["kernel.pid_max"] == "" || found["state_dir"] == "" {
		t.Errorf("%v", found)
	}
	code, out, errOut = agentctl(t, "preflight", "--config", file, "--sandboxes", "7", "-o", "wide")
	if code != 1 || !strings.Contains(out, "bundle.dir") || !strings.Contains(out, "scripts/bundle.sh") || !strings.Contains(out, "WHY") || !strings.Contains(errOut, "this host allows 0 of 7 sandboxes") {
		t.Errorf("exit code %d\n%s%s", code, out, errOut)
	}
	for _, wrong := range [][]string{{"--sandboxes", "-1"}, {"--sandboxes", "100001"}, {"--config", dir + "/none.yaml"}, {"extra"}} {
		if code, _, errOut := agentctl(t, append([]string{"preflight"}, wrong...)...); code != 2 {
			t.Errorf("%v: exit code %d, %s", wrong, code, errOut)
		}
	}
}
