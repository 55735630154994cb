package pki

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"time"

	"github.com/dormouse-run/dormouse/pkg/durable"
)

// Validity of what is made here.
const (
	CAValidity   = 10 * 365 * 24 * time.Hour
	CertValidity = 365 * 24 * time.Hour
	backdate     = 24 * time.Hour // for clocks that lag, or are set back
)

// CA signs certificates.
type CA struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

// Pair is a certificate and its key, in PEM.
type Pair struct {
	Cert []byte
	Key  []byte
}

// NewCA makes a certificate authority with a key of its own.
func NewCA(name string) (*CA, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("make the CA's key: %w", err)
	}
	tmpl, err := template(name, CAValidity)
	if err != nil {
		return nil, err
	}
	tmpl.IsCA, tmpl.BasicConstraintsValid, tmpl.MaxPathLenZero = true, true, true
	tmpl.KeyUsage = x509.KeyUsageCertSign | x509.KeyUsageCRLSign
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, key.Public(), key)
	if err != nil {
		return nil, fmt.Errorf("sign the CA: %w", err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, fmt.Errorf("read back the CA: %w", err)
	}
	return &CA{cert: cert, key: key}, nil
}

// LoadCA reads a CA from its files.
func LoadCA(certFile, keyFile string) (*CA, error) {
	cert, err := readPEM(certFile, "CERTIFICATE")
	if err != nil {
		return nil, err
	}
	c, err := x509.ParseCertificate(cert)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", certFile, err)
	}
	raw, err := readPEM(keyFile, "PRIVATE KEY")
	if err != nil {
		return nil, err
	}
	k, err := x509.ParsePKCS8PrivateKey(raw)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", keyFile, err)
	}
	key, ok := k.(*ecdsa.PrivateKey)
	if !ok {
		return nil, fmt.Errorf("%s: an ECDSA key is expected", keyFile)
	}
	if !key.PublicKey.Equal(c.PublicKey) || !c.IsCA {
		return nil, fmt.Errorf("%s is not the CA certificate of the key in %s", certFile, keyFile)
	}
	return &CA{cert: c, key: key}, nil
}

func readPEM(file, kind string) ([]byte, error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	block, _ := pem.Decode(data)
	if block == nil || block.Type != kind {
		return nil, fmt.Errorf("%s: no PEM block %q", file, kind)
	}
	return block.Bytes, nil
}

// CertPEM gives the CA's certificate, for those who verify.
func (ca *CA) CertPEM() []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: ca.cert.Raw})
}

// Save writes the CA's certificate and key.
func (ca *CA) Save(certFile, keyFile string) error {
	key, err := keyPEM(ca.key)
	if err != nil {
		return err
	}
	return Pair{Cert: ca.CertPEM(), Key: key}.Save(certFile, keyFile)
}

// Issue makes a certificate for both ends of a connection. The sans are host names and addresses
// for clients that verify by those.
func (ca *CA) Issue(id Identity, sans ...string) (Pair, error) {
	return ca.IssueFor(CertValidity, id, sans...)
}

// IssueFor is Issue with a validity.
func (ca *CA) IssueFor(validity time.Duration, id Identity, sans ...string) (Pair, error) {
	if err := id.Check(); err != nil {
		return Pair{}, err
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return Pair{}, fmt.Errorf("make a key: %w", err)
	}
	tmpl, err := template(id.Name, validity)
	if err != nil {
		return Pair{}, err
	}
	tmpl.KeyUsage = x509.KeyUsageDigitalSignature
	tmpl.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
	if !id.Role.tenanted() {
		tmpl.ExtKeyUsage = append(tmpl.ExtKeyUsage, x509.ExtKeyUsageServerAuth)
	}
	tmpl.URIs = []*url.URL{id.url()}
	for _, s := range sans {
		if ip := net.ParseIP(s); ip != nil {
			tmpl.IPAddresses = append(tmpl.IPAddresses, ip)
		} else {
			tmpl.DNSNames = append(tmpl.DNSNames, s)
		}
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, ca.cert, key.Public(), ca.key)
	if err != nil {
		return Pair{}, fmt.Errorf("sign the certificate of %s: %w", id, err)
	}
	p := Pair{Cert: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})}
	p.Key, err = keyPEM(key)
	return p, err
}

func template(name string, validity time.Duration) (*x509.Certificate, error) {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
	if err != nil {
		return nil, fmt.Errorf("make a serial number: %w", err)
	}
	now := time.Now()
	return &x509.Certificate{
		SerialNumber: serial, Subject: pkix.Name{CommonName: name, Organization: []string{"dormouse"}},
		NotBefore: now.Add(-backdate), NotAfter: now.Add(validity),
	}, nil
}

func keyPEM(key *ecdsa.PrivateKey) ([]byte, error) {
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, fmt.Errorf("encode a key: %w", err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}), nil
}

// Save writes both files, each replaced as a whole, readable by the owner only. The key comes
// first: who reads in between finds a pair that does not fit and keeps what it has.
func (p Pair) Save(certFile, keyFile string) error {
	return errors.Join(writeFile(keyFile, p.Key), writeFile(certFile, p.Cert))
}

// writeFile replaces a file as a whole, with mode 0600, in a folder that only the owner enters if it
// has to be made.
func writeFile(file string, data []byte) error {
	dir := filepath.Dir(file)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	return durable.WriteFile(file, data)
}
