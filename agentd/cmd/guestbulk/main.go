// Command guestbulk is a bulk helper: agentd starts one inside a sandbox for each transfer of a file, an
// archive or a connection's bytes. Its standard input and output are pipes to agentd.
package main

import (
	"os"

	"github.com/dormouse-run/dormouse/agentd/internal/bulkguest"
)

func main() {
	os.Exit(bulkguest.Main(os.Stdin, os.Stdout))
}
