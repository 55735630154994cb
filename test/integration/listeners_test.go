package integration

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/dynamicpb"

	"github.com/dormouse-run/dormouse/pkg/apikey"
	"github.com/dormouse-run/dormouse/pkg/client"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/pki"
	"github.com/dormouse-run/dormouse/pkg/uid"
	nodev1 "github.com/dormouse-run/dormouse/proto/dormouse/node/v1"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
	"github.com/dormouse-run/dormouse/test/fabric"
	"github.com/dormouse-run/dormouse/test/stack"
)

// Where the daemons listen inside the fabric (see test/cluster).
var (
	publicAddr = fabric.HubAddr + ":7443"
	nodeAddr   = fabric.HubAddr + ":7444"
	restAddr   = fabric.HubAddr + ":7080"
	agentAddr  = fabric.NodeAddr(1) + ":7421"
)

// methods are all of some services.
func methods(files ...protoreflect.FileDescriptor) (all []protoreflect.MethodDescriptor) {
	for _, f := range files {
		for i := range f.Services().Len() {
			s := f.Services().Get(i)
			for j := range s.Methods().Len() {
				all = append(all, s.Methods().Get(j))
			}
		}
	}
	return all
}

var publicFiles = []protoreflect.FileDescriptor{
	dormousev1.File_dormouse_v1_sandbox_proto, dormousev1.File_dormouse_v1_process_proto, dormousev1.File_dormouse_v1_snapshot_proto,
	dormousev1.File_dormouse_v1_volume_proto, dormousev1.File_dormouse_v1_cluster_proto, dormousev1.File_dormouse_v1_ticket_proto, dormousev1.File_dormouse_v1_port_proto,
}

// call makes a call with an empty request.
func call(ctx context.Context, cc *grpc.ClientConn, m protoreflect.MethodDescriptor) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	name := fmt.Sprintf("/%s/%s", m.Parent().FullName(), m.Name())
	req, reply := dynamicpb.NewMessage(m.Input()), dynamicpb.NewMessage(m.Output())
	if !m.IsStreamingServer() && !m.IsStreamingClient() {
		return cc.Invoke(ctx, name, req, reply)
	}
	stream, err := cc.NewStream(ctx, &grpc.StreamDesc{ServerStreams: m.IsStreamingServer(), ClientStreams: m.IsStreamingClient()}, name)
	if err != nil {
		return err
	}
	if err := stream.SendMsg(req); err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	if err := stream.CloseSend(); err != nil {
		return err
	}
	return stream.RecvMsg(reply)
}

// inHub dials from inside the hub's namespace, and says whom it took the server for.
func (w *world) inHub() grpc.DialOption {
	dial := fabric.Dialer(w.HubNetns())
	return grpc.WithContextDialer(func(ctx context.Context, addr string) (net.Conn, error) { return dial(ctx, "tcp", addr) })
}

// tlsOf is a client's side of mTLS: with the certificate of an identity, or with none. It takes any
// server of our CA that has the role.
func (w *world) tlsOf(files pki.Files, server pki.Role) *tls.Config {
	w.Helper()
	cfg, err := pki.ClientTLS(files, nil, server, "")
	w.ok(err)
	return cfg
}

// identities are certificates of the right CA for somebody else, and one of another CA.
func (w *world) identities() map[string]pki.Files {
	w.Helper()
	ca := w.CoordinatorTLS().CA
	user, err := w.Issue(pki.Identity{Role: pki.RoleClient, Name: "somebody", Tenant: w.tenant})
	w.ok(err)
	operator, err := w.Issue(pki.Identity{Role: pki.RoleOperator, Name: "operator", Tenant: w.tenant})
	w.ok(err)
	foreign, err := pki.NewCA("another")
	w.ok(err)
	pair, err := foreign.Issue(pki.Identity{Role: pki.RoleCoordinator, Name: "coordinator-1"}, fabric.HubAddr)
	w.ok(err)
	dir := w.TempDir()
	forged := pki.Files{CA: ca, Cert: filepath.Join(dir, "forged.pem"), Key: filepath.Join(dir, "forged.key")}
	w.ok(pair.Save(forged.Cert, forged.Key))
	return map[string]pki.Files{"no certificate": {CA: ca}, "a user": user, "an operator": operator, "node 2": w.NodeTLS(2), "the coordinator": w.CoordinatorTLS(), "another CA": forged}
}

