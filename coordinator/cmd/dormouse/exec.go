package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/urfave/cli/v2"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/dormouse-run/dormouse/pkg/client"
	"github.com/dormouse-run/dormouse/pkg/command"
	"github.com/dormouse-run/dormouse/pkg/errs"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// removeTime bounds the deletion that --rm does after the command ended or was interrupted.
const removeTime = time.Minute

// Exit codes that shells give for a command that could not be run.
const (
	exitNotRunnable = 126
	exitNotFound    = 127
)

func inputFlags() []cli.Flag {
	return []cli.Flag{
		&cli.BoolFlag{Name: "interactive", Aliases: []string{"i"}, Usage: "pass standard input on"},
		&cli.BoolFlag{Name: "tty", Aliases: []string{"t"}, Usage: "run the command on a terminal; its output is one stream"},
	}
}

func processTimeout() cli.Flag {
	return &cli.DurationFlag{Name: "timeout", Usage: "end the command and all it started after this time"}
}

func runCommand() *cli.Command {
	return &cli.Command{
		Name: "run", Usage: "create a sandbox, run a command in it, and pass on its exit code", ArgsUsage: "IMAGE [-- CMD...]",
		Description:            "Without CMD the image's own command runs. The sandbox stays, unless --rm is given; its uid goes to standard error. " + escapeHelp,
		UseShortOptionHandling: true,
		Flags: append(append(specFlags(), inputFlags()...), operationFlag(), processTimeout(),
			&cli.BoolFlag{Name: "rm", Usage: "delete the sandbox afterwards"}),
		Action: patient(1, -1, func(c call) error {
			ctx, in := catchInterrupts(c.ctx)
			defer in.stop()
			c.ctx = ctx
			return runImage(c, in)
		}),
	}
}

func runImage(c call, in *interrupts) (err error) {
	argv := c.Args().Tail()
	if err := wrongTerminal(c, argv); err != nil {
		return err
	}
	if len(argv) == 0 && (c.Bool("interactive") || c.IsSet("timeout")) {
		return command.Usage(c.Context, "-i and --timeout are for a command: give one after --")
	}
	req, err := createRequest(c, c.Args().First(), nil)
	if err != nil {
		return err
	}
	req.Spec.RunImageCommand = len(argv) == 0
	s, err := c.client.CreateSandbox(c.ctx, req)
	if err != nil {
		return withOperation(err, req.GetOperationId())
	}
	if c.Bool("rm") {
		defer func() {
			ctx, cancel := context.WithTimeout(context.WithoutCancel(c.ctx), removeTime)
			defer cancel()
			if e := s.Delete(ctx, ""); e != nil && !notThere(e) {
				fmt.Fprintf(c.App.ErrWriter, "the sandbox %s is still there: %s\n", s.UID, errs.From(e).Message)
				if err == nil {
					err = e
				}
			}
		}()
	} else {
		fmt.Fprintf(c.App.ErrWriter, "sandbox %s\n", s.UID)
	}
	if err := failed(s.Last); err != nil {
		return err
	}
	if len(argv) > 0 {
		env, err := environment(c.Context)
		if err != nil {
			return err
		}
		return runIn(c, s, in, &dormousev1.ProcessSpec{Argv: argv, Env: env, User: c.String("user"), WorkingDir: c.String("workdir")}, req.GetSecretEnv())
	}
	return followMain(c, s, in)
}

// followMain shows the output of the sandbox's own command and passes on its exit code. The
// sandbox may have stopped already: then its status has the code.
func followMain(c call, s *client.Sandbox, in *interrupts) error {
	p, err := s.Main(c.ctx)
	if err == nil {
		in.forward(p)
		var exit *dormousev1.ProcessExit
		if exit, err = p.Follow(c.ctx, outputOf(c), true); err == nil {
			return passOn(exit)
		}
	}
	if s.Refresh(c.ctx) == nil && s.Last.GetStatus() != nil && s.Last.GetStatus().ExitCode != nil {
		return passOn(&dormousev1.ProcessExit{Code: s.Last.GetStatus().GetExitCode()})
	}
	return err
}

func execCommand() *cli.Command {
	return &cli.Command{
		Name: "exec", Usage: "run a command in a sandbox and pass on its exit code", ArgsUsage: "SANDBOX -- CMD...",
		Description:            "The first Ctrl-C goes to the command, the second leaves it running. " + escapeHelp,
		UseShortOptionHandling: true,
		Flags: append(append(envFlags(), inputFlags()...), processTimeout(),
			&cli.StringSliceFlag{Name: "secret-env", Usage: "KEY to pass on; may be repeated"},
			&cli.StringSliceFlag{Name: "tag", Usage: "KEY=VALUE to find the process by; may be repeated"},
			&cli.BoolFlag{Name: "detach", Aliases: []string{"d"}, Usage: "leave it running and print its process id"}),
		Action: patient(2, -1, func(c call) error {
			if err := wrongTerminal(c, c.Args().Tail()); err != nil {
				return err
			}
			env, err := environment(c.Context)
			if err != nil {
				return err
			}
			secrets, err := secretsOf(c.Context)
			if err != nil {
				return err
			}
			tags, err := pairs(c.Context, "tag", false)
			if err != nil {
				return err
			}
			spec := &dormousev1.ProcessSpec{Argv: c.Args().Tail(), Env: env, User: c.String("user"), WorkingDir: c.String("workdir"), Tags: tags}
			s, err := c.client.FindSandbox(c.ctx, c.Args().First())
			if err != nil {
				return err
			}
			if c.Bool("detach") {
				return startIn(c, s, spec, secrets)
			}
			ctx, in := catchInterrupts(c.ctx)
			defer in.stop()
			c.ctx = ctx
			return runIn(c, s, in, spec, secrets)
		}),
	}
}

