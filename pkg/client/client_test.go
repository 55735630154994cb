package client

import (
	"bytes"
	"context"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"

	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/obs"
	"github.com/dormouse-run/dormouse/pkg/pki"
	"github.com/dormouse-run/dormouse/pkg/uid"
	"github.com/dormouse-run/dormouse/pkg/wire"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

func TestMain(m *testing.M) {
	firstBackoff = time.Millisecond
	goleak.VerifyTestMain(m)
}

// server answers with what the test put in.
type server struct {
	dormousev1.UnimplementedSandboxServiceServer
	dormousev1.UnimplementedProcessServiceServer
	dormousev1.UnimplementedFileServiceServer

	mu      sync.Mutex
	calls   []string
	answers map[string][]error // by method, one for each call; then success
	phase   dormousev1.SandboxPhase
	peer    pki.Identity
	bearer  string
	run     func(*dormousev1.RunProcessRequest, grpc.ServerStreamingServer[dormousev1.RunProcessResponse]) error
	read    func(*dormousev1.ReadOutputRequest, grpc.ServerStreamingServer[dormousev1.ReadOutputResponse]) error
	watch   func(*dormousev1.WatchSandboxesRequest, grpc.ServerStreamingServer[dormousev1.WatchSandboxesResponse]) error
	attach  func(*dormousev1.AttachOpen, attachServer) error
}

func (s *server) call(ctx context.Context, method, note string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.calls = append(s.calls, method+" "+note)
	s.peer, _ = pki.PeerIdentity(ctx)
	if md, ok := metadata.FromIncomingContext(ctx); ok {
		s.bearer = strings.Join(md.Get("authorization"), ",")
	}
	if next := s.answers[method]; len(next) > 0 {
		s.answers[method] = next[1:]
		return next[0]
	}
	return nil
}

func (s *server) count(method string) (n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range s.calls {
		if strings.HasPrefix(c, method+" ") {
			n++
		}
	}
	return n
}

func (s *server) GetSandbox(ctx context.Context, r *dormousev1.GetSandboxRequest) (*dormousev1.GetSandboxResponse, error) {
	if err := s.call(ctx, "Get", r.GetUid()); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return &dormousev1.GetSandboxResponse{Sandbox: &dormousev1.Sandbox{Meta: &dormousev1.ObjectMeta{Uid: r.GetUid()}, Status: &dormousev1.SandboxStatus{Phase: s.phase}}}, nil
}

func (s *server) DeleteSandbox(ctx context.Context, r *dormousev1.DeleteSandboxRequest) (*dormousev1.DeleteSandboxResponse, error) {
	return &dormousev1.DeleteSandboxResponse{}, s.call(ctx, "Delete", r.GetOperationId())
}

func (s *server) ListSandboxes(ctx context.Context, _ *dormousev1.ListSandboxesRequest) (*dormousev1.ListSandboxesResponse, error) {
	return &dormousev1.ListSandboxesResponse{Sequence: 5}, s.call(ctx, "List", "")
}

func (s *server) WatchSandboxes(r *dormousev1.WatchSandboxesRequest, ss grpc.ServerStreamingServer[dormousev1.WatchSandboxesResponse]) error {
	if err := s.call(ss.Context(), "Watch", r.GetUid()); err != nil {
		return err
	}
	return s.watch(r, ss)
}

func (s *server) RunProcess(r *dormousev1.RunProcessRequest, ss grpc.ServerStreamingServer[dormousev1.RunProcessResponse]) error {
	if err := s.call(ss.Context(), "Run", r.GetProcessId()); err != nil {
		return err
	}
	return s.run(r, ss)
}

func (s *server) StartProcess(ctx context.Context, r *dormousev1.StartProcessRequest) (*dormousev1.StartProcessResponse, error) {
	return &dormousev1.StartProcessResponse{Process: &dormousev1.Process{ProcessId: r.GetProcessId()}}, s.call(ctx, "Start", r.GetProcessId())
}

func (s *server) ReadOutput(r *dormousev1.ReadOutputRequest, ss grpc.ServerStreamingServer[dormousev1.ReadOutputResponse]) error {
	if err := s.call(ss.Context(), "Read", ""); err != nil {
		return err
	}
	return s.read(r, ss)
}

func (s *server) AttachProcess(ss attachServer) error {
	first, err := ss.Recv()
	if err != nil {
		return err
	}
	if err := s.call(ss.Context(), "Attach", first.GetOpen().GetProcessId()); err != nil {
		return err
	}
	return s.attach(first.GetOpen(), ss)
}

func listen(t *testing.T, network, addr string, s *server, opts ...grpc.ServerOption) string {
	t.Helper()
	around, err := wire.NewServer(obs.Discard(), nil)
	if err != nil {
		t.Fatal(err)
	}
	gs := grpc.NewServer(append(around.Options(), opts...)...)
	dormousev1.RegisterSandboxServiceServer(gs, s)
	dormousev1.RegisterProcessServiceServer(gs, s)
	dormousev1.RegisterFileServiceServer(gs, s)
	l, err := net.Listen(network, addr)
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
	return l.Addr().String()
}

func local(t *testing.T) (*server, *Client) {
	t.Helper()
	s := &server{answers: make(map[string][]error)}
	path := filepath.Join(t.TempDir(), "s")
	listen(t, "unix", path, s)
	return s, dialed(t, Config{Addr: "unix://" + path})
}

func dialed(t *testing.T, cfg Config) *Client {
	t.Helper()
	c, err := Dial(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func TestTLSAndCredentials(t *testing.T) {
	dir := t.TempDir()
	authority := func(name string) *pki.CA {
		ca, err := pki.NewCA(name)
		if err != nil {
			t.Fatal(err)
		}
		if err := ca.Save(filepath.Join(dir, name+".crt"), filepath.Join(dir, name+".key")); err != nil {
			t.Fatal(err)
		}
		return ca
	}
	ca, _ := authority("ca"), authority("other")
	give := func(file string, id pki.Identity) pki.Files {
		p, err := ca.Issue(id, "localhost")
		if err != nil {
			t.Fatal(err)
		}
		f := pki.Files{CA: filepath.Join(dir, "ca.crt"), Cert: filepath.Join(dir, file+".crt"), Key: filepath.Join(dir, file+".key")}
		if err := p.Save(f.Cert, f.Key); err != nil {
			t.Fatal(err)
		}
		return f
	}
	src, err := pki.Open(give("coordinator", pki.Identity{Role: pki.RoleCoordinator, Name: "c"}), nil)
	if err != nil {
		t.Fatal(err)
	}
	node, err := pki.Open(give("node", pki.Identity{Role: pki.RoleNode, Name: "n"}), nil)
	if err != nil {
		t.Fatal(err)
	}
	alice := pki.Identity{Role: pki.RoleClient, Name: "alice", Tenant: "acme"}
	mine := give("alice", alice)
	s := &server{}
	addr := "https://" + listen(t, "tcp", "127.0.0.1:0", s, grpc.Creds(credentials.NewTLS(src.ServerOptional(pki.RoleClient))))
	impostor := "https://" + listen(t, "tcp", "127.0.0.1:0", s, grpc.Creds(credentials.NewTLS(node.ServerOptional(pki.RoleClient))))

	if err := dialed(t, Config{Addr: addr, CA: mine.CA, APIKey: "k"}).Sandbox("u").Refresh(t.Context()); err != nil || s.bearer != "Bearer k" {
		t.Errorf("with a key: %v, sent %q", err, s.bearer)
	}
	if err := dialed(t, Config{Addr: addr, CA: mine.CA, Cert: mine.Cert, Key: mine.Key}).Sandbox("u").Refresh(t.Context()); err != nil || s.peer != alice {
		t.Errorf("with a certificate: %v, seen %v", err, s.peer)
	}
	before := s.count("Get")
	for name, cfg := range map[string]Config{
		"another CA":          {Addr: addr, CA: filepath.Join(dir, "other.crt"), APIKey: "k"},
		"the system's CAs":    {Addr: addr, APIKey: "k"},
		"a node's server":     {Addr: impostor, CA: mine.CA, APIKey: "k"},
		"a node's credential": {Addr: addr, CA: mine.CA, Cert: filepath.Join(dir, "node.crt"), Key: filepath.Join(dir, "node.key")},
	} {
		err := dialed(t, cfg).Sandbox("u").Refresh(t.Context())
		if e := errs.From(err); e.Outcome != errs.Unknown || s.count("Get") != before {
			t.Errorf("%s: %v", name, err)
		}
	}
	for _, cfg := range []Config{{}, {Addr: "http://x"}, {Addr: "x"}, {Addr: "https://"}, {Addr: "https://x/y"}, {Addr: addr, CA: "/nonexistent"},
		{Addr: addr, CA: mine.CA, Cert: mine.Cert}, {Addr: addr, APIKeyFile: "/nonexistent"}} {
		if _, err := Dial(cfg); !errs.Has(err, errs.InvalidField) {
			t.Errorf("%+v: %v", cfg, err)
		}
	}
}

func TestConfigFromEnvironment(t *testing.T) {
	file := filepath.Join(t.TempDir(), "config.yaml")
	t.Setenv("DORMOUSE_CONFIG", file)
	for _, v := range []string{"ADDR", "API_KEY", "API_KEY_FILE", "CA", "CERT", "KEY"} {
		t.Setenv("DORMOUSE_"+v, "")
	}
	write := func(text string) {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("current: dev\ncontexts:\n  dev: {addr: 'https://dev', api_key: one}\n  prod: {addr: 'https://prod', ca: /ca}\n")
	if c, err := FromEnvironment(""); err != nil || c.Addr != "https://dev" || c.APIKey != "one" {
		t.Errorf("current: %+v %v", c, err)
	}
	if c, err := FromEnvironment("prod"); err != nil || c.CA != "/ca" {
		t.Errorf("named: %+v %v", c, err)
	}
	t.Setenv("DORMOUSE_ADDR", "unix:///s")
	t.Setenv("DORMOUSE_API_KEY_FILE", "/key")
	if c, err := FromEnvironment(""); err != nil || c.Addr != "unix:///s" || c.APIKey != "" || c.APIKeyFile != "/key" {
		t.Errorf("environment: %+v %v", c, err)
	}
	if _, err := FromEnvironment("stage"); !errs.Has(err, errs.InvalidField) {
		t.Errorf("no such context: %v", err)
	}
	for _, bad := range []string{"contexts:\n  dev:\n    adr: x\n", "contexts: hunter2\n", "contexts: {dev: {addr: [hunter2]}}\n"} {
		write(bad)
		if _, err := FromEnvironment("dev"); err == nil || strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

func TestTryingAgainIsBounded(t *testing.T) {
	s, c := local(t)
	lost := errs.New(errs.ReplyLost, "lost")
	s.answers["Delete"] = []error{lost, errs.New(errs.NoLeader, "no leader")}
	if err := c.Sandbox("u").Delete(t.Context(), ""); err != nil || s.count("Delete") != 3 {
		t.Errorf("%v after %d calls", err, s.count("Delete"))
	}
	if s.calls[0] != s.calls[1] || s.calls[1] != s.calls[2] || uid.Check(strings.TrimPrefix(s.calls[0], "Delete ")) != nil {
		t.Errorf("the operation ids differ: %v", s.calls)
	}
	s.answers["Get"] = []error{lost, lost, lost, lost, lost}
	if err := c.Sandbox("u").Refresh(t.Context()); !errs.Has(err, errs.ReplyLost) || s.count("Get") != maxAttempts {
		t.Errorf("%v after %d calls", err, s.count("Get"))
	}
	for _, final := range []errs.Reason{errs.StaleUID, errs.NoNodeFits, errs.CredentialsInvalid, errs.StateDamaged} {
		s.answers["Get"] = []error{errs.New(final, "x")}
		before := s.count("Get")
		if err := c.Sandbox("u").Refresh(t.Context()); !errs.Has(err, final) || s.count("Get") != before+1 {
			t.Errorf("%s: %v after %d calls", final, err, s.count("Get")-before)
		}
	}
	// What an operation came to is its answer for good, also where another operation might fare better.
	before := s.count("Delete")
	s.answers["Delete"] = []error{errs.New(errs.NodeAway, "away").AsAnswer()}
	if err := c.Sandbox("u").Delete(t.Context(), ""); !errs.Has(err, errs.NodeAway) || s.count("Delete") != before+1 {
		t.Errorf("a failed operation: %v after %d calls", err, s.count("Delete")-before)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := c.Sandbox("u").Refresh(ctx); !errs.Has(err, errs.CallCancelled) {
		t.Errorf("cancelled: %v", err)
	}
}

func TestAwait(t *testing.T) {
	s, c := local(t)
	s.phase = dormousev1.SandboxPhase_SANDBOX_PHASE_STARTING
	round := 0
	s.watch = func(r *dormousev1.WatchSandboxesRequest, ss grpc.ServerStreamingServer[dormousev1.WatchSandboxesResponse]) error {
		if r.GetAfterSequence() != 5 {
			t.Errorf("watch after %d", r.GetAfterSequence())
		}
		round++
		switch round {
		case 1: // the log no longer reaches back
			return errs.New(errs.ResumeTooOld, "list again")
		case 2: // a leader that goes
			return errs.New(errs.NoLeader, "no leader")
		}
		if err := ss.Send(&dormousev1.WatchSandboxesResponse{Uid: "other", Deleted: true}); err != nil {
			return err
		}
		return ss.Send(&dormousev1.WatchSandboxesResponse{Uid: "u", Sandbox: &dormousev1.Sandbox{Status: &dormousev1.SandboxStatus{Phase: dormousev1.SandboxPhase_SANDBOX_PHASE_RUNNING}}})
	}
	running := func(sb *dormousev1.Sandbox) bool {
		return sb.GetStatus().GetPhase() == dormousev1.SandboxPhase_SANDBOX_PHASE_RUNNING
	}
	if err := c.Sandbox("u").Await(t.Context(), running); err != nil || round != 3 {
		t.Errorf("%v after %d watches", err, round)
	}
	s.watch = func(_ *dormousev1.WatchSandboxesRequest, ss grpc.ServerStreamingServer[dormousev1.WatchSandboxesResponse]) error {
		return ss.Send(&dormousev1.WatchSandboxesResponse{Uid: "u", Deleted: true})
	}
	if err := c.Sandbox("u").Await(t.Context(), running); !errs.Has(err, errs.ObjectNotFound) {
		t.Errorf("deleted while waiting: %v", err)
	}
	if err := c.Sandbox("u").Await(t.Context(), func(sb *dormousev1.Sandbox) bool { return sb == nil }); err != nil {
		t.Errorf("waiting for the deletion: %v", err)
	}
	s.answers["Get"] = []error{errs.New(errs.ObjectNotFound, "gone")}
	if err := c.Sandbox("u").Await(t.Context(), func(sb *dormousev1.Sandbox) bool { return sb == nil }); err != nil {
		t.Errorf("gone already: %v", err)
	}
}

func chunk(offset uint64, text string, gap uint64) *dormousev1.OutputChunk {
	return &dormousev1.OutputChunk{Stream: dormousev1.OutputStream_OUTPUT_STREAM_STDOUT, Offset: offset, Data: []byte(text), GapBytes: gap}
}

// The reply to the start is lost: the process is started once, under one id, and followed.
func TestRunStartsOnceWhenTheStreamBreaks(t *testing.T) {
	s, c := local(t)
	s.answers["Run"] = []error{errs.New(errs.ReplyLost, "lost")}
	reads := 0
	s.read = func(r *dormousev1.ReadOutputRequest, ss grpc.ServerStreamingServer[dormousev1.ReadOutputResponse]) error {
		reads++
		if reads == 1 {
			if err := ss.Send(&dormousev1.ReadOutputResponse{Event: &dormousev1.ReadOutputResponse_Output{Output: chunk(0, "abc", 0)}}); err != nil {
				return err
			}
			return errs.New(errs.NodeAway, "away")
		}
		if r.GetStdoutOffset() != 3 {
			t.Errorf("read again from %d", r.GetStdoutOffset())
		}
		if err := ss.Send(&dormousev1.ReadOutputResponse{Event: &dormousev1.ReadOutputResponse_Output{Output: chunk(10, "xyz", 7)}}); err != nil {
			return err
		}
		return ss.Send(&dormousev1.ReadOutputResponse{Event: &dormousev1.ReadOutputResponse_Exit{Exit: &dormousev1.ProcessExit{Code: 9}}})
	}
	var out bytes.Buffer
	var gap uint64
	started := 0
	p, exit, err := c.Sandbox("u").Run(t.Context(), &dormousev1.ProcessSpec{Argv: []string{"a"}}, nil,
		&Output{Stdout: &out, Gap: func(_ dormousev1.OutputStream, n uint64) { gap += n }}, func(*Process) { started++ })
	if err != nil || exit.GetCode() != 9 || out.String() != "abcxyz" || gap != 7 || started != 1 {
		t.Errorf("%v %v %q gap %d started %d", exit, err, out.String(), gap, started)
	}
	if s.calls[0] != "Run "+p.ID || s.calls[1] != "Start "+p.ID {
		t.Errorf("calls %v", s.calls)
	}
}

// A process that ends without reading its input does not hang the caller.
func TestRunEndsBeforeItsInput(t *testing.T) {
	s, c := local(t)
	s.attach = func(o *dormousev1.AttachOpen, ss attachServer) error {
		if !o.GetInput() || !o.GetHold() || o.GetWriter() == "" {
			t.Errorf("asked %v", o)
		}
		if err := opened(ss, 0); err != nil {
			return err
		}
		return exited(ss, 0)
	}
	input, feed := io.Pipe()
	if _, exit, err := c.Sandbox("u").Run(t.Context(), &dormousev1.ProcessSpec{Argv: []string{"true"}}, input, &Output{}, nil); err != nil || exit.GetCode() != 0 {
		t.Errorf("%v %v", exit, err)
	}
	feed.Close() // lets the reader go
}

// A refusal to write output stops at once: the caller's pipe is closed.
func TestBrokenOutputEnds(t *testing.T) {
	s, c := local(t)
	s.read = func(_ *dormousev1.ReadOutputRequest, ss grpc.ServerStreamingServer[dormousev1.ReadOutputResponse]) error {
		return ss.Send(&dormousev1.ReadOutputResponse{Event: &dormousev1.ReadOutputResponse_Output{Output: chunk(0, "abc", 0)}})
	}
	r, w := io.Pipe()
	r.Close()
	if _, err := c.Sandbox("u").Process("p").Follow(t.Context(), &Output{Stdout: w}, true); err == nil || s.count("Read") != 1 {
		t.Errorf("%v after %d reads", err, s.count("Read"))
	}
}
