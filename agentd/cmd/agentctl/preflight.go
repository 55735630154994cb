package main

import (
	"fmt"
	"strconv"

	"github.com/urfave/cli/v2"

	"github.com/dormouse-run/dormouse/agentd/app"
	"github.com/dormouse-run/dormouse/agentd/internal/preflight"
	"github.com/dormouse-run/dormouse/pkg/command"
	"github.com/dormouse-run/dormouse/pkg/config"
)

// maxSandboxes bounds what can be asked about, far above what a kernel has process ids for.
const maxSandboxes = 100_000

func preflightCommand() *cli.Command {
	return &cli.Command{
		Name: "preflight", Usage: "compare this host's limits with what its sandboxes need; asks no agentd; exit code 1 when something is too low",
		Flags: append([]cli.Flag{
			&cli.StringFlag{Name: config.FileFlag, Usage: "agentd's configuration file", EnvVars: []string{app.EnvPrefix + "_CONFIG"}},
			&cli.Int64Flag{Name: "sandboxes", Usage: "how many the host is to carry; limits.sandboxes by default"},
			&cli.BoolFlag{Name: "fix", Usage: "raise the limits that can be raised, until the host is started again"},
		}, command.OutputFlags()...),
		Action: preflightAction,
	}
}

func preflightAction(c *cli.Context) error {
	if c.Args().Present() {
		return command.Usage(c, "too many arguments: %q", c.Args().First())
	}
	if n := c.Int64("sandboxes"); n < 0 || n > maxSandboxes {
		return command.Usage(c, "--sandboxes %d: 1 to %d", n, maxSandboxes)
	}
	p, err := command.NewPrinter(c)
	if err != nil {
		return err
	}
	cfg := app.Defaults()
	if file := c.String(config.FileFlag); file != "" {
		if err := config.LoadFile(file, &cfg); err != nil {
			return command.Usage(c, "%s", err)
		}
	}
	report, err := app.Preflight(c.Context, cfg, c.Int64("sandboxes"), c.Bool("fix"))
	if err != nil {
		return err
	}
	if err := showReport(c, p, report); err != nil {
		return err
	}
	for _, check := range report.Checks {
		if check.Verdict != preflight.OK {
			return command.Exit(command.ExitFailed)
		}
	}
	return nil
}

func showReport(c *cli.Context, p command.Printer, report app.Report) error {
	if p.Names() {
		for _, check := range report.Checks {
			if _, err := fmt.Fprintln(c.App.Writer, check.Name); err != nil {
				return err
			}
		}
		return nil
	}
	if !p.Table() {
		return p.Value(report)
	}
	type col = command.Column[preflight.Check]
	if err := command.Table(p, report.Checks, []col{
		{Name: "CHECK", Show: func(k preflight.Check) string { return k.Name }},
		{Name: "FOUND", Show: func(k preflight.Check) string { return k.Found }},
		{Name: "NEEDED", Show: func(k preflight.Check) string { return k.Needed }},
		{Name: "VERDICT", Show: func(k preflight.Check) string { return string(k.Verdict) }},
		{Name: "SANDBOXES", Show: func(k preflight.Check) string {
			if k.Sandboxes < 0 {
				return "-"
			}
			return strconv.FormatInt(k.Sandboxes, 10)
		}},
		{Name: "WHY", Wide: true, Show: func(k preflight.Check) string { return k.Why }},
		{Name: "REMEDY", Show: func(k preflight.Check) string { return k.Remedy }},
	}); err != nil {
		return err
	}
	_, err := fmt.Fprintf(c.App.ErrWriter, "this host allows %d of %d sandboxes\n", report.Sandboxes, report.Wanted)
	return err
}
