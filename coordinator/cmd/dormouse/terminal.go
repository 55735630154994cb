package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/urfave/cli/v2"
	"golang.org/x/term"

	"github.com/dormouse-run/dormouse/pkg/client"
	"github.com/dormouse-run/dormouse/pkg/command"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// escapeHelp is in the description of what can be left.
const escapeHelp = "On a terminal, Enter ~ . leaves the command running and comes back here; ~~ sends one ~."

// flushTime bounds the wait for what was typed before the escape.
const flushTime = 2 * time.Second

// loginShell is the best shell that the image has, as a login.
const loginShell = `if [ -x /bin/bash ]; then exec /bin/bash -l; fi; exec /bin/sh -l`

// console is this side's terminal, where there is one.
type console struct {
	file *os.File
}

// consoleOf gives the terminal that is read from, or none.
func consoleOf(r io.Reader) console {
	if f, ok := r.(*os.File); ok && term.IsTerminal(int(f.Fd())) {
		return console{f}
	}
	return console{}
}

func (t console) there() bool { return t.file != nil }

// size is what a terminal inside gets.
func (t console) size() *dormousev1.Terminal {
	if !t.there() {
		return &dormousev1.Terminal{}
	}
	cols, rows, err := term.GetSize(int(t.file.Fd()))
	if err != nil || cols < 1 || rows < 1 {
		return &dormousev1.Terminal{}
	}
	return &dormousev1.Terminal{Rows: int32(min(rows, 4096)), Cols: int32(min(cols, 4096))}
}

// raw hands every key on, until restore.
func (t console) raw() (restore func(), err error) {
	if !t.there() {
		return func() {}, nil
	}
	state, err := term.MakeRaw(int(t.file.Fd()))
	if err != nil {
		return nil, fmt.Errorf("the terminal cannot be made raw: %w", err)
	}
	return func() { _ = term.Restore(int(t.file.Fd()), state) }, nil
}

// follow tells the process the size, in case it has changed since the process was started, and each new
// one, until stop.
func (t console) follow(a *client.Attachment) (stop func()) {
	if !t.there() {
		return func() {}
	}
	changed := make(chan os.Signal, 1)
	signal.Notify(changed, syscall.SIGWINCH)
	tell := func() {
		if s := t.size(); s.GetRows() > 0 {
			a.Resize(int(s.GetRows()), int(s.GetCols()))
		}
	}
	tell()
	done := make(chan struct{})
	go func() {
		defer close(done)
		for range changed {
			tell()
		}
	}()
	return func() {
		signal.Stop(changed)
		close(changed)
		<-done
	}
}

// onTerminal starts a process on a terminal and is at it until it ends.
func onTerminal(c call, s *client.Sandbox, in *interrupts, spec *dormousev1.ProcessSpec, interactive bool) error {
	t := consoleOf(c.App.Reader)
	spec.Terminal = t.size()
	if _, given := spec.GetEnv()["TERM"]; !given && os.Getenv("TERM") != "" && t.there() {
		if spec.Env == nil {
			spec.Env = map[string]string{}
		}
		spec.Env["TERM"] = os.Getenv("TERM")
	}
	in.start()
	p, err := s.StartHeld(c.ctx, spec)
	if err != nil {
		return notRun(c, err)
	}
	return attached(c, s, in, p, t, outputOf(c), interactive)
}

// attached is at a process until it ends or is left.
func attached(c call, s *client.Sandbox, in *interrupts, p *client.Process, t console, out *client.Output, input bool) error {
	in.forward(p)
	left := errors.New("left")
	ctx, cancel := context.WithCancelCause(c.ctx)
	defer cancel(nil)
	// Raw before the first output: who sees it may type.
	restore := func() {}
	if input {
		var err error
		if restore, err = t.raw(); err != nil {
			return err
		}
	}
	defer func() { restore() }()
	a, err := p.Attach(ctx, client.AttachOptions{Output: out, Input: input, Hold: true})
	if err != nil {
		restore()
		restore = func() {}
		return after(c, s, p, nil, err)
	}
	defer a.Close()
	stop := t.follow(a)
	defer stop()
	if input {
		go func() {
			if !t.there() {
				a.Feed(c.App.Reader)
				return
			}
			keys := &escape{r: c.App.Reader, fresh: true}
			if a.Feed(keys); keys.found {
				flush(ctx, a)
				cancel(left)
			}
		}()
	}
	exit, err := a.Wait()
	restore()
	restore = func() {}
	if errors.Is(context.Cause(ctx), left) {
		fmt.Fprintf(c.App.ErrWriter, "\nleft; the process goes on: %s attach %s %s\n", c.App.Name, s.UID, p.ID)
		return nil
	}
	return after(c, s, p, exit, err)
}

