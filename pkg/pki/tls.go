package pki

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"time"
)

// Files are where a process finds its certificate and whom it trusts. Cert and Key may be empty
// for a client that shows no certificate.
type Files struct {
	CA   string `yaml:"ca" usage:"file with the CAs that peers are verified against"`
	Cert string `yaml:"cert" usage:"file with the own certificate"`
	Key  string `yaml:"key" usage:"file with the key of the own certificate"`
}

// Source is the current content of Files. It is safe for concurrent use.
type Source struct {
	files    Files
	onReload func(error)

	mu     sync.Mutex
	stamps [3]stamp
	cert   *tls.Certificate
	pool   *x509.CertPool
}

// stamp tells whether a file was replaced or written.
type stamp struct {
	size  int64
	mtime time.Time
	inode os.FileInfo
}

func stampOf(file string) (stamp, error) {
	if file == "" {
		return stamp{}, nil
	}
	fi, err := os.Stat(file)
	if err != nil {
		return stamp{}, err
	}
	return stamp{size: fi.Size(), mtime: fi.ModTime(), inode: fi}, nil
}

func (s stamp) same(o stamp) bool {
	if s.inode == nil || o.inode == nil {
		return s.inode == o.inode
	}
	return s.size == o.size && s.mtime.Equal(o.mtime) && os.SameFile(s.inode, o.inode)
}

// Open reads the files once; they must fit together. Afterwards they are read again when they
// changed, and onReload (may be nil) is told of each attempt, with the error of one that failed.
func Open(files Files, onReload func(error)) (*Source, error) {
	if files.CA == "" || (files.Cert == "") != (files.Key == "") {
		return nil, errors.New("TLS needs a CA file, and a certificate and its key together")
	}
	s := &Source{files: files, onReload: onReload}
	if s.onReload == nil {
		s.onReload = func(error) {}
	}
	if err := s.load(); err != nil {
		return nil, err
	}
	return s, nil
}

// current gives the newest content that fits together.
func (s *Source) current() (*tls.Certificate, *x509.CertPool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i, f := range []string{s.files.CA, s.files.Cert, s.files.Key} {
		if now, err := stampOf(f); err != nil || !now.same(s.stamps[i]) {
			s.onReload(s.load())
			break
		}
	}
	return s.cert, s.pool
}

