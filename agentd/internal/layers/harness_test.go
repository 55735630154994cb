// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package layers

import (
	"bufio"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	ggcr "github.com/google/go-containerregistry/pkg/v1/remote"
	"go.uber.org/goleak"

	"github.com/dormouse-run/dormouse/test/tools"
)

// The real parts, started once: containerd and two registries, one plain and one with TLS and a password.
var env struct {
	socket  string
	plain   string // host:port
	secured string
	caFile  string
	caPool  *x509.CertPool
}

const (
	testUser     = "dormouse"
	testPassword = "sesame-open"
	// bcrypt of the password, at its lowest cost
	testHash = "$2b$04$dRfYIXRx7X2HpCo0mGbz5OSnUCJR86ktYrs8CDof4JT7wyPwEjs8a"
)

func TestMain(m *testing.M) {
	if cfg := os.Getenv(victimEnv); cfg != "" {
		os.Exit(victim(cfg))
	}
	code, err := runReal(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, "the real components did not start or goroutines are left:", err)
		code = 1
	}
	os.Exit(code)
}

func runReal(m *testing.M) (code int, err error) {
	dir, err := os.MkdirTemp("", "dml")
	if err != nil {
		return 1, err
	}
	defer os.RemoveAll(dir)
	var ends []func()
	defer func() {
		for _, end := range ends {
			end()
		}
	}()
	for _, start := range []func(string) (func(), error){startContainerd, startPlain, startSecured} {
		end, err := start(dir)
		if end != nil {
			ends = append(ends, end)
		}
		if err != nil {
			return 1, err
		}
	}
	return m.Run(), goleak.Find(
		goleak.IgnoreTopFunction("net/http.(*persistConn).readLoop"), // of the test's own pushes
		goleak.IgnoreTopFunction("net/http.(*persistConn).writeLoop"),
		goleak.IgnoreAnyFunction("github.com/google/go-containerregistry/internal/gzip.ReadCloserLevel.func1"), // a push of what is there
		goleak.IgnoreAnyFunction("github.com/dormouse-run/dormouse/agentd/internal/layers.waitFor.func1"))
}

// waitFor starts a program and waits until a line of its output matches; it gives the line's first group.
// The returned function ends the program.
func waitFor(cmd *exec.Cmd, want *regexp.Regexp) (string, func(), error) {
	out, err := cmd.StderrPipe()
	if err != nil {
		return "", nil, err
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		return "", nil, err
	}
	found := make(chan string, 1)
	read := make(chan struct{})
	var said strings.Builder
	go func() {
		defer close(read)
		defer close(found)
		sc := bufio.NewScanner(out)
		sc.Buffer(nil, 1<<20)
		for sc.Scan() {
			if m := want.FindStringSubmatch(sc.Text()); m != nil {
				found <- m[1]
				_, _ = io.Copy(io.Discard, out)
				return
			}
			if said.Len() < 1<<16 {
				said.WriteString(sc.Text() + "\n")
			}
		}
	}()
	end := func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		killer := time.AfterFunc(time.Minute, func() { _ = cmd.Process.Kill() })
		<-read
		_ = cmd.Wait()
		killer.Stop()
	}
	select {
	case line, ok := <-found:
		if ok {
			return line, end, nil
		}
		end()
		return "", nil, fmt.Errorf("%s ended: %s", filepath.Base(cmd.Path), said.String())
	case <-time.After(2 * time.Minute):
		end()
		return "", nil, fmt.Errorf("%s did not get ready: %s", filepath.Base(cmd.Path), said.String())
	}
}

func startContainerd(dir string) (func(), error) {
	bin, err := tools.Find("containerd")
	if err != nil {
		return nil, err
	}
	env.socket = filepath.Join(dir, "c.sock")
	cfg := fmt.Sprintf(`version = 3
root = %q
state = %q
disabled_plugins = ["io.containerd.grpc.v1.cri", "io.containerd.cri.v1.images", "io.containerd.cri.v1.runtime", "io.containerd.internal.v1.opt"]
[grpc]
  address = %q
[ttrpc]
  address = %q
`, filepath.Join(dir, "cd"), filepath.Join(dir, "cs"), env.socket, env.socket+".ttrpc")
	path := filepath.Join(dir, "containerd.toml")
	if err := os.WriteFile(path, []byte(cfg), 0o600); err != nil {
		return nil, err
	}
	_, end, err := waitFor(exec.Command(bin, "--config", path), regexp.MustCompile(`(containerd successfully booted)`))
	return end, err
}

