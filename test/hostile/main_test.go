package hostile

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/dormouse-run/dormouse/test/cluster"
	"github.com/dormouse-run/dormouse/test/images"
	"github.com/dormouse-run/dormouse/test/stack"
	"github.com/dormouse-run/dormouse/test/tools"
)

// shared is the cluster of all tests.
var shared struct {
	once     sync.Once
	bin      string
	cluster  *cluster.Cluster
	password string
	image    string
	err      error
}

func TestMain(m *testing.M) {
	code := m.Run()
	if err := end(); err != nil {
		fmt.Fprintln(os.Stderr, "ending the cluster:", err)
		code = 1
	}
	if err := goleak.Find(); err != nil {
		fmt.Fprintln(os.Stderr, "goroutines left:", err)
		code = 1
	}
	os.Exit(code)
}

func end() error {
	if shared.bin != "" {
		defer os.RemoveAll(shared.bin)
	}
	if shared.cluster == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	_ = shared.cluster.Client.Close()
	return shared.cluster.Down(ctx)
}

// up gives the cluster and the image of the sandboxes; the first call starts it.
func up(t testing.TB) *cluster.Cluster {
	t.Helper()
	shared.once.Do(func() { shared.err = start(t) })
	if shared.err != nil {
		t.Fatal(shared.err)
	}
	return shared.cluster
}

func start(t testing.TB) (err error) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	defer cancel()
	if shared.bin, err = binaries(ctx, t); err != nil {
		return err
	}
	shared.password = cluster.NewPassword()
	c, err := cluster.Up(ctx, stack.Options{Bin: shared.bin, RegistryUser: "puller", RegistryPassword: shared.password, Logf: t.Logf})
	if err != nil {
		return err
	}
	c.SetLogf(func(string, ...any) {}) // t is not there for ever
	shared.cluster = c
	registry, err := c.Registry()
	if err != nil {
		return err
	}
	digest, err := registry.Push(ctx, "busybox", images.Busybox(t))
	shared.image = registry.Ref("busybox") + "@" + digest
	return err
}

// binaries builds the daemons, and a bundle with the hostile guest init.
func binaries(ctx context.Context, t testing.TB) (string, error) {
	_, file, _, _ := runtime.Caller(0)
	root := filepath.Join(filepath.Dir(file), "..", "..")
	bin, err := os.MkdirTemp("", "dm-hostile-")
	if err != nil {
		return "", err
	}
	build := func(out string, packages ...string) error {
		cmd := exec.CommandContext(ctx, "go", append([]string{"build", "-trimpath", "-buildvcs=false", "-o", out}, packages...)...)
		cmd.Dir, cmd.Env = root, append(os.Environ(), "CGO_ENABLED=0")
		if text, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("build %v: %w: %s", packages, err, text)
		}
		return nil
	}
	initDir, bundle := filepath.Join(bin, "init"), filepath.Join(bin, "bundle")
	for _, dir := range []string{initDir, bundle} {
		if err := os.Mkdir(dir, 0o755); err != nil {
			return bin, err
		}
	}
	if err := build(bin+"/", "./agentd/cmd/agentd", "./coordinator/cmd/coordinator"); err != nil {
		return bin, err
	}
	if err := build(filepath.Join(initDir, "guestinit"), "./agentd/internal/guestinit/testdata/hostile"); err != nil {
		return bin, err
	}
	mkfs := exec.CommandContext(ctx, tools.Path(t, "mkfs.erofs"), "--quiet", "-b4096", "-U", "clear", "-Enoinline_data", "-T0", "--all-root",
		filepath.Join(bundle, "guestinit.erofs"), initDir)
	if text, err := mkfs.CombinedOutput(); err != nil {
		return bin, fmt.Errorf("mkfs.erofs: %w: %s", err, text)
	}
	return bin, writeBundle(bundle, tools.Path(t, "runsc"))
}

// writeBundle adds runsc and the manifest, as scripts/bundle.sh does.
func writeBundle(dir, runsc string) error {
	version, err := exec.Command(runsc, "--version").Output()
	if err != nil {
		return err
	}
	if err := copyFile(runsc, filepath.Join(dir, "runsc")); err != nil {
		return err
	}
	files, lines := map[string]string{}, sha256.New()
	for _, name := range []string{"guestinit.erofs", "runsc"} {
		data, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			return err
		}
		sum := sha256.Sum256(data)
		files[name] = "sha256:" + hex.EncodeToString(sum[:])
		fmt.Fprintf(lines, "%s  %s\n", hex.EncodeToString(sum[:]), name)
	}
	var word string
	_, _ = fmt.Sscanf(string(version), "runsc version %s", &word) // "" is a version too
	manifest, err := json.Marshal(map[string]any{"digest": "sha256:" + hex.EncodeToString(lines.Sum(nil)), "runsc_version": word, "files": files})
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, "bundle.json"), manifest, 0o644)
}

func copyFile(from, to string) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o755)
	if err != nil {
		return err
	}
	if _, err := io.Copy(out, in); err != nil {
		_ = out.Close()
		return err
	}
	return out.Close()
}
