package runner

import (
	"context"
	"os"
	"path/filepath"
	goruntime "runtime"
	"sync"
	"testing"

	"github.com/dormouse-run/dormouse/agentd/internal/runtime"
)

// filled opens a shelf and waits until it is full; the returned function ends the filling.
func filled(t *testing.T, root string, size int) (*shelf, func()) {
	t.Helper()
	s, err := openShelf(root, size)
	must(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { s.fill(ctx, func(err error) { t.Error(err) }) })
	end := sync.OnceFunc(func() { cancel(); wg.Wait() })
	t.Cleanup(end)
	for ; len(s.ready) < size; goruntime.Gosched() {
		if t.Context().Err() != nil {
			t.Fatal("it is never full")
		}
	}
	return s, end
}

// A folder from the shelf is what a start makes where there is none, and is nobody else's.
func TestAFolderFromTheShelf(t *testing.T) {
	root := t.TempDir()
	s, end := filled(t, filepath.Join(root, "prepared"), 2)
	end()
	one, two, made := filepath.Join(root, "one"), filepath.Join(root, "two"), filepath.Join(root, "made")
	if !s.take(one) || !s.take(two) {
		t.Fatal("none was taken")
	}
	if s.take(filepath.Join(root, "three")) {
		t.Fatal("there were more than two")
	}
	must(t, furnish(made))
	for _, name := range []string{".", "fifo", "fifo/in", "fifo/out", "fifo/err"} {
		want, err := os.Lstat(filepath.Join(made, name))
		must(t, err)
		for _, dir := range []string{one, two} {
			got, err := os.Lstat(filepath.Join(dir, name))
			must(t, err)
			if got.Mode() != want.Mode() || os.SameFile(got, want) {
				t.Errorf("%s: %v, not %v", name, got.Mode(), want.Mode())
			}
		}
	}
	for _, name := range []string{specName, runtime.ConfigName} {
		info, err := os.Lstat(filepath.Join(one, name))
		if err != nil || info.Size() != 0 || info.Mode() != 0o600 {
			t.Errorf("%s: %v %v", name, info, err)
		}
	}
}

// A folder that is there, of a sandbox that is woken, is not replaced; what an earlier agentd kept ready goes.
func TestTheShelfLeavesWhatIsThere(t *testing.T) {
	root := t.TempDir()
	s, end := filled(t, filepath.Join(root, "prepared"), 1)
	dir := filepath.Join(root, "mine")
	must(t, os.Mkdir(dir, 0o700))
	if s.take(dir) {
		t.Error("an empty folder was replaced")
	}
	must(t, os.WriteFile(filepath.Join(dir, "kept"), nil, 0o600))
	if s.take(dir) || len(s.ready) != 1 {
		t.Error("a folder was replaced")
	}
	end()
	must(t, os.WriteFile(filepath.Join(root, "prepared", "half"), nil, 0o600))
	again, end := filled(t, filepath.Join(root, "prepared"), 1)
	end()
	left, err := os.ReadDir(filepath.Join(root, "prepared"))
	if err != nil || len(left) != 1 {
		t.Errorf("%v %v", left, err)
	}
	if !again.take(filepath.Join(root, "other")) {
		t.Error("nothing is ready")
	}
	// One that has gone meanwhile: the start makes its own.
	gone, end := filled(t, filepath.Join(root, "prepared"), 1)
	end()
	must(t, os.RemoveAll(filepath.Join(root, "prepared")))
	if gone.take(filepath.Join(root, "third")) {
		t.Error("what is gone was taken")
	}
}
