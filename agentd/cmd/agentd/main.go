// Command agentd runs Dormouse's sandboxes on one node.
package main

import (
	"os"

	"github.com/dormouse-run/dormouse/agentd/app"
)

func main() { os.Exit(app.Main(os.Args, os.Stdout, os.Stderr)) }
