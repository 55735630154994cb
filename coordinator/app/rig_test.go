package app_test

import (
	"context"
	"crypto/tls"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	"github.com/dormouse-run/dormouse/coordinator/app"
	"github.com/dormouse-run/dormouse/pkg/apikey"
	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/catalog/memory"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/pki"
	"github.com/dormouse-run/dormouse/pkg/uid"
	"github.com/dormouse-run/dormouse/pkg/wire"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

func TestMain(m *testing.M) {
	if conf := os.Getenv(childEnv); conf != "" {
		os.Exit(child(conf))
	}
	goleak.VerifyTestMain(m)
}

func quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }

// pkiFiles is a CA of the test.
type pkiFiles struct {
	ca  *pki.CA
	dir string
}

func newPKI(t *testing.T) *pkiFiles {
	ca, err := pki.NewCA("test")
	if err != nil {
		t.Fatal(err)
	}
	p := &pkiFiles{ca, t.TempDir()}
	if err := os.WriteFile(filepath.Join(p.dir, "ca.pem"), ca.CertPEM(), 0o600); err != nil {
		t.Fatal(err)
	}
	return p
}

func (p *pkiFiles) files(t *testing.T, id pki.Identity) pki.Files {
	t.Helper()
	pair, err := p.ca.Issue(id, "127.0.0.1", "localhost")
	if err != nil {
		t.Fatal(err)
	}
	f := pki.Files{CA: filepath.Join(p.dir, "ca.pem"), Cert: filepath.Join(p.dir, string(id.Role)+id.Name+".pem"), Key: filepath.Join(p.dir, string(id.Role)+id.Name+".key")}
	if err := pair.Save(f.Cert, f.Key); err != nil {
		t.Fatal(err)
	}
	return f
}

func (p *pkiFiles) source(t *testing.T, id pki.Identity) *pki.Source {
	t.Helper()
	s, err := pki.Open(p.files(t, id), nil)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// rig is a coordinator with what surrounds it.
type rig struct {
	t     *testing.T
	pki   *pkiFiles
	cfg   app.Config
	store *keptStore
	app   *app.App
	user  string // API keys
	other string
	root  string
}

// keptStore survives the coordinator that closes it.
type keptStore struct{ catalog.Store }

func (keptStore) Close() error { return nil }

func newRig(t *testing.T, change ...func(*app.Config)) *rig {
	r := &rig{t: t, pki: newPKI(t), cfg: app.DefaultConfig()}
	mem := memory.New(memory.Options{})
	r.store = &keptStore{mem}
	t.Cleanup(func() { _ = mem.Close() })
	var entries []apikey.Entry
	for _, k := range []struct {
		tenant string
		role   apikey.Role
		to     *string
	}{{"acme", apikey.RoleUser, &r.user}, {"rival", apikey.RoleUser, &r.other}, {"ops", apikey.RoleOperator, &r.root}} {
		text, e, err := apikey.New(k.tenant, k.role, "")
		if err != nil {
			t.Fatal(err)
		}
		*k.to, entries = text, append(entries, e)
	}
	r.cfg.Keys = filepath.Join(r.pki.dir, "keys.yaml")
	if err := apikey.Write(r.cfg.Keys, entries); err != nil {
		t.Fatal(err)
	}
	r.cfg.Listen.GRPC, r.cfg.Listen.REST, r.cfg.Listen.Node = []string{"127.0.0.1:0"}, []string{"127.0.0.1:0"}, []string{"127.0.0.1:0"}
	r.cfg.TLS = r.pki.files(t, pki.Identity{Role: pki.RoleCoordinator, Name: "c1"})
	r.cfg.Admin = filepath.Join(r.pki.dir, "run", "admin.sock")
	// Long enough that a busy machine is no dead one; tests of those override them.
	r.cfg.Lease.TTL = 20 * time.Second
	r.cfg.Nodes.Heartbeat = 100 * time.Millisecond
	r.cfg.Nodes.Missed = 200
	r.cfg.Nodes.ReturnTime = 0 // tests of it override it
	r.cfg.Stop = time.Second
	for _, c := range change {
		c(&r.cfg)
	}
	r.start()
	t.Cleanup(func() { r.app.Stop() })
	return r
}

func (r *rig) start() {
	r.t.Helper()
	a, err := app.Start(context.Background(), r.cfg, app.WithStore(r.store), app.WithLog(io.Discard))
	if err != nil {
		r.t.Fatal(err)
	}
	r.app = a
	eventually(r.t, "it leads", a.Leading)
}

func eventually(t *testing.T, what string, cond func() bool) {
	t.Helper()
	deadline := time.After(time.Minute)
	for !cond() {
		select {
		case <-deadline:
			t.Fatalf("never: %s", what)
		case <-time.After(2 * time.Millisecond):
		}
	}
}

// bearer adds an API key to each call.
type bearer string

func (b bearer) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	if b == "" {
		return nil, nil
	}
	return map[string]string{"authorization": "Bearer " + string(b)}, nil
}

func (bearer) RequireTransportSecurity() bool { return true }

func (r *rig) conn(key string, opts ...grpc.DialOption) *grpc.ClientConn {
	r.t.Helper()
	src, err := pki.Open(pki.Files{CA: r.cfg.TLS.CA}, nil)
	if err != nil {
		r.t.Fatal(err)
	}
	return r.connTLS(src.Client(pki.RoleCoordinator, ""), append(opts, grpc.WithPerRPCCredentials(bearer(key)))...)
}

func (r *rig) connTLS(c *tls.Config, opts ...grpc.DialOption) *grpc.ClientConn {
	r.t.Helper()
	cc, err := grpc.NewClient("passthrough:///"+r.app.Addresses("grpc")[0], append(append(wire.DialOptions(), grpc.WithTransportCredentials(credentials.NewTLS(c))), opts...)...)
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { _ = cc.Close() })
	return cc
}

func (r *rig) node(name string) *fakeNode {
	r.t.Helper()
	n := newFakeNode(r.t, r.pki, name)
	if err := n.dial(r.app.Addresses("node")[0], 20*time.Millisecond); err != nil {
		r.t.Fatal(err)
	}
	return n
}

func wantReason(t *testing.T, err error, want errs.Reason) {
	t.Helper()
	if !errs.Has(err, want) {
		t.Fatalf("got %v, want %s", err, want)
	}
}

func wantEnvelope(t *testing.T, err error, want errs.Reason) *errs.Error {
	t.Helper()
	wantReason(t, err, want)
	return errs.From(err)
}

func box(name string) *dormousev1.CreateSandboxRequest {
	return &dormousev1.CreateSandboxRequest{OperationId: uid.New(), Name: name, Spec: &dormousev1.SandboxSpec{Image: "registry.test/base:1"}}
}
