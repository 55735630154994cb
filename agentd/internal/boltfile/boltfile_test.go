package boltfile

import (
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	bolt "go.etcd.io/bbolt"
)

// Each kind of reason is told apart, since one is mended by moving the file away and the others are not.
func TestReasons(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "a.db")
	db, err := Open(path, time.Second)
	if err != nil {
		t.Fatal(err)
	}
	if err := db.Update(func(tx *bolt.Tx) error { _, err := tx.CreateBucket([]byte("b")); return err }); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(path, time.Millisecond); !errors.Is(err, ErrInUse) || errors.Is(err, ErrDamaged) {
		t.Errorf("a file that is open gave %v", err)
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	again, err := Open(path, time.Second)
	if err != nil {
		t.Fatalf("a good file gave %v", err)
	}
	if err := again.Close(); err != nil {
		t.Fatal(err)
	}
	for name, content := range map[string][]byte{"empty": {}, "cut": whole[:len(whole)/2+1], "foreign": []byte("no database")} {
		bad := filepath.Join(dir, name)
		if err := os.WriteFile(bad, content, 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := Open(bad, time.Second); !errors.Is(err, ErrDamaged) {
			t.Errorf("%s gave %v", name, err)
		}
		if after, err := os.ReadFile(bad); err != nil || string(after) != string(content) {
			t.Errorf("%s was changed, %v", name, err)
		}
	}
	for _, host := range []string{filepath.Join(path, "below-a-file"), filepath.Join(dir, "nowhere", "a.db")} {
		var no syscall.Errno
		if _, err := Open(host, time.Second); !errors.As(err, &no) || errors.Is(err, ErrDamaged) || errors.Is(err, ErrInUse) {
			t.Errorf("%s gave %v", host, err)
		}
	}
}
