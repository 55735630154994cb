// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

// Command soak starts a cluster of two nodes, does at random to many sandboxes what users do, kills daemons
// meanwhile, and compares everything with a model; see package soak.
//
//	soak [--duration 10m] [--sandboxes 30] [--workers 6] [--kill-every 20s] [--seed N] [--json FILE]
//
// It ends with 1 if something did not hold; then the logs of the daemons are kept, and it says where.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/dormouse-run/dormouse/pkg/durable"
	"github.com/dormouse-run/dormouse/test/cluster"
	"github.com/dormouse-run/dormouse/test/soak"
	"github.com/dormouse-run/dormouse/test/stack"
)

var errFailed = errors.New("something did not hold")

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	var opts soak.Options
	flag.DurationVar(&opts.Duration, "duration", 10*time.Minute, "how long the random part takes")
	flag.IntVar(&opts.Sandboxes, "sandboxes", 30, "how many there are at most")
	flag.IntVar(&opts.Workers, "workers", 6, "how many operations are asked for at once")
	flag.DurationVar(&opts.KillEvery, "kill-every", 20*time.Second, "the mean time between two kills of a daemon; 0: none")
	flag.Uint64Var(&opts.Seed, "seed", uint64(time.Now().Unix()), "of all choices") //nolint:gosec // a seed
	file := flag.String("json", "", "write the report to this `file` as well")
	flag.Parse()
	err := run(ctx, opts, *file)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "soak:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, opts soak.Options, file string) (err error) {
	began := time.Now()
	opts.Logf = func(format string, args ...any) {
		fmt.Printf("%5.0fs  %s\n", time.Since(began).Seconds(), fmt.Sprintf(format, args...))
	}
	ctx, cancel := context.WithTimeout(ctx, opts.Duration+30*time.Minute)
	defer cancel()
	c, err := cluster.Up(ctx, stack.Options{Nodes: 2, Logf: opts.Logf})
	if err != nil {
		return err
	}
	c.SetLogf(func(string, ...any) {}) // each restart of a daemon would be a line
	defer func() {
		if err != nil {
			err = errors.Join(err, keepLogs(c, opts.Logf))
		}
		down, cancel := context.WithTimeout(context.WithoutCancel(ctx), 3*time.Minute)
		defer cancel()
		err = errors.Join(err, c.Client.Close(), c.Down(down))
	}()
	if opts.Image, err = soak.PushImage(ctx, c); err != nil {
		return err
	}
	report, err := soak.Run(ctx, c, c.Client, opts)
	if err != nil {
		return err
	}
	fmt.Print(report)
	if file != "" {
		data, err := json.MarshalIndent(report, "", "  ")
		if err := errors.Join(err, durable.WriteFile(file, append(data, '\n'))); err != nil {
			return err
		}
	}
	if len(report.Failures) > 0 {
		return errFailed
	}
	return nil
}

// keepLogs copies the logs out of the folder that the cluster's end removes.
func keepLogs(c *cluster.Cluster, logf func(string, ...any)) error {
	dir, err := os.MkdirTemp("", "dormouse-soak-")
	if err != nil {
		return err
	}
	if err := os.CopyFS(dir, os.DirFS(filepath.Dir(c.Log("any")))); err != nil {
		return err
	}
	logf("the daemons' logs are kept in %s", dir)
	return nil
}
