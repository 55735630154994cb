package integration

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/mutate"

	"github.com/dormouse-run/dormouse/pkg/client"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
	"github.com/dormouse-run/dormouse/test/cluster"
	"github.com/dormouse-run/dormouse/test/images"
)

// Each server answers "PID NONCE COUNT" on a port of its own, from its memory.
const (
	pythonServer = `
import http.server, itertools, os, secrets
nonce, count = secrets.token_hex(8), itertools.count(1)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = f"{os.getpid()} {nonce} {next(count)}\n".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *args):
        pass
http.server.ThreadingHTTPServer(("127.0.0.1", 8001), Handler).serve_forever()
`
	nodeServer = `
const nonce = require("crypto").randomBytes(8).toString("hex");
let count = 0;
require("http").createServer((_, res) => res.end(process.pid + " " + nonce + " " + ++count + "\n")).listen(8002, "127.0.0.1");
`
	fetch = `python3 -c 'import sys, urllib.request; print(urllib.request.urlopen("http://127.0.0.1:%d/", timeout=30).read().decode(), end="")'`
)

// programs is the image with real programs in it.
func (w *world) programs() string {
	w.Helper()
	return w.image("test/programs", func() (v1.Image, error) {
		base, err := images.ReadLayout(images.CachedDir("programs"))
		if err != nil {
			return nil, fmt.Errorf("run scripts/images.sh programs: %w", err)
		}
		server := filepath.Join(w.TempDir(), "goserver")
		build := exec.CommandContext(w.ctx, "go", "build", "-trimpath", "-buildvcs=false", "-o", server, "./test/cmd/goserver")
		build.Dir, build.Env = filepath.Join("..", ".."), append(os.Environ(), "CGO_ENABLED=0")
		if out, err := build.CombinedOutput(); err != nil {
			return nil, fmt.Errorf("%s: %w: %s", build, err, out)
		}
		binary, err := os.ReadFile(server)
		if err != nil {
			return nil, err
		}
		layer, err := images.Layer(
			images.Dir("srv", 0o755),
			images.File("srv/goserver", string(binary), 0o755),
			images.File("srv/server.py", pythonServer, 0o644),
			images.File("srv/server.js", nodeServer, 0o644))
		if err != nil {
			return nil, err
		}
		return mutate.AppendLayers(base, layer)
	})
}

// said is one answer of a server.
type said struct {
	pid   int
	nonce string
	count int
}

func (w *world) hear(s *client.Sandbox, port int) (a said) {
	w.Helper()
	w.await(fmt.Sprintf("the server on port %d answers", port), func() error {
		out, err := cluster.Exec(w.ctx, s, "sh", "-c", fmt.Sprintf(fetch, port))
		if err != nil {
			return err
		}
		if n, err := fmt.Sscan(string(out), &a.pid, &a.nonce, &a.count); n != 3 {
			return fmt.Errorf("it says %q: %w", out, err)
		}
		return nil
	})
	return a
}

// CPython, Node.js and a Go server go on after a restore as if nothing had been, and git works on the
// repository that was there.
func TestRealProgramsLiveOn(t *testing.T) {
	w := enter(t)
	spec := w.spec()
	spec.Image, spec.Resources = w.programs(), &dormousev1.Resources{MemoryLimitBytes: 768 * mib, DiskLimitBytes: 128 * mib}
	source := w.create(spec)
	servers := map[int][]string{
		8001: {"python3", "/srv/server.py"},
		8002: {"node", "/srv/server.js"},
		8003: {"/srv/goserver", "8003"},
	}
	before := map[int]said{}
	for port, argv := range servers {
		_, err := source.Start(w.ctx, &dormousev1.ProcessSpec{Argv: argv}, "")
		w.ok(err)
		before[port] = w.hear(source, port)
	}
	commit := `cd /root/work && git -c user.name=a -c user.email=a@example.org commit -q -m `
	w.sh(source, "git init -q -b main /root/work && cd /root/work && echo one > file && git add file && "+commit+"one")

	snap := w.checkpoint(source)
	w.ok(source.Delete(w.ctx, ""))
	made, err := snap.Restore(w.ctx, &dormousev1.RestoreSandboxRequest{})
	w.ok(err)
	for port, was := range before {
		now := w.hear(made, port)
		if now.pid != was.pid || now.nonce != was.nonce || now.count <= was.count {
			t.Errorf("%v was %+v and is %+v", servers[port], was, now)
		}
	}
	if got := w.sh(made, "cd /root/work && echo two >> file && "+commit+"two -a && git fsck --strict && git log --format=%s"); got != "two\none" {
		t.Errorf("git log says %q", got)
	}
	// And they compute: a program that is started after the restore in each language.
	for _, argv := range []string{
		`python3 -c 'import hashlib; print(hashlib.sha256(b"x").hexdigest())'`,
		`node -e 'console.log(require("crypto").createHash("sha256").update("x").digest("hex"))'`,
	} {
		if got := w.sh(made, argv); got != "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881" {
			t.Errorf("%s says %q", argv, got)
		}
	}
}
