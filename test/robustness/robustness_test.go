package robustness

import (
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	code := m.Run()
	if err := goleak.Find(); err != nil {
		fmt.Fprintln(os.Stderr, "goroutines left:", err)
		code = 1
	}
	if binaries.dir != "" {
		_ = os.RemoveAll(binaries.dir) // of this run
	}
	os.Exit(code)
}

// binaries are the coordinators of this run.
var binaries struct {
	sync.Mutex
	dir  string
	made map[string]string
}

// coordinator builds the coordinator with the tags, once.
func coordinator(t *testing.T, tags string) string {
	t.Helper()
	binaries.Lock()
	defer binaries.Unlock()
	if made := binaries.made[tags]; made != "" {
		return made
	}
	if binaries.dir == "" {
		dir, err := os.MkdirTemp("", "dmrbin")
		if err != nil {
			t.Fatal(err)
		}
		binaries.dir, binaries.made = dir, make(map[string]string)
	}
	out := filepath.Join(binaries.dir, "coordinator"+tags)
	cmd := exec.CommandContext(t.Context(), "go", "build", "-trimpath", "-buildvcs=false", "-tags", tags, "-o", out, "../../coordinator/cmd/coordinator")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if text, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build the coordinator: %v\n%s", err, text)
	}
	binaries.made[tags] = out
	return out
}

func number(t *testing.T, name string, otherwise int) int {
	t.Helper()
	text := os.Getenv(name)
	if text == "" {
		return otherwise
	}
	n, err := strconv.Atoi(text)
	if err != nil {
		t.Fatalf("%s=%q is no number", name, text)
	}
	return n
}

// lanes is how many seeds are run side by side: a system that waits for a fault to pass leaves the cores to others.
const lanes = 3

// operations and faults of each run.
const operations, faultsOfRun = 1000, 5

// seeds gives the seeds of this run: SEED alone, or SEEDS of them (20) from 1, or new ones for DURATION.
func seeds(t *testing.T) <-chan uint64 {
	t.Helper()
	only, count, text := number(t, "SEED", 0), number(t, "SEEDS", 20), os.Getenv("DURATION")
	first, end := uint64(1), time.Time{}
	switch {
	case only > 0:
		first, count = uint64(only), 1
	case text != "":
		long, err := time.ParseDuration(text)
		if err != nil {
			t.Fatalf("DURATION: %v", err)
		}
		now := time.Now()
		first, count, end = uint64(now.Unix()), math.MaxInt, now.Add(long)
	}
	all := make(chan uint64)
	go func() { // ends with the test
		defer close(all)
		for n := range uint64(count) {
			if !end.IsZero() && time.Now().After(end) {
				return
			}
			select {
			case all <- first + n:
			case <-t.Context().Done():
				return
			}
		}
	}()
	return all
}

// TestC30_HistoriesAreLinearizable runs the seeds. OUT is a folder for the reports, if any are wanted; ONLY is the kind of fault that all are to be of; with LOSSES
// or DURATION faults after which something is lost are among them.
func TestC30_HistoriesAreLinearizable(t *testing.T) {
	binary, out := coordinator(t, ""), os.Getenv("OUT")
	if out == "" {
		out = t.TempDir()
	}
	var mu sync.Mutex
	var reports []*Report
	var troubles []string // told last: an output may be cut
	trouble := func(format string, args ...any) {
		mu.Lock()
		defer mu.Unlock()
		troubles = append(troubles, fmt.Sprintf(format, args...))
	}
	var group sync.WaitGroup
	next := seeds(t)
	for range lanes {
		group.Go(func() {
			for seed := range next {
				dir := filepath.Join(out, strconv.FormatUint(seed, 10))
				report, err := Run(t.Context(), Options{Seed: seed, Operations: operations, Faults: faultsOfRun, Only: os.Getenv("ONLY"), Losses: os.Getenv("LOSSES") != "" || os.Getenv("DURATION") != "", FaultPatience: time.Duration(number(t, "PATIENCE", 0)) * time.Second, Binary: binary, Out: dir})
				if err != nil {
					trouble("seed %d: %v", seed, err)
					continue
				}
				if err := report.Save(dir); err != nil {
					trouble("seed %d: %v", seed, err)
				}
				t.Log(report.Line())
				if !report.Good() {
					trouble("%s\nmake robustness SEED=%d OUT=folder runs it again", report.Trouble(), seed)
				}
				if report.Operations < operations {
					trouble("seed %d: only %d operations", seed, report.Operations)
				}
				mu.Lock()
				reports = append(reports, report)
				mu.Unlock()
			}
		})
	}
	group.Wait()
	t.Logf("the longest times without a mutation that succeeded:\n%s", Outages(reports))
	for _, what := range troubles {
		t.Error(what)
	}
}
