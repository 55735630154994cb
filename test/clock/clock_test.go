package clock

import (
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

var offsets = []time.Duration{0, time.Hour, -time.Hour, time.Second, -100 * 24 * time.Hour, 0}

// near tells whether a clock that is off by d says about that; how long the test takes is not judged.
func near(t *testing.T, what string, at time.Time, before time.Time, d time.Duration) {
	t.Helper()
	if at.Before(before.Add(d)) || at.After(time.Now().Add(d)) {
		t.Errorf("%s, moved by %s, says %s; asked at %s", what, d, at, before)
	}
}

func TestGoProgram(t *testing.T) {
	dir := t.TempDir()
	binary, faults := filepath.Join(dir, "main"), filepath.Join(dir, "fault")
	file := faults + ".clock"
	build := exec.CommandContext(t.Context(), "go", append(append([]string{"build", "-o", binary}, BuildFlags()...), "./testdata/asked")...)
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	cmd := exec.CommandContext(t.Context(), binary, faults)
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	last := int64(-1)
	for _, d := range offsets {
		if err := Set(file, d); err != nil {
			t.Fatal(err)
		}
		before := time.Now()
		if _, err := in.Write([]byte("\n")); err != nil {
			t.Fatal(err)
		}
		var wall, passed int64
		line := make([]byte, 64)
		n, err := out.Read(line)
		if err != nil {
			t.Fatal(err)
		}
		words := strings.Fields(string(line[:n]))
		if len(words) != 2 {
			t.Fatalf("it says %q", line[:n])
		}
		if wall, err = strconv.ParseInt(words[0], 10, 64); err != nil {
			t.Fatal(err)
		}
		if passed, err = strconv.ParseInt(words[1], 10, 64); err != nil {
			t.Fatal(err)
		}
		near(t, "a Go program", time.Unix(0, wall), before, d)
		if passed <= last || passed > int64(10*time.Minute) {
			t.Errorf("moved by %s, its monotonic clock went from %d to %d", d, last, passed)
		}
		last = passed
	}
	if err := in.Close(); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Fatal(err)
	}
}

func TestCProgram(t *testing.T) {
	dir := t.TempDir()
	library, err := BuildShim(t.Context(), dir)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, "clock")
	for _, d := range offsets {
		if err := Set(file, d); err != nil {
			t.Fatal(err)
		}
		before := time.Now()
		cmd := exec.CommandContext(t.Context(), "date", "+%s.%N")
		cmd.Env = append(os.Environ(), Env(library, file)...)
		out, err := cmd.Output()
		if err != nil {
			t.Fatal(err)
		}
		sec, nsec, ok := strings.Cut(strings.TrimSpace(string(out)), ".")
		s, err1 := strconv.ParseInt(sec, 10, 64)
		n, err2 := strconv.ParseInt(nsec, 10, 64)
		if !ok || err1 != nil || err2 != nil {
			t.Fatalf("it says %q", out)
		}
		near(t, "a C program", time.Unix(s, n), before, d)
	}
}
