package app

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/dormouse-run/dormouse/pkg/dataplane"
	"github.com/dormouse-run/dormouse/pkg/pki"
	"github.com/dormouse-run/dormouse/pkg/uid"
	"github.com/dormouse-run/dormouse/pkg/wire"
	nodev1 "github.com/dormouse-run/dormouse/proto/dormouse/node/v1"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
	testimages "github.com/dormouse-run/dormouse/test/images"
	"github.com/dormouse-run/dormouse/test/stack"
)

// bench is one real agentd on a real node, with this test as its coordinator.
type bench struct {
	t       testing.TB
	stack   *stack.Stack
	image   string
	command int
	agent   nodev1.AgentServiceClient
	process dormousev1.ProcessServiceClient
	debug   nodev1.DebugServiceClient
	coord   *coordinator

	stopCoordinator func()
}

var built struct {
	once sync.Once
	dir  string
	err  error
}

// binaries builds agentd and a runtime bundle once for all tests.
func binaries(t testing.TB) string {
	t.Helper()
	built.once.Do(func() {
		if built.dir, built.err = os.MkdirTemp("", "agentd-test-"); built.err != nil {
			return
		}
		for _, c := range []*exec.Cmd{
			exec.Command("go", "build", "-tags", "faults", "-o", filepath.Join(built.dir, "agentd"), "../cmd/agentd"),
			exec.Command("../../scripts/bundle.sh", filepath.Join(built.dir, "bundle")),
		} {
			if out, err := c.CombinedOutput(); err != nil {
				built.err = fmt.Errorf("%s: %w\n%s", c, err, out)
				return
			}
		}
	})
	if built.err != nil {
		t.Fatal(built.err)
	}
	return built.dir
}

// coordinator is the coordinator's side of the session: it welcomes, and acknowledges what it is told.
type coordinator struct {
	nodev1.UnimplementedSessionServiceServer
	mu       sync.Mutex
	sessions uint64
	hello    *nodev1.Hello
	reports  map[string]*nodev1.SandboxObservation
}

func (c *coordinator) Session(stream grpc.BidiStreamingServer[nodev1.SessionRequest, nodev1.SessionResponse]) error {
	for {
		msg, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		var answer *nodev1.SessionResponse
		c.mu.Lock()
		switch {
		case msg.GetHello() != nil:
			c.sessions++
			c.hello = msg.GetHello()
			answer = &nodev1.SessionResponse{Message: &nodev1.SessionResponse_Welcome{Welcome: &nodev1.Welcome{
				SessionEpoch: c.sessions, CoordinatorEpoch: 1, HeartbeatInterval: durationpb.New(time.Second)}}}
		case msg.GetReport() != nil:
			o := msg.GetReport().GetSandbox()
			c.reports[o.GetUid()] = o
			answer = &nodev1.SessionResponse{Message: &nodev1.SessionResponse_ReportAck{ReportAck: &nodev1.ReportAck{Id: msg.GetReport().GetId()}}}
		default:
			answer = &nodev1.SessionResponse{Message: &nodev1.SessionResponse_HeartbeatAck{HeartbeatAck: &nodev1.HeartbeatAck{}}}
		}
		c.mu.Unlock()
		if err := stream.Send(answer); err != nil {
			return err
		}
	}
}

func (c *coordinator) epoch() uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.sessions
}

func (c *coordinator) reported(uid string) *nodev1.SandboxObservation {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.reports[uid]
}

const agentdYAML = `node: %[1]s
state_dir: %[2]s/agentd
run_dir: %[2]s/run
cgroup: %[3]s
protect: {cgroup: %[3]s-agentd}
layers: {root: %[4]s}
containerd: {socket: %[5]s, namespace: %[6]s}
registry: {ca_files: [%[7]s]}
bundle: {dir: %[8]s}
listen: unix:%[2]s/run/api.sock
coordinator: unix:%[2]s/coordinator.sock
tls: {ca: %[9]s, cert: %[10]s, key: %[11]s}
raise_limits: false
log: {level: debug}
`

func newBench(t testing.TB) *bench {
	t.Helper()
	bin := binaries(t)
	s := stack.New(t, stack.Options{Bin: bin})
	b := &bench{t: t, stack: s, coord: &coordinator{reports: map[string]*nodev1.SandboxObservation{}}}
	registry, err := s.Registry()
	must(t, err)
	digest := registry.MustPush(t, "busybox:1", testimages.Busybox(t))
	b.image = registry.Ref("busybox") + "@" + digest
	tls := s.NodeTLS(1)
	yaml := fmt.Sprintf(agentdYAML, stack.NodeName(1), s.NodeDir(1), s.CgroupParent(1), s.LayersDir(), s.ContainerdSocket(1), stack.ContainerdNamespace,
		s.RegistryCA(), filepath.Join(bin, "bundle"), tls.CA, tls.Cert, tls.Key)
	must(t, os.WriteFile(s.AgentdConfig(1), []byte(yaml), 0o600))
	b.serveCoordinator()
	b.startAgentd()
	b.dial()
	b.await(b.cmd)
	return b
}

