package main

import (
	"context"
	"fmt"

	"github.com/urfave/cli/v2"

	"github.com/dormouse-run/dormouse/pkg/client"
	"github.com/dormouse-run/dormouse/pkg/command"
)

func pauseCommand() *cli.Command {
	return turnCommand("pause", "freeze sandboxes in memory and print their uids", (*client.Sandbox).Pause)
}

func resumeCommand() *cli.Command {
	return turnCommand("resume", "let paused sandboxes run again and print their uids", (*client.Sandbox).Resume)
}

// turnCommand changes the phase of each sandbox that is named.
func turnCommand(name, usage string, turn func(*client.Sandbox, context.Context, string) error) *cli.Command {
	return &cli.Command{
		Name: name, Usage: usage, ArgsUsage: "SANDBOX...", Flags: callFlags(true),
		Action: action(1, -1, func(c call) error {
			op, err := operationOf(c.Context)
			if err != nil {
				return err
			}
			if c.IsSet("operation-id") && c.Args().Len() > 1 {
				return command.Usage(c.Context, "--operation-id is for one object")
			}
			return each(c, func(ref string) error {
				s, err := c.client.FindSandbox(c.ctx, ref)
				if err != nil {
					return err
				}
				id := op
				if c.Args().Len() > 1 {
					id = ""
				}
				if err := turn(s, c.ctx, id); err != nil {
					return withOperation(err, id)
				}
				if !c.print.Table() {
					return command.One(c.print, s.Last, sandboxID, sandboxColumns())
				}
				_, err = fmt.Fprintln(c.App.Writer, s.UID)
				return err
			})
		}),
	}
}
