// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

// Command dormouse-load makes many sandboxes and checkpoints and restores all of them at once; see package load.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/urfave/cli/v2"

	"github.com/dormouse-run/dormouse/pkg/client"
	"github.com/dormouse-run/dormouse/test/load"
	"github.com/dormouse-run/dormouse/test/load/local"
	"github.com/dormouse-run/dormouse/test/stack"
)

// errFailed has been explained already.
var errFailed = errors.New("the run did not pass")

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	app := &cli.App{
		Name: "dormouse-load", Usage: "checkpoint and restore many sandboxes at once",
		Commands: []*cli.Command{runCommand(), compareCommand(), publishCommand(), cleanCommand(), workerCommand()},
	}
	err := app.RunContext(ctx, os.Args)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "dormouse-load:", err)
		os.Exit(1)
	}
}

func runCommand() *cli.Command {
	return &cli.Command{
		Name: "run", ArgsUsage: "PLAN",
		Usage: "run a plan: " + strings.Join(load.PlanNames(), ", ") + ", or a file",
		Description: "The plan is run on a cluster of its own on this machine, or with --external on the one that DORMOUSE_ADDR and the other\n" +
			"variables of the dormouse command name. It ends with 1 if anything failed or was left.",
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "out", Usage: "folder of the run, made by it (load-runs/NAME-TIME)"},
			&cli.BoolFlag{Name: "external", Usage: "use the cluster that the environment names"},
			&cli.StringFlag{Name: "image", Usage: "the subject's image, with --external; docs/load.md says how to make it"},
			&cli.IntFlag{Name: "subjects", Usage: "in place of the plan's"},
			&cli.IntFlag{Name: "heap", Usage: "MiB, in place of the plan's"},
			&cli.IntFlag{Name: "file", Usage: "MiB, in place of the plan's"},
			&cli.IntFlag{Name: "rounds", Usage: "in place of the plan's"},
			&cli.IntFlag{Name: "clients", Usage: "in place of the plan's"},
			&cli.IntFlag{Name: "nodes", Usage: "in place of the plan's"},
			&cli.Float64Flag{Name: "pace", Usage: "calls begun a second, in place of the plan's"},
			&cli.Uint64Flag{Name: "seed", Usage: "in place of the plan's"},
			&cli.BoolFlag{Name: "volume", Usage: "give each subject a volume"},
			&cli.StringFlag{Name: "floor", Usage: "measure in the same run, bare: the rates of bare runsc, disk: dd and bare checkpoints; none: nothing"},
		},
		Action: func(c *cli.Context) error {
			if c.NArg() != 1 {
				return fmt.Errorf("want one plan: %s, or a file", strings.Join(load.PlanNames(), ", "))
			}
			plan, err := load.ReadPlan(c.Args().First())
			if err != nil {
				return err
			}
			override(c, &plan)
			if err := plan.Check(); err != nil {
				return err
			}
			out := c.String("out")
			if out == "" {
				out = filepath.Join("load-runs", plan.Name+"-"+time.Now().UTC().Format("20060102-150405"))
			}
			return run(c.Context, plan, out, c.String("image"), c.Bool("external"))
		},
	}
}

// override takes what was given on the command line in place of the plan's.
func override(c *cli.Context, p *load.Plan) {
	for name, into := range map[string]*int{
		"subjects": &p.Subjects, "heap": &p.HeapMiB, "file": &p.FileMiB, "rounds": &p.Rounds, "clients": &p.Clients, "nodes": &p.Nodes,
	} {
		if c.IsSet(name) {
			*into = c.Int(name)
		}
	}
	if c.IsSet("pace") {
		p.Pace = c.Float64("pace")
	}
	if c.IsSet("seed") {
		p.Seed = c.Uint64("seed")
	}
	if c.IsSet("volume") {
		p.Volume = c.Bool("volume")
	}
	if c.IsSet("floor") {
		p.Floor = strings.TrimPrefix(c.String("floor"), "none")
	}
}

