package pki

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// authority makes a CA and a way to give out files.
func authority(t *testing.T, dir string) (*CA, func(Identity) Files) {
	t.Helper()
	ca, err := NewCA("test")
	if err != nil {
		t.Fatal(err)
	}
	if err := ca.Save(filepath.Join(dir, "ca.crt"), filepath.Join(dir, "ca.key")); err != nil {
		t.Fatal(err)
	}
	return ca, func(id Identity) Files {
		f := Files{CA: filepath.Join(dir, "ca.crt"), Cert: filepath.Join(dir, id.Name+".crt"), Key: filepath.Join(dir, id.Name+".key")}
		issue(t, ca, id, f)
		return f
	}
}

func issue(t *testing.T, ca *CA, id Identity, f Files) {
	t.Helper()
	p, err := ca.Issue(id, "localhost", "127.0.0.1")
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Save(f.Cert, f.Key); err != nil {
		t.Fatal(err)
	}
}

// echo serves one byte back on each connection, over a unix socket.
func echo(t *testing.T, cfg *tls.Config) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			tc := tls.Server(c, cfg)
			buf := make([]byte, 1)
			if _, err := io.ReadFull(tc, buf); err == nil {
				_, _ = tc.Write(buf)
			}
			_ = tc.Close()
		}
	}()
	t.Cleanup(func() { l.Close(); <-done })
	return path
}

// talk shakes hands and exchanges a byte: with TLS 1.3 a server's refusal comes after the client's handshake.
func talk(path string, cfg *tls.Config) (Identity, error) {
	raw, err := net.Dial("unix", path)
	if err != nil {
		return Identity{}, err
	}
	c := tls.Client(raw, cfg)
	defer c.Close()
	if _, err := c.Write([]byte("x")); err != nil {
		return Identity{}, err
	}
	if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
		return Identity{}, err
	}
	state := c.ConnectionState()
	if state.Version != tls.VersionTLS13 {
		return Identity{}, errors.New("not TLS 1.3")
	}
	id, _ := StateIdentity(&state)
	return id, nil
}

