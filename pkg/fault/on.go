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
}

// At is a point. A name that is in no list is a mistake of the program.
func At(point string) {
	if !slices.Contains(points(), point) {
		panic("the fault point " + point + " is in no list of package fault")
	}
	state.Lock()
	defer state.Unlock() // not reached once the point has struck: no other goroutine gets past one then
	if state.file == "" {
		return
	}
	data, err := os.ReadFile(state.file)
	if errors.Is(err, fs.ErrNotExist) {
		return
	}
	if err != nil {
		panic(fmt.Sprintf("read the fault file: %v", err))
	}
	line, rest, _ := strings.Cut(string(data), "\n")
	name, count, _ := strings.Cut(line, "#")
	if line != state.armed {
		state.armed, state.seen = line, 0
	}
	if name != point {
		return
	}
	state.seen++
	if n, err := strconv.Atoi(count); err == nil && state.seen < n {
		return
	}
	if strings.TrimSpace(rest) == "" {
		err = os.Remove(state.file)
	} else {
		err = os.WriteFile(state.file, []byte(rest), 0o600)
	}
	if err := errors.Join(err, syscall.Kill(os.Getpid(), syscall.SIGKILL)); err != nil {
		panic(fmt.Sprintf("the fault point %s: %v", point, err))
	}
	select {} // the signal is on its way
}
