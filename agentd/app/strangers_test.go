package app

import (
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/dormouse-run/dormouse/pkg/pki"
	"github.com/dormouse-run/dormouse/pkg/wire"
	"github.com/dormouse-run/dormouse/test/stack"
)

// strangers are peers that are not the coordinator: without TLS, without a certificate, with a node's own, a
// client's, and with a coordinator's of another CA.
func strangers(t *testing.T, b *bench) map[string]credentials.TransportCredentials {
	t.Helper()
	as := func(files pki.Files) credentials.TransportCredentials {
		tls, err := pki.ClientTLS(files, nil, pki.RoleNode, stack.NodeName(1))
		must(t, err)
		return credentials.NewTLS(tls)
	}
	client, err := b.stack.Issue(pki.Identity{Role: pki.RoleClient, Tenant: "dev", Name: "someone"})
	must(t, err)
	other, err := pki.NewCA("another")
	must(t, err)
	pair, err := other.Issue(pki.Identity{Role: pki.RoleCoordinator, Name: "coordinator-1"})
	must(t, err)
	dir := t.TempDir()
	foreign := pki.Files{CA: b.stack.NodeTLS(1).CA, Cert: dir + "/cert.pem", Key: dir + "/key.pem"}
	must(t, pair.Save(foreign.Cert, foreign.Key))
	return map[string]credentials.TransportCredentials{
		"a peer without TLS": insecure.NewCredentials(), "a peer without a certificate": as(pki.Files{CA: foreign.CA}),
		"a node": as(b.stack.NodeTLS(1)), "a client": as(client), "a coordinator of another CA": as(foreign),
	}
}

func dialAs(t *testing.T, target string, creds credentials.TransportCredentials) *grpc.ClientConn {
	t.Helper()
	conn, err := grpc.NewClient(target, append(wire.DialOptions(), grpc.WithTransportCredentials(creds))...)
	must(t, err)
	t.Cleanup(func() { conn.Close() })
	return conn
}
