// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

// Command devstack starts and ends a stack of Dormouse's real parts.
//
//	devstack up [--dir DIR] [--nodes N]   start one and leave it running
//	devstack down [--dir DIR]             end it; all stacks without --dir
//	devstack status [--dir DIR]           say what runs and where it is
//
// It starts Redis, the registry and each node's containerd; the daemons are
// started by whoever has their configuration.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/dormouse-run/dormouse/test/stack"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "devstack:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, out io.Writer) error {
	if len(args) == 0 {
		return errors.New("want up, down or status")
	}
	flags := flag.NewFlagSet("devstack "+args[0], flag.ExitOnError)
	dir := flags.String("dir", "", "the stack's `folder`")
	nodes := flags.Int("nodes", 2, "how many nodes to start")
	if err := flags.Parse(args[1:]); err != nil {
		return err
	}
	if flags.NArg() > 0 {
		return fmt.Errorf("unexpected %q", flags.Args())
	}
	switch args[0] {
	case "up":
		s, err := stack.Up(ctx, stack.Options{Dir: *dir, Nodes: *nodes, Logf: progress})
		if err != nil {
			return err
		}
		if err := s.Keep(); err != nil {
			return errors.Join(err, s.Down(context.WithoutCancel(ctx)))
		}
		return show(s, out)
	case "down":
		return down(ctx, *dir)
	case "status":
		return each(*dir, func(s *stack.Stack) error { return show(s, out) })
	}
	return fmt.Errorf("%q is none of up, down and status", args[0])
}

func progress(format string, args ...any) { fmt.Fprintf(os.Stderr, format+"\n", args...) }

// down ends one stack, or all that nobody is at work with. That there is none is
// what was asked for.
func down(ctx context.Context, dir string) error {
	return each(dir, func(s *stack.Stack) error {
		s.SetLogf(progress)
		err := s.Down(ctx)
		if dir == "" && errors.Is(err, stack.ErrOwned) {
			progress("%s: left alone, a running process owns it", s.Dir)
			return nil
		}
		return err
	})
}

// each does it for the stacks in dir, or for all of them.
func each(dir string, do func(*stack.Stack) error) error {
	all, err := stack.Indexed()
	if err != nil {
		return err
	}
	abs, err := filepath.Abs(dir)
	if err != nil {
		return err
	}
	var errs []error
	none := true
	for _, s := range all {
		if dir == "" || s.Dir == abs {
			errs, none = append(errs, do(s)), false
		}
	}
	if none {
		progress("no stack is up")
	}
	return errors.Join(errs...)
}

// show prints the stack as NAME=VALUE lines, for people and for shells.
func show(s *stack.Stack, out io.Writer) error {
	var lines strings.Builder
	line := func(name, value string) { fmt.Fprintf(&lines, "%s=%s\n", name, value) }
	line("DORMOUSE_STACK", s.ID)
	line("DORMOUSE_STACK_DIR", s.Dir)
	line("DORMOUSE_REDIS", s.RedisSocket())
	line("DORMOUSE_REGISTRY", s.RegistryHost())
	line("DORMOUSE_REGISTRY_CA", s.RegistryCA())
	line("DORMOUSE_HUB_NETNS", s.HubNetns())
	for i := 1; i <= s.Nodes; i++ {
		line(fmt.Sprintf("DORMOUSE_NODE%d_DIR", i), s.NodeDir(i))
		line(fmt.Sprintf("DORMOUSE_NODE%d_NETNS", i), s.NodeNetns(i))
		line(fmt.Sprintf("DORMOUSE_NODE%d_CONTAINERD", i), s.ContainerdSocket(i))
	}
	line("DORMOUSE_RUNNING", `"`+strings.Join(s.RunningParts(), " ")+`"`)
	_, err := io.WriteString(out, lines.String())
	return err
}
