package auth

import (
	"context"
	"log/slog"
	"path/filepath"
	"testing"

	"google.golang.org/grpc/metadata"

	"github.com/dormouse-run/dormouse/pkg/apikey"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/pki"
)

func call(value ...string) context.Context {
	md := metadata.MD{}
	for _, v := range value {
		md.Append("authorization", v)
	}
	return metadata.NewIncomingContext(context.Background(), md)
}

func TestBearer(t *testing.T) {
	text, entry, err := apikey.New("acme", apikey.RoleUser, "")
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "keys.yaml")
	if err := apikey.Write(path, []apikey.Entry{entry}); err != nil {
		t.Fatal(err)
	}
	a, err := Open(path, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	id, err := a.Authenticate(call("Bearer " + text))
	if err != nil || id.Tenant != "acme" || id.Has(RoleOperator) || !id.Has(RoleUser) {
		t.Fatalf("%+v, %v", id, err)
	}
	if _, err := Operator(With(context.Background(), id)); !errs.Has(err, errs.NotAllowed) {
		t.Fatalf("a user is no operator: %v", err)
	}
	for name, ctx := range map[string]context.Context{
		"wrong secret": call("Bearer " + text + "x"), "two": call("Bearer "+text, "Bearer "+text),
	} {
		if _, err := a.Authenticate(ctx); !errs.Has(err, errs.CredentialsInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for name, ctx := range map[string]context.Context{"none": call(), "no scheme": call(text)} {
		if _, err := a.Authenticate(ctx); !errs.Has(err, errs.CredentialsMissing) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestCertificate(t *testing.T) {
	if _, err := Certificate(pki.Identity{Role: pki.RoleNode, Name: "n1"}); !errs.Has(err, errs.NotAllowed) {
		t.Errorf("a node: %v", err)
	}
	id, err := Certificate(pki.Identity{Role: pki.RoleOperator, Name: "op", Tenant: "acme"})
	if err != nil || !id.Has(RoleOperator) || id.Tenant != "acme" {
		t.Errorf("%+v, %v", id, err)
	}
}
