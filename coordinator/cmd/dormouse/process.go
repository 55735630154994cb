package main

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/urfave/cli/v2"
	"golang.org/x/sys/unix"

	"github.com/dormouse-run/dormouse/pkg/client"
	"github.com/dormouse-run/dormouse/pkg/command"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

func processID(p *dormousev1.Process) string { return p.GetProcessId() }

func processColumns() []command.Column[*dormousev1.Process] {
	type col = command.Column[*dormousev1.Process]
	return []col{
		{Name: "PROCESS", Show: processID},
		{Name: "PID", Show: func(p *dormousev1.Process) string { return strconv.Itoa(int(p.GetPid())) }},
		{Name: "STATE", Show: stateOf},
		{Name: "AGE", Show: func(p *dormousev1.Process) string { return ageOf(p.GetStartTime()) }},
		{Name: "COMMAND", Show: func(p *dormousev1.Process) string { return strings.Join(p.GetSpec().GetArgv(), " ") }},
		{Name: "MAIN", Wide: true, Show: func(p *dormousev1.Process) string { return strconv.FormatBool(p.GetMain()) }},
		{Name: "STDOUT", Wide: true, Show: func(p *dormousev1.Process) string { return strconv.FormatUint(p.GetStdoutOffset(), 10) }},
		{Name: "STDERR", Wide: true, Show: func(p *dormousev1.Process) string { return strconv.FormatUint(p.GetStderrOffset(), 10) }},
	}
}

func stateOf(p *dormousev1.Process) string {
	switch exit := p.GetExit(); {
	case exit == nil:
		return "running"
	case exit.GetTimedOut():
		return "timed out"
	case exit.GetSignal() != 0:
		return "killed by " + signalName(exit.GetSignal())
	default:
		return fmt.Sprintf("exited %d", exit.GetCode())
	}
}

func signalName(n int32) string {
	if name := unix.SignalName(unix.Signal(n)); name != "" {
		return name
	}
	return strconv.Itoa(int(n))
}

func psCommand() *cli.Command {
	return &cli.Command{
		Name: "ps", Usage: "list the processes started in a sandbox", ArgsUsage: "SANDBOX",
		Flags: callFlags(false, &cli.StringSliceFlag{Name: "tag", Usage: "only those with KEY=VALUE; may be repeated"}),
		Action: action(1, 1, func(c call) error {
			s, err := c.client.FindSandbox(c.ctx, c.Args().First())
			if err != nil {
				return err
			}
			all, err := s.Processes(c.ctx, c.StringSlice("tag")...)
			if err != nil {
				return err
			}
			return command.List(c.print, all, processID, processColumns())
		}),
	}
}

// processOf finds the process that the second argument names, or the sandbox's own.
func processOf(c call) (*client.Sandbox, *client.Process, error) {
	s, err := c.client.FindSandbox(c.ctx, c.Args().Get(0))
	if err != nil {
		return nil, nil, err
	}
	if id := c.Args().Get(1); id != "" {
		return s, s.Process(id), nil
	}
	p, err := s.Main(c.ctx)
	return s, p, err
}

func logsCommand() *cli.Command {
	return &cli.Command{
		Name: "logs", Usage: "show the output of a process, by default of the sandbox's own command", ArgsUsage: "SANDBOX [PROCESS]",
		Flags: []cli.Flag{
			&cli.BoolFlag{Name: "follow", Aliases: []string{"f"}, Usage: "go on until the process ends"},
			&cli.Uint64Flag{Name: "since-offset", Usage: "begin with this byte of standard output (ps -o wide has the end)"},
			&cli.Uint64Flag{Name: "since-stderr-offset", Usage: "begin with this byte of standard error"},
			&cli.DurationFlag{Name: "timeout", Usage: "stop after this time"},
		},
		Action: action(1, 2, func(c call) error {
			_, p, err := processOf(c)
			if err != nil {
				return err
			}
			out := outputOf(c)
			out.From(c.Uint64("since-offset"), c.Uint64("since-stderr-offset"))
			_, err = p.Follow(c.ctx, out, c.Bool("follow"))
			return err
		}),
	}
}

func killCommand() *cli.Command {
	return &cli.Command{
		Name: "kill", Usage: "send a signal to a process, by default to the sandbox's own command", ArgsUsage: "SANDBOX [PROCESS]",
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "signal", Aliases: []string{"s"}, Usage: "name or number", Value: "TERM"},
			&cli.BoolFlag{Name: "tree", Usage: "all that the process started, too"},
			&cli.DurationFlag{Name: "timeout", Usage: "give up after this time"},
		},
		Action: action(1, 2, func(c call) error {
			n, err := signalOf(c.Context)
			if err != nil {
				return err
			}
			_, p, err := processOf(c)
			if err != nil {
				return err
			}
			return p.Signal(c.ctx, n, c.Bool("tree"))
		}),
	}
}

func signalOf(c *cli.Context) (int32, error) {
	name := strings.ToUpper(c.String("signal"))
	if n, err := strconv.ParseInt(name, 10, 32); err == nil && n > 0 && n <= 64 {
		return int32(n), nil
	}
	if n := unix.SignalNum("SIG" + strings.TrimPrefix(name, "SIG")); n != 0 {
		return int32(n), nil
	}
	return 0, command.Usage(c, "--signal %q: a name like TERM, or a number from 1 to 64", c.String("signal"))
}
