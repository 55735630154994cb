// Command agentctl looks at a node from the node itself: what agentd recorded and what is there.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	"github.com/dormouse-run/dormouse/pkg/command"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP)
	code := command.Run(ctx, newApp(os.Stdout, os.Stderr), os.Args)
	stop()
	os.Exit(code)
}
