package hostile

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.yaml.in/yaml/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/dormouse-run/dormouse/pkg/apikey"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/pki"
	"github.com/dormouse-run/dormouse/pkg/wire"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
	"github.com/dormouse-run/dormouse/test/fabric"
)

// bearer is a key as a call shows it.
type bearer string

func (b bearer) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	return map[string]string{"authorization": "Bearer " + string(b)}, nil
}
func (bearer) RequireTransportSecurity() bool { return false }

// raw is a connection with the key and none of the client's courtesies.
func (w *world) raw(key string) *grpc.ClientConn {
	w.Helper()
	cc, err := grpc.NewClient("unix://"+w.GRPCSocket(), append(wire.DialOptions(), grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithPerRPCCredentials(bearer(key)))...)
	w.ok(err)
	w.Cleanup(func() { _ = cc.Close() })
	return cc
}

// wantLimit asks for a reason and its number.
func (w *world) wantLimit(err error, reason errs.Reason, resource, limit string) {
	w.Helper()
	e := errs.From(err)
	if err == nil || e.Reason != reason || e.Details["limit"] != limit || e.Details["resource"]+e.Details["field"] != resource {
		w.Errorf("%v, details %v; want %s of %s with %s", err, e.Details, reason, resource, limit)
	}
}

// TestDoorTooMuch: too large, too deep, too many and too fast, each with its type and its number; and
// what one tenant does not get, another does.
func TestDoorTooMuch(t *testing.T) {
	w := enter(t)
	restore := w.limitTenants(map[string]int{"calls_per_second": 2, "burst": 30, "calls": 6, "streams": 3})
	defer restore()
	key, err := w.NewAPIKey("greedy")
	w.ok(err)
	sandboxes := dormousev1.NewSandboxServiceClient(w.raw(key))

	_, err = sandboxes.CreateSandbox(w.ctx, &dormousev1.CreateSandboxRequest{SecretEnv: map[string]string{"A": strings.Repeat("x", 5<<20)}})
	w.wantLimit(err, errs.LimitExceeded, "message", "4194304")
	if body := w.rest(key, strings.Repeat(`{"spec":`, 2000)); !strings.Contains(body, "INVALID_FIELD") && !strings.Contains(body, "UNKNOWN_FIELD") {
		t.Errorf("deep JSON: %s", body)
	}
	if body := w.rest(key, `{"secret_env":{"A":"`+strings.Repeat("x", 5<<20)+`"}}`); !strings.Contains(body, "LIMIT_EXCEEDED") || !strings.Contains(body, "4194304") {
		t.Errorf("large JSON: %.300s", body)
	}

	ended := make(chan error, 4)
	for range 4 {
		stream, err := sandboxes.WatchSandboxes(w.ctx, &dormousev1.WatchSandboxesRequest{})
		w.ok(err)
		go func() {
			for {
				if _, err := stream.Recv(); err != nil {
					ended <- err
					return
				}
			}
		}()
	}
	// Three stay open, so that what ends first is the one too many.
	w.wantLimit(<-ended, errs.TooMany, "streams", "3")

	var refused error
	for range 200 { // far more than two a second
		if _, err := sandboxes.ListSandboxes(w.ctx, &dormousev1.ListSandboxesRequest{}); err != nil {
			refused = err
			break
		}
	}
	w.wantLimit(refused, errs.TooMany, "calls_per_second", "2")
	w.ok(w.honest.Refresh(w.ctx)) // another tenant
}

// rest posts a body and gives the answer's.
func (w *world) rest(key, body string) string {
	w.Helper()
	transport := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", w.RESTSocket())
	}}
	defer transport.CloseIdleConnections()
	req, err := http.NewRequestWithContext(w.ctx, http.MethodPost, "http://dormouse/v1/sandboxes", strings.NewReader(body))
	w.ok(err)
	req.Header.Set("Authorization", "Bearer "+key)
	resp, err := transport.RoundTrip(req)
	w.ok(err)
	defer resp.Body.Close()
	text, err := io.ReadAll(io.LimitReader(resp.Body, 64<<10))
	w.ok(err)
	return fmt.Sprintf("%d %s", resp.StatusCode, text)
}

// limitTenants restarts the coordinator with limits, and gives the way back.
func (w *world) limitTenants(limits map[string]int) (restore func()) {
	w.Helper()
	before, err := os.ReadFile(w.CoordinatorConfig())
	w.ok(err)
	var cfg map[string]any
	w.ok(yaml.Unmarshal(before, &cfg))
	cfg["tenant"] = limits
	data, err := yaml.Marshal(cfg)
	w.ok(err)
	apply := func(data []byte) {
		w.Helper()
		w.ok(w.StopCoordinator(w.ctx))
		w.ok(os.WriteFile(w.CoordinatorConfig(), data, 0o600))
		w.ok(w.StartCoordinatorReady(w.ctx))
		w.eventually("the node is back", func() bool {
			over, err := w.Overview(w.ctx, 1)
			return err == nil && over.GetConnected()
		})
	}
	apply(data)
	return func() { apply(before) }
}

