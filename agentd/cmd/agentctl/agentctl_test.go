package main

import (
	"bytes"
	"context"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
	"google.golang.org/grpc"

	"github.com/dormouse-run/dormouse/agentd/app"
	"github.com/dormouse-run/dormouse/pkg/command"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/obs"
	"github.com/dormouse-run/dormouse/pkg/wire"
	nodev1 "github.com/dormouse-run/dormouse/proto/dormouse/node/v1"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// Without flags, agentctl asks where agentd without flags answers.
func TestDefaultSocketIsAgentds(t *testing.T) {
	cfg := app.Defaults()
	if got := cfg.DebugSocket(); got != defaultSocket {
		t.Errorf("agentd listens at %s, agentctl asks at %s", got, defaultSocket)
	}
}

type fakeNode struct {
	nodev1.UnimplementedDebugServiceServer
	findings []*nodev1.Finding
	inspect  *nodev1.InspectRequest
}

func (f *fakeNode) Overview(context.Context, *nodev1.OverviewRequest) (*nodev1.OverviewResponse, error) {
	return &nodev1.OverviewResponse{Node: "n1", Version: "v1", SessionEpoch: 3, CoordinatorEpoch: 2, Connected: true, Sandboxes: 4}, nil
}

func (f *fakeNode) Inspect(_ context.Context, r *nodev1.InspectRequest) (*nodev1.InspectResponse, error) {
	f.inspect = r
	if r.GetUid() == "nobody" {
		return nil, errs.New(errs.ObjectNotFound, "there is no such sandbox here")
	}
	return &nodev1.InspectResponse{Json: `{"record":{"phase":"Running"},"observed":null}`}, nil
}

func (f *fakeNode) ListDebugObjects(_ context.Context, r *nodev1.ListDebugObjectsRequest) (*nodev1.ListDebugObjectsResponse, error) {
	if r.GetKind() != nodev1.DebugKind_DEBUG_KIND_SANDBOX {
		return &nodev1.ListDebugObjectsResponse{}, nil
	}
	return &nodev1.ListDebugObjectsResponse{Objects: []*nodev1.DebugObject{
		{Uid: "u1", Tenant: "acme", State: "running", Columns: map[string]string{"pid": "12", "image": "a:1"}},
		{Uid: "u2", Tenant: "acme", State: "deleting", Columns: map[string]string{"image": "b\x1b[31m"}},
	}}, nil
}

func (f *fakeNode) ListSandboxProcesses(context.Context, *nodev1.ListSandboxProcessesRequest) (*nodev1.ListSandboxProcessesResponse, error) {
	return &nodev1.ListSandboxProcessesResponse{Processes: []*dormousev1.Process{{ProcessId: "p1", Pid: 2, Spec: &dormousev1.ProcessSpec{Argv: []string{"sh", "-c", "x"}}}}}, nil
}

func (f *fakeNode) TailOutput(_ *nodev1.TailOutputRequest, s grpc.ServerStreamingServer[nodev1.TailOutputResponse]) error {
	for stream, text := range map[dormousev1.OutputStream]string{dormousev1.OutputStream_OUTPUT_STREAM_STDOUT: "out\n", dormousev1.OutputStream_OUTPUT_STREAM_STDERR: "err\n"} {
		if err := s.Send(&nodev1.TailOutputResponse{Output: &dormousev1.OutputChunk{Stream: stream, Data: []byte(text)}}); err != nil {
			return err
		}
	}
	return nil
}

func (f *fakeNode) Doctor(_ context.Context, r *nodev1.DoctorRequest) (*nodev1.DoctorResponse, error) {
	for _, one := range f.findings {
		one.Fixed = r.GetFix() && one.GetError() == ""
	}
	return &nodev1.DoctorResponse{Findings: f.findings, Checked: map[string]int32{"sandboxes": 2, "mounts": 5}}, nil
}

func serve(t *testing.T) *fakeNode {
	t.Helper()
	f := &fakeNode{}
	server, err := wire.NewServer(obs.Discard(), nil)
	if err != nil {
		t.Fatal(err)
	}
	gs := grpc.NewServer(server.Options()...)
	nodev1.RegisterDebugServiceServer(gs, f)
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- gs.Serve(l) }()
	t.Cleanup(func() {
		gs.Stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	t.Setenv("AGENTCTL_SOCKET", path)
	return f
}

func agentctl(t *testing.T, args ...string) (int, string, string) {
	t.Helper()
	var out, errOut bytes.Buffer
	code := command.Run(t.Context(), newApp(&out, &errOut), append([]string{"agentctl"}, args...))
	return code, out.String(), errOut.String()
}

func TestShows(t *testing.T) {
	f := serve(t)
	for line, want := range map[string]string{
		"ls":                       "UID  TENANT  STATE     IMAGE   PID\nu1   acme    running   a:1     12\nu2   acme    deleting  b?[31m  -\n",
		"ls -q":                    "u1\nu2\n",
		"volumes":                  "UID  TENANT  STATE\n",
		"layers -q":                "",
		"snapshots -o json":        "{\n  \"items\": []\n}\n",
		"ps u1":                    "PROCESS  PID  STATE    AGE  COMMAND\np1       2    running  -    sh -c x\n",
		"logs -f u1":               "out\n",
		"inspect u1 -o yaml":       "observed: null\nrecord:\n  phase: Running\n",
		"inspect --kind volume v1": "{\n  \"record\": {\n    \"phase\": \"Running\"\n  },\n  \"observed\": null\n}\n",
		"overview -o name":         "n1\n",
	} {
		code, out, errOut := agentctl(t, strings.Fields(line)...)
		if code != 0 || out != want {
			t.Errorf("%s: code %d, %s%s", line, code, cmp.Diff(want, out), errOut)
		}
	}
	if code, out, _ := agentctl(t, "overview"); code != 0 || !strings.Contains(out, "session epoch      3\n") || !strings.Contains(out, "connected          yes\n") {
		t.Errorf("overview: %s", out)
	}
	if _, _, _ = agentctl(t, "inspect", "x", "--kind", "image"); f.inspect.GetKind() != nodev1.DebugKind_DEBUG_KIND_IMAGE {
		t.Errorf("asked %v", f.inspect)
	}
}

func TestDoctor(t *testing.T) {
	f := serve(t)
	if code, out, _ := agentctl(t, "doctor"); code != 0 || out != "nothing is left behind, nothing is lost\n" {
		t.Errorf("healthy: %d %s", code, out)
	}
	f.findings = []*nodev1.Finding{{Kind: "orphan-mount", Name: "/m", Recorded: "none", Observed: "mounted", Remedy: "agentctl doctor --fix"}}
	code, out, errOut := agentctl(t, "doctor")
	if code != 1 || !strings.Contains(out, "orphan-mount  /m    none      mounted   no     agentctl doctor --fix") || errOut != "looked at: 5 mounts, 2 sandboxes\n1 remain\n" {
		t.Errorf("sick: %d %s %s", code, out, errOut)
	}
	if code, out, _ := agentctl(t, "doctor", "--fix"); code != 0 || !strings.Contains(out, "yes") {
		t.Errorf("fixed: %d %s", code, out)
	}
	f.findings[0].Error = "device busy"
	if code, out, _ := agentctl(t, "doctor", "--fix"); code != 1 || !strings.Contains(out, "failed: device busy") {
		t.Errorf("not fixed: %d %s", code, out)
	}
	if code, out, _ := agentctl(t, "doctor", "-q"); code != 1 || out != "orphan-mount//m\n" {
		t.Errorf("quiet: %d %s", code, out)
	}
}

func TestErrors(t *testing.T) {
	serve(t)
	for line, want := range map[string]int{"nonsense": 2, "inspect": 2, "ls x": 2, "inspect u --kind dog": 2, "ls --nope": 2, "inspect nobody": 3, "--socket /nonexistent/s ls": 5} {
		code, out, errOut := agentctl(t, strings.Fields(line)...)
		if code != want || out != "" || errOut == "" {
			t.Errorf("%s: code %d, %q %q", line, code, out, errOut)
		}
	}
	before := now
	now = func() time.Time { return time.Unix(0, 0) }
	defer func() { now = before }()
	if code, _, _ := agentctl(t, "version"); code != 0 {
		t.Error("version")
	}
}
