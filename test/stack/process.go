// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package stack

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dormouse-run/dormouse/test/fabric"
	"github.com/dormouse-run/dormouse/test/tools"
)

// marker is the environment variable that says which stack a process belongs to.
// It covers the moment between a start and its record.
const marker = "DORMOUSE_STACK="

// identity names one process for good: a pid comes back, a pid with its start
// time in one boot does not.
type identity struct {
	PID   int    `json:"pid"`
	Start uint64 `json:"start"`
	Boot  string `json:"boot"`
}

// identify reads the identity of a living process. A zombie is not living.
func identify(pid int) (identity, error) {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return identity{}, err
	}
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return identity{}, err
	}
	// The name, in parentheses, may hold anything; the fields after it do not.
	fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	if len(fields) < 20 {
		return identity{}, fmt.Errorf("/proc/%d/stat has %d fields", pid, len(fields))
	}
	if fields[0] == "Z" || fields[0] == "X" {
		return identity{}, os.ErrProcessDone
	}
	start, err := strconv.ParseUint(fields[19], 10, 64)
	if err != nil {
		return identity{}, err
	}
	return identity{PID: pid, Start: start, Boot: strings.TrimSpace(string(boot))}, nil
}

// command is a process to start.
type command struct {
	name  string // of its record and its log
	netns string // the machine's own where empty
	path  string
	args  []string
	env   []string
	ready func(ctx context.Context) error // polled until nil
}

// start runs a process, records it, and waits until it is ready. A process that
// ends before it is ready, or is not ready when ctx or the bound ends, is an
// error, and is not left running.
func (s *Stack) start(ctx context.Context, c command) error {
	if id, ok := s.recorded(c.name); ok {
		return fmt.Errorf("%s runs already, as process %d", c.name, id.PID)
	}
	log, err := os.OpenFile(s.Log(c.name), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("%s: %w", c.name, err)
	}
	defer log.Close()
	cmd := exec.Command(c.path, c.args...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = s.Dir, log, log
	cmd.Env = append([]string{
		// The pinned tools first: containerd and agentd look for mkfs.erofs.
		"PATH=" + tools.Dir() + ":/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
		"HOME=/root", marker + s.ID,
	}, c.env...)
	// A session of its own: an interrupt at the terminal is for the owner, who
	// then ends the parts in order.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	begin := time.Now()
	if c.netns == "" {
		err = cmd.Start()
	} else {
		err = fabric.Do(c.netns, cmd.Start)
	}
	if err != nil {
		return fmt.Errorf("start %s: %w", c.name, err)
	}
	ended := make(chan struct{})
	s.wait.Go(func() {
		_ = cmd.Wait() // the log says why it ended
		close(ended)
	})
	if err := s.note(c.name, cmd.Process.Pid); err != nil {
		_ = cmd.Process.Kill()
		return fmt.Errorf("%s: %w; its log ends:\n%s", c.name, err, tail(s.Log(c.name), 20))
	}
	if err := s.awaitReady(ctx, c, ended); err != nil {
		_ = cmd.Process.Kill()
		return err
	}
	s.logf("%s: ready in %d ms", c.name, time.Since(begin).Milliseconds())
	return nil
}

// note records which process plays the part.
func (s *Stack) note(name string, pid int) error {
	id, err := identify(pid)
	if err != nil {
		return fmt.Errorf("it ended at once: %w", err)
	}
	data, err := json.Marshal(id)
	if err != nil {
		return err
	}
	return writeFile(s.pidFile(name), data, 0o600)
}

func (s *Stack) awaitReady(ctx context.Context, c command, ended <-chan struct{}) error {
	if c.ready == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		err := c.ready(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-ended:
			return fmt.Errorf("%s ended before it was ready; its log ends:\n%s", c.name, tail(s.Log(c.name), 20))
		case <-ctx.Done():
			return fmt.Errorf("%s is not ready: %w (%w); its log ends:\n%s", c.name, err, ctx.Err(), tail(s.Log(c.name), 20))
		case <-tick.C:
		}
	}
}

func (s *Stack) pidFile(name string) string { return s.path("pids", name+".json") }

// recorded is the living process that plays the part, if there is one.
func (s *Stack) recorded(name string) (identity, bool) {
	data, err := os.ReadFile(s.pidFile(name))
	if err != nil {
		return identity{}, false
	}
	var id identity
	if err := json.Unmarshal(data, &id); err != nil {
		return identity{}, false
	}
	now, err := identify(id.PID)
	return id, err == nil && now == id
}

