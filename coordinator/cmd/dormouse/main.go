// Command dormouse is the user's and the operator's tool: it talks to a coordinator.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	"github.com/dormouse-run/dormouse/pkg/command"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGHUP)
	code := command.Run(ctx, newApp(streams{in: os.Stdin, out: os.Stdout, err: os.Stderr}), os.Args)
	stop()
	os.Exit(code)
}