// load reads all files. The stamps are taken before reading, so that a change in between is seen
// the next time. On failure what was loaded before stays.
func (s *Source) load() error {
	var stamps [3]stamp
	for i, f := range []string{s.files.CA, s.files.Cert, s.files.Key} {
		var err error
		if stamps[i], err = stampOf(f); err != nil {
			return fmt.Errorf("TLS files: %w", err)
		}
	}
	ca, err := os.ReadFile(s.files.CA)
	if err != nil {
		return fmt.Errorf("TLS files: %w", err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(ca) {
		return fmt.Errorf("TLS files: %s has no certificate", s.files.CA)
	}
	var cert *tls.Certificate
	if s.files.Cert != "" {
		c, err := tls.LoadX509KeyPair(s.files.Cert, s.files.Key)
		if err != nil {
			return fmt.Errorf("TLS files: %s and %s: %w", s.files.Cert, s.files.Key, err)
		}
		cert = &c
	}
	s.stamps, s.cert, s.pool = stamps, cert, pool
	return nil
}

// Server gives a configuration that demands a client certificate of one of the roles.
func (s *Source) Server(allowed ...Role) *tls.Config { return s.server(true, allowed) }

// ServerOptional gives a configuration that takes clients without a certificate too: they must be
// known by something else, such as an API key. A certificate that is shown must be of a role.
func (s *Source) ServerOptional(allowed ...Role) *tls.Config { return s.server(false, allowed) }

// ServerAlone gives a configuration that asks for no client certificate: clients must be known by something else.
func (s *Source) ServerAlone() *tls.Config {
	cfg := s.server(false, nil)
	cfg.ClientAuth, cfg.VerifyConnection = tls.NoClientCert, nil
	return cfg
}

func (s *Source) server(required bool, allowed []Role) *tls.Config {
	auth := tls.RequestClientCert
	if required {
		auth = tls.RequireAnyClientCert
	}
	return &tls.Config{
		MinVersion: tls.VersionTLS13,
		ClientAuth: auth, // any here: the check below verifies the chain against the CAs of this moment
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
			cert, _ := s.current()
			if cert == nil {
				return nil, errors.New("no server certificate")
			}
			return cert, nil
		},
		VerifyConnection: func(state tls.ConnectionState) error {
			if len(state.PeerCertificates) == 0 {
				if required {
					return errors.New("a client certificate is required")
				}
				return nil
			}
			id, err := s.verify(state.PeerCertificates, x509.ExtKeyUsageClientAuth)
			if err != nil {
				return err
			}
			if !slices.Contains(allowed, id.Role) {
				return fmt.Errorf("a certificate of role %s is not allowed here", id.Role)
			}
			return nil
		},
	}
}

// Client gives a configuration that accepts only a server of the role and, unless it is empty, the
// name. The host name that was dialled does not matter, so it also serves unix sockets.
func (s *Source) Client(role Role, name string) *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS13,
		ServerName: string(role) + ".dormouse.internal", // only sent, never compared
		// The standard check is by host name and by CAs fixed when the configuration is made.
		// VerifyConnection does the whole of it instead: chain, usage, validity, role and name.
		InsecureSkipVerify:   true, //nolint:gosec // see above
		GetClientCertificate: s.clientCertificate,
		VerifyConnection: func(state tls.ConnectionState) error {
			id, err := s.verify(state.PeerCertificates, x509.ExtKeyUsageServerAuth)
			if err != nil {
				return err
			}
			if id.Role != role || name != "" && id.Name != name {
				return fmt.Errorf("the server is %s, expected was the %s %s", id, role, name)
			}
			return nil
		},
	}
}

func (s *Source) clientCertificate(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
	if cert, _ := s.current(); cert != nil {
		return cert, nil
	}
	return &tls.Certificate{}, nil // shows none
}

// verify checks the chain of a peer's certificates and gives the identity in the first.
func (s *Source) verify(chain []*x509.Certificate, usage x509.ExtKeyUsage) (Identity, error) {
	if len(chain) == 0 {
		return Identity{}, errors.New("the peer showed no certificate")
	}
	_, pool := s.current()
	between := x509.NewCertPool()
	for _, c := range chain[1:] {
		between.AddCert(c)
	}
	if _, err := chain[0].Verify(x509.VerifyOptions{Roots: pool, Intermediates: between, KeyUsages: []x509.ExtKeyUsage{usage}}); err != nil {
		return Identity{}, err
	}
	return IdentityOf(chain[0])
}

// ClientOf gives the configuration of a client that shows no certificate, and accepts only a server of the role and
// name that the CAs (PEM) stand for.
func ClientOf(ca []byte, role Role, name string) (*tls.Config, error) {
	s := &Source{onReload: func(error) {}, pool: x509.NewCertPool()}
	if !s.pool.AppendCertsFromPEM(ca) {
		return nil, errors.New("there is no certificate among the CAs")
	}
	return s.Client(role, name), nil
}

// ServerTLS opens the files and gives the configuration of a server that demands a certificate of one
// of the roles.
func ServerTLS(files Files, onReload func(error), allowed ...Role) (*tls.Config, error) {
	s, err := Open(files, onReload)
	if err != nil {
		return nil, err
	}
	if files.Cert == "" {
		return nil, errors.New("a server needs a certificate and its key")
	}
	return s.Server(allowed...), nil
}

// ClientTLS opens the files and gives the configuration of a client that accepts only a server of
// the role and, unless it is empty, the name.
func ClientTLS(files Files, onReload func(error), role Role, name string) (*tls.Config, error) {
	s, err := Open(files, onReload)
	if err != nil {
		return nil, err
	}
	return s.Client(role, name), nil
}
