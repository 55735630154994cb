package bench

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

func TestSample(t *testing.T) {
	var s Sample
	if s.Median() != 0 {
		t.Error("an empty sample has a median")
	}
	for i := range 100 {
		s.add(time.Duration(100-i) * time.Millisecond)
	}
	if s.Median() != 51 || s.at(0.95) != 96 || s.at(1) != 100 || s[0] != 100 {
		t.Errorf("median %v, p95 %v, most %v, first %v", s.Median(), s.at(0.95), s.at(1), s[0])
	}
}

func TestReportKeepsOtherResults(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"memory", "start", "memory"} {
		r := Result{Name: name, When: time.Unix(0, 0).UTC(), Rows: []Row{{What: "what of " + name, Value: 1, Unit: "x", AtMost: 2}}}
		if err := save(dir, r); err != nil {
			t.Fatal(err)
		}
	}
	data, err := os.ReadFile(filepath.Join(dir, "RESULTS.md"))
	if err != nil {
		t.Fatal(err)
	}
	text := string(data)
	if strings.Count(text, "what of memory") != 1 || strings.Index(text, "| start |") > strings.Index(text, "| memory |") ||
		!strings.Contains(text, "| at most 2 x | met | 1970-01-01 | unknown |") || !strings.Contains(text, "2 targets met, 0 missed") {
		t.Errorf("report:\n%s", text)
	}
}

func TestEveryNameHasABenchmark(t *testing.T) {
	if len(functions)+len(apart) != len(names) {
		t.Errorf("%d benchmarks, %d names", len(functions)+len(apart), len(names))
	}
	for _, n := range Names() {
		if functions[n] == nil && apart[n] == nil {
			t.Errorf("no benchmark %q", n)
		}
	}
}

func TestWaiter(t *testing.T) {
	path := filepath.Join(t.TempDir(), "waiter")
	if err := os.WriteFile(path, waiter(), 0o700); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), path)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	var exit *exec.ExitError
	if err := cmd.Wait(); !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGTERM {
		t.Errorf("told to end it ended with %v", err)
	}
}

func TestOneMemory(t *testing.T) {
	if me := os.Getpid(); !oneMemory(me, me) || oneMemory(me, os.Getppid()) {
		t.Error("this process has not its own memory alone")
	}
}
