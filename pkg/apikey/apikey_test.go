package apikey

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/dormouse-run/dormouse/pkg/errs"
)

func TestKeyringFollowsItsFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "keys.yaml")
	key, entry, err := New("acme", RoleOperator, "for tests")
	if err != nil {
		t.Fatal(err)
	}
	if err := Write(file, []Entry{entry}); err != nil {
		t.Fatal(err)
	}
	raw, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(raw), key[len("dm_")+13:]) {
		t.Fatal("the secret is in the file")
	}
	if fi, err := os.Stat(file); err != nil || fi.Mode().Perm() != 0o600 {
		t.Fatalf("mode %v, %v", fi.Mode(), err)
	}
	ring, err := OpenKeyring(file, nil)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := ring.Check(key); err != nil || got.Tenant != "acme" || got.Role != RoleOperator || ID(key) != entry.ID {
		t.Fatalf("%+v %v", got, err)
	}
	for name, c := range map[string]struct {
		key    string
		reason errs.Reason
	}{
		"none":          {"", errs.CredentialsMissing},
		"not a key":     {"hello", errs.CredentialsInvalid},
		"wrong secret":  {key[:len(key)-4] + "AAAA", errs.CredentialsInvalid},
		"hash as key":   {entry.SHA256, errs.CredentialsInvalid},
		"another's":     {other(t), errs.CredentialsInvalid},
		"more after it": {key + "A", errs.CredentialsInvalid},
	} {
		_, err := ring.Check(c.key)
		if !errs.Has(err, c.reason) || c.key != "" && strings.Contains(err.Error(), c.key) {
			t.Errorf("%s: %v", name, err)
		}
	}
	second, e2, err := New("other", RoleUser, "")
	if err != nil {
		t.Fatal(err)
	}
	if err := Write(file, []Entry{e2}); err != nil {
		t.Fatal(err)
	}
	if _, err := ring.Check(second); err != nil {
		t.Errorf("the new key: %v", err)
	}
	if _, err := ring.Check(key); !errs.Has(err, errs.CredentialsInvalid) {
		t.Errorf("the revoked key: %v", err)
	}
	if err := os.WriteFile(file, []byte("keys: [{idd: x}]"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := ring.Check(second); err != nil {
		t.Errorf("a damaged file must leave the old keys in use: %v", err)
	}
	if _, err := OpenKeyring(file, nil); err == nil || !strings.Contains(err.Error(), "idd") {
		t.Errorf("an unknown field: %v", err)
	}
}

func other(t *testing.T) string {
	t.Helper()
	key, _, err := New("acme", RoleUser, "")
	if err != nil {
		t.Fatal(err)
	}
	return key
}

func TestBadRequestsAndHeaders(t *testing.T) {
	if _, _, err := New("../x", RoleUser, ""); err == nil {
		t.Error("a bad tenant")
	}
	if _, _, err := New("x", "root", ""); err == nil {
		t.Error("a bad role")
	}
	for in, want := range map[string]string{"Bearer abc": "abc", "bearer  abc ": "abc", "Basic abc": "", "abc": "", "": ""} {
		if got := FromBearer(in); got != want {
			t.Errorf("%q: %q", in, got)
		}
	}
	if e, err := Read(filepath.Join(t.TempDir(), "none")); err != nil || e != nil {
		t.Errorf("no file: %v %v", e, err)
	}
}
