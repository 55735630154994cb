// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

// Command runsc is gVisor's runtime with a garbage collector policy of our own, and a place of its own in the kernel's order of whom to
// kill for memory.
//
// One binary plays two very different parts. Most commands (create, start,
// pause, checkpoint, state ...) live for milliseconds and would spend a good
// share of them collecting garbage that dies with the process. The sandbox
// itself ("boot") lives for days: it should collect rarely while it starts or
// loads an image, and afterwards give back what that phase left in its heap,
// because a node carries a thousand of them.
//
// runsc empties the environment of the sandbox process, so GOGC and GOMEMLIMIT
// cannot do this from outside.
package main

import (
	"os"
	"runtime/debug"

	"gvisor.dev/gvisor/runsc/cli/maincli"
	"gvisor.dev/gvisor/runsc/version"
)

// The version is stamped by the linker; the reference keeps it in the binary,
// and with it gVisor's own refusal to restore an image of another build.
var _ = version.Version()

const (
	// shortLimit bounds the heap of a command that runs without a collector:
	// near it the collector comes back, so that "wait" or "events", which may
	// run for hours, cannot grow without end.
	shortLimit = 64 << 20

	bootPercent = 400
	// settlePercent is for the days after. A save makes several times the live heap of
	// garbage; at 50 a fifth of its CPU went into collections. An idle sandbox
	// makes next to none, and keeps what the trim left it.
	settlePercent = 200
)

// oomScore is above that of everything that a host ordinarily runs: should memory run out in spite of all admission, a sandbox goes, and not the
// node. It is inherited by all that runsc starts, also by the processes that it makes later for those inside.
const oomScore = "500"

func main() {
	// Raising one's own needs no rights. Where it cannot be done (in the sandbox's own root there is no /proc) it was done by the command that
	// started this one.
	_ = os.WriteFile("/proc/self/oom_score_adj", []byte(oomScore), 0)
	switch role(os.Args) {
	case sandbox:
		debug.SetGCPercent(bootPercent)
		go newTrimmer().run()
	case gofer:
		// Long-lived, and small: the default suits it.
	default:
		debug.SetGCPercent(-1)
		debug.SetMemoryLimit(shortLimit)
	}
	maincli.Main()
}

type part int

const (
	command part = iota
	sandbox
	gofer
)

// role finds the part this process plays. runsc starts its own long-lived
// children with a first argument that names them, and keeps the subcommand when
// such a child executes itself again; the flags between the two are all of the
// form --name=value, so the first bare argument is the subcommand.
func role(args []string) part {
	for _, a := range args[1:] {
		if len(a) > 0 && a[0] == '-' {
			continue
		}
		switch a {
		case "boot":
			return sandbox
		case "gofer":
			return gofer
		}
		return command
	}
	return command
}
