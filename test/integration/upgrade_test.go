package integration

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/dormouse-run/dormouse/pkg/errs"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// A snapshot is restored by the runtime that made it, which is kept beside a newer one. Where it is no more, the refusal
// says what is wanted and what there is, and the snapshot stays.
func TestB06RuntimeUpgraded(t *testing.T) {
	w := enter(t)
	const node = 1
	v := w.volume("node-1") // keeps it on the node
	spec := w.spec()
	spec.Volumes = []*dormousev1.VolumeMount{mount(v, "/data")}
	source := w.create(spec)
	w.sh(source, "echo kept > /tmp/kept")
	old := source.Last.GetStatus().GetRuntimeBundle()
	snap := w.checkpoint(source)
	w.ok(source.Delete(w.ctx, ""))

	config, err := os.ReadFile(w.AgentdConfig(node))
	w.ok(err)
	newer, digest := w.newerBundle()
	upgraded := strings.Replace(string(config), filepath.Join(w.Bin, "bundle"), newer, 1)
	if upgraded == string(config) {
		t.Fatal("the configuration names no bundle")
	}
	w.ok(os.WriteFile(w.AgentdConfig(node), []byte(upgraded), 0o600))
	defer func() {
		w.ok(os.WriteFile(w.AgentdConfig(node), config, 0o600))
		w.restartAgentd(node)
		w.nodesOnline()
	}()
	w.restartAgentd(node)
	w.nodesOnline()

	fresh := w.create(spec)
	if got := fresh.Last.GetStatus().GetRuntimeBundle(); got != digest {
		t.Errorf("a new sandbox is driven by %s, want the new bundle %s", got, digest)
	}
	w.ok(fresh.Delete(w.ctx, ""))
	restored, err := snap.Restore(w.ctx, &dormousev1.RestoreSandboxRequest{})
	w.ok(err)
	if got := restored.Last.GetStatus().GetRuntimeBundle(); got != old {
		t.Errorf("the restored sandbox is driven by %s, want the one that made it, %s", got, old)
	}
	if got := w.sh(restored, "cat /tmp/kept"); got != "kept" {
		t.Errorf("the restored sandbox has %q", got)
	}
	w.ok(restored.Delete(w.ctx, ""))

	// The old bundle is lost.
	kept := filepath.Join(w.NodeDir(node), "bundles", strings.TrimPrefix(old, "sha256:"))
	aside := filepath.Join(t.TempDir(), "kept")
	if out, err := exec.CommandContext(w.ctx, "cp", "-a", kept, aside).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	w.ok(w.StopAgentd(w.ctx, node))
	w.ok(os.RemoveAll(kept))
	w.ok(w.StartAgentdReady(w.ctx, node))
	w.nodesOnline()
	_, err = snap.Restore(w.ctx, &dormousev1.RestoreSandboxRequest{})
	version := snap.Last.GetStatus().GetRuntimeVersion()
	if e := w.refusal(err, errs.IncompatibleRuntime); e.Details["want"] != version || e.Details["has"] != newerVersion || !strings.Contains(e.Message, old) {
		t.Errorf("the refusal does not name bundle %s and both versions, %s and %s: %v %v", old, version, newerVersion, e, e.Details)
	}
	w.ok(snap.Refresh(w.ctx))
	if phase := snap.Last.GetStatus().GetPhase(); phase != dormousev1.SnapshotPhase_SNAPSHOT_PHASE_READY {
		t.Errorf("the snapshot is %s", phase)
	}

	// Once it is put back, so is the snapshot.
	w.ok(w.StopAgentd(w.ctx, node))
	if out, err := exec.CommandContext(w.ctx, "cp", "-a", aside, kept).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	w.ok(w.StartAgentdReady(w.ctx, node))
	w.nodesOnline()
	restored, err = snap.Restore(w.ctx, &dormousev1.RestoreSandboxRequest{})
	w.ok(err)
	if got := w.sh(restored, "cat /tmp/kept"); got != "kept" {
		t.Errorf("the restored sandbox has %q", got)
	}
}

// newerVersion is what the newer bundle calls itself.
const newerVersion = "dormouse-newer"

// newerBundle makes a bundle with another runsc, which does the same.
func (w *world) newerBundle() (dir, digest string) {
	w.Helper()
	dir = filepath.Join(w.TempDir(), "bundle")
	if out, err := exec.CommandContext(w.ctx, "cp", "-a", filepath.Join(w.Bin, "bundle"), dir).CombinedOutput(); err != nil {
		w.Fatalf("%v: %s", err, out)
	}
	f, err := os.OpenFile(filepath.Join(dir, "runsc"), os.O_APPEND|os.O_WRONLY, 0)
	w.ok(err)
	_, err = f.WriteString("newer")
	w.ok(err)
	w.ok(f.Close())
	var manifest map[string]any
	data, err := os.ReadFile(filepath.Join(dir, "bundle.json"))
	w.ok(err)
	w.ok(json.Unmarshal(data, &manifest))
	files, whole := map[string]string{}, sha256.New()
	for _, name := range []string{"guestinit.erofs", "runsc"} {
		content, err := os.ReadFile(filepath.Join(dir, name))
		w.ok(err)
		sum := sha256.Sum256(content)
		files[name] = "sha256:" + hex.EncodeToString(sum[:])
		_, _ = fmt.Fprintf(whole, "%x  %s\n", sum, name) // as sha256sum does
	}
	digest = "sha256:" + hex.EncodeToString(whole.Sum(nil))
	manifest["files"], manifest["digest"], manifest["runsc_version"] = files, digest, newerVersion
	data, err = json.Marshal(manifest)
	w.ok(err)
	w.ok(os.WriteFile(filepath.Join(dir, "bundle.json"), data, 0o600))
	return dir, digest
}
