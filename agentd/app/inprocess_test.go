package app

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/dormouse-run/dormouse/pkg/config"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/uid"
	nodev1 "github.com/dormouse-run/dormouse/proto/dormouse/node/v1"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// serveHere runs agentd in this process on the bench's node until stop is called, which waits for its end.
func (b *bench) serveHere() (cfg Config, stop func() error) {
	b.t.Helper()
	cfg = Defaults()
	must(b.t, config.LoadFile(b.stack.AgentdConfig(1), &cfg))
	mkfs, err := os.Readlink("/proc/self/exe")
	must(b.t, err)
	cfg.Layers.Mkfs = mkfs // nothing is converted here
	before := b.coord.epoch()
	a, err := New(ctx(b.t), cfg, slog.New(slog.DiscardHandler))
	must(b.t, err)
	serve, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- a.Serve(serve) }()
	eventually(b.t, "a session", func() bool { return b.coord.epoch() > before && a.session.Connected() })
	return cfg, func() error {
		cancel()
		err := <-ended
		must(b.t, a.Close())
		return err
	}
}

// get asks the admin socket.
func get(t *testing.T, cfg Config, path string) (int, string) {
	t.Helper()
	transport := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", cfg.AdminSocket())
	}}
	defer transport.CloseIdleConnections()
	resp, err := (&http.Client{Transport: transport}).Get("http://agentd" + path)
	must(t, err)
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	must(t, err)
	return resp.StatusCode, string(body)
}

// TestServeStopsInOrderAndLeavesSandboxes runs agentd inside the test, twice on one state, around a sandbox
// that another agentd started. TestMain looks for goroutines that are left.
func TestServeStopsInOrderAndLeavesSandboxes(t *testing.T) {
	b := newBench(t)
	box := b.start(func(r *nodev1.StartSandboxRequest) { r.SecretEnv = map[string]string{"TOKEN": "hush-hush-secret"} })
	must(t, b.stack.StopAgentd(ctx(t), 1))
	for range 2 {
		cfg, stop := b.serveHere()
		if code, body := get(t, cfg, "/readyz"); code != http.StatusOK {
			t.Errorf("ready: %d %s", code, body)
		}
		if _, body := get(t, cfg, "/metrics"); !strings.Contains(body, `dormouse_agentd_sandboxes{phase="Running"} 1`) {
			t.Error("the metrics do not count the sandbox")
		}
		eventually(t, "the sandbox answers", func() bool {
			_, err := b.process.ListProcesses(ctx(t), &dormousev1.ListProcessesRequest{SandboxUid: box.GetUid()})
			return err == nil
		})
		must(t, stop())
		for _, socket := range []string{cfg.AdminSocket(), cfg.DebugSocket(), strings.TrimPrefix(cfg.Listen, "unix:")} {
			if _, err := os.Lstat(socket); err == nil {
				t.Errorf("%s is left", socket)
			}
		}
	}
	// A second agentd of the same node is kept out while there is one.
	cfg, stop := b.serveHere()
	_, err := New(ctx(t), cfg, slog.New(slog.DiscardHandler))
	wantReason(t, err, errs.AlreadyAttached)
	must(t, stop())
	b.startAgentd()
	if out, code := b.sh(box.GetUid(), "echo alive"); out != "alive\n" || code != 0 {
		t.Fatalf("%q %d", out, code)
	}
	// The secret is in no file of the node's: not in records, specs or logs.
	must(t, filepath.WalkDir(b.stack.Dir, func(path string, d os.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return nil //nolint:nilerr // it went meanwhile
		}
		if data, err := os.ReadFile(path); err == nil && strings.Contains(string(data), "hush-hush-secret") {
			t.Errorf("the secret is in %s", path)
		}
		return nil
	}))
	b.delete(box.GetUid())
	b.doctor()
	_, err = b.agent.DeleteSandbox(ctx(t), &nodev1.DeleteSandboxRequest{Command: b.cmd(), Uid: uid.New()})
	must(t, err)
}

// TestI04RoomIsMadeFromWhatNobodyHolds: under disk pressure an image that a sandbox needs stays, and goes once
// it is needed no more.
func TestI04RoomIsMadeFromWhatNobodyHolds(t *testing.T) {
	b := newBench(t)
	stream, err := b.agent.PullImage(ctx(t), &nodev1.PullImageRequest{Command: b.cmd(), Reference: b.image})
	must(t, err)
	var steps []string
	for {
		msg, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		must(t, err)
		if p := msg.GetProgress(); p != nil && !slices.Contains(steps, p.GetStep()) {
			steps = append(steps, p.GetStep())
		}
	}
	if len(steps) == 0 || steps[len(steps)-1] != "done" {
		t.Errorf("progress was %v", steps)
	}
	box := b.start()
	must(t, b.stack.StopAgentd(ctx(t), 1))
	cfg := Defaults()
	must(t, config.LoadFile(b.stack.AgentdConfig(1), &cfg))
	cfg.Layers.Mkfs, cfg.Reserve.Disk = "/proc/self/exe", 1<<60
	a, err := New(ctx(t), cfg, slog.New(slog.DiscardHandler))
	must(t, err)
	images := func() int {
		all, err := a.images.List(ctx(t))
		must(t, err)
		return len(all)
	}
	a.makeRoom(ctx(t))
	if images() != 1 {
		t.Error("an image was removed under a sandbox")
	}
	must(t, a.reconcile(ctx(t)))
	must(t, a.run.Delete(ctx(t), box.GetUid()))
	a.makeRoom(ctx(t))
	if images() != 0 {
		t.Error("an image that nobody holds is kept on a full disk")
	}
	must(t, a.Close())
}
