package app

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/urfave/cli/v2"

	"github.com/dormouse-run/dormouse/agentd/internal/bundle"
	"github.com/dormouse-run/dormouse/pkg/config"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/obs"
	"github.com/dormouse-run/dormouse/pkg/version"
)

// Main is the program: it returns the exit code. SIGTERM and SIGINT stop agentd in order; a second one
// ends it at once. Sandboxes go on in either case.
func Main(args []string, stdout, stderr io.Writer) int {
	cfg := Defaults()
	cli := &cli.App{
		Name: "agentd", Usage: "runs Dormouse's sandboxes on this node", HideHelpCommand: true, HideVersion: true,
		Writer: stdout, ErrWriter: stderr,
		Flags: append(config.Flags(&cfg, EnvPrefix), &cli.BoolFlag{Name: "version", Usage: "print the version, the commit and the bundle's digest"},
			&cli.BoolFlag{Name: "print-config", Usage: "print the configuration that results, and end"}),
		Action: func(c *cli.Context) error {
			if c.Args().Present() {
				return fmt.Errorf("agentd takes no arguments, got %q", c.Args().First())
			}
			if err := config.Load(c, &cfg, EnvPrefix); err != nil {
				return err
			}
			switch {
			case c.Bool("version"):
				return printVersion(stdout, cfg)
			case c.Bool("print-config"):
				return printConfig(stdout, cfg)
			}
			return run(c.Context, cfg, stderr)
		},
		ExitErrHandler: func(*cli.Context, error) {},
	}
	if err := cli.Run(args); err != nil {
		message := err.Error()
		var e *errs.Error
		if errors.As(err, &e) {
			message = e.Message
		}
		fmt.Fprintln(stderr, "agentd:", message)
		return 1
	}
	return 0
}

func printVersion(w io.Writer, cfg Config) error {
	if _, err := fmt.Fprintln(w, "agentd", version.Get()); err != nil {
		return err
	}
	b, err := bundle.Open(cfg.Bundle.Dir)
	if err != nil {
		_, err = fmt.Fprintf(w, "bundle: none that can be used in %s\n", cfg.Bundle.Dir)
		return err
	}
	_, err = fmt.Fprintf(w, "bundle %s (runsc %s)\n", b.Digest, b.RunscVersion)
	return err
}

func printConfig(w io.Writer, cfg Config) error {
	data, err := config.Dump(cfg)
	if err == nil {
		_, err = w.Write(data)
	}
	return err
}

func run(parent context.Context, cfg Config, stderr io.Writer) (err error) {
	log, err := obs.NewLogger(stderr, cfg.Log)
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(parent, syscall.SIGTERM, os.Interrupt)
	defer stop()
	// After the first signal the next one has its default effect.
	context.AfterFunc(ctx, stop)
	log.Info("starting", "version", version.Get().String(), "node", cfg.Node, "pid", os.Getpid())
	a, err := New(ctx, cfg, log)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, a.Close()) }()
	defer a.protect(ctx)()
	return a.Serve(ctx)
}
