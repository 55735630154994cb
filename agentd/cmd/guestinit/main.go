// Command guestinit is PID 1 of every sandbox. Its standard input and output are the FIFOs of the
// guest channel. It takes no arguments and ends only with the sandbox.
package main

import (
	"syscall"

	"github.com/dormouse-run/dormouse/agentd/internal/guestinit"
)

// build is set by the linker.
var build = "unstamped"

func main() {
	err := guestinit.Run(guestinit.Config{In: 0, Out: 1, Build: build})
	msg := "guestinit: " + err.Error() + "\n"
	_, _ = syscall.Write(2, []byte(msg))
	syscall.Exit(1)
}