// after passes on how a process that ran has ended, or says that it goes on.
func after(c call, s *client.Sandbox, p *client.Process, exit *dormousev1.ProcessExit, err error) error {
	switch {
	case err == nil:
		if exit.GetTimedOut() {
			fmt.Fprintf(c.App.ErrWriter, "%s: the command was ended after --timeout %s\n", c.App.Name, c.Duration("timeout"))
		}
		return passOn(exit)
	case errors.Is(err, syscall.EPIPE):
		return brokenPipe(c, p)
	case !c.Bool("rm"): // else the process goes with the sandbox
		fmt.Fprintf(c.App.ErrWriter, "the process goes on: %s logs -f %s %s\n", c.App.Name, s.UID, p.ID)
	}
	return err
}

// flush lets the keys before the escape arrive, unless the process does not take them.
func flush(ctx context.Context, a *client.Attachment) {
	ctx, cancel := context.WithTimeout(ctx, flushTime)
	defer cancel()
	_ = a.Flush(ctx) // what is typed for a process that does not read is lost
}

// escape looks for "~." at the beginning of a line.
type escape struct {
	r     io.Reader
	fresh bool // at the beginning of a line
	tilde bool // it began with ~
	found bool
}

// Read gives the keys that are for the process; after the escape io.ErrClosedPipe.
func (e *escape) Read(b []byte) (int, error) {
	for !e.found {
		// One key may become two.
		n, err := e.r.Read(b[:max(len(b)/2, 1)])
		var kept []byte
		kept, e.found = e.filter(b[:n])
		if n = copy(b, kept); n > 0 || err != nil {
			return n, err
		}
	}
	return 0, io.ErrClosedPipe
}

func (e *escape) filter(in []byte) (out []byte, found bool) {
	for _, c := range in {
		if e.tilde {
			e.tilde = false
			switch c {
			case '.':
				return out, true
			case '~':
				out = append(out, '~')
				e.fresh = false
				continue
			}
			out = append(out, '~')
		} else if e.fresh && c == '~' {
			e.tilde = true
			continue
		}
		out = append(out, c)
		e.fresh = c == '\r' || c == '\n'
	}
	return out, false
}

func shellCommand() *cli.Command {
	return &cli.Command{
		Name: "shell", Usage: "open a shell in a sandbox and pass on its exit code", ArgsUsage: "SANDBOX",
		Description: "It is /bin/bash where the image has it, else /bin/sh, as a login shell. Where standard input is no terminal it reads commands from there. " + escapeHelp,
		Flags:       envFlags(),
		Action: patient(1, 1, func(c call) error {
			env, err := environment(c.Context)
			if err != nil {
				return err
			}
			s, err := c.client.FindSandbox(c.ctx, c.Args().First())
			if err != nil {
				return err
			}
			ctx, in := catchInterrupts(c.ctx)
			defer in.stop()
			c.ctx = ctx
			spec := &dormousev1.ProcessSpec{Shell: loginShell, Env: env, User: c.String("user"), WorkingDir: c.String("workdir")}
			if consoleOf(c.App.Reader).there() {
				return onTerminal(c, s, in, spec, true)
			}
			return piped(c, s, in, spec, c.App.Reader)
		}),
	}
}

func attachCommand() *cli.Command {
	return &cli.Command{
		Name: "attach", Usage: "be at a process that runs: see its output from now on, type its input", ArgsUsage: "SANDBOX [PROCESS]",
		Description: "Without PROCESS it is the sandbox's own command. A process has one that types, the newest. " + escapeHelp,
		Flags: []cli.Flag{
			&cli.BoolFlag{Name: "no-input", Usage: "only look"},
			&cli.BoolFlag{Name: "replay", Usage: "begin with what is kept of the output so far"},
		},
		Action: patient(1, 2, func(c call) error {
			s, p, err := processOf(c)
			if err != nil {
				return err
			}
			if err := p.Refresh(c.ctx); err != nil {
				return err
			}
			ctx, in := catchInterrupts(c.ctx)
			defer in.stop()
			c.ctx = ctx
			t := console{}
			if p.Last.GetSpec().GetTerminal() != nil && !c.Bool("no-input") { // who only looks does not set the size
				t = consoleOf(c.App.Reader)
			}
			out := outputOf(c)
			if !c.Bool("replay") {
				out.From(p.Last.GetStdoutOffset(), p.Last.GetStderrOffset())
			}
			return attached(c, s, in, p, t, out, !c.Bool("no-input"))
		}),
	}
}

// piped runs a process with pipes and passes on its exit code.
func piped(c call, s *client.Sandbox, in *interrupts, spec *dormousev1.ProcessSpec, input io.Reader) error {
	in.start()
	running := false
	p, exit, err := s.Run(c.ctx, spec, input, outputOf(c), func(p *client.Process) {
		running = true
		in.forward(p)
	})
	if err != nil && !running {
		return notRun(c, err)
	}
	return after(c, s, p, exit, err)
}

// wrongTerminal refuses what -t cannot do.
func wrongTerminal(c call, argv []string) error {
	switch {
	case !c.Bool("tty"):
		return nil
	case len(argv) == 0:
		return command.Usage(c.Context, "-t is for a command: give one after --")
	case c.Bool("detach"):
		return command.Usage(c.Context, "-t and -d exclude each other")
	}
	return nil
}
