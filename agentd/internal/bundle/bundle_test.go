package bundle

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"

	"github.com/dormouse-run/dormouse/pkg/errs"
)

func makeBundle(t *testing.T, runsc, init string) (dir, digest string) {
	t.Helper()
	dir = t.TempDir()
	sum := func(s string) string { h := sha256.Sum256([]byte(s)); return hex.EncodeToString(h[:]) }
	digest = "sha256:" + sum(fmt.Sprintf("%s  guestinit.erofs\n%s  runsc\n", sum(init), sum(runsc)))
	m, err := json.Marshal(manifest{Digest: digest, RunscVersion: "v1", Files: map[string]string{
		"runsc": "sha256:" + sum(runsc), "guestinit.erofs": "sha256:" + sum(init),
	}})
	if err != nil {
		t.Fatal(err)
	}
	for name, data := range map[string]string{"runsc": runsc, "guestinit.erofs": init, "bundle.json": string(m)} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(data), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir, digest
}

func TestInstallSideBySideAndIdempotent(t *testing.T) {
	root := t.TempDir()
	first, firstDigest := makeBundle(t, "one", "init")
	second, secondDigest := makeBundle(t, "two", "init")
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			if _, err := Install(first, root); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	b, err := Install(second, root)
	if err != nil {
		t.Fatal(err)
	}
	if b.Digest != secondDigest {
		t.Fatalf("digest %s, want %s", b.Digest, secondDigest)
	}
	info, err := os.Stat(b.Runsc())
	if err != nil || info.Mode()&0o111 == 0 {
		t.Fatalf("runsc is not executable: %v %v", info, err)
	}
	digests, err := List(root)
	if err != nil || len(digests) != 2 {
		t.Fatalf("installed: %v, %v", digests, err)
	}
	if _, err := Find(root, firstDigest); err != nil {
		t.Fatal(err)
	}
	if left, _ := filepath.Glob(filepath.Join(root, "bundles", ".*")); len(left) != 0 {
		t.Fatalf("staged folders are left: %v", left)
	}
}

func TestInstallRemovesWhatACrashLeft(t *testing.T) {
	root := t.TempDir()
	stale := filepath.Join(root, "bundles", stagePrefix+"crashed")
	if err := os.MkdirAll(stale, 0o755); err != nil {
		t.Fatal(err)
	}
	src, _ := makeBundle(t, "one", "init")
	if _, err := Install(src, root); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(stale); !os.IsNotExist(err) {
		t.Fatalf("the staged folder is still there: %v", err)
	}
}

func TestDamageIsSeen(t *testing.T) {
	cases := map[string]struct {
		damage func(dir string) error
		want   errs.Reason
	}{
		"content":     {func(d string) error { return os.WriteFile(filepath.Join(d, "runsc"), []byte("x"), 0o644) }, errs.DigestMismatch},
		"no file":     {func(d string) error { return os.Remove(filepath.Join(d, "guestinit.erofs")) }, errs.ArtefactDamaged},
		"no manifest": {func(d string) error { return os.Remove(filepath.Join(d, "bundle.json")) }, errs.ArtefactDamaged},
		"bad manifest": {func(d string) error {
			return os.WriteFile(filepath.Join(d, "bundle.json"), []byte(`{"other":1}`), 0o644)
		}, errs.ArtefactDamaged},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			src, digest := makeBundle(t, "one", "init")
			if err := c.damage(src); err != nil {
				t.Fatal(err)
			}
			root := t.TempDir()
			if _, err := Install(src, root); !errs.Has(err, c.want) {
				t.Fatalf("got %v, want %s", err, c.want)
			}
			if _, err := Find(root, digest); !errs.Has(err, errs.IncompatibleRuntime) {
				t.Fatalf("a damaged bundle was installed: %v", err)
			}
		})
	}
}

// The script and this package agree on what a bundle is, and the same sources give the same one.
func TestScriptBuildsABundle(t *testing.T) {
	script, err := filepath.Abs("../../../scripts/bundle.sh")
	if err != nil {
		t.Fatal(err)
	}
	var digests []string
	for range 2 {
		out := filepath.Join(t.TempDir(), "bundle")
		if said, err := exec.Command(script, out).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, said)
		}
		b, err := Open(out)
		if err != nil {
			t.Fatal(err)
		}
		if b.RunscVersion == "" {
			t.Error("the bundle does not tell the runtime's version")
		}
		digests = append(digests, b.Digest)
	}
	if digests[0] != digests[1] {
		t.Errorf("two builds of the same sources: %v", digests)
	}
}
