package pki

import (
	"crypto/x509"
	"net/url"
	"os"
	"path/filepath"
	"testing"
)

// FuzzIdentity: what a certificate says of its bearer is an identity that checks, or nothing.
func FuzzIdentity(f *testing.F) {
	f.Add((Identity{Role: RoleNode, Name: "node-1"}).String(), "")
	f.Add((Identity{Role: RoleClient, Name: "c", Tenant: "acme"}).String(), "")
	f.Add("spiffe://dormouse/client/../operator/x", "dormouse://%2e%2e/a")
	f.Fuzz(func(t *testing.T, one, two string) {
		cert := &x509.Certificate{}
		for _, text := range []string{one, two} {
			if u, err := url.Parse(text); err == nil && text != "" {
				cert.URIs = append(cert.URIs, u)
			}
		}
		id, err := IdentityOf(cert)
		if err != nil {
			return
		}
		if err := id.Check(); err != nil {
			t.Fatalf("%q gives %v: %v", one, id, err)
		}
		if again, err := url.Parse(id.String()); err != nil {
			t.Fatal(err)
		} else if back, err := IdentityOf(&x509.Certificate{URIs: []*url.URL{again}}); err != nil || back != id {
			t.Fatalf("%v became %v, %v", id, back, err)
		}
	})
}

// FuzzFiles: certificates and keys of any content are refused, never worse.
func FuzzFiles(f *testing.F) {
	ca, err := NewCA("x")
	if err != nil {
		f.Fatal(err)
	}
	f.Add(ca.CertPEM(), []byte("-----BEGIN EC PRIVATE KEY-----\nAAAA\n-----END EC PRIVATE KEY-----\n"))
	f.Add([]byte("-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----\n"), []byte{})
	f.Fuzz(func(t *testing.T, cert, key []byte) {
		dir := t.TempDir()
		files := Files{CA: filepath.Join(dir, "ca"), Cert: filepath.Join(dir, "cert"), Key: filepath.Join(dir, "key")}
		for path, data := range map[string][]byte{files.CA: cert, files.Cert: cert, files.Key: key} {
			if err := os.WriteFile(path, data, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		_, _ = LoadCA(files.Cert, files.Key)
		_, _ = Open(files, func(error) {})
	})
}
