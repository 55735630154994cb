package runsc

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

func ok(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// What was replaced or removed is written anew: as many files are made as there are records at a time, and one.
func TestSparesAreWrittenAnew(t *testing.T) {
	dir := t.TempDir()
	ok(t, os.WriteFile(filepath.Join(dir, sparePrefix+"of an earlier driver"), nil, 0o600))
	s, err := openSpares(dir)
	ok(t, err)
	path := filepath.Join(dir, "a.json")
	for i := range 20 {
		staged, err := s.stage([]byte("first" + strings.Repeat(".", 20-i)))
		ok(t, err)
		ok(t, s.link(staged, path))
		if staged, err = s.stage([]byte("taken")); err != nil {
			t.Fatal(err)
		}
		if err := s.link(staged, path); !errors.Is(err, fs.ErrExist) {
			t.Fatalf("a name was given twice: %v", err)
		}
		if staged, err = s.stage([]byte("second")); err != nil {
			t.Fatal(err)
		}
		ok(t, s.replace(staged, path))
		if data, err := s.read(path); err != nil || string(data) != "second" {
			t.Fatalf("%q, %v", data, err)
		}
		ok(t, s.retire(path))
		if _, err := s.read(path); !errors.Is(err, fs.ErrNotExist) {
			t.Fatalf("a retired record is there: %v", err)
		}
		if err := s.retire(path); !errors.Is(err, fs.ErrNotExist) {
			t.Fatalf("retired twice: %v", err)
		}
	}
	entries, err := os.ReadDir(dir)
	ok(t, err)
	if len(entries) != 2 {
		t.Fatalf("%d files: %v", len(entries), entries)
	}
	staged, err := s.stage([]byte("late")) // its record was removed meanwhile
	ok(t, err)
	ok(t, s.replace(staged, path))
	if _, err = openSpares(dir); err != nil {
		t.Fatal(err)
	}
	if entries, err = os.ReadDir(dir); err != nil || len(entries) != 1 || entries[0].Name() != "a.json" {
		t.Fatalf("the next driver found and left %v, %v", entries, err)
	}
}

// A reader meets whole records only, and those of its own name.
func TestSparesAreNotReadHalf(t *testing.T) {
	s, err := openSpares(t.TempDir())
	ok(t, err)
	var all sync.WaitGroup
	for who := range 4 {
		path, said := filepath.Join(s.dir, fmt.Sprint(who, ".json")), fmt.Sprint(who)
		put := func(n int) {
			staged, err := s.stage([]byte(strings.Repeat(said, n)))
			if err == nil {
				err = s.replace(staged, path)
			}
			if err != nil {
				t.Error(err)
			}
		}
		put(1)
		all.Go(func() {
			for i := range 300 {
				put(1 + i%7*100)
			}
		})
		all.Go(func() {
			for range 300 {
				data, err := s.read(path)
				if n := len(data); err != nil || n == 0 || n != 1 && n%100 != 1 || string(data) != strings.Repeat(said, n) {
					t.Errorf("read %d bytes, %v: %.20q", n, err, data)
				}
			}
		})
	}
	all.Wait()
}
