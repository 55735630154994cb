package integration

import (
	"bytes"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/dormouse-run/dormouse/pkg/apikey"
	"github.com/dormouse-run/dormouse/pkg/uid"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
	"github.com/dormouse-run/dormouse/test/cluster"
)

// A secret reaches the main command's environment and is stored nowhere: not in a record, a log, a
// manifest or an argument. A memory image holds it by nature.
func TestSecretEnvironment(t *testing.T) {
	w := enter(t)
	secret := cluster.NewPassword()
	req := &dormousev1.CreateSandboxRequest{OperationId: uid.New(), SecretEnv: map[string]string{"TOKEN": secret},
		Spec: w.spec("sh", "-c", `[ -n "$TOKEN" ] && echo -n "$TOKEN" | md5sum > /tmp/new && mv /tmp/new /tmp/sum; exec sleep 100000`)}
	s, err := w.api.CreateSandbox(w.ctx, req)
	w.ok(err)
	sum := w.sh(s, "echo -n '"+secret+"' | md5sum")
	w.await("the command has the secret", func() error {
		out, err := cluster.Exec(w.ctx, s, "cat", "/tmp/sum")
		if err == nil && strings.TrimSpace(string(out)) != sum {
			t.Fatalf("it has another: %s, want %s", out, sum)
		}
		return err
	})
	if got := w.sh(s, `echo "[$TOKEN]"`); got != "[]" {
		t.Errorf("another process has it: %s", got)
	}
	// The SDK's types and the CLI show no trace of it, and neither does a replay.
	again, err := w.api.CreateSandbox(w.ctx, req)
	w.ok(err)
	if strings.Contains(again.Last.String(), secret) {
		t.Error("the answer has the secret")
	}
	out, code := w.dormouse("inspect", s.UID)
	if code != 0 || strings.Contains(out, secret) {
		t.Errorf("inspect: exit code %d: %s", code, out)
	}
	snap := w.checkpoint(s)
	// Its own argument above was a process' argv, which is a record by intent: look for it without that one.
	w.nowhere(map[string]string{"the password of the registry": shared.password, "the tenant's API key": w.key, "the operator's API key": w.operatorKey()})
	w.ok(s.Delete(w.ctx, ""))
	w.ok(snap.Delete(w.ctx, ""))

	// The same without handing the secret to a shell.
	secret = cluster.NewPassword()
	s, err = w.api.CreateSandbox(w.ctx, &dormousev1.CreateSandboxRequest{SecretEnv: map[string]string{"TOKEN": secret}, Spec: w.spec("sh", "-c", `echo ${#TOKEN} > /tmp/length; exec sleep 100000`)})
	w.ok(err)
	w.await("the command has it", func() error {
		_, err := cluster.Exec(w.ctx, s, "grep", "-qx", "24", "/tmp/length")
		return err
	})
	snap = w.checkpoint(s)
	w.nowhere(map[string]string{"the secret": secret})
	w.ok(s.Delete(w.ctx, ""))
	restored, err := snap.Restore(w.ctx, &dormousev1.RestoreSandboxRequest{})
	w.ok(err)
	w.nowhere(map[string]string{"the secret": secret})
	w.sh(restored, "true")
}

func (w *world) operatorKey() string {
	w.Helper()
	key, err := w.APIKey()
	w.ok(err)
	if apikey.ID(key) == "" {
		w.Fatal("the operator's key is none")
	}
	return key
}

// nowhere looks for secrets in everything that the cluster wrote and in the arguments and environments
// of all processes. Left out are the few files that are there to hold one, and memory images.
func (w *world) nowhere(secrets map[string]string) {
	w.Helper()
	holders := map[string]bool{w.RegistryPasswordFile(): true, w.APIKeyFile(): true}
	for i := 1; i <= w.Nodes; i++ {
		holders[filepath.Join(w.NodeDir(i), "docker.json")] = true
	}
	looked := 0
	w.ok(filepath.WalkDir(w.Dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			if os.IsNotExist(err) {
				return nil // it went while we looked
			}
			return err
		}
		if d.IsDir() && (path == filepath.Join(w.Dir, "registry", "data") || strings.HasSuffix(path, "/containerd/root")) {
			return filepath.SkipDir // the images' content
		}
		image := strings.HasSuffix(path, ".img") || strings.HasSuffix(path, ".erofs")
		if !d.Type().IsRegular() || holders[path] || image {
			return nil
		}
		looked++
		return w.search(path, secrets)
	}))
	if looked < 20 {
		w.Errorf("only %d files were looked at", looked)
	}
	for _, pattern := range []string{"/proc/[0-9]*/cmdline", "/proc/[0-9]*/environ"} {
		files, err := filepath.Glob(pattern)
		w.ok(err)
		for _, f := range files {
			if strings.Contains(f, "/self/") {
				continue
			}
			data, err := os.ReadFile(f)
			if err != nil {
				continue // it has ended
			}
			for what, s := range secrets {
				if bytes.Contains(data, []byte(s)) {
					w.Errorf("%s is in %s", what, f)
				}
			}
		}
	}
}

// search reads a file piece by piece: a database may be large.
func (w *world) search(path string, secrets map[string]string) error {
	f, err := os.Open(path)
	if err != nil {
		if os.IsNotExist(err) {
			return nil
		}
		return err
	}
	defer func() { _ = f.Close() }()
	const piece, overlap = 1 << 20, 256
	buf := make([]byte, 0, piece+overlap)
	for {
		n, err := io.ReadFull(f, buf[len(buf):len(buf)+piece])
		buf = buf[:len(buf)+n]
		for what, s := range secrets {
			if bytes.Contains(buf, []byte(s)) {
				w.Errorf("%s is in %s", what, path)
			}
		}
		if err != nil {
			return nil // the end
		}
		buf = buf[:copy(buf[:overlap], buf[len(buf)-overlap:])]
	}
}