// The public API answers nobody without credentials, on any listener, by any method.
func TestListenersPublicAPI(t *testing.T) {
	w := enter(t)
	revoked, err := w.NewAPIKey(w.tenant)
	w.ok(err)
	revokedClient := w.raw(revoked)
	list := &dormousev1.ListVolumesRequest{}
	if _, err := dormousev1.NewVolumeServiceClient(revokedClient).ListVolumes(w.ctx, list); err != nil {
		t.Fatal(err)
	}
	w.revoke(revoked)

	ids := w.identities()
	bare := credentials.NewTLS(w.tlsOf(ids["no certificate"], pki.RoleCoordinator))
	for listener, dial := range map[string]func(key string) *grpc.ClientConn{
		"socket": w.raw,
		"TCP":    func(key string) *grpc.ClientConn { return w.dial("passthrough:///"+publicAddr, bare, key, w.inHub()) },
	} {
		if _, err := dormousev1.NewVolumeServiceClient(dial(w.key)).ListVolumes(w.ctx, list); err != nil {
			t.Fatalf("%s with a key: %v", listener, err)
		}
		for who, tc := range map[string]struct {
			key    string
			reason errs.Reason
		}{
			"no key":         {"", errs.CredentialsMissing},
			"a wrong secret": {w.key[:len(w.key)-4] + "AAAA", errs.CredentialsInvalid},
			"no such key":    {"dm_000000000000_" + strings.Repeat("A", 43), errs.CredentialsInvalid},
			"no key at all":  {"something", errs.CredentialsInvalid},
			"a revoked key":  {revoked, errs.CredentialsInvalid},
		} {
			t.Run(listener+" "+who, func(t *testing.T) {
				w := w.sub(t)
				cc := dial(tc.key)
				for _, m := range methods(publicFiles...) {
					err := call(w.ctx, cc, m)
					if e := errs.From(err); err == nil || e.Reason != tc.reason || e.RequestID == "" {
						t.Errorf("%s: %v", m.FullName(), err)
					}
				}
			})
		}
	}
	// An open connection is nothing that a revoked key lives on.
	_, err = dormousev1.NewVolumeServiceClient(revokedClient).ListVolumes(w.ctx, list)
	w.refused(err, errs.CredentialsInvalid)

	// Certificates: those of users and operators are good, those of daemons and of others are not.
	for who, files := range ids {
		cc := w.dial("passthrough:///"+publicAddr, credentials.NewTLS(w.tlsOf(files, pki.RoleCoordinator)), "", w.inHub())
		_, err := dormousev1.NewVolumeServiceClient(cc).ListVolumes(w.ctx, list)
		if good := who == "a user" || who == "an operator"; good != (err == nil) {
			t.Errorf("%s: %v", who, err)
		}
	}
	cc := w.dial("passthrough:///"+publicAddr, insecure.NewCredentials(), w.key, w.inHub())
	if _, err := dormousev1.NewVolumeServiceClient(cc).ListVolumes(w.ctx, list); err == nil {
		t.Error("TCP without TLS was answered")
	}
	// The internal services are not on the public listener.
	for _, m := range methods(nodev1.File_dormouse_node_v1_node_proto, nodev1.File_dormouse_node_v1_debug_proto) {
		if err := call(w.ctx, w.raw(w.operatorKey()), m); err == nil {
			t.Errorf("%s is on the public listener", m.FullName())
		}
	}
}

// revoke takes a key out of the file that the coordinator reads.
func (w *world) revoke(key string) {
	w.Helper()
	entries, err := apikey.Read(w.APIKeys())
	w.ok(err)
	var kept []apikey.Entry
	for _, e := range entries {
		if e.ID != apikey.ID(key) {
			kept = append(kept, e)
		}
	}
	if len(kept) != len(entries)-1 {
		w.Fatal("the key is not in the file")
	}
	w.ok(apikey.Write(w.APIKeys(), kept))
}

