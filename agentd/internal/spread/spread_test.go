package spread

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// The flag is there or the file system has no such flag; what is in the folder, and its mode, stay as they are, and it may be asked again.
func TestBelow(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		switch err := Below(dir); {
		case err == nil:
			if !marked(t, dir) {
				t.Fatal("the folder is not marked")
			}
		case errors.Is(err, unix.ENOTTY), errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.EINVAL):
			t.Logf("not on this file system: %v", err)
		default:
			t.Fatal(err)
		}
	}
	if err := os.Mkdir(filepath.Join(dir, "below"), 0o700); err != nil {
		t.Fatal(err)
	}
	if data, err := os.ReadFile(file); err != nil || string(data) != "x" {
		t.Fatalf("the file holds %q, %v", data, err)
	}
}

func marked(t *testing.T, dir string) bool {
	t.Helper()
	d, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = d.Close() }()
	flags, err := unix.IoctlGetUint32(int(d.Fd()), unix.FS_IOC_GETFLAGS)
	if err != nil {
		t.Fatal(err)
	}
	return flags&topFlag != 0
}

func TestBelowWhatIsNotThere(t *testing.T) {
	if err := Below(filepath.Join(t.TempDir(), "none")); !errors.Is(err, fs.ErrNotExist) {
		t.Fatalf("error = %v", err)
	}
}
