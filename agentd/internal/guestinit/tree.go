package guestinit

import (
	"syscall"

	"github.com/dormouse-run/dormouse/agentd/internal/guestwire"
)

func (a *agent) signal(m *guestwire.Signal) (guestwire.Message, *failure) {
	p, err := a.find(m.ProcessID)
	if err != nil {
		return nil, err
	}
	if m.Signal == 0 || m.Signal > 64 {
		return nil, fail("INVALID_FIELD", "a signal is a number from 1 to 64").with("field", "signal")
	}
	sig := syscall.Signal(m.Signal)
	if m.Tree {
		return &guestwire.Signaled{Sent: uint32(a.signalTree(p, sig))}, nil
	}
	// Not reaped, so the pid is still this process's.
	if p.exit == nil && syscall.Kill(p.pid, sig) == nil {
		return &guestwire.Signaled{Sent: 1}, nil
	}
	return &guestwire.Signaled{}, nil
}

// processMark is an environment variable that every process gets from init and hands on to what it
// starts. By it a descendant is known that took a session of its own and lost its parent, as daemons
// do.
const processMark = "DORMOUSE_PROCESS_ID="

// The environment of a process is looked through this far for the mark.
const environLimit = 1 << 20

// signalTree signals the process, its descendants, and whoever else is in its session, which it
// leads, or carries its mark: children that outlived it too. Only one that cleared its environment,
// took a session of its own and lost its parent is no longer known to be one.
func (a *agent) signalTree(p *process, sig syscall.Signal) int {
	sent := map[int]bool{}
	// A killed process may have forked while the table was read: look again until nobody is new.
	for range 8 {
		before := len(sent)
		for _, pid := range a.members(p) {
			if !sent[pid] && syscall.Kill(pid, sig) == nil {
				sent[pid] = true
			}
		}
		if len(sent) == before || sig != syscall.SIGKILL {
			break
		}
	}
	return len(sent)
}

type entry struct{ pid, parent, session int }

// members lists the tree, its root first.
func (a *agent) members(p *process) []int {
	session := p.pid
	if other := a.byPID[p.pid]; other != nil && other != p {
		session = -1 // the pid, and with it the session, is another's now
	}
	table := processTable()
	in := map[int]bool{}
	var out []int
	add := func(pid int) {
		if pid > 1 && !in[pid] {
			in[pid] = true
			out = append(out, pid)
		}
	}
	if p.exit == nil {
		add(p.pid)
	}
	for grown := true; grown; {
		grown = false
		for _, e := range table {
			if !in[e.pid] && (e.session == session || in[e.parent]) {
				add(e.pid)
				grown = in[e.pid] || grown
			}
		}
		if grown {
			continue
		}
		for _, e := range table {
			if !in[e.pid] && e.pid > 1 && a.byPID[e.pid] == nil && marked(e.pid, p.id) {
				add(e.pid)
				grown = true
			}
		}
	}
	return out
}

// marked tells whether a process has another's mark in the environment that it was executed with.
func marked(pid int, id string) bool {
	environ, err := readFile("/proc/"+itoa(uint64(pid))+"/environ", environLimit)
	if err != nil {
		return false
	}
	for rest := string(environ); rest != ""; {
		var one string
		if one, rest, _ = cut(rest, 0); one == processMark+id {
			return true
		}
	}
	return false
}

// processTable reads /proc. Without one it is empty, and a tree is its root.
func processTable() []entry {
	fd, err := syscall.Open("/proc", syscall.O_RDONLY|syscall.O_DIRECTORY|syscall.O_CLOEXEC, 0)
	if err != nil {
		return nil
	}
	defer func() { _ = syscall.Close(fd) }()
	var out []entry
	buf := make([]byte, 8192)
	for {
		n, err := syscall.ReadDirent(fd, buf)
		if err != nil || n <= 0 {
			return out
		}
		var names []string
		_, _, names = syscall.ParseDirent(buf[:n], -1, names)
		for _, name := range names {
			pid, ok := atoi(name)
			if !ok {
				continue
			}
			stat, err := readFile("/proc/"+name+"/stat", 4096)
			if err != nil {
				continue
			}
			if e, ok := parseStat(pid, string(stat)); ok {
				out = append(out, e)
			}
		}
	}
}

// parseStat reads "pid (name) state ppid pgrp session ..."; the name may hold anything.
func parseStat(pid int, stat string) (entry, bool) {
	for i := len(stat) - 1; i >= 0; i-- {
		if stat[i] != ')' {
			continue
		}
		var f [4]string
		rest := stat[min(i+2, len(stat)):]
		for j := range f {
			f[j], rest, _ = cut(rest, ' ')
		}
		parent, ok1 := atoi(f[1])
		session, ok2 := atoi(f[3])
		return entry{pid, parent, session}, ok1 && ok2
	}
	return entry{}, false
}