func TestListenersREST(t *testing.T) {
	w := enter(t)
	some := uid.New()
	calls := []struct{ method, path string }{
		{"GET", "/v1/sandboxes"}, {"POST", "/v1/sandboxes"}, {"GET", "/v1/sandboxes/" + some}, {"DELETE", "/v1/sandboxes/" + some},
		{"GET", "/v1/sandboxes:watch"}, {"POST", "/v1/sandboxes:fork"}, {"POST", "/v1/sandboxes/" + some + ":checkpoint"}, {"GET", "/v1/snapshots"},
		{"POST", "/v1/snapshots/" + some + ":restore"}, {"GET", "/v1/volumes"}, {"POST", "/v1/volumes"}, {"GET", "/v1/nodes"}, {"POST", "/v1/nodes/node-1:cordon"},
		{"GET", "/v1/images"}, {"POST", "/v1/images:pull"}, {"GET", "/v1/operations/" + some}, {"GET", "/v1/events"},
		{"POST", "/v1/sandboxes/" + some + "/processes:run"}, {"GET", "/v1/sandboxes/" + some + "/processes"},
	}
	ids := w.identities()
	transport := func(files pki.Files) *http.Transport {
		tr := &http.Transport{DialContext: fabric.Dialer(w.HubNetns()), TLSClientConfig: w.tlsOf(files, pki.RoleCoordinator)}
		w.Cleanup(tr.CloseIdleConnections)
		return tr
	}
	over := map[string]func(key, method, path, body string) answer{
		"socket": w.rest,
		"TCP": func(key, method, path, body string) answer {
			a, err := w.restOver(transport(ids["no certificate"]), "https://"+restAddr, key, method, path, body)
			w.ok(err)
			return a
		},
	}
	for listener, rest := range over {
		if a := rest(w.key, "GET", "/v1/volumes", ""); a.status != 200 {
			t.Fatalf("%s with a key: %d %s", listener, a.status, a.body)
		}
		for _, c := range calls {
			body := ""
			if c.method == "POST" {
				body = "{}"
			}
			w.refusedREST(rest("", c.method, c.path, body), errs.CredentialsMissing)
			w.refusedREST(rest("dm_000000000000_"+strings.Repeat("A", 43), c.method, c.path, body), errs.CredentialsInvalid)
		}
	}
	for who, files := range ids {
		a, err := w.restOver(transport(files), "https://"+restAddr, "", "GET", "/v1/volumes", "")
		if good := who == "a user" || who == "an operator"; good != (err == nil && a.status == 200) {
			t.Errorf("%s: %d %s %v", who, a.status, a.body, err)
		}
	}
	if a, err := w.restOver(&http.Transport{DialContext: fabric.Dialer(w.HubNetns()), DisableKeepAlives: true}, "http://"+restAddr, w.key, "GET", "/v1/volumes", ""); err == nil && a.status < 400 {
		t.Errorf("TCP without TLS: %d %s", a.status, a.body)
	}
	// Nobody can hand in the identity that the gateway hands on.
	for _, header := range []string{"dormouse-rest-peer", "Grpc-Metadata-dormouse-rest-peer"} {
		req, err := http.NewRequestWithContext(w.ctx, "GET", "https://"+restAddr+"/v1/volumes", nil)
		w.ok(err)
		req.Header.Set(header, "x.eyJUZW5hbnQiOiJkZXYifQ")
		resp, err := transport(ids["no certificate"]).RoundTrip(req)
		w.ok(err)
		_ = resp.Body.Close()
		if resp.StatusCode != 401 {
			t.Errorf("with a forged %s: %d", header, resp.StatusCode)
		}
	}
}

// agentd answers the coordinator alone, and the coordinator takes as a node only who has its certificate.
func TestListenersOfNodes(t *testing.T) {
	w := enter(t)
	ids := w.identities()
	agent := methods(append(publicFiles[1:2:2], nodev1.File_dormouse_node_v1_node_proto)...)
	for who, files := range ids {
		cc := w.dial("passthrough:///"+agentAddr, credentials.NewTLS(w.tlsOf(files, pki.RoleNode)), "", w.inHub())
		_, err := nodev1.NewAgentServiceClient(cc).GetInventory(w.ctx, &nodev1.GetInventoryRequest{})
		if good := who == "the coordinator"; good != (err == nil || errs.From(err).Code == errs.InvalidArgument || errs.Has(err, errs.Fenced)) {
			t.Errorf("%s asks agentd: %v", who, err)
		}
		if who == "the coordinator" {
			continue
		}
		for _, m := range agent {
			if err := call(w.ctx, cc, m); err == nil || errs.From(err).Reason != errs.ReplyLost && errs.From(err).Code != errs.Unavailable && errs.From(err).Code != errs.OutcomeUnknown {
				t.Errorf("%s calls %s of agentd: %v", who, m.FullName(), err)
			}
		}
	}
	for what, creds := range map[string]credentials.TransportCredentials{"without TLS": insecure.NewCredentials()} {
		for _, addr := range []string{agentAddr, nodeAddr} {
			cc := w.dial("passthrough:///"+addr, creds, w.operatorKey(), w.inHub())
			if _, err := nodev1.NewAgentServiceClient(cc).GetInventory(w.ctx, &nodev1.GetInventoryRequest{}); err == nil {
				t.Errorf("%s answers %s", addr, what)
			}
		}
	}
	before, err := w.Client.GetNode(w.ctx, stack.NodeName(1))
	w.ok(err)
	for who, files := range ids {
		err := w.hello(files, stack.NodeName(1))
		if err == nil {
			t.Errorf("%s has a session as node 1", who)
		}
	}
	after, err := w.Client.GetNode(w.ctx, stack.NodeName(1))
	w.ok(err)
	if !after.GetOnline() || after.GetSessionEpoch() != before.GetSessionEpoch() || after.GetAddress() != before.GetAddress() {
		t.Errorf("node 1 was %v and is %v", before, after)
	}
}

