// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package stack

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dormouse-run/dormouse/test/fabric"
)

// Down ends the stack and everything it made: daemons first, so that nobody
// starts anything new, then the sandboxes, which outlive their agentd by design,
// then the rest. Every step runs, whatever became of the others; where all went
// well, the folder and the index entry go too. It may be repeated. ErrOwned is
// returned where another living process owns the stack.
func (s *Stack) Down(ctx context.Context) error {
	if err := s.own(); err != nil {
		return err
	}
	begin := time.Now()
	var errs []error
	for _, step := range []struct {
		what string
		do   func(context.Context) error
	}{
		{"daemons", s.stopDaemons},
		{"sandboxes", s.endSandboxes},
		{"parts", s.stopParts},
		{"other processes of the stack", s.endMarked},
		{"control groups", s.removeCgroups},
		{"mounts", s.unmount},
		{"network namespaces", func(context.Context) error { return fabric.Remove(s.ID) }},
	} {
		if err := step.do(ctx); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", step.what, err))
		}
	}
	if len(errs) == 0 {
		errs = append(errs, s.forget())
	}
	errs = append(errs, s.release())
	s.wait.Wait()
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("ending the stack in %s: %w", s.Dir, err)
	}
	s.logf("stack %s: ended in %d ms", s.ID, time.Since(begin).Milliseconds())
	return nil
}

// own makes this process the owner, unless it is. A stack whose folder has gone
// has no lock, but may have left namespaces and processes.
func (s *Stack) own() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.lock != nil {
		return nil
	}
	lock, err := lockDir(s.Dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	s.lock = lock
	return err
}

func (s *Stack) stopDaemons(ctx context.Context) error {
	errs := []error{s.StopStandby(ctx), s.stop(ctx, coordinatorName, stopGrace)}
	for i := 1; i <= s.Nodes; i++ {
		errs = append(errs, s.stop(ctx, agentdName(i), stopGrace))
	}
	return errors.Join(errs...)
}

// stopParts ends what holds only data of the stack: nothing of it is needed after.
func (s *Stack) stopParts(ctx context.Context) error {
	errs := []error{s.stop(ctx, "redis", 0), s.stop(ctx, "registry", 0)}
	for i := 1; i <= s.Nodes; i++ {
		// Asked first: it undoes its own mounts.
		errs = append(errs, s.stop(ctx, containerdName(i), stopGrace))
	}
	return errors.Join(errs...)
}

const stopGrace = 30 * time.Second

// endSandboxes ends the processes of runsc whose state is inside the folder. The
// sandbox's environment is empty, so they are known by the --root they were given.
func (s *Stack) endSandboxes(ctx context.Context) error {
	root := []byte("\x00--root=" + s.Dir + "/")
	return s.endWhere(ctx, "cmdline", func(cmdline []byte) bool {
		return bytes.HasPrefix(cmdline, []byte("runsc-")) && bytes.Contains(cmdline, root)
	})
}

// endMarked ends the processes that carry the stack's id in their environment, and
// Redis, which overwrites its environment with a title: that names its socket.
func (s *Stack) endMarked(ctx context.Context) error {
	mark := []byte("\x00" + marker + s.ID + "\x00")
	title := []byte("unixsocket:" + s.RedisSocket())
	return errors.Join(
		s.endWhere(ctx, "environ", func(environ []byte) bool {
			return bytes.Contains(slices.Concat([]byte{0}, environ), mark)
		}),
		s.endWhere(ctx, "cmdline", func(cmdline []byte) bool { return bytes.Contains(cmdline, title) }),
	)
}

// endWhere ends the processes whose file in /proc says so, until there is none:
// one that was being started while the first ones ended is found by the next look.
func (s *Stack) endWhere(ctx context.Context, file string, match func([]byte) bool) error {
	for range 10 {
		var found []identity
		dirs, err := filepath.Glob("/proc/[0-9]*")
		if err != nil {
			return err
		}
		for _, dir := range dirs {
			pid, err := strconv.Atoi(filepath.Base(dir))
			if err != nil || pid == os.Getpid() {
				continue
			}
			id, err := identify(pid)
			if err != nil {
				continue // ended meanwhile
			}
			data, err := os.ReadFile(filepath.Join(dir, file))
			if err != nil || !match(data) {
				continue
			}
			found = append(found, id)
		}
		if len(found) == 0 {
			return nil
		}
		var errs []error
		for _, id := range found {
			errs = append(errs, end(ctx, id, 0))
		}
		if err := errors.Join(errs...); err != nil {
			return err
		}
	}
	return errors.New("new ones keep appearing")
}

