// Package pki is the identity of Dormouse's processes: certificates that say what their holder is
// (a coordinator, a node, a client of a tenant, an operator), and TLS configurations that check it.
//
// The identity is a URI in the certificate, dormouse://role/<role>/<name> or, for clients and
// operators, dormouse://role/<role>/<tenant>/<name>. Host names in a certificate are only for
// clients that know nothing of roles. A peer is accepted when its chain leads to the CA *and* its
// role (and name, where one is expected) is the right one: a node's certificate opens nothing that
// is the coordinator's, although the same CA signed both.
//
// Files are looked at on each handshake and read again when they changed, so certificates and CAs
// are replaced without a restart. While the new files do not fit together the old ones stay in use.
package pki

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net/url"
	"regexp"
	"strings"

	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
)

// Role is what the holder of a certificate is.
type Role string

// The roles. Clients and operators belong to a tenant; an operator may also do what concerns no tenant.
const (
	RoleCoordinator Role = "coordinator"
	RoleNode        Role = "node"
	RoleClient      Role = "client"
	RoleOperator    Role = "operator"
)

// tenanted tells whether the role's identity names a tenant.
func (r Role) tenanted() bool { return r == RoleClient || r == RoleOperator }

// Identity is who a certificate was given to.
type Identity struct {
	Role   Role
	Name   string
	Tenant string
}

const scheme = "dormouse"

var nameForm = regexp.MustCompile(`^[a-zA-Z0-9]([a-zA-Z0-9._-]{0,61}[a-zA-Z0-9])?$`)

// Check tells why the identity cannot be.
func (i Identity) Check() error {
	switch i.Role {
	case RoleCoordinator, RoleNode, RoleClient, RoleOperator:
	default:
		return fmt.Errorf("role %q: coordinator, node, client or operator", i.Role)
	}
	if !nameForm.MatchString(i.Name) {
		return fmt.Errorf("name %q: 1 to 63 letters, digits, '.', '_' and '-', beginning and ending with a letter or digit", i.Name)
	}
	if i.Role.tenanted() != (i.Tenant != "") {
		return fmt.Errorf("role %s: clients and operators have a tenant, others have none", i.Role)
	}
	if i.Tenant != "" && !nameForm.MatchString(i.Tenant) {
		return fmt.Errorf("tenant %q: the same form as a name", i.Tenant)
	}
	return nil
}

func (i Identity) String() string { return i.url().String() }

func (i Identity) url() *url.URL {
	p := "/" + string(i.Role) + "/"
	if i.Role.tenanted() {
		p += i.Tenant + "/"
	}
	return &url.URL{Scheme: scheme, Host: "role", Path: p + i.Name}
}

// IdentityOf reads the identity in a certificate. It does not verify the certificate.
func IdentityOf(cert *x509.Certificate) (Identity, error) {
	var found []*url.URL
	for _, u := range cert.URIs {
		if u.Scheme == scheme {
			found = append(found, u)
		}
	}
	if len(found) != 1 {
		return Identity{}, fmt.Errorf("the certificate has %d dormouse identities, exactly one is expected", len(found))
	}
	u := found[0]
	parts := strings.Split(strings.TrimPrefix(u.Path, "/"), "/")
	i := Identity{Role: Role(parts[0]), Name: parts[len(parts)-1]}
	if i.Role.tenanted() && len(parts) == 3 {
		i.Tenant = parts[1]
	}
	if err := i.Check(); err != nil || i.String() != u.String() {
		return Identity{}, errors.Join(fmt.Errorf("the certificate's identity %q is malformed", u), err)
	}
	return i, nil
}

// PeerIdentity gives the identity of the verified certificate of the peer of a gRPC call, if it
// showed one.
func PeerIdentity(ctx context.Context) (Identity, bool) {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return Identity{}, false
	}
	info, ok := p.AuthInfo.(credentials.TLSInfo)
	if !ok {
		return Identity{}, false
	}
	return StateIdentity(&info.State)
}

// StateIdentity gives the identity of the verified certificate of a connection, e.g. that of an HTTP
// request. The certificate must have been verified by a configuration of this package.
func StateIdentity(state *tls.ConnectionState) (Identity, bool) {
	if state == nil || len(state.PeerCertificates) == 0 {
		return Identity{}, false
	}
	i, err := IdentityOf(state.PeerCertificates[0])
	return i, err == nil
}
