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
	signal.Ignore(syscall.SIGPIPE) // a reader that went away is an error of the write, and of the process inside
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGHUP)
	code := command.Run(ctx, newApp(streams{in: os.Stdin, out: os.Stdout, err: os.Stderr}), os.Args)
	stop()
	os.Exit(code)
}