// hello tries to open a session as a node, and gives why it was refused.
func (w *world) hello(files pki.Files, node string) error {
	w.Helper()
	cc := w.dial("passthrough:///"+nodeAddr, credentials.NewTLS(w.tlsOf(files, pki.RoleCoordinator)), "", w.inHub())
	ctx, cancel := context.WithTimeout(w.ctx, time.Minute)
	defer cancel()
	stream, err := nodev1.NewSessionServiceClient(cc).Session(ctx)
	if err != nil {
		return err
	}
	hello := &nodev1.Hello{Node: node, Address: "10.88.0.99:1", Architecture: runtime.GOARCH, BootId: uid.New(), Inventory: &nodev1.GetInventoryResponse{}}
	if err := stream.Send(&nodev1.SessionRequest{Message: &nodev1.SessionRequest_Hello{Hello: hello}}); err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	_, err = stream.Recv()
	return err
}

// Sockets are for root: by their modes, by their folders', and in fact.
func TestListenersSocketsAreRootOnly(t *testing.T) {
	w := enter(t)
	var sockets []string
	w.ok(filepath.WalkDir(w.Dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.Type() == fs.ModeSocket {
			sockets = append(sockets, path)
		}
		return nil
	}))
	want := []string{w.GRPCSocket(), w.RESTSocket(), filepath.Join(w.Dir, "admin.sock")}
	for i := 1; i <= w.Nodes; i++ {
		want = append(want, w.DebugSocket(i), filepath.Join(w.NodeDir(i), "run", "admin.sock"))
	}
	for _, path := range want {
		info, err := os.Stat(path)
		w.ok(err)
		dir, err := os.Stat(filepath.Dir(path))
		w.ok(err)
		if info.Mode() != fs.ModeSocket|0o600 || dir.Mode().Perm() != 0o700 {
			t.Errorf("%s is %s in %s", path, info.Mode(), dir.Mode())
		}
	}
	for _, path := range sockets {
		if err := asNobody(path); !errors.Is(err, unix.EACCES) {
			t.Errorf("nobody connects to %s: %v", path, err)
		}
	}
	if len(sockets) < len(want) {
		t.Errorf("sockets: %v", sockets)
	}
}

// asNobody connects to a socket on a thread without root's rights.
func asNobody(path string) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends here
		fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			done <- err
			return
		}
		defer func() { _ = unix.Close(fd) }()
		const nobody = 65534
		// The thread's own call, not the process': package syscall would change all threads.
		if _, _, e := unix.RawSyscall(unix.SYS_SETRESUID, nobody, nobody, nobody); e != 0 {
			done <- e
			return
		}
		done <- unix.Connect(fd, &unix.SockaddrUnix{Name: path})
	}()
	return <-done
}