func logf(format string, args ...any) {
	fmt.Printf("%s  %s\n", time.Now().UTC().Format("15:04:05"), fmt.Sprintf(format, args...))
}

func run(ctx context.Context, plan load.Plan, out, image string, external bool) (err error) {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	opts := load.Options{Plan: plan, Out: out, Image: image, Command: []string{self, "worker"}, Logf: logf}
	if external {
		if image == "" {
			return errors.New("--external needs --image, the subject's image by digest")
		}
		reach, err := client.FromEnvironment("")
		if err != nil {
			return err
		}
		opts.Reach = load.ReachOf(reach)
	} else {
		l, err := local.Up(ctx, plan, logf)
		if err != nil {
			return err
		}
		l.SetLogf(func(string, ...any) {})
		defer func() { err = errors.Join(err, l.End(ctx)) }()
		opts.Reach, opts.Image, opts.Machine, opts.Debt = l.Reach(), l.Image, l, l.Debt
		switch plan.Floor {
		case "bare":
			opts.Floor = l.Floor
		case "disk":
			opts.Floor = l.DiskFloor
		}
		if plan.Simulated {
			opts.Publications = l.Within
		}
	}
	s, err := load.Run(ctx, load.NewID(), opts)
	fmt.Printf("\n%s\nreport: %s\n", s, filepath.Join(out, "report.html"))
	if err == nil && len(s.Failed()) > 0 {
		err = errFailed
	}
	return err
}

func compareCommand() *cli.Command {
	return &cli.Command{
		Name: "compare", ArgsUsage: "A B", Usage: "put the folders of two runs side by side",
		Action: func(c *cli.Context) error {
			if c.NArg() != 2 {
				return errors.New("want the folders of two runs")
			}
			a, err := load.ReadSummary(c.Args().Get(0))
			if err != nil {
				return err
			}
			b, err := load.ReadSummary(c.Args().Get(1))
			if err != nil {
				return err
			}
			fmt.Print(load.Compare(a, b))
			return nil
		},
	}
}

func publishCommand() *cli.Command {
	return &cli.Command{
		Name: "publish", ArgsUsage: "RUN NAME", Usage: "keep what came of a run where others see it, e.g. publish load-runs/node-TIME docs/results/l02",
		Description: "It writes NAME.json and NAME.md: the summary of the run's folder without paths, addresses, names of hosts and times of the day.",
		Action: func(c *cli.Context) error {
			if c.NArg() != 2 {
				return errors.New("want the folder of a run and a name, e.g. docs/results/l02")
			}
			s, err := load.ReadSummary(c.Args().First())
			if err != nil {
				return err
			}
			return s.Publish(c.Args().Get(1))
		},
	}
}

func cleanCommand() *cli.Command {
	return &cli.Command{
		Name: "clean", ArgsUsage: "[FOLDER]", Usage: "clean up after runs that were killed",
		Description: "Without a folder it ends the clusters of this machine whose harness is gone. With the folder of a run it deletes what\n" +
			"that run made on a cluster that is still there, reached as the environment says.",
		Action: func(c *cli.Context) error {
			switch c.NArg() {
			case 0:
				return stack.Sweep(c.Context, logf)
			case 1:
			default:
				return errors.New("want at most one folder")
			}
			reach, err := client.FromEnvironment("")
			if err != nil {
				return err
			}
			debt, err := load.CleanFolder(c.Context, c.Args().First(), load.ReachOf(reach), logf)
			for _, d := range debt {
				fmt.Println("left:", d)
			}
			if err == nil && len(debt) > 0 {
				err = errors.New("some of it could not be deleted")
			}
			return err
		},
	}
}

func workerCommand() *cli.Command {
	return &cli.Command{
		Name: "worker", Usage: "a client process; the harness starts them", Hidden: true,
		Action: func(c *cli.Context) error { return load.Work(c.Context, os.Stdin, os.Stdout) },
	}
}
