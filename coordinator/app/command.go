package app

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"runtime/debug"
	"syscall"

	"github.com/urfave/cli/v2"

	"github.com/dormouse-run/dormouse/pkg/apikey"
	"github.com/dormouse-run/dormouse/pkg/config"
	"github.com/dormouse-run/dormouse/pkg/version"
)

// Command is the program's command line.
func Command() *cli.App {
	defaults := DefaultConfig()
	return &cli.App{
		Name: "coordinator", Usage: "places sandboxes, remembers them, and serves the API", Version: version.Get().String(),
		Flags: config.Flags(&defaults, EnvPrefix), HideHelpCommand: true,
		Action: func(c *cli.Context) error {
			if c.NArg() > 0 {
				return fmt.Errorf("unknown argument %q", c.Args().First())
			}
			cfg := DefaultConfig()
			if err := config.Load(c, &cfg, EnvPrefix); err != nil {
				return err
			}
			ctx, stop := signal.NotifyContext(c.Context, os.Interrupt, syscall.SIGTERM)
			defer stop()
			return Run(ctx, cfg)
		},
		Commands: []*cli.Command{newKeyCommand()},
	}
}

// newKeyCommand adds an API key to a keys file and prints it, once.
func newKeyCommand() *cli.Command {
	return &cli.Command{
		Name: "new-key", Usage: "add an API key to a keys file; the key itself is printed once and kept nowhere",
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "file", Required: true, Usage: "keys file; made if it is missing"},
			&cli.StringFlag{Name: "tenant", Required: true, Usage: "the tenant that the key acts for"},
			&cli.StringFlag{Name: "role", Value: string(apikey.RoleUser), Usage: "user or operator"},
			&cli.StringFlag{Name: "note", Usage: "what it is for"},
		},
		Action: func(c *cli.Context) error {
			entries, err := apikey.Read(c.String("file"))
			if err != nil {
				return err
			}
			text, entry, err := apikey.New(c.String("tenant"), apikey.Role(c.String("role")), c.String("note"))
			if err != nil {
				return err
			}
			if err := apikey.Write(c.String("file"), append(entries, entry)); err != nil {
				return err
			}
			_, err = fmt.Fprintln(c.App.Writer, text)
			return err
		},
	}
}

// Main runs the command line and gives the exit code.
func Main(args []string) int {
	if os.Getenv("GOGC") == "" {
		// Bursts of calls leave much behind: the heap may grow by half over what lives before it is looked through, not by as much again.
		debug.SetGCPercent(50)
	}
	if err := Command().RunContext(context.Background(), args); err != nil {
		fmt.Fprintln(os.Stderr, "coordinator:", err)
		return 1
	}
	return 0
}
