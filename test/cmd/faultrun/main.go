// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

// Command faultrun starts a cluster of three nodes, does to it what goes wrong in a cluster's life, and checks that nothing was
// lost; see package faultrun.
//
//	faultrun [--subjects 16] [--heap 64] [--file 32] [--points none|sample|all] [--out FOLDER]
//
// It ends with 1 if a check did not hold. The crash points are those of test/crash, which is run from the checkout.
package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/dormouse-run/dormouse/test/faultrun"
	"github.com/dormouse-run/dormouse/test/load"
	"github.com/dormouse-run/dormouse/test/load/local"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	var opts faultrun.Options
	flag.IntVar(&opts.Subjects, "subjects", 16, "how many sandboxes")
	flag.IntVar(&opts.HeapMiB, "heap", 64, "MiB of random memory in each")
	flag.IntVar(&opts.FileMiB, "file", 32, "MiB in the private file of each")
	points := flag.String("points", "sample", "crash points of agentd to kill it at: none, a sample, or all (a quarter of an hour)")
	out := flag.String("out", "", "folder of the report (fault-runs/TIME)")
	flag.Parse()
	if *out == "" {
		*out = filepath.Join("fault-runs", time.Now().UTC().Format("20060102-150405"))
	}
	err := run(ctx, opts, *points, *out)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "faultrun:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, opts faultrun.Options, points, out string) (err error) {
	switch points {
	case "none":
	case "sample", "all":
		opts.Points = func(ctx context.Context) (string, error) { return crashPoints(ctx, points == "all") }
	default:
		return fmt.Errorf("--points is %q; it must be none, sample or all", points)
	}
	began := time.Now()
	opts.Logf = func(format string, args ...any) {
		fmt.Printf("%6.1fs  %s\n", time.Since(began).Seconds(), fmt.Sprintf(format, args...))
	}
	c, err := local.Up(ctx, load.Plan{Subjects: opts.Subjects, Nodes: faultrun.Nodes}, opts.Logf)
	if err != nil {
		return err
	}
	c.SetLogf(func(string, ...any) {})
	defer func() { err = errors.Join(err, c.End(ctx)) }()
	report, err := faultrun.Run(ctx, c, opts)
	if err != nil {
		return err
	}
	fmt.Printf("\n%sreport: %s\n", report, filepath.Join(out, "report.html"))
	if err := report.Write(out); err != nil {
		return err
	}
	if !report.Passed() {
		return errors.New("the fault run failed")
	}
	return nil
}

// crashPoints runs the rows of the crash matrix, each of which kills a daemon at a point and starts it again.
func crashPoints(ctx context.Context, all bool) (string, error) {
	cmd := exec.CommandContext(ctx, "go", "test", "-count=1", "-v", "-timeout=60m", "-run=^TestF10CrashMatrix$", "./test/crash")
	cmd.Env = os.Environ()
	if all {
		cmd.Env = append(cmd.Env, "CRASH_ALL=1")
	}
	text, err := cmd.CombinedOutput()
	passed := bytes.Count(text, []byte("    --- PASS: "))
	var failed []string
	for line := range strings.Lines(string(text)) {
		if name, ok := strings.CutPrefix(strings.TrimSpace(line), "--- FAIL: TestF10CrashMatrix/"); ok {
			failed = append(failed, name)
		}
	}
	found := fmt.Sprintf("%d rows passed, %d failed %v", passed, len(failed), failed)
	if err == nil && passed == 0 {
		err = errors.New("no row was run")
	}
	return found, err
}