func startRegistry(dir, name, extra string) (string, func(), error) {
	bin, err := tools.Find("registry")
	if err != nil {
		return "", nil, err
	}
	cfg := fmt.Sprintf(`version: 0.1
log: {level: info, accesslog: {disabled: true}}
storage: {filesystem: {rootdirectory: %q}, delete: {enabled: true}, maintenance: {uploadpurging: {enabled: false}}}
http:
  addr: "127.0.0.1:0"
  secret: "of this test"
%s`, filepath.Join(dir, name), extra)
	path := filepath.Join(dir, name+".yml")
	if err := os.WriteFile(path, []byte(cfg), 0o600); err != nil {
		return "", nil, err
	}
	return waitFor(exec.Command(bin, "serve", path), regexp.MustCompile(`listening on (127\.0\.0\.1:\d+)`))
}

func startPlain(dir string) (end func(), err error) {
	env.plain, end, err = startRegistry(dir, "plain", "")
	return end, err
}

func startSecured(dir string) (end func(), err error) {
	cert, key, err := makeCert(dir)
	if err != nil {
		return nil, err
	}
	htpasswd := filepath.Join(dir, "htpasswd")
	if err := os.WriteFile(htpasswd, []byte(testUser+":"+testHash+"\n"), 0o600); err != nil {
		return nil, err
	}
	env.caFile = cert
	env.secured, end, err = startRegistry(dir, "secured", fmt.Sprintf("  tls: {certificate: %q, key: %q}\nauth: {htpasswd: {realm: test, path: %q}}\n", cert, key, htpasswd))
	return end, err
}

func makeCert(dir string) (certFile, keyFile string, err error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return "", "", err
	}
	tmpl := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test registry"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour), IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, key.Public(), key)
	if err != nil {
		return "", "", err
	}
	keyDER, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return "", "", err
	}
	certFile, keyFile = filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	pemCert := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	env.caPool = x509.NewCertPool()
	env.caPool.AppendCertsFromPEM(pemCert)
	if err := os.WriteFile(certFile, pemCert, 0o600); err != nil {
		return "", "", err
	}
	return certFile, keyFile, os.WriteFile(keyFile, pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: keyDER}), 0o600)
}

// push puts an image into a registry and gives its reference by tag.
func push(t testing.TB, registry, repo string, img v1.Image) string {
	t.Helper()
	ref, err := name.ParseReference(registry + "/" + repo + ":v1")
	if err != nil {
		t.Fatal(err)
	}
	if err := ggcr.Write(ref, img, pushOptions()...); err != nil {
		t.Fatalf("push %s: %v", ref, err)
	}
	return ref.String()
}

func pushOptions() []ggcr.Option {
	tr := http.DefaultTransport.(*http.Transport).Clone()
	tr.TLSClientConfig = &tls.Config{RootCAs: env.caPool, MinVersion: tls.VersionTLS12}
	tr.DisableKeepAlives = true
	return []ggcr.Option{ggcr.WithTransport(tr), ggcr.WithAuth(&authn.Basic{Username: testUser, Password: testPassword})}
}

// testConfig is of a store on its own root and namespace.
func testConfig(t testing.TB) Config {
	t.Helper()
	root := filepath.Join(t.TempDir(), "layers")
	return Config{Root: root, Node: "node-a", ContainerdSocket: env.socket, Namespace: fmt.Sprintf("t%x", sha256.Sum256([]byte(root)))[:32],
		Mkfs: tools.Path(t, "mkfs.erofs"), PlainHTTP: []string{env.plain}, CAFiles: []string{env.caFile}, Platform: "linux/amd64",
		Log: slog.New(slog.NewTextHandler(testLog{t}, &slog.HandlerOptions{Level: slog.LevelInfo}))}
}

type testLog struct{ t testing.TB }

func (l testLog) Write(p []byte) (int, error) {
	l.t.Log(strings.TrimSpace(string(p)))
	return len(p), nil
}

func openStore(t testing.TB, cfg Config) *Store {
	t.Helper()
	s, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	if _, err := s.Recover(context.Background()); err != nil {
		t.Fatal(err)
	}
	return s
}
