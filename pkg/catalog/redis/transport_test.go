package redis_test

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"io"
	"math/big"
	mathrand "math/rand/v2"
	"net"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/dormouse-run/dormouse/pkg/catalog/catalogtest"
	"github.com/dormouse-run/dormouse/pkg/catalog/redis"
	"github.com/dormouse-run/dormouse/pkg/catalog/redis/redistest"
	"github.com/dormouse-run/dormouse/pkg/errs"
)

// forward carries what the listener accepts to the server's unix socket, until the test ends.
func forward(t *testing.T, listener net.Listener, server *redistest.Server) {
	t.Helper()
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}
			upstream, err := net.Dial("unix", server.Socket)
			if err != nil {
				client.Close()
				return
			}
			for _, pair := range [][2]net.Conn{{client, upstream}, {upstream, client}} {
				wg.Go(func() {
					_, _ = io.Copy(pair[0], pair[1])
					pair[0].Close()
					pair[1].Close()
				})
			}
		}
	})
	t.Cleanup(func() {
		listener.Close()
		server.Kill(t) // ends what is still connected
		wg.Wait()
	})
}

func TestPasswordOverTCP(t *testing.T) { redistest.Each(t, passwordOverTCP) }

func passwordOverTCP(t *testing.T, p redistest.Program) {
	const secret = "correct-horse"
	server := p.Start(t, "requirepass", secret)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	forward(t, listener, server)
	for password, want := range map[string]errs.Reason{secret: "", "wrong-horse": errs.StoreUnavailable, "": errs.StoreUnavailable} {
		s, err := redis.Open(t.Context(), redis.Options{Address: listener.Addr().String(), Password: password})
		if errs.ReasonOf(err) != want {
			t.Errorf("password %q: %v", password, err)
		}
		if err != nil {
			if strings.Contains(err.Error(), "horse") || !strings.Contains(err.Error(), "password") {
				t.Errorf("the error's text: %v", err)
			}
			continue
		}
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}
}

func TestTLS(t *testing.T) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "store"}, DNSNames: []string{"store"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	trusted := x509.NewCertPool()
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	trusted.AddCert(cert)
	listener, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}})
	if err != nil {
		t.Fatal(err)
	}
	server := redistest.Start(t)
	forward(t, listener, server)
	address := listener.Addr().String()
	f := catalogtest.NewFixture(t, open(t, redis.Options{Address: address, TLS: &tls.Config{RootCAs: trusted, ServerName: "store"}}))
	f.Must(catalogtest.Create(catalogtest.Sandbox("s")))
	_, err = redis.Open(t.Context(), redis.Options{Address: address, TLS: &tls.Config{ServerName: "store"}})
	if !errs.Has(err, errs.StoreUnavailable) || !errs.NotStartedFor(err) {
		t.Errorf("an untrusted server: %v", err)
	}
}

// freePort finds a port for the bus of a cluster, which cannot do without. It is none of those that the system gives
// to whoever asks for any.
func freePort(t *testing.T) string {
	t.Helper()
	for {
		port := strconv.Itoa(20000 + mathrand.IntN(10000))
		l, err := net.Listen("tcp", "127.0.0.1:"+port)
		if err == nil {
			if err := l.Close(); err != nil {
				t.Fatal(err)
			}
			return port
		}
		if !errors.Is(err, syscall.EADDRINUSE) {
			t.Fatal(err)
		}
	}
}

// TestConformanceInClusterMode shows that all keys of a catalog, the scripts' own too, are in one slot.
func TestConformanceInClusterMode(t *testing.T) { redistest.Each(t, conformanceInClusterMode) }

func conformanceInClusterMode(t *testing.T, p redistest.Program) {
	server := p.Start(t, "cluster-enabled", "yes", "bind", "127.0.0.1", "cluster-port", freePort(t))
	t.Parallel() // the port is taken
	client := raw(t, server)
	if err := client.ClusterAddSlotsRange(t.Context(), 0, 16383).Err(); err != nil {
		t.Fatal(err)
	}
	catalogtest.Eventually(t, "the cluster is up", func() bool {
		info, err := client.ClusterInfo(t.Context()).Result()
		return err == nil && strings.Contains(info, "cluster_state:ok")
	})
	conformOn(t, server)
}
