// Package command is what Dormouse's command line tools have in common: flags before and after the
// arguments, one meaning for exit codes, one way to show objects and errors.
package command

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/urfave/cli/v2"

	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/wire"
)

// Exit codes.
const (
	ExitFailed   = 1
	ExitUsage    = 2
	ExitNotFound = 3
	ExitConflict = 4
	ExitUnknown  = 5 // unavailable, or the outcome is unknown
	ExitDeadline = 124
)

// UsageError is a command line that cannot be; Hint says how it is done.
type UsageError struct {
	Message string
	Hint    string
}

func (e *UsageError) Error() string { return e.Message }

// Usage makes a UsageError that points to the command's help.
func Usage(c *cli.Context, format string, args ...any) error {
	return &UsageError{Message: fmt.Sprintf(format, args...), Hint: hint(c)}
}

func hint(c *cli.Context) string {
	name := c.App.Name
	if c.Command != nil && c.Command.HelpName != "" {
		name = c.Command.HelpName
	}
	if c.Command != nil && c.Command.ArgsUsage != "" {
		return fmt.Sprintf("usage: %s [flags] %s\nsee '%s --help'", name, c.Command.ArgsUsage, name)
	}
	return fmt.Sprintf("see '%s --help'", name)
}

// Exit ends the program with a code of its own, without a message.
type Exit int

func (e Exit) Error() string { return fmt.Sprintf("exit code %d", int(e)) }

// Code gives the exit code of an error.
func Code(err error) int {
	var exit Exit
	var usage *UsageError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &exit):
		return int(exit)
	case errors.As(err, &usage):
		return ExitUsage
	}
	e := wire.Envelope(err)
	switch e.Code {
	case errs.InvalidArgument:
		return ExitUsage
	case errs.NotFound:
		return ExitNotFound
	case errs.Conflict:
		return ExitConflict
	case errs.Unavailable, errs.OutcomeUnknown:
		return ExitUnknown
	case errs.DeadlineExceeded:
		return ExitDeadline
	}
	var typed *errs.Error
	if errors.As(err, &typed) && e.Outcome == errs.Unknown {
		return ExitUnknown
	}
	return ExitFailed
}

// Run runs an app with the arguments (the program's name first) and gives its exit code. Errors go
// to standard error, as the envelope in JSON when -o json was asked for.
func Run(ctx context.Context, app *cli.App, args []string) int {
	prepare(app)
	if n := len(args) - 1; n > 0 && args[n] == CompletionFlag {
		for _, word := range Complete(app, args[1:n]) {
			fmt.Fprintln(app.Writer, word)
		}
		return 0
	}
	args = Reorder(app, args)
	err := app.RunContext(ctx, args)
	Show(app.ErrWriter, app.Name, err, wantsJSON(args))
	return Code(err)
}

// wantsJSON looks at the flags only: what comes after "--" is not this program's.
func wantsJSON(args []string) bool {
	if i := slices.Index(args, "--"); i >= 0 {
		args = args[:i]
	}
	return slices.Contains(args, "--output=json")
}

// prepare makes urfave/cli leave errors to Run, and arguments of leaf commands alone.
func prepare(app *cli.App) {
	app.UseShortOptionHandling = true
	app.DisableSliceFlagSeparator = true
	app.HideHelpCommand = true
	app.ExitErrHandler = func(*cli.Context, error) {}
	app.OnUsageError = usageError
	if app.Action == nil {
		app.Action = group
	}
	prepareAll(app.Commands)
}

func prepareAll(commands []*cli.Command) {
	for _, c := range commands {
		c.HideHelpCommand = true
		c.OnUsageError = usageError
		if len(c.Subcommands) > 0 && c.Action == nil {
			c.Action = group
		}
		prepareAll(c.Subcommands)
	}
}

func usageError(c *cli.Context, err error, _ bool) error {
	return Usage(c, "%s", err)
}

// group is the action of a command that only has subcommands.
func group(c *cli.Context) error {
	if !c.Args().Present() {
		if c.Command == nil || c.Command.HelpName == "" || c.Command.HelpName == c.App.HelpName {
			return cli.ShowAppHelp(c)
		}
		return cli.ShowSubcommandHelp(c)
	}
	return Usage(c, "there is no command %q", c.Args().First())
}

