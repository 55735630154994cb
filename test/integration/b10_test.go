package integration

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/opencontainers/go-digest"

	"github.com/dormouse-run/dormouse/pkg/client"
	"github.com/dormouse-run/dormouse/pkg/errs"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
	"github.com/dormouse-run/dormouse/test/images"
	"github.com/dormouse-run/dormouse/test/stack"
	"github.com/dormouse-run/dormouse/test/tools"
)

// A snapshot needs no more of its image than the file that it holds: it is restored although containerd has
// lost the image, with the registry gone too. When even the file is lost, the image is fetched again by its
// digest; until that can be done, the restore fails with the reason and the snapshot stays as good as it was.
func TestB10RestoreWithoutItsImage(t *testing.T) {
	w := enter(t)
	ref := w.image("test/"+w.tenant, func() (v1.Image, error) {
		return busyboxAnd([]images.Entry{images.File("marker", w.tenant, 0o644)})
	})
	spec := w.spec("sh", "-c", "echo written > /tmp/file; exec sleep 100000")
	spec.Image, spec.NodeSelector = ref, map[string]string{"zone": "z1"}
	source := w.create(spec)
	w.until("the command has written", source, "cat /tmp/file", "written")
	snap := w.checkpoint(source)
	file := w.erofsFile(snap)
	w.ok(source.Delete(w.ctx, ""))
	w.containerdForgets(ref)

	w.ok(w.KillRegistry(w.ctx))
	away := true
	t.Cleanup(func() {
		if away {
			w.ok(w.StartRegistry(context.Background()))
		}
	})
	w.restores(snap)

	w.ok(os.Remove(file))
	_, err := snap.Restore(w.ctx, &dormousev1.RestoreSandboxRequest{})
	w.refused(err, errs.RegistryUnreachable)
	w.holdNothing()
	w.ok(snap.Refresh(w.ctx))
	if p := snap.Last.GetStatus().GetPhase(); p != dormousev1.SnapshotPhase_SNAPSHOT_PHASE_READY {
		t.Fatalf("a restore that failed made the snapshot %s", p)
	}

	w.ok(w.StartRegistry(w.ctx))
	away = false
	w.restores(snap)
	if again := w.erofsFile(snap); again != file {
		t.Errorf("the image came back as %s, was %s", again, file)
	}
}

// restores checks that a snapshot gives a sandbox with its processes and both its files, and deletes it.
func (w *world) restores(snap *client.Snapshot) {
	w.Helper()
	s, err := snap.Restore(w.ctx, &dormousev1.RestoreSandboxRequest{})
	w.ok(err)
	if got := w.sh(s, "cat /tmp/file /marker; ps | grep -c '[s]leep 100000'"); got != "written\n"+w.tenant+"1" {
		w.Errorf("the restored sandbox says %q", got)
	}
	w.ok(s.Delete(w.ctx, ""))
}

// erofsFile is the file of a snapshot's image, whose digest its name says.
func (w *world) erofsFile(snap *client.Snapshot) string {
	w.Helper()
	file := filepath.Join(w.LayersDir(), "images", digest.Digest(snap.Last.GetStatus().GetErofsDigest()).Encoded()+".erofs")
	data, err := os.ReadFile(file)
	w.ok(err)
	if got := digest.FromBytes(data).String(); got != snap.Last.GetStatus().GetErofsDigest() {
		w.Fatalf("%s has the digest %s", file, got)
	}
	return file
}

// containerdForgets removes an image, and all that only it has, from the containerd of node 1.
func (w *world) containerdForgets(ref string) {
	w.Helper()
	_, manifest, _ := strings.Cut(ref, "@")
	var named []string
	for line := range strings.Lines(w.ctr("images", "ls", "-q")) {
		if name := strings.TrimSpace(line); strings.Contains(name, manifest) {
			named = append(named, name)
		}
	}
	if len(named) == 0 {
		w.Fatalf("containerd does not have %s", ref)
	}
	w.ctr(append([]string{"images", "rm", "--sync"}, named...)...)
	if content := w.ctr("content", "ls", "-q"); strings.Contains(content, manifest) {
		w.ctr("content", "rm", manifest)
	}
	if left := w.ctr("images", "ls", "-q") + w.ctr("content", "ls", "-q"); strings.Contains(left, manifest) {
		w.Fatalf("containerd still has %s", ref)
	}
}

func (w *world) ctr(args ...string) string {
	w.Helper()
	cmd := exec.CommandContext(w.ctx, tools.Path(w.T, "ctr"), append([]string{"--address", w.ContainerdSocket(1), "--namespace", stack.ContainerdNamespace}, args...)...)
	out, err := cmd.CombinedOutput()
	if err != nil {
		w.Fatalf("ctr %v: %v: %s", args, err, out)
	}
	return string(out)
}
