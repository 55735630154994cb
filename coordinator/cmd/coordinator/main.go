// Command coordinator places sandboxes, remembers them, and serves the API.
package main

import (
	"os"

	"github.com/dormouse-run/dormouse/coordinator/app"
)

func main() { os.Exit(app.Main(os.Args)) }