// What belongs to another tenant is answered as what does not exist.
func TestListenersAnotherTenant(t *testing.T) {
	w := enter(t)
	s := w.create(w.spec("sleep", "100000"))
	v := w.volume("node-1")
	snap := w.checkpoint(s)
	op := uid.New()
	_, err := s.Checkpoint(w.ctx, &dormousev1.CheckpointSandboxRequest{OperationId: op})
	w.ok(err)
	main, err := s.Main(w.ctx)
	w.ok(err)
	other := w.ClientOf(t, "t-another-tenant")
	missing := uid.New()

	for name, call := range map[string]func(sandbox, snapshot, volume, operation string) error{
		"get sandbox":    func(s, _, _, _ string) error { return other.Sandbox(s).Refresh(w.ctx) },
		"delete sandbox": func(s, _, _, _ string) error { return other.Sandbox(s).Delete(w.ctx, "") },
		"checkpoint": func(s, _, _, _ string) error {
			_, err := other.Sandbox(s).Checkpoint(w.ctx, &dormousev1.CheckpointSandboxRequest{})
			return err
		},
		"fork": func(s, _, _, _ string) error {
			_, _, err := other.Fork(w.ctx, &dormousev1.ForkSandboxRequest{SandboxUid: s})
			return err
		},
		"start": func(s, _, _, _ string) error {
			_, err := other.Sandbox(s).Start(w.ctx, &dormousev1.ProcessSpec{Argv: []string{"true"}}, "")
			return err
		},
		"run": func(s, _, _, _ string) error {
			_, _, err := other.Sandbox(s).Run(w.ctx, &dormousev1.ProcessSpec{Argv: []string{"true"}}, nil, &client.Output{}, nil)
			return err
		},
		"list processes": func(s, _, _, _ string) error { _, err := other.Sandbox(s).Processes(w.ctx); return err },
		"output": func(s, _, _, _ string) error {
			_, err := other.Sandbox(s).Process(main.ID).Follow(w.ctx, &client.Output{}, false)
			return err
		},
		"signal": func(s, _, _, _ string) error { return other.Sandbox(s).Process(main.ID).Signal(w.ctx, 9, true) },
		"input": func(s, _, _, _ string) error {
			return other.Sandbox(s).Process(main.ID).Write(w.ctx, []byte("x"), true)
		},
		"get snapshot":    func(_, n, _, _ string) error { return other.Snapshot(n).Refresh(w.ctx) },
		"delete snapshot": func(_, n, _, _ string) error { return other.Snapshot(n).Delete(w.ctx, "") },
		"restore": func(_, n, _, _ string) error {
			_, err := other.Snapshot(n).Restore(w.ctx, &dormousev1.RestoreSandboxRequest{})
			return err
		},
		"get volume":    func(_, _, v, _ string) error { return other.Volume(v).Refresh(w.ctx) },
		"delete volume": func(_, _, v, _ string) error { return other.Volume(v).Delete(w.ctx, "") },
		"clone volume": func(_, _, v, _ string) error {
			_, err := other.CreateVolume(w.ctx, &dormousev1.CreateVolumeRequest{Spec: &dormousev1.VolumeSpec{SourceVolumeUid: v}})
			return err
		},
		"attach volume": func(_, _, v, _ string) error {
			spec := w.spec()
			spec.Volumes = []*dormousev1.VolumeMount{{VolumeUid: v, Path: "/v"}}
			_, err := other.CreateSandbox(w.ctx, &dormousev1.CreateSandboxRequest{Spec: spec})
			return err
		},
		"get operation": func(_, _, _, op string) error { _, err := other.GetOperation(w.ctx, op); return err },
	} {
		t.Run(name, func(t *testing.T) {
			theirs, none := call(s.UID, snap.UID, v.UID, op), call(missing, missing, missing, missing)
			a, b := envelopeOf(theirs), envelopeOf(none)
			for _, u := range []string{s.UID, snap.UID, v.UID, op} {
				a = strings.ReplaceAll(a, u, "UID")
			}
			b = strings.ReplaceAll(b, missing, "UID")
			if theirs == nil || a != b || errs.From(theirs).Code != errs.NotFound {
				t.Errorf("another tenant's:\n%s\nmissing:\n%s", a, b)
			}
		})
	}
	// Nor do lists and watches show it.
	for what, n := range map[string]int{
		"sandboxes": number(client.Collect(other.ListSandboxes(w.ctx, &dormousev1.ListSandboxesRequest{}))),
		"snapshots": number(client.Collect(other.ListSnapshots(w.ctx, &dormousev1.ListSnapshotsRequest{IncludeDeleted: true}))),
		"volumes":   number(client.Collect(other.ListVolumes(w.ctx, &dormousev1.ListVolumesRequest{}))),
		"events":    number(client.Collect(other.ListEvents(w.ctx, &dormousev1.ListEventsRequest{}))),
		"events of": number(client.Collect(other.ListEvents(w.ctx, &dormousev1.ListEventsRequest{ObjectUid: s.UID}))),
	} {
		if n != 0 {
			t.Errorf("another tenant sees %d %s", n, what)
		}
	}
	// A user is no operator.
	_, err = other.Cordon(w.ctx, stack.NodeName(1), true, "")
	w.refused(err, errs.NotAllowed)
	w.sh(s, "true")
}

func number[T any](all []T, err error) int {
	if err != nil {
		return -1
	}
	return len(all)
}

// envelopeOf is all of an error but what names the call.
func envelopeOf(err error) string {
	if err == nil {
		return "no error"
	}
	e := errs.From(err)
	return fmt.Sprintf("%s %s %q %s %s %v", e.Code, e.Reason, e.Message, e.Retry, e.Outcome, e.Details)
}