// TestDoorRevokedWhileStreaming: an open stream ends when its key is revoked.
func TestDoorRevokedWhileStreaming(t *testing.T) {
	w := enter(t)
	key, err := w.NewAPIKey("short")
	w.ok(err)
	stream, err := dormousev1.NewSandboxServiceClient(w.raw(key)).WatchSandboxes(w.ctx, &dormousev1.WatchSandboxesRequest{})
	w.ok(err)
	other := w.ClientOf(t, "short") // by another key of the tenant
	s, err := other.CreateSandbox(w.ctx, &dormousev1.CreateSandboxRequest{Spec: &dormousev1.SandboxSpec{Image: shared.image}})
	w.ok(err)
	_, err = stream.Recv() // it is open, and tells
	w.ok(err)
	entries, err := apikey.Read(w.APIKeys())
	w.ok(err)
	var kept []apikey.Entry
	for _, e := range entries {
		if e.ID != apikey.ID(key) {
			kept = append(kept, e)
		}
	}
	w.ok(apikey.Write(w.APIKeys(), kept))
	for err == nil {
		_, err = stream.Recv()
	}
	if errs.ReasonOf(err) != errs.CredentialsInvalid {
		t.Errorf("the stream of a revoked key: %v", err)
	}
	w.ok(s.Delete(w.ctx, ""))
}

// TestDoorExpired: a certificate that has ended opens no listener.
func TestDoorExpired(t *testing.T) {
	w := enter(t)
	ca, err := pki.LoadCA(filepath.Join(w.Dir, "tls", "ca.pem"), filepath.Join(w.Dir, "tls", "ca.key"))
	w.ok(err)
	dir := t.TempDir()
	for _, c := range []struct {
		id           pki.Identity
		addr, method string
		server       pki.Role
	}{
		{pki.Identity{Role: pki.RoleClient, Name: "late", Tenant: "acme"}, fabric.HubAddr + ":7443", "/dormouse.v1.SandboxService/ListSandboxes", pki.RoleCoordinator},
		{pki.Identity{Role: pki.RoleNode, Name: "node-1"}, fabric.HubAddr + ":7444", "/dormouse.node.v1.SessionService/Session", pki.RoleCoordinator},
		{pki.Identity{Role: pki.RoleCoordinator, Name: "coordinator-1"}, fabric.NodeAddr(1) + ":7421", "/dormouse.node.v1.AgentService/GetInventory", pki.RoleNode},
	} {
		for name, validity := range map[string]time.Duration{"in force": time.Hour, "expired": -time.Second} {
			pair, err := ca.IssueFor(validity, c.id)
			w.ok(err)
			cert, err := tls.X509KeyPair(pair.Cert, pair.Key)
			w.ok(err)
			files := pki.Files{CA: filepath.Join(w.Dir, "tls", "ca.pem"), Cert: filepath.Join(dir, "c.pem"), Key: filepath.Join(dir, "c.key")}
			w.ok(pair.Save(files.Cert, files.Key))
			cfg, err := pki.ClientTLS(files, nil, c.server, "")
			w.ok(err)
			// A client that does not look at its own certificate.
			cfg.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &cert, nil }
			err = w.callOver(c.addr, cfg, c.method)
			opened := err == nil || errs.ReasonOf(err) != errs.ReplyLost && errs.ReasonOf(err) != errs.CredentialsMissing && errs.ReasonOf(err) != errs.DeadlineExpired
			if opened != (name == "in force") {
				t.Errorf("%s at %s, %s: %v", c.id, c.addr, name, err)
			}
		}
	}
}

// callOver makes an empty call from inside the hub's namespace.
func (w *world) callOver(addr string, cfg *tls.Config, method string) error {
	dial := fabric.Dialer(w.HubNetns())
	cc, err := grpc.NewClient("passthrough:///"+addr, append(wire.DialOptions(), grpc.WithTransportCredentials(credentials.NewTLS(cfg)),
		grpc.WithContextDialer(func(ctx context.Context, addr string) (net.Conn, error) { return dial(ctx, "tcp", addr) }))...)
	if err != nil {
		return err
	}
	defer func() { _ = cc.Close() }()
	ctx, cancel := context.WithTimeout(w.ctx, time.Minute)
	defer cancel()
	if strings.HasSuffix(method, "/Session") {
		stream, err := cc.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, method)
		if err != nil {
			return err
		}
		if err := stream.CloseSend(); err != nil {
			return err
		}
		if err := stream.RecvMsg(new(emptypb.Empty)); !errors.Is(err, io.EOF) {
			return err
		}
		return nil
	}
	return cc.Invoke(ctx, method, new(emptypb.Empty), new(emptypb.Empty))
}