// Show writes an error for people, or as JSON.
func Show(w io.Writer, program string, err error, asJSON bool) {
	var exit Exit
	if err == nil || errors.As(err, &exit) {
		return
	}
	var usage *UsageError
	if errors.As(err, &usage) {
		fmt.Fprintf(w, "%s: %s\n%s\n", program, usage.Message, usage.Hint)
		return
	}
	var many interface{ Unwrap() []error }
	if errors.As(err, &many) {
		for _, one := range many.Unwrap() {
			Show(w, program, one, asJSON)
		}
		return
	}
	var e *errs.Error
	if !errors.As(err, &e) {
		fmt.Fprintf(w, "%s: %s\n", program, err)
		return
	}
	if asJSON {
		if b, err := wire.MarshalJSON(wire.ErrorToProto(e)); err == nil {
			fmt.Fprintln(w, string(compact(b)))
			return
		}
	}
	fmt.Fprintf(w, "%s: %s\n  %s\n", program, e.Message, envelopeLine(e))
	if e.Retry == errs.SameOperation && e.OperationID != "" {
		fmt.Fprintf(w, "  the same command with --operation-id %s tells the outcome\n", e.OperationID)
	}
}

func envelopeLine(e *errs.Error) string {
	parts := []string{fmt.Sprintf("%s/%s", e.Code, e.Reason), "outcome " + string(e.Outcome)}
	if e.RequestID != "" {
		parts = append(parts, "request "+e.RequestID)
	}
	for _, k := range slices.Sorted(maps.Keys(e.Details)) {
		if v := e.Details[k]; !strings.Contains(e.Message, v) {
			parts = append(parts, k+"="+v)
		}
	}
	return strings.Join(parts, ", ")
}

func compact(b []byte) []byte {
	var v any
	if json.Unmarshal(b, &v) != nil {
		return b
	}
	out, err := json.Marshal(v)
	if err != nil {
		return b
	}
	return out
}

// Reorder puts the flags of the command that is called before its arguments, so that both
// "rm -f X" and "rm X -f" work. Everything from "--" on stays as it is.
func Reorder(app *cli.App, args []string) []string {
	if len(args) == 0 {
		return args
	}
	out, rest := []string{args[0]}, args[1:]
	flags, commands := app.Flags, app.Commands
	for {
		var taken []string
		taken, rest = leadingFlags(flags, rest)
		out = append(out, taken...)
		if len(rest) == 0 {
			return out
		}
		next := find(commands, rest[0])
		if next == nil {
			break
		}
		out, rest = append(out, rest[0]), rest[1:]
		flags, commands = next.Flags, next.Subcommands
	}
	var positional []string
	for len(rest) > 0 && rest[0] != "--" {
		if isFlag(rest[0]) {
			var taken []string
			taken, rest = leadingFlags(flags, rest)
			out = append(out, taken...)
			continue
		}
		positional, rest = append(positional, rest[0]), rest[1:]
	}
	if len(rest) > 0 {
		rest = rest[1:] // the "--" goes in front of the first argument
	}
	if len(positional)+len(rest) == 0 {
		return out
	}
	return append(append(append(out, "--"), positional...), rest...)
}

func isFlag(s string) bool { return len(s) > 1 && s[0] == '-' && s != "--" }

func find(commands []*cli.Command, name string) *cli.Command {
	for _, c := range commands {
		if c.HasName(name) {
			return c
		}
	}
	return nil
}

// leadingFlags takes flags and their values from the front, each under its first name: urfave/cli
// refuses two forms of one flag, even of one that may be repeated. A flag that is not known is
// taken alone, and urfave/cli refuses it.
func leadingFlags(flags []cli.Flag, args []string) (taken, rest []string) {
	for len(args) > 0 && isFlag(args[0]) {
		a := args[0]
		args = args[1:]
		name, value, given := strings.Cut(strings.TrimLeft(a, "-"), "=")
		f := lookup(flags, name)
		switch {
		case f == nil && !given && combined(flags, a) && len(args) > 0: // -ie K=V: urfave/cli splits it
			taken, args = append(taken, a, args[0]), args[1:]
		case f == nil:
			taken = append(taken, a)
		case given:
			taken = append(taken, "--"+f.Names()[0]+"="+value)
		case takesValue(f) && len(args) > 0:
			taken, args = append(taken, "--"+f.Names()[0]+"="+args[0]), args[1:]
		default:
			taken = append(taken, "--"+f.Names()[0])
		}
	}
	return taken, args
}

// combined tells whether an argument is several short flags, the last of which takes a value.
func combined(flags []cli.Flag, arg string) bool {
	return !strings.HasPrefix(arg, "--") && takesValue(lookup(flags, arg[len(arg)-1:]))
}

func takesValue(f cli.Flag) bool {
	d, ok := f.(cli.DocGenerationFlag)
	return ok && d.TakesValue()
}

func lookup(flags []cli.Flag, name string) cli.Flag {
	for _, f := range flags {
		if slices.Contains(f.Names(), name) {
			return f
		}
	}
	return nil
}