// removeCgroups ends what is in the stack's control groups and removes them from
// every hierarchy.
func (s *Stack) removeCgroups(ctx context.Context) error {
	mounts, err := mountPoints(func(kind string) bool { return kind == "cgroup" || kind == "cgroup2" })
	if err != nil {
		return err
	}
	var errs []error
	for _, mount := range mounts {
		groups, err := filepath.Glob(filepath.Join(mount, s.cgroupPrefix()+"*"))
		if err != nil {
			return err
		}
		for _, group := range groups {
			errs = append(errs, removeCgroup(ctx, group))
		}
		// The last stack takes the common parent along; while others have groups
		// in it, it stays.
		_ = os.Remove(filepath.Join(mount, filepath.Dir(s.cgroupPrefix())))
	}
	return errors.Join(errs...)
}

func removeCgroup(ctx context.Context, top string) error {
	var dirs []string
	if err := filepath.WalkDir(top, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() {
			dirs = append(dirs, path)
		}
		return nil
	}); err != nil {
		return err
	}
	slices.Reverse(dirs)
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for _, dir := range dirs {
		deadline := time.Now().Add(time.Minute)
		for {
			if err := endGroup(ctx, dir); err != nil {
				return err
			}
			err := os.Remove(dir)
			if err == nil || errors.Is(err, os.ErrNotExist) {
				break
			}
			// The kernel counts a process for a moment after it has ended.
			if time.Now().After(deadline) {
				return err
			}
			<-tick.C
		}
	}
	return nil
}

func endGroup(ctx context.Context, dir string) error {
	data, err := os.ReadFile(filepath.Join(dir, "cgroup.procs"))
	if err != nil {
		return nil // removed meanwhile
	}
	var errs []error
	for _, field := range strings.Fields(string(data)) {
		pid, err := strconv.Atoi(field)
		if err != nil || pid == os.Getpid() || pid == 0 {
			continue
		}
		id, err := identify(pid)
		if err != nil {
			continue // ended meanwhile
		}
		errs = append(errs, end(ctx, id, 0))
	}
	return errors.Join(errs...)
}

// unmount undoes the mounts inside the folder, the latest first.
func (s *Stack) unmount(context.Context) error {
	inside, err := s.mountsInside()
	if err != nil {
		return err
	}
	slices.Reverse(inside)
	var errs []error
	for _, point := range inside {
		if err := unix.Unmount(point, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil && !errors.Is(err, unix.EINVAL) {
			errs = append(errs, fmt.Errorf("%s: %w", point, err))
		}
	}
	return errors.Join(errs...)
}

func (s *Stack) mountsInside() ([]string, error) {
	all, err := mountPoints(func(string) bool { return true })
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(all, func(point string) bool { return !strings.HasPrefix(point, s.Dir+"/") }), nil
}

// mountPoints lists this namespace's mounts of certain kinds, in mount order.
func mountPoints(want func(kind string) bool) ([]string, error) {
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var points []string
	for lines := bufio.NewScanner(f); ; {
		if !lines.Scan() {
			return points, lines.Err()
		}
		before, after, ok := strings.Cut(lines.Text(), " - ")
		fields, kind := strings.Fields(before), strings.Fields(after)
		if !ok || len(fields) < 5 || len(kind) == 0 || !want(kind[0]) {
			continue
		}
		points = append(points, unescape(fields[4]))
	}
}

// unescape undoes the octal escapes of mountinfo.
func unescape(s string) string {
	return strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`).Replace(s)
}

// forget removes the folder and, when it has gone, the index entry.
func (s *Stack) forget() error {
	inside, err := s.mountsInside()
	if err != nil {
		return err
	}
	if len(inside) > 0 {
		return fmt.Errorf("still mounted inside, so the folder stays: %s", strings.Join(inside, ", "))
	}
	if err := os.RemoveAll(s.Dir); err != nil {
		return err
	}
	if err := os.Remove(s.indexFile()); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}
