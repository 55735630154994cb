package integration

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"golang.org/x/sys/unix"

	"github.com/dormouse-run/dormouse/pkg/client"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/uid"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
	"github.com/dormouse-run/dormouse/test/images"
)

// stuck gives a spec whose image does not come until the returned function is called.
func (w *world) stuck(name string) (*dormousev1.SandboxSpec, func()) {
	w.Helper()
	ref := w.image("test/"+name+"-"+w.tenant, func() (v1.Image, error) { return busyboxAnd([]images.Entry{images.File(name, w.tenant, 0o644)}) })
	spec := w.spec() // has its own image pushed, which needs the registry
	spec.Image = ref
	registry := w.PID("registry")
	w.ok(unix.Kill(registry, unix.SIGSTOP))
	released := false
	release := func() {
		if !released {
			released = true
			w.ok(unix.Kill(registry, unix.SIGCONT))
		}
	}
	w.Cleanup(release)
	return spec, release
}

// A coordinator that is killed while it makes a sandbox leaves the operation to its successor, which
// finishes it; the client, who tries again by itself, notices nothing (C24).
func TestC24CoordinatorKilledDuringCreate(t *testing.T) {
	w := enter(t)
	spec, release := w.stuck("c24")
	spec.Command = []string{"sh", "-c", "echo begun >> /tmp/begun; exec sleep 100000"}
	req := &dormousev1.CreateSandboxRequest{OperationId: uid.New(), Spec: spec}
	go func() { _, _ = w.api.CreateSandbox(w.ctx, req) }() // what it says depends on when it asks again
	w.await("a sandbox that is starting", func() error {
		return some(client.Collect(w.api.ListSandboxes(w.ctx, &dormousev1.ListSandboxesRequest{Phase: dormousev1.SandboxPhase_SANDBOX_PHASE_STARTING})))
	})
	w.ok(w.KillCoordinator(w.ctx))
	w.ok(w.StartCoordinatorReady(w.ctx))
	w.nodesOnline()
	release()
	s, err := w.api.CreateSandbox(w.ctx, req)
	w.ok(err)
	w.succeeded(req.OperationId, s.UID)
	w.until("the command has begun, once", s, "cat /tmp/begun", "begun")
	if n := number(client.Collect(w.api.ListSandboxes(w.ctx, &dormousev1.ListSandboxesRequest{}))); n != 1 {
		t.Errorf("%d sandboxes", n)
	}
}

// Secrets are stored nowhere, so such a coordinator loses them: the operation fails, says so, and leaves nothing.
func TestSecretsLostWithTheCoordinator(t *testing.T) {
	w := enter(t)
	v := w.volume("")
	spec, release := w.stuck("lost")
	spec.Volumes = []*dormousev1.VolumeMount{mount(v, "/data")}
	req := &dormousev1.CreateSandboxRequest{OperationId: uid.New(), Spec: spec, SecretEnv: map[string]string{"TOKEN": "x"}}
	cc := w.raw(w.key)
	first := make(chan error, 1)
	go func() {
		_, err := dormousev1.NewSandboxServiceClient(cc).CreateSandbox(w.ctx, req)
		first <- err
	}()
	w.await("a sandbox that is starting", func() error {
		return some(client.Collect(w.api.ListSandboxes(w.ctx, &dormousev1.ListSandboxesRequest{Phase: dormousev1.SandboxPhase_SANDBOX_PHASE_STARTING})))
	})
	w.ok(w.KillCoordinator(w.ctx))
	if e := errs.From(<-first); e.Outcome != errs.Unknown {
		t.Errorf("the cut call said %v (%s)", e, e.Outcome)
	}
	w.ok(w.StartCoordinatorReady(w.ctx))
	w.nodesOnline()
	release()
	_, err := w.api.CreateSandbox(w.ctx, req)
	w.refused(err, errs.SecretsLost)
	w.holdNothing()
}