// complete adds what both ways of starting take.
func complete(c call, spec *dormousev1.ProcessSpec, secrets map[string]string) {
	if d := c.Duration("timeout"); d > 0 {
		spec.Timeout = durationpb.New(d)
	}
	for k, v := range secrets {
		if spec.Env == nil {
			spec.Env = make(map[string]string)
		}
		spec.Env[k] = v
	}
}

func startIn(c call, s *client.Sandbox, spec *dormousev1.ProcessSpec, secrets map[string]string) error {
	if c.Bool("interactive") {
		return command.Usage(c.Context, "-i and -d exclude each other")
	}
	complete(c, spec, secrets)
	p, err := s.Start(c.ctx, spec, "")
	if err != nil {
		return notRun(c, err)
	}
	_, err = fmt.Fprintln(c.App.Writer, p.ID)
	return err
}

func runIn(c call, s *client.Sandbox, in *interrupts, spec *dormousev1.ProcessSpec, secrets map[string]string) error {
	complete(c, spec, secrets)
	if c.Bool("tty") {
		return onTerminal(c, s, in, spec, c.Bool("interactive"))
	}
	var input io.Reader
	if c.Bool("interactive") {
		input = c.App.Reader
	}
	return piped(c, s, in, spec, input)
}

// brokenPipe ends a command whose output nobody reads any more, as a pipe on one machine would.
func brokenPipe(c call, p *client.Process) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(c.ctx), removeTime)
	defer cancel()
	if err := p.Signal(ctx, int32(syscall.SIGPIPE), true); err != nil && !errs.Has(err, errs.ProcessNotFound) {
		return err
	}
	return command.Exit(128 + int(syscall.SIGPIPE))
}

// notRun gives a command that could not be run the exit code that shells give it.
func notRun(c call, err error) error {
	code := 0
	switch {
	case errs.Has(err, errs.CommandNotFound):
		code = exitNotFound
	case errs.Has(err, errs.CommandNotRunnable):
		code = exitNotRunnable
	default:
		return err
	}
	command.Show(c.App.ErrWriter, c.App.Name, err, false)
	return command.Exit(code)
}

func passOn(exit *dormousev1.ProcessExit) error {
	switch {
	case exit.GetTimedOut():
		return command.Exit(command.ExitDeadline)
	case exit.GetCode() == 0:
		return nil
	}
	return command.Exit(exit.GetCode())
}

func outputOf(c call) *client.Output {
	return &client.Output{Stdout: c.App.Writer, Stderr: c.App.ErrWriter, Gap: func(_ dormousev1.OutputStream, n uint64) {
		fmt.Fprintf(c.App.ErrWriter, "\n(%d bytes of output were overwritten before they were read)\n", n)
	}}
}

// interrupts turns Ctrl-C into a signal for the process inside; the second one ends the command
// here. So does the first while there is no process yet; while one is being started it is kept
// until that runs, so that none is left behind.
type interrupts struct {
	ctx    context.Context //nolint:containedctx // of the command that it interrupts
	cancel context.CancelFunc
	signal chan os.Signal
	target chan *client.Process
	done   chan struct{}

	starting atomic.Bool
}

func catchInterrupts(parent context.Context) (context.Context, *interrupts) {
	ctx, cancel := context.WithCancel(parent)
	in := &interrupts{ctx: ctx, cancel: cancel, signal: make(chan os.Signal, 2), target: make(chan *client.Process, 1), done: make(chan struct{})}
	signal.Notify(in.signal, os.Interrupt)
	go in.loop()
	return ctx, in
}

func (in *interrupts) loop() {
	defer close(in.done)
	var p *client.Process
	caught := 0
	for {
		select {
		case <-in.ctx.Done():
			return
		case p = <-in.target:
		case <-in.signal:
			caught++
		}
		switch {
		case caught == 0 || caught == 1 && p == nil && in.starting.Load():
		case caught > 1 || p == nil || p.Signal(in.ctx, int32(syscall.SIGINT), true) != nil:
			in.cancel()
		}
	}
}

// start says that a process is about to run.
func (in *interrupts) start() { in.starting.Store(true) }

// forward names the process that gets the first interrupt. It is called once.
func (in *interrupts) forward(p *client.Process) { in.target <- p }

func (in *interrupts) stop() {
	signal.Stop(in.signal)
	in.cancel()
	<-in.done
}
