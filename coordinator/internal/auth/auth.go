// Package auth tells who calls the public API, and what they may do.
//
// A caller shows an API key ("authorization: Bearer dm_<id>_<secret>", see pkg/apikey) or a client
// certificate. A call with neither is refused, whatever the listener; certificates of nodes and
// coordinators are not for this API.
package auth

import (
	"context"
	"log/slog"
	"slices"

	"google.golang.org/grpc/metadata"

	"github.com/dormouse-run/dormouse/pkg/apikey"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/pki"
)

// Role is what a caller may do.
type Role string

// RoleUser acts on the objects of its tenant. RoleOperator also on nodes and images.
const (
	RoleUser     Role = "user"
	RoleOperator Role = "operator"
)

// Identity is an authenticated caller.
type Identity struct {
	Tenant  string
	Subject string // the key's id or the certificate's name, for the log
	Roles   []Role
}

// Has tells whether the caller has the role.
func (i Identity) Has(r Role) bool { return slices.Contains(i.Roles, r) }

type contextKey struct{}

// With puts the identity into the context.
func With(ctx context.Context, i Identity) context.Context {
	return context.WithValue(ctx, contextKey{}, i)
}

// From gives the identity in the context. Without one the call was not authenticated.
func From(ctx context.Context) (Identity, error) {
	i, ok := ctx.Value(contextKey{}).(Identity)
	if !ok {
		return i, missing()
	}
	return i, nil
}

// Operator gives the identity, if it may act on what concerns no tenant.
func Operator(ctx context.Context) (Identity, error) {
	i, err := From(ctx)
	if err == nil && !i.Has(RoleOperator) {
		err = errs.New(errs.NotAllowed, "this needs the role operator")
	}
	return i, err
}

func missing() error {
	return errs.New(errs.CredentialsMissing, "show an API key (authorization: Bearer dm_...) or a client certificate")
}

// Authenticator checks credentials.
type Authenticator struct{ keys *apikey.Keyring }

// Open reads the keys file, which is read again when it changes; "" means that there are no keys,
// only certificates.
func Open(path string, log *slog.Logger) (*Authenticator, error) {
	if path == "" {
		return &Authenticator{}, nil
	}
	ring, err := apikey.OpenKeyring(path, func(err error) {
		if err != nil {
			log.Error("the keys file was not read again; the keys before stay in force", "error", err)
		} else {
			log.Info("the keys file was read again")
		}
	})
	return &Authenticator{ring}, err
}

// Authenticate tells who makes the gRPC call.
func (a *Authenticator) Authenticate(ctx context.Context) (Identity, error) {
	md, _ := metadata.FromIncomingContext(ctx)
	if values := md.Get("authorization"); len(values) > 0 {
		if len(values) != 1 || a.keys == nil {
			return Identity{}, errs.New(errs.CredentialsInvalid, "the API key is not known here; send one authorization header")
		}
		e, err := a.keys.Check(apikey.FromBearer(values[0]))
		if err != nil {
			return Identity{}, err
		}
		id := Identity{Tenant: e.Tenant, Subject: "key:" + e.ID, Roles: []Role{RoleUser}}
		if e.Role == apikey.RoleOperator {
			id.Roles = append(id.Roles, RoleOperator)
		}
		return id, nil
	}
	if id, ok := pki.PeerIdentity(ctx); ok {
		return Certificate(id)
	}
	return Identity{}, missing()
}

// Certificate gives the identity of a verified client certificate.
func Certificate(id pki.Identity) (Identity, error) {
	i := Identity{Tenant: id.Tenant, Subject: "cert:" + id.Name, Roles: []Role{RoleUser}}
	switch id.Role {
	case pki.RoleClient:
		return i, nil
	case pki.RoleOperator:
		i.Roles = append(i.Roles, RoleOperator)
		return i, nil
	}
	return Identity{}, errs.New(errs.NotAllowed, "a certificate of role %s is not for this API; use that of a client, or an API key", id.Role)
}
