// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

// Command faultrun starts a cluster of three nodes, does to it what goes wrong in a cluster's life, and checks that nothing was
// lost; see package faultrun.
//
//	faultrun [--subjects 16] [--heap 64] [--file 32] [--points none|sample|all] [--out FOLDER]
//	faultrun publish RUN NAME
//
// It ends with 1 if a check did not hold. The crash points are those of test/crash, which is run from the checkout.
package main

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
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
	if len(os.Args) > 1 && os.Args[1] == "publish" {
		if err := publish(os.Args[2:]); err != nil {
			fmt.Fprintln(os.Stderr, "faultrun:", err)
			os.Exit(1)
		}
		return
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	var opts faultrun.Options
	flag.IntVar(&opts.Subjects, "subjects", 16, "how many sandboxes")
	flag.IntVar(&opts.HeapMiB, "heap", 64, "MiB of random memory in each")
	flag.IntVar(&opts.FileMiB, "file", 32, "MiB in the private file of each")
	points := flag.String("points", "sample", "crash points: none, a sample of all that there are, or all of agentd in a start, checkpoint, restore and deletion (some ten minutes)")
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
		opts.Points = func(ctx context.Context) (string, error) { return crashPoints(ctx, points == "all", opts.Logf) }
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

// allPoints are the rows of the crash matrix in which agentd is killed at a point of a start, a checkpoint, a restore or a deletion (F10).
const allPoints = "^agentd1/(create|checkpoint|restore|delete)/"

// crashPoints runs rows of the crash matrix, each of which kills a daemon at a point and starts it again: those of allPoints, or a
// sample of the whole matrix.
func crashPoints(ctx context.Context, all bool, logf func(format string, args ...any)) (string, error) {
	cmd := exec.CommandContext(ctx, "go", "test", "-count=1", "-v", "-timeout=60m", "-run=^TestF10CrashMatrix$", "./test/crash")
	cmd.Env = os.Environ()
	if all {
		cmd.Env = append(cmd.Env, "CRASH_POINT="+allPoints)
	}
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		return "", err
	}
	if err := cmd.Start(); err != nil {
		return "", err
	}
	rows := rowsOf(out, logf)
	err = cmd.Wait()
	if err == nil && rows.passed == 0 {
		err = errors.New("no row was run")
	}
	return fmt.Sprintf("%d rows passed, %d failed %v", rows.passed, len(rows.failed), rows.failed), err
}

// rows of the crash matrix that were run.
type rows struct {
	passed int
	failed []string
}

// rowsOf reads what the test says, tells which row it is at, and what a row that failed had to say.
func rowsOf(out io.Reader, logf func(format string, args ...any)) (r rows) {
	const test = "TestF10CrashMatrix/"
	begun, said := 0, []string(nil)
	for scan := bufio.NewScanner(out); scan.Scan(); {
		line := strings.TrimSpace(scan.Text())
		switch {
		case strings.HasPrefix(line, "=== RUN") && strings.Contains(line, test):
			if begun++; begun%10 == 1 {
				_, row, _ := strings.Cut(line, test)
				logf("crash point %d: %s", begun, row)
			}
			said = nil
		case strings.HasPrefix(line, "--- PASS: "+test):
			r.passed++
		case strings.HasPrefix(line, "--- FAIL: "+test):
			name, _, _ := strings.Cut(strings.TrimPrefix(line, "--- FAIL: "+test), " ")
			r.failed = append(r.failed, name)
		case strings.Contains(line, "_test.go:") && !strings.HasSuffix(line, " s"):
			if said = append(said, line); len(said) <= 5 {
				logf("  %s", line)
			}
		}
	}
	return r
}

// publish keeps the report of a run where others see it.
func publish(args []string) error {
	if len(args) != 2 {
		return errors.New("want the folder of a run and a name: faultrun publish fault-runs/TIME docs/results/fault-run")
	}
	report, err := faultrun.Read(args[0])
	if err != nil {
		return err
	}
	return report.Publish(args[1])
}