func (b *bench) serveCoordinator() {
	tls, err := pki.ServerTLS(b.stack.CoordinatorTLS(), nil, pki.RoleNode)
	must(b.t, err)
	l, err := net.Listen("unix", filepath.Join(b.stack.NodeDir(1), "coordinator.sock"))
	must(b.t, err)
	server := grpc.NewServer(grpc.Creds(credentials.NewTLS(tls)))
	nodev1.RegisterSessionServiceServer(server, b.coord)
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = server.Serve(l) // ends with Stop
	}()
	b.stopCoordinator = func() {
		server.Stop()
		<-done
	}
	b.t.Cleanup(b.stopCoordinator)
}

// startAgentd starts agentd and waits until it has a session, and takes commands in it.
func (b *bench) startAgentd() {
	b.t.Helper()
	before := b.coord.epoch()
	must(b.t, b.stack.StartAgentd(ctx(b.t), 1, func(context.Context) error {
		if b.coord.epoch() == before {
			return errors.New("no session yet")
		}
		return nil
	}))
	if b.agent != nil {
		b.await(b.cmd)
	}
}

func (b *bench) dial() {
	client, err := pki.ClientTLS(b.stack.CoordinatorTLS(), nil, pki.RoleNode, stack.NodeName(1))
	must(b.t, err)
	run := filepath.Join(b.stack.NodeDir(1), "run")
	conn, err := grpc.NewClient("unix:"+filepath.Join(run, "api.sock"), append(wire.DialOptions(), grpc.WithTransportCredentials(credentials.NewTLS(client)),
		grpc.WithChainUnaryInterceptor(func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
			return invoke(metadata.AppendToOutgoingContext(ctx, dataplane.TenantKey, "dev"), method, req, reply, cc, opts...)
		}),
		grpc.WithChainStreamInterceptor(func(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, open grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
			return open(metadata.AppendToOutgoingContext(ctx, dataplane.TenantKey, "dev"), desc, cc, method, opts...)
		}))...)
	must(b.t, err)
	b.t.Cleanup(func() { conn.Close() })
	b.agent, b.process = nodev1.NewAgentServiceClient(conn), dormousev1.NewProcessServiceClient(conn)
	local, err := grpc.NewClient("unix:"+filepath.Join(run, "agentd.sock"), append(wire.DialOptions(), grpc.WithTransportCredentials(insecureLocal()))...)
	must(b.t, err)
	b.t.Cleanup(func() { local.Close() })
	b.debug = nodev1.NewDebugServiceClient(local)
}

func (b *bench) cmd() *nodev1.Command {
	b.command++
	return &nodev1.Command{CoordinatorEpoch: 1, SessionEpoch: b.coord.epoch(), CommandId: fmt.Sprintf("command-%d", b.command), Tenant: "dev"}
}

// numbered gives commands to who asks beside the test.
func (b *bench) numbered(prefix string) func() *nodev1.Command {
	n := 0
	return func() *nodev1.Command {
		n++
		return &nodev1.Command{CoordinatorEpoch: 1, SessionEpoch: b.coord.epoch(), CommandId: fmt.Sprintf("%s-%d", prefix, n), Tenant: "dev"}
	}
}

func (b *bench) start(change ...func(*nodev1.StartSandboxRequest)) *nodev1.SandboxObservation {
	b.t.Helper()
	req := &nodev1.StartSandboxRequest{Command: b.cmd(), Uid: uid.New(), Generation: 1, Spec: &dormousev1.SandboxSpec{Image: b.image}}
	for _, c := range change {
		c(req)
	}
	resp, err := b.agent.StartSandbox(ctx(b.t), req, grpc.WaitForReady(true))
	must(b.t, err)
	return resp.GetSandbox()
}

func (b *bench) delete(uid string) {
	b.t.Helper()
	_, err := b.agent.DeleteSandbox(ctx(b.t), &nodev1.DeleteSandboxRequest{Command: b.cmd(), Uid: uid})
	must(b.t, err)
}

// sh runs a shell line and gives what it wrote and its code.
func (b *bench) sh(sandbox, line string) (string, int32) {
	b.t.Helper()
	stream, err := b.process.RunProcess(ctx(b.t), &dormousev1.RunProcessRequest{SandboxUid: sandbox, Spec: &dormousev1.ProcessSpec{Argv: []string{"/bin/sh", "-c", line}}}, grpc.WaitForReady(true))
	must(b.t, err)
	var out []byte
	for {
		msg, err := stream.Recv()
		must(b.t, err)
		out = append(out, msg.GetOutput().GetData()...)
		if e := msg.GetExit(); e != nil {
			return string(out), e.GetCode()
		}
	}
}

// doctor fails the test for anything that is on the node and should not be.
func (b *bench) doctor() {
	b.t.Helper()
	resp, err := b.debug.Doctor(ctx(b.t), &nodev1.DoctorRequest{}, grpc.WaitForReady(true))
	must(b.t, err)
	for _, f := range resp.GetFindings() {
		b.t.Errorf("doctor: %s %s: recorded %s, observed %s", f.GetKind(), f.GetName(), f.GetRecorded(), f.GetObserved())
	}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func ctx(t testing.TB) context.Context {
	c, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	t.Cleanup(cancel)
	return c
}

func eventually(t testing.TB, what string, cond func() bool) {
	t.Helper()
	c := ctx(t)
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for !cond() {
		select {
		case <-tick.C:
		case <-c.Done():
			t.Fatalf("never: %s", what)
		}
	}
}
