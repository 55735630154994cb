package robustness

import (
	"bytes"
	"strconv"
)

// whole is how many bytes of a server's log are whole commands, none of them within a MULTI whose EXEC is not there.
func whole(log []byte) (end int) {
	within := false
	for rest := log; ; {
		command, n := firstCommand(rest)
		if n == 0 {
			return end
		}
		rest = rest[n:]
		switch {
		case bytes.EqualFold(command, []byte("MULTI")):
			within = true
		case bytes.EqualFold(command, []byte("EXEC")):
			within = false
		}
		if !within {
			end = len(log) - len(rest)
		}
	}
}

// firstCommand gives the name of the command that the log begins with, and its length, which is 0 if it is not whole.
func firstCommand(log []byte) (name []byte, length int) {
	rest := log
	header := func(mark byte) (n int, ok bool) {
		line, after, found := bytes.Cut(rest, []byte("\r\n"))
		if !found || len(line) == 0 || line[0] != mark {
			return 0, false
		}
		rest = after
		n, err := strconv.Atoi(string(line[1:]))
		return n, err == nil && n >= 0
	}
	count, ok := header('*')
	for i := 0; ok && i < count; i++ {
		var size int
		if size, ok = header('$'); !ok || len(rest) < size+2 {
			return nil, 0
		}
		if i == 0 {
			name = rest[:size]
		}
		rest = rest[size+2:]
	}
	if !ok {
		return nil, 0
	}
	return name, len(log) - len(rest)
}
