package room

import (
	"os"
	"path/filepath"
	"testing"
)

func TestReadMachine(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) {
		t.Helper()
		ok(t, os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o755))
		ok(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600))
	}
	if _, err := ReadMachine(dir); err == nil {
		t.Fatal("no figures were read")
	}
	write("meminfo", "MemTotal:       24684096 kB\nMemFree:        15923572 kB\nMemAvailable:   23802564 kB\nBuffers: x kB\n")
	m, err := ReadMachine(dir)
	if want := (Machine{Total: 24684096 << 10, Available: 23802564 << 10}); err != nil || m != want {
		t.Fatalf("%+v, %v", m, err)
	}
	write("pressure/memory", "some avg10=12.50 avg60=0.14 avg300=0.07 total=13243260\nfull avg10=1.00 avg60=0.08 avg300=0.05 total=4766587\n")
	if m, err = ReadMachine(dir); err != nil || m.Stalled != 12.5 {
		t.Fatalf("%+v, %v", m, err)
	}
	for _, bad := range []string{"MemTotal: 1 kB\n", "MemTotal: 1 kB\nMemAvailable: lots\n"} {
		write("meminfo", bad)
		if _, err := ReadMachine(dir); err == nil {
			t.Errorf("%q was read", bad)
		}
	}
	if m, err = ReadMachine("/proc"); err != nil || m.Total <= 0 || m.Available <= 0 || m.Available > m.Total {
		t.Fatalf("this machine: %+v, %v", m, err)
	}
}
