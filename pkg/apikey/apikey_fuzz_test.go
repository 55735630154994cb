package apikey

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// FuzzKeys: a keys file, and a header, of any content.
func FuzzKeys(f *testing.F) {
	key, entry, err := New("acme", RoleUser, "")
	if err != nil {
		f.Fatal(err)
	}
	path := filepath.Join(f.TempDir(), "good.yaml")
	if err := Write(path, []Entry{entry}); err != nil {
		f.Fatal(err)
	}
	good, err := os.ReadFile(path)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(good, "Bearer "+key)
	f.Add(good, "bearer  "+strings.ToUpper(key))
	f.Add([]byte("keys: [{}]"), "Bearer dm_000000000000_")
	f.Add([]byte("keys: &a [*a]"), "")
	f.Add([]byte("a: &a [x,x]\nb: &b [*a,*a]\nc: &c [*b,*b]\nkeys: *c"), "Basic x")
	f.Fuzz(func(t *testing.T, file []byte, header string) {
		path := filepath.Join(t.TempDir(), "keys.yaml")
		if err := os.WriteFile(path, file, 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := Read(path); err != nil {
			return
		}
		ring, err := OpenKeyring(path, func(error) {})
		if err != nil {
			return
		}
		if e, err := ring.Check(FromBearer(header)); err == nil && !strings.Contains(header, e.ID) {
			t.Fatalf("%q opened the door of %s", header, e.Tenant)
		}
	})
}
