package api

import (
	"context"
	"errors"
	"reflect"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/dormouse-run/dormouse/agentd/internal/guest"
	"github.com/dormouse-run/dormouse/agentd/internal/runner"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
	"github.com/dormouse-run/dormouse/pkg/snapshot"
	"github.com/dormouse-run/dormouse/pkg/uid"
	nodev1 "github.com/dormouse-run/dormouse/proto/dormouse/node/v1"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// book is a Commands that admits all and notes what it is given.
type book struct {
	mu   sync.Mutex
	seen []runner.Command
}

func (b *book) Do(ctx context.Context, cmd runner.Command, run func(ctx context.Context) ([]byte, error)) ([]byte, error) {
	b.mu.Lock()
	b.seen = append(b.seen, cmd)
	b.mu.Unlock()
	return run(ctx)
}

func (b *book) Admit(context.Context, runner.Command) error { return nil }

// node notes what reaches it.
type node struct {
	started []runner.StartRequest
	claimed []runner.ClaimRequest
	egress  *sandbox.Egress
}

func (n *node) StartSandbox(_ context.Context, req runner.StartRequest) (Observed, error) {
	n.started = append(n.started, req)
	return Observed{UID: req.UID, Tenant: req.Tenant, Status: sandbox.Status{Phase: sandbox.Running, Observation: 2}}, nil
}
func (n *node) RestoreSandbox(context.Context, runner.RestoreRequest) (Observed, error) {
	return Observed{}, errors.New("not asked for")
}
func (n *node) DeleteSandbox(context.Context, string) error { return nil }
func (n *node) CheckpointSandbox(context.Context, runner.CaptureRequest) (snapshot.Snapshot, error) {
	return snapshot.Snapshot{}, nil
}
func (n *node) DeleteSnapshot(context.Context, string) error { return nil }

func (n *node) PauseSandbox(_ context.Context, u string, _ time.Duration) (Observed, error) {
	return Observed{UID: u, Tenant: "t", Status: sandbox.Status{Phase: sandbox.Paused, Observation: 3}}, nil
}
func (n *node) SetEgress(_ context.Context, u string, generation int64, egress *sandbox.Egress) (Observed, error) {
	n.egress = egress
	return Observed{UID: u, Tenant: "t", Status: sandbox.Status{Phase: sandbox.Running, Observation: 6, ObservedGeneration: generation}}, nil
}
func (n *node) ResumeSandbox(_ context.Context, u string) (Observed, error) {
	return Observed{UID: u, Tenant: "t", Status: sandbox.Status{Phase: sandbox.Running, Observation: 4}}, nil
}
func (n *node) ClaimSandbox(_ context.Context, req runner.ClaimRequest) (Observed, error) {
	n.claimed = append(n.claimed, req)
	return Observed{UID: req.UID, Tenant: req.Tenant, Status: sandbox.Status{Phase: sandbox.Running, Observation: 7, ObservedGeneration: req.Generation}}, nil
}
func (n *node) HibernateSandbox(_ context.Context, u string, _ time.Duration) (Observed, error) {
	return Observed{UID: u, Tenant: "t", Status: sandbox.Status{Phase: sandbox.Hibernated, Observation: 5}}, nil
}

func startRequest() *nodev1.StartSandboxRequest {
	return &nodev1.StartSandboxRequest{
		Command: &nodev1.Command{CoordinatorEpoch: 1, SessionEpoch: 1, CommandId: "c", Tenant: "t", RequestId: "r"},
		Uid:     uid.New(), Name: "box", Generation: 1, SecretEnv: map[string]string{"TOKEN": "one"},
		Spec: &dormousev1.SandboxSpec{Image: "example/app:1", Env: map[string]string{"A": "1", "B": "2"}},
	}
}

func wantReason(t *testing.T, err error, want errs.Reason) {
	t.Helper()
	if errs.ReasonOf(err) != want {
		t.Fatalf("got %v, want reason %s", err, want)
	}
}

// TestADigestIsOfTheBodyAlone: retries with other epochs and request ids are the same command, another body
// or tenant is not, and the digest tells nothing of a secret's value.
func TestADigestIsOfTheBodyAlone(t *testing.T) {
	b := &book{}
	s := &Server{Commands: b, Runner: &node{}}
	base := startRequest()
	send := func(change func(*nodev1.StartSandboxRequest)) string {
		t.Helper()
		req := startRequest()
		req.Uid = base.Uid
		change(req)
		if _, err := s.StartSandbox(context.Background(), req); err != nil {
			t.Fatal(err)
		}
		return b.seen[len(b.seen)-1].Digest
	}
	want := send(func(*nodev1.StartSandboxRequest) {})
	for name, c := range map[string]struct {
		change func(*nodev1.StartSandboxRequest)
		same   bool
	}{
		"epochs":  {func(r *nodev1.StartSandboxRequest) { r.Command.CoordinatorEpoch, r.Command.SessionEpoch = 9, 9 }, true},
		"request": {func(r *nodev1.StartSandboxRequest) { r.Command.RequestId = "s" }, true},
		"secret":  {func(r *nodev1.StartSandboxRequest) { r.SecretEnv["TOKEN"] = "two" }, true},
		// What an update may have changed meanwhile.
		"generation": {func(r *nodev1.StartSandboxRequest) { r.Generation = 7 }, true},
		"egress": {func(r *nodev1.StartSandboxRequest) {
			r.Spec.Network, r.Spec.Egress = dormousev1.NetworkMode_NETWORK_MODE_OUTBOUND, &dormousev1.EgressPolicy{}
		}, false},
		"wake on use": {func(r *nodev1.StartSandboxRequest) { r.Spec.WakeOnUse = true }, true},
		"secrets":     {func(r *nodev1.StartSandboxRequest) { r.SecretEnv["MORE"] = "x" }, false},
		"tenant":      {func(r *nodev1.StartSandboxRequest) { r.Command.Tenant = "u" }, false},
		"image":       {func(r *nodev1.StartSandboxRequest) { r.Spec.Image = "example/app:2" }, false},
	} {
		if got := send(c.change); (got == want) != c.same {
			t.Errorf("%s: same digest %t, want %t", name, got == want, c.same)
		}
	}
	if n := s.Runner.(*node); n.started[0].SecretEnv["TOKEN"] != "one" {
		t.Errorf("the secret did not arrive: %v", n.started[0].SecretEnv)
	}
}

func TestBadRequestsReachNobody(t *testing.T) {
	b := &book{}
	s := &Server{Commands: b, Runner: &node{}}
	for name, c := range map[string]struct {
		change func(*nodev1.StartSandboxRequest)
		want   errs.Reason
	}{
		"uid":    {func(r *nodev1.StartSandboxRequest) { r.Uid = "../x" }, errs.InvalidField},
		"tenant": {func(r *nodev1.StartSandboxRequest) { r.Command.Tenant = "" }, errs.InvalidField},
		"image":  {func(r *nodev1.StartSandboxRequest) { r.Spec.Image = "" }, errs.InvalidField},
		"path":   {func(r *nodev1.StartSandboxRequest) { r.Spec.WorkingDir = "/a/../b" }, errs.UnsafePath},
		"memory": {func(r *nodev1.StartSandboxRequest) { r.Spec.Resources = &dormousev1.Resources{MemoryLimitBytes: 1} }, errs.BelowFloor},
		"two": {func(r *nodev1.StartSandboxRequest) {
			r.Spec.Volumes = []*dormousev1.VolumeMount{{VolumeUid: uid.New(), Path: "/a"}, {VolumeUid: uid.New(), Path: "/a"}}
		}, errs.DuplicatePath},
		"name":     {func(r *nodev1.StartSandboxRequest) { r.Name = "UP" }, errs.InvalidField},
		"variable": {func(r *nodev1.StartSandboxRequest) { r.SecretEnv = map[string]string{"A=B": "x"} }, errs.InvalidField},
	} {
		req := startRequest()
		c.change(req)
		_, err := s.StartSandbox(context.Background(), req)
		if errs.ReasonOf(err) != c.want {
			t.Errorf("%s: %v, want %s", name, err, c.want)
		}
	}
	if len(b.seen) > 0 {
		t.Errorf("reached the runner: %v", b.seen)
	}
}

func TestUpdateSandbox(t *testing.T) {
	n := &node{}
	s := &Server{Commands: &book{}, Runner: n}
	good := func() *nodev1.UpdateSandboxRequest {
		return &nodev1.UpdateSandboxRequest{Command: startRequest().GetCommand(), Uid: uid.New(), Generation: 3,
			Egress: &dormousev1.EgressPolicy{DefaultAction: dormousev1.EgressAction_EGRESS_ACTION_DENY}}
	}
	for name, change := range map[string]func(*nodev1.UpdateSandboxRequest){
		"uid":        func(r *nodev1.UpdateSandboxRequest) { r.Uid = "x" },
		"generation": func(r *nodev1.UpdateSandboxRequest) { r.Generation = 0 },
		"rule":       func(r *nodev1.UpdateSandboxRequest) { r.Egress.Allow = []*dormousev1.EgressRule{{}} },
		"action":     func(r *nodev1.UpdateSandboxRequest) { r.Egress.DefaultAction = 9 },
	} {
		req := good()
		change(req)
		if _, err := s.UpdateSandbox(context.Background(), req); errs.ReasonOf(err) != errs.InvalidField || n.egress != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	got, err := s.UpdateSandbox(context.Background(), good())
	if err != nil || got.GetSandbox().GetObservedGeneration() != 3 || n.egress == nil || n.egress.Default != sandbox.EgressDeny {
		t.Errorf("%v, %v; set %+v", got, err, n.egress)
	}
}

func TestClaimSandbox(t *testing.T) {
	n, b := &node{}, &book{}
	s := &Server{Commands: b, Runner: n}
	good := func() *nodev1.ClaimSandboxRequest {
		return &nodev1.ClaimSandboxRequest{Command: startRequest().GetCommand(), Uid: uid.New(), Name: "mine", Generation: 3, Hostname: "here", Env: map[string]string{"A": "1"}}
	}
	for name, change := range map[string]func(*nodev1.ClaimSandboxRequest){
		"uid":      func(r *nodev1.ClaimSandboxRequest) { r.Uid = "x" },
		"tenant":   func(r *nodev1.ClaimSandboxRequest) { r.Command.Tenant = "" },
		"name":     func(r *nodev1.ClaimSandboxRequest) { r.Name = "UP" },
		"hostname": func(r *nodev1.ClaimSandboxRequest) { r.Hostname = "a b" },
		"env":      func(r *nodev1.ClaimSandboxRequest) { r.Env = map[string]string{"A=B": "1"} },
	} {
		req := good()
		change(req)
		if _, err := s.ClaimSandbox(context.Background(), req); errs.ReasonOf(err) != errs.InvalidField || len(n.claimed) > 0 {
			t.Errorf("%s: %v", name, err)
		}
	}
	req := good()
	got, err := s.ClaimSandbox(context.Background(), req)
	if err != nil || got.GetSandbox().GetObservedGeneration() != 3 {
		t.Fatalf("%v, %v", got, err)
	}
	want := runner.ClaimRequest{UID: req.Uid, Tenant: "t", Name: "mine", Generation: 3, CommandID: "c", Hostname: "here", Env: req.Env}
	if !reflect.DeepEqual(n.claimed, []runner.ClaimRequest{want}) || len(b.seen) != 1 || !b.seen[0].Repeats {
		t.Errorf("claimed %+v by %+v", n.claimed, b.seen)
	}
}

// ended is a node with one sandbox whose command has ended.
type ended struct{ final runner.Final }

func (e *ended) Channel(string) (*guest.Conn, error) {
	return nil, errs.New(errs.WrongPhase, "it is Stopped")
}
func (e *ended) Defaults(string) (Defaults, error)  { return Defaults{}, nil }
func (e *ended) Final(string) (runner.Final, error) { return e.final, nil }

// TestAnEndedCommandCanStillBeRead from any offset: what the ring no longer has is a gap.
func TestAnEndedCommandCanStillBeRead(t *testing.T) {
	big := make([]byte, maxChunk+10)
	s := &Processes{Sandboxes: &ended{runner.Final{Argv: []string{"/x"}, Exit: runner.MainExit{Code: 3},
		Stdout: runner.Tail{Offset: 100, Data: []byte("last words")}, Stderr: runner.Tail{Data: big}}}}
	id := uid.New()
	read := func(from uint64) (text string, gap uint64, stderr int) {
		t.Helper()
		exit, err := s.Follow(context.Background(), &dormousev1.ReadOutputRequest{SandboxUid: id, ProcessId: runner.MainID, StdoutOffset: from, Follow: true},
			func(c *dormousev1.OutputChunk) error {
				if c.GetStream() == dormousev1.OutputStream_OUTPUT_STREAM_STDERR {
					stderr += len(c.GetData())
					return nil
				}
				text, gap = text+string(c.GetData()), gap+c.GetGapBytes()
				return nil
			})
		if err != nil || exit.GetCode() != 3 {
			t.Fatalf("%v %v", exit, err)
		}
		return text, gap, stderr
	}
	if text, gap, n := read(0); text != "last words" || gap != 100 || n != len(big) {
		t.Errorf("%q %d %d", text, gap, n)
	}
	if text, gap, _ := read(105); text != "words" || gap != 0 {
		t.Errorf("%q %d", text, gap)
	}
	if text, _, _ := read(1000); text != "" {
		t.Errorf("%q", text)
	}
	got, err := s.WaitProcess(context.Background(), &dormousev1.WaitProcessRequest{SandboxUid: id, ProcessId: runner.MainID})
	if err != nil || got.GetProcess().GetExit().GetCode() != 3 || got.GetProcess().GetStdoutOffset() != 110 {
		t.Errorf("%v %v", got, err)
	}
	_, err = s.WaitProcess(context.Background(), &dormousev1.WaitProcessRequest{SandboxUid: id, ProcessId: "other"})
	wantReason(t, err, errs.WrongPhase)
	_, err = s.StartProcess(context.Background(), &dormousev1.StartProcessRequest{SandboxUid: id, ProcessId: runner.MainID, Spec: &dormousev1.ProcessSpec{Argv: []string{"x"}}})
	wantReason(t, err, errs.InvalidField)
	_, err = s.StartProcess(context.Background(), &dormousev1.StartProcessRequest{SandboxUid: id, Spec: &dormousev1.ProcessSpec{}})
	wantReason(t, err, errs.InvalidField)
}