// A sandbox whose sentry is killed is Failed, for another reason than memory; nothing of it is left but
// its record, and its volume is free once that is deleted (B16).
func TestB16SentryKilled(t *testing.T) {
	w := enter(t)
	v := w.volume("")
	spec := w.spec("sleep", "100000")
	spec.Volumes = []*dormousev1.VolumeMount{mount(v, "/data")}
	s := w.create(spec)
	w.ok(unix.Kill(w.sentry(s), unix.SIGKILL))
	w.ok(s.Await(w.ctx, func(s *dormousev1.Sandbox) bool {
		return s.GetStatus().GetPhase() == dormousev1.SandboxPhase_SANDBOX_PHASE_FAILED
	}))
	if st := s.Last.GetStatus(); st.GetReason() == "" || st.GetReason() == "OOMKilled" || st.GetMessage() == "" {
		t.Errorf("status %v", st)
	}
	w.await("no process of it", func() error { return leftProcesses(w.Dir) })
	_, err := s.Start(w.ctx, &dormousev1.ProcessSpec{Argv: []string{"true"}}, "")
	w.refused(err, errs.WrongPhase)
	_, err = s.Checkpoint(w.ctx, &dormousev1.CheckpointSandboxRequest{})
	w.refused(err, errs.WrongPhase)
	w.ok(s.Delete(w.ctx, ""))
	s = w.create(spec)
	w.sh(s, "echo x > /data/file")
}

// The same while agentd is away: it is noticed when agentd comes back.
func TestB16SentryKilledWhileAgentdIsAway(t *testing.T) {
	w := enter(t)
	spec := w.spec("sleep", "100000")
	spec.NodeSelector = map[string]string{"zone": "z1"}
	dies, lives := w.create(spec), w.create(spec)
	pid := w.sentry(dies)
	w.ok(w.KillAgentd(w.ctx, 1))
	w.ok(unix.Kill(pid, unix.SIGKILL))
	w.ok(w.StartAgentdReady(w.ctx, 1))
	w.ok(dies.Await(w.ctx, func(s *dormousev1.Sandbox) bool {
		return s.GetStatus().GetPhase() == dormousev1.SandboxPhase_SANDBOX_PHASE_FAILED
	}))
	if r := dies.Last.GetStatus().GetReason(); r == "" || r == "OOMKilled" {
		t.Errorf("status %v", dies.Last.GetStatus())
	}
	w.sh(lives, "true")
}

// sentry finds the process of a sandbox' sentry: a runsc that boots it.
func (w *world) sentry(s *client.Sandbox) int {
	w.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	w.ok(err)
	for _, f := range files {
		data, err := os.ReadFile(f)
		if err != nil {
			continue // it has ended
		}
		args := strings.Split(string(bytes.TrimRight(data, "\x00")), "\x00")
		if !strings.Contains(string(data), w.Dir+"/") || !strings.Contains(args[0], "runsc-sandbox") && !slices.Contains(args, "boot") {
			continue
		}
		if strings.Contains(args[len(args)-1], s.UID) {
			pid, err := strconv.Atoi(filepath.Base(filepath.Dir(f)))
			w.ok(err)
			return pid
		}
	}
	w.Fatal(errors.New("no sentry of sandbox " + s.UID))
	return 0
}

// A registry that goes away in the middle of a pull fails the sandbox with the reason, and the next
// attempt succeeds.
func TestRegistryKilledDuringPull(t *testing.T) {
	w := enter(t)
	ref := w.image("test/"+w.tenant, func() (v1.Image, error) { return busyboxAnd(ballast(32 * mib)) })
	killed := false
	_, err := w.api.PullImage(w.ctx, ref, "node-1", func(p *dormousev1.PullProgress) {
		if p.GetStep() == "pulling" && !killed {
			killed = true
			if err := w.KillRegistry(w.ctx); err != nil {
				t.Error(err)
			}
		}
	})
	if !killed {
		t.Fatalf("the registry was not killed: %v", err)
	}
	w.ok(w.StartRegistry(w.ctx))
	if err != nil { // unless all was there already
		w.refused(err, errs.RegistryUnreachable)
	}
	image, err := w.api.PullImage(w.ctx, ref, "node-1", nil)
	w.ok(err)
	w.ok(w.Client.Image(image.Digest).Delete(w.ctx))
}
