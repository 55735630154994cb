package main

import (
	"context"
	"io"
	"os"
	"time"

	"github.com/urfave/cli/v2"
	"golang.org/x/term"

	"github.com/dormouse-run/dormouse/pkg/client"
	"github.com/dormouse-run/dormouse/pkg/command"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/uid"
	"github.com/dormouse-run/dormouse/pkg/version"
)

// streams are the standard streams; tests give their own.
type streams struct {
	in  io.Reader
	out io.Writer
	err io.Writer
}

// terminal tells whether what is written there is read by a person.
func terminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}

// now is the clock of the AGE columns.
var now = time.Now

func newApp(s streams) *cli.App {
	return &cli.App{
		Name:    "dormouse",
		Usage:   "create, checkpoint, fork and restore sandboxes",
		Version: version.Get().String(),
		Reader:  s.in, Writer: s.out, ErrWriter: s.err,
		Metadata: map[string]any{command.NamesKey: command.Names(names)},
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "addr", Usage: "the coordinator: https://host:port or unix:///path; several are separated by commas (DORMOUSE_ADDR)"},
			&cli.StringFlag{Name: "api-key-file", Usage: "file with the API key (DORMOUSE_API_KEY has the key itself)"},
			&cli.StringFlag{Name: "ca", Usage: "file with Dormouse's CA (DORMOUSE_CA)"},
			&cli.StringFlag{Name: "context", Usage: "which context of the file that DORMOUSE_CONFIG names"},
		},
		Commands: []*cli.Command{
			runCommand(), createCommand(), lsCommand(), getCommand(), inspectCommand(), waitCommand(), rmCommand(),
			execCommand(), shellCommand(), attachCommand(), psCommand(), networkCommand(), logsCommand(), killCommand(), cpCommand(), forwardCommand(),
			updateCommand(), pauseCommand(), hibernateCommand(), resumeCommand(),
			checkpointCommand(), restoreCommand(), forkCommand(), claimCommand(),
			templateCommands(), poolCommands(),
			snapshotCommands(), volumeCommands(), imageCommands(), nodeCommands(), operationCommands(), eventCommands(),
			adminCommands(), completionCommand(), versionCommand(),
		},
	}
}

// callFlags are those of commands that ask the server: with changes, one for the operation's id.
func callFlags(changes bool, more ...cli.Flag) []cli.Flag {
	flags := append(more, command.OutputFlags()...)
	flags = append(flags, &cli.DurationFlag{Name: "timeout", Usage: "give up after this time; the work may go on"})
	if changes {
		flags = append(flags, operationFlag())
	}
	return flags
}

func operationFlag() cli.Flag {
	return &cli.StringFlag{Name: "operation-id", Usage: "a UUIDv7; the same id and arguments give the same answer"}
}

// operationOf checks the id, or makes one, so that an error can always name it.
func operationOf(c *cli.Context) (string, error) {
	id := c.String("operation-id")
	if id == "" {
		return uid.New(), nil
	}
	if err := uid.Check(id); err != nil {
		return "", command.Usage(c, "--operation-id: %s", err)
	}
	return id, nil
}

// dial makes the client that the flags, the environment and the context file describe.
func dial(c *cli.Context) (*client.Client, error) {
	cfg, err := client.FromEnvironment(c.String("context"))
	if err != nil {
		return nil, err
	}
	if v := c.String("addr"); v != "" {
		cfg.Addr = v
	}
	if v := c.String("ca"); v != "" {
		cfg.CA = v
	}
	if v := c.String("api-key-file"); v != "" {
		cfg.APIKey, cfg.APIKeyFile = "", v
	}
	return client.Dial(cfg)
}

// call is an action that asks the server: it has the client, the printer and a context with the
// caller's deadline.
type call struct {
	*cli.Context
	ctx    context.Context //nolint:containedctx // lives as long as one action
	client *client.Client
	print  command.Printer
}

// action wraps what asks the server within --timeout. It takes between least and most arguments
// (most < 0: any number).
func action(least, most int, do func(call) error) cli.ActionFunc {
	return patient(least, most, func(c call) error {
		if d := c.Duration("timeout"); d > 0 {
			ctx, cancel := context.WithTimeout(c.ctx, d)
			defer cancel()
			c.ctx = ctx
		}
		return do(c)
	})
}

// patient is action for commands whose --timeout is that of a process inside.
func patient(least, most int, do func(call) error) cli.ActionFunc {
	return func(c *cli.Context) error {
		n := c.Args().Len()
		switch {
		case n < least:
			return command.Usage(c, "an argument is missing")
		case most >= 0 && n > most:
			return command.Usage(c, "too many arguments: %q", c.Args().Get(most))
		}
		p, err := command.NewPrinter(c)
		if err != nil {
			return err
		}
		cl, err := dial(c)
		if err != nil {
			return err
		}
		defer cl.Close()
		return do(call{Context: c, ctx: c.Context, client: cl, print: p})
	}
}

// each does something with every argument, goes on after a failure, and gives all errors. The exit
// code is the first one's.
func each(c call, do func(arg string) error) error {
	var failed []error
	for _, arg := range c.Args().Slice() {
		if err := do(arg); err != nil {
			failed = append(failed, err)
		}
		if c.ctx.Err() != nil {
			break
		}
	}
	if len(failed) == 0 {
		return nil
	}
	return several(failed)
}

// several are the failures of one command.
type several []error

func (s several) Error() string { return s[0].Error() }

func (s several) Unwrap() []error { return s }

// notThere tells whether an object is gone, for flags that do not mind.
func notThere(err error) bool { return errs.Has(err, errs.ObjectNotFound) }

func versionCommand() *cli.Command {
	return &cli.Command{Name: "version", Usage: "show the version", Flags: command.OutputFlags(), Action: func(c *cli.Context) error {
		p, err := command.NewPrinter(c)
		if err != nil {
			return err
		}
		if p.Table() {
			_, err := io.WriteString(c.App.Writer, "dormouse "+version.Get().String()+"\n")
			return err
		}
		return p.Value(version.Get())
	}}
}