func open(t *testing.T, f Files) *Source {
	t.Helper()
	s, err := Open(f, nil)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestRolesAreChecked(t *testing.T) {
	dir := t.TempDir()
	_, give := authority(t, dir)
	node := Identity{Role: RoleNode, Name: "n1"}
	coord := Identity{Role: RoleCoordinator, Name: "c1"}
	client := Identity{Role: RoleClient, Name: "alice", Tenant: "acme"}
	nodeSrc, coordSrc, clientSrc := open(t, give(node)), open(t, give(coord)), open(t, give(client))
	_, giveOther := authority(t, t.TempDir())
	foreign := open(t, giveOther(coord))
	bare := open(t, Files{CA: filepath.Join(dir, "ca.crt")})

	nodeAPI := echo(t, nodeSrc.Server(RoleCoordinator))
	public := echo(t, coordSrc.ServerOptional(RoleClient, RoleOperator))
	for name, c := range map[string]struct {
		path string
		cfg  *tls.Config
		ok   bool
	}{
		"coordinator to node":              {nodeAPI, coordSrc.Client(RoleNode, "n1"), true},
		"any node":                         {nodeAPI, coordSrc.Client(RoleNode, ""), true},
		"wrong node":                       {nodeAPI, coordSrc.Client(RoleNode, "n2"), false},
		"wrong role expected":              {nodeAPI, coordSrc.Client(RoleCoordinator, "n1"), false},
		"node to node":                     {nodeAPI, nodeSrc.Client(RoleNode, "n1"), false},
		"client to node":                   {nodeAPI, clientSrc.Client(RoleNode, "n1"), false},
		"no certificate to node":           {nodeAPI, bare.Client(RoleNode, "n1"), false},
		"another CA":                       {nodeAPI, foreign.Client(RoleNode, "n1"), false},
		"foreign client, server unchecked": {nodeAPI, unchecked(foreign), false},
		"client to public":                 {public, clientSrc.Client(RoleCoordinator, "c1"), true},
		"no certificate to public":         {public, bare.Client(RoleCoordinator, ""), true},
		"node to public":                   {public, nodeSrc.Client(RoleCoordinator, ""), false},
		"TLS 1.2":                          {public, &tls.Config{InsecureSkipVerify: true, MaxVersion: tls.VersionTLS12}, false},
	} {
		if _, err := talk(c.path, c.cfg); (err == nil) != c.ok {
			t.Errorf("%s: ok=%v expected, got %v", name, c.ok, err)
		}
	}
	if id, err := talk(nodeAPI, coordSrc.Client(RoleNode, "n1")); err != nil || id != node {
		t.Errorf("the peer's identity: %+v, %v", id, err)
	}
}

// unchecked is a client that would accept any server.
func unchecked(s *Source) *tls.Config {
	c := s.Client(RoleNode, "")
	c.VerifyConnection = nil
	return c
}

func TestReloadWithoutRestart(t *testing.T) {
	dir := t.TempDir()
	ca, give := authority(t, dir)
	id := Identity{Role: RoleNode, Name: "n1"}
	files := give(id)
	var reloads []error
	src, err := Open(files, func(err error) { reloads = append(reloads, err) })
	if err != nil {
		t.Fatal(err)
	}
	serial := func() string {
		c, _ := src.current()
		x, err := x509.ParseCertificate(c.Certificate[0])
		if err != nil {
			t.Fatal(err)
		}
		return x.SerialNumber.String()
	}
	first := serial()
	if serial() != first || len(reloads) != 0 {
		t.Fatal("reloaded without a change")
	}
	issue(t, ca, id, files)
	second := serial()
	if second == first || len(reloads) != 1 || reloads[0] != nil {
		t.Fatalf("not reloaded: %v", reloads)
	}
	if err := os.WriteFile(files.Cert, []byte("torn"), 0o600); err != nil {
		t.Fatal(err)
	}
	if serial() != second || len(reloads) != 2 || reloads[1] == nil {
		t.Fatalf("a torn file must leave the old pair in use: %v", reloads)
	}
	issue(t, ca, id, files)
	if serial() == second {
		t.Fatal("not reloaded after the repair")
	}
	// A new CA takes over: peers of the old one are refused from now on.
	path := echo(t, src.Server(RoleCoordinator))
	coord := open(t, give(Identity{Role: RoleCoordinator, Name: "c1"}))
	if _, err := talk(path, coord.Client(RoleNode, "n1")); err != nil {
		t.Fatal(err)
	}
	_, giveNew := authority(t, dir)
	giveNew(id)
	if _, err := talk(path, unchecked(open(t, Files{CA: files.CA, Cert: filepath.Join(dir, "c1.crt"), Key: filepath.Join(dir, "c1.key")}))); err == nil {
		t.Fatal("a certificate of the old CA was accepted")
	}
}

func TestExpiredIsRefused(t *testing.T) {
	dir := t.TempDir()
	ca, give := authority(t, dir)
	nodeSrc := open(t, give(Identity{Role: RoleNode, Name: "n1"}))
	p, err := ca.IssueFor(-time.Minute, Identity{Role: RoleCoordinator, Name: "late"})
	if err != nil {
		t.Fatal(err)
	}
	f := Files{CA: filepath.Join(dir, "ca.crt"), Cert: filepath.Join(dir, "late.crt"), Key: filepath.Join(dir, "late.key")}
	if err := p.Save(f.Cert, f.Key); err != nil {
		t.Fatal(err)
	}
	if _, err := talk(echo(t, nodeSrc.Server(RoleCoordinator)), open(t, f).Client(RoleNode, "n1")); err == nil {
		t.Fatal("accepted")
	}
}

func TestFilesAndIdentities(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "new")
	_, give := authority(t, dir)
	f := give(Identity{Role: RoleOperator, Name: "ops", Tenant: "acme"})
	for _, file := range []string{f.Cert, f.Key, filepath.Join(dir, "ca.key")} {
		fi, err := os.Stat(file)
		if err != nil || fi.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v %v", file, fi.Mode(), err)
		}
	}
	if _, err := LoadCA(filepath.Join(dir, "ca.crt"), filepath.Join(dir, "ca.key")); err != nil {
		t.Error(err)
	}
	if _, err := LoadCA(f.Cert, f.Key); err == nil || !strings.Contains(err.Error(), "not the CA") {
		t.Errorf("a leaf as CA: %v", err)
	}
	ca, err := NewCA("x")
	if err != nil {
		t.Fatal(err)
	}
	for _, bad := range []Identity{
		{}, {Role: "king", Name: "a"}, {Role: RoleNode}, {Role: RoleNode, Name: "a/b"}, {Role: RoleNode, Name: "a", Tenant: "t"},
		{Role: RoleClient, Name: "a"}, {Role: RoleClient, Name: "a", Tenant: ".."}, {Role: RoleNode, Name: strings.Repeat("a", 64)},
	} {
		if _, err := ca.Issue(bad); err == nil {
			t.Errorf("%+v was given a certificate", bad)
		}
	}
	if _, err := ServerTLS(Files{CA: filepath.Join(dir, "ca.crt")}, nil, RoleNode); err == nil {
		t.Error("a server without a certificate")
	}
	if _, err := ClientTLS(Files{CA: "/nonexistent"}, nil, RoleNode, ""); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("no CA file: %v", err)
	}
	if _, ok := PeerIdentity(context.Background()); ok {
		t.Error("an identity from nowhere")
	}
}