// Running says whether the process of this name (redis, registry, coordinator,
// containerd1, agentd1 ...) lives.
func (s *Stack) Running(name string) bool {
	_, ok := s.recorded(name)
	return ok
}

// RunningParts names the processes that live.
func (s *Stack) RunningParts() []string {
	files, err := filepath.Glob(s.path("pids", "*.json"))
	if err != nil {
		return nil
	}
	var names []string
	for _, file := range files {
		if name := strings.TrimSuffix(filepath.Base(file), ".json"); s.Running(name) {
			names = append(names, name)
		}
	}
	return names
}

// PID is the process id of a part, or 0.
func (s *Stack) PID(name string) int {
	id, ok := s.recorded(name)
	if !ok {
		return 0
	}
	return id.PID
}

// signal sends a signal to the process of this name.
func (s *Stack) signal(name string, sig unix.Signal) error {
	id, ok := s.recorded(name)
	if !ok {
		return fmt.Errorf("%s does not run", name)
	}
	h, err := hold(id)
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	defer h.Close()
	return h.signal(sig)
}

// stop ends the process of this name and waits until it has: with SIGTERM and
// SIGKILL after the grace, or at once with SIGKILL where there is none. That it
// does not run is no error.
func (s *Stack) stop(ctx context.Context, name string, grace time.Duration) error {
	id, ok := s.recorded(name)
	if ok {
		if err := end(ctx, id, grace); err != nil {
			return fmt.Errorf("end %s: %w", name, err)
		}
	}
	if err := os.Remove(s.pidFile(name)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("end %s: %w", name, err)
	}
	return nil
}

// held is a process that cannot be mistaken for a later one with its pid.
type held struct{ fd int }

// hold finds the process again; os.ErrProcessDone says that it has gone.
func hold(id identity) (held, error) {
	fd, err := unix.PidfdOpen(id.PID, 0)
	if errors.Is(err, unix.ESRCH) {
		return held{}, os.ErrProcessDone
	}
	if err != nil {
		return held{}, fmt.Errorf("process %d: %w", id.PID, err)
	}
	// The descriptor is fixed on one process now; is it the one that was meant?
	if now, err := identify(id.PID); err != nil || now != id {
		_ = unix.Close(fd)
		return held{}, os.ErrProcessDone
	}
	return held{fd: fd}, nil
}

func (h held) Close() { _ = unix.Close(h.fd) }

func (h held) signal(sig unix.Signal) error {
	if err := unix.PidfdSendSignal(h.fd, sig, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("signal: %w", err)
	}
	return nil
}

// gone waits until the process has ended or the time is up.
func (h held) gone(ctx context.Context, within time.Duration) bool {
	for deadline := time.Now().Add(within); ; {
		left := min(time.Until(deadline), 50*time.Millisecond)
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(h.fd), Events: unix.POLLIN}}, max(0, int(left.Milliseconds())))
		if n > 0 && err == nil {
			return true
		}
		if ctx.Err() != nil || left <= 0 {
			return false
		}
	}
}

// end ends a process. Even a stopped one hears SIGTERM, for it is continued.
func end(ctx context.Context, id identity, grace time.Duration) error {
	h, err := hold(id)
	if errors.Is(err, os.ErrProcessDone) {
		return nil
	}
	if err != nil {
		return err
	}
	defer h.Close()
	if grace > 0 {
		if err := errors.Join(h.signal(unix.SIGTERM), h.signal(unix.SIGCONT)); err != nil {
			return err
		}
		if h.gone(ctx, grace) {
			return nil
		}
	}
	if err := h.signal(unix.SIGKILL); err != nil {
		return err
	}
	if !h.gone(context.WithoutCancel(ctx), time.Minute) {
		return fmt.Errorf("process %d does not end", id.PID)
	}
	return nil
}

// tail is the end of a file, for messages.
func tail(path string, lines int) string {
	f, err := os.Open(path)
	if err != nil {
		return err.Error()
	}
	defer f.Close()
	const most = 16 << 10
	if info, err := f.Stat(); err == nil && info.Size() > most {
		if _, err := f.Seek(-most, io.SeekEnd); err != nil {
			return err.Error()
		}
	}
	data, err := io.ReadAll(f)
	if err != nil {
		return err.Error()
	}
	all := strings.Split(strings.TrimRight(string(data), "\n"), "\n")
	return strings.Join(all[max(0, len(all)-lines):], "\n")
}

func (s *Stack) tailLogs(logf func(string, ...any)) {
	files, err := filepath.Glob(s.path("logs", "*.log"))
	if err != nil {
		return
	}
	for _, file := range files {
		logf("--- %s ---\n%s", filepath.Base(file), tail(file, 40))
	}
}
