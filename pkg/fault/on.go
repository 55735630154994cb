//go:build faults

package fault

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Enabled tells whether this build has fault points.
const Enabled = true

var points = sync.OnceValue(func() []string { return slices.Concat(Agentd(), Coordinator()) })

var state struct {
	sync.Mutex
	file  string
	armed string // the line that passes are counted for
	seen  int
}

// Open says which file arms a point.
func Open(file string) {
	state.Lock()
	defer state.Unlock()
	state.file = file
	mapClock(file + ".clock")
}

// At is a point. A name that is in no list is a mistake of the program.
func At(point string) {
	if !slices.Contains(points(), point) {
		panic("the fault point " + point + " is in no list of package fault")
	}
	if held := pass(point); held != "" {
		stay(held)
	}
}

// stay waits until the file is gone.
func stay(held string) {
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for range tick.C {
		if _, err := os.Stat(held); errors.Is(err, fs.ErrNotExist) {
			return
		}
	}
}

// pass strikes if the point is armed. Where it only holds, it gives the file that does.
func pass(point string) (held string) {
	state.Lock()
	defer state.Unlock() // not reached once the point has struck: no other goroutine gets past one then
	if state.file == "" {
		return ""
	}
	data, err := os.ReadFile(state.file)
	if errors.Is(err, fs.ErrNotExist) {
		return ""
	}
	if err != nil {
		panic(fmt.Sprintf("read the fault file: %v", err))
	}
	line, rest, _ := strings.Cut(string(data), "\n")
	spec, hold := strings.CutSuffix(line, "!")
	name, count, _ := strings.Cut(spec, "#")
	if line != state.armed {
		state.armed, state.seen = line, 0
	}
	if name != point {
		return ""
	}
	state.seen++
	if n, err := strconv.Atoi(count); err == nil && state.seen < n {
		return ""
	}
	if hold {
		held = state.file + ".held"
		if err := os.WriteFile(held, []byte(point), 0o600); err != nil {
			panic(fmt.Sprintf("the fault point %s: %v", point, err))
		}
	}
	if strings.TrimSpace(rest) == "" {
		err = os.Remove(state.file)
	} else {
		err = os.WriteFile(state.file, []byte(rest), 0o600)
	}
	state.armed, state.seen = "", 0
	if hold && err == nil {
		return held
	}
	if err := errors.Join(err, syscall.Kill(os.Getpid(), syscall.SIGKILL)); err != nil {
		panic(fmt.Sprintf("the fault point %s: %v", point, err))
	}
	select {} // the signal is on its way
}
