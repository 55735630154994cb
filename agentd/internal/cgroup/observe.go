package cgroup

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dormouse-run/dormouse/pkg/errs"
)

// Stats are a group's counters; a counter that the kernel does not keep is 0.
type Stats struct {
	CPU              time.Duration
	MemoryBytes      uint64
	MemoryPeakBytes  uint64
	MemoryLimitBytes uint64 // 0 for none
	Pids             uint64
	OOMKills         uint64
}

// Exists tells whether the group is there in any hierarchy.
func (g *Group) Exists() bool {
	for _, mount := range g.m.mounts() {
		if _, err := os.Stat(g.dir(mount)); err == nil {
			return true
		}
	}
	return false
}

// Stats reads the counters. OBJECT_NOT_FOUND when the group is not there.
func (g *Group) Stats() (Stats, error) {
	if !g.Exists() {
		return Stats{}, errs.New(errs.ObjectNotFound, "there is no control group %s", g.m.Path(g.id)).With("kind", "cgroup")
	}
	if g.m.V2Only() {
		return g.statsV2(), nil
	}
	return g.statsV1(), nil
}

// CPU reads the time alone, which is one file. OBJECT_NOT_FOUND when the group is not there, or the kernel does not
// count for it.
func (g *Group) CPU() (time.Duration, error) {
	var used time.Duration
	if g.m.V2Only() {
		dir, _ := g.unifiedDir()
		used = time.Duration(keyed(dir, "cpu.stat", "usage_usec")) * time.Microsecond
	} else if dir, ok := g.v1dir("cpuacct"); ok {
		used = time.Duration(number(dir, "cpuacct.usage"))
	}
	if used == 0 {
		return 0, errs.New(errs.ObjectNotFound, "no time is counted for the control group %s", g.m.Path(g.id)).With("kind", "cgroup")
	}
	return used, nil
}

// InMemory is what the group has in memory and cannot give back: page cache is not counted. 0 when it is not there.
func (g *Group) InMemory() (int64, error) { return g.m.inMemory(g.dir) }

// InMemory is that of all groups below the parent.
func (m *Manager) InMemory() (int64, error) {
	return m.inMemory(func(mount string) string { return filepath.Join(mount, m.parent) })
}

func (m *Manager) inMemory(in func(mount string) string) (int64, error) {
	if m.V2Only() {
		return heldV2(in(m.unified))
	}
	for _, h := range m.v1 {
		if slices.Contains(h.controllers, "memory") {
			return heldV1(in(h.mount))
		}
	}
	return 0, lacking("memory")
}

// heldV1 is what is used, less the page cache that is not shared memory: the kernel counts that among it.
func heldV1(dir string) (int64, error) {
	stat, err := numbers(dir, "memory.stat")
	if err != nil || stat == nil {
		return 0, err
	}
	return max(int64(number(dir, "memory.usage_in_bytes"))-stat["total_cache"]+stat["total_shmem"], 0), nil
}

func heldV2(dir string) (int64, error) {
	stat, err := numbers(dir, "memory.stat")
	if err != nil || stat == nil {
		return 0, err
	}
	return max(int64(number(dir, "memory.current"))-stat["file"]+stat["shmem"]-stat["slab_reclaimable"], 0), nil
}

// numbers reads a file of "key value" lines; nil when there is none.
func numbers(dir, file string) (map[string]int64, error) {
	data, err := os.ReadFile(filepath.Join(dir, file))
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV) {
		return nil, nil
	}
	if err != nil {
		return nil, errs.Wrap(err, errs.InternalError, "read %s of %s: %v", file, dir, err)
	}
	all := make(map[string]int64)
	for line := range strings.Lines(string(data)) {
		if k, v, ok := strings.Cut(strings.TrimSpace(line), " "); ok {
			if n, err := strconv.ParseInt(v, 10, 64); err == nil {
				all[k] = n
			}
		}
	}
	return all, nil
}

func (g *Group) statsV2() Stats {
	dir, _ := g.unifiedDir()
	return Stats{
		CPU:              time.Duration(keyed(dir, "cpu.stat", "usage_usec")) * time.Microsecond,
		MemoryBytes:      number(dir, "memory.current"),
		MemoryPeakBytes:  number(dir, "memory.peak"),
		MemoryLimitBytes: number(dir, "memory.max"),
		Pids:             number(dir, "pids.current"),
		OOMKills:         keyed(dir, "memory.events", "oom_kill"),
	}
}

func (g *Group) statsV1() Stats {
	var s Stats
	if dir, ok := g.v1dir("cpuacct"); ok {
		s.CPU = time.Duration(number(dir, "cpuacct.usage"))
	}
	if dir, ok := g.v1dir("memory"); ok {
		s.MemoryBytes = number(dir, "memory.usage_in_bytes")
		s.MemoryPeakBytes = number(dir, "memory.max_usage_in_bytes")
		// No limit reads as the largest number of whole pages.
		if limit := number(dir, "memory.limit_in_bytes"); limit < 1<<62 {
			s.MemoryLimitBytes = limit
		}
		s.OOMKills = keyed(dir, "memory.oom_control", "oom_kill")
	}
	if dir, ok := g.v1dir("pids"); ok {
		s.Pids = number(dir, "pids.current")
	}
	return s
}

// Pids gives the processes in the group, in order: the union over all hierarchies.
func (g *Group) Pids() ([]int, error) {
	var pids []int
	for _, mount := range g.m.mounts() {
		data, err := os.ReadFile(filepath.Join(g.dir(mount), "cgroup.procs"))
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV) {
			continue
		}
		if err != nil {
			return nil, errs.Wrap(err, errs.InternalError, "list the processes of %s: %v", g.m.Path(g.id), err)
		}
		for _, field := range strings.Fields(string(data)) {
			// 0 is a process of another pid namespace; it cannot be named, v2's kill still reaches it.
			if pid, err := strconv.Atoi(field); err == nil && pid > 0 {
				pids = append(pids, pid)
			}
		}
	}
	slices.Sort(pids)
	return slices.Compact(pids), nil
}

// Kill kills every process in the group, never the caller's own, and does not wait. Idempotent.
func (g *Group) Kill() error {
	if dir, ok := g.unifiedDir(); ok {
		err := os.WriteFile(filepath.Join(dir, "cgroup.kill"), []byte("1"), 0)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return errs.Wrap(err, errs.InternalError, "kill the control group %s: %v", g.m.Path(g.id), err)
		}
		if err == nil && g.m.V2Only() {
			return nil
		}
	}
	pids, err := g.Pids()
	if err != nil {
		return err
	}
	for _, pid := range pids {
		if pid == os.Getpid() {
			continue
		}
		if err := unix.Kill(pid, unix.SIGKILL); err != nil && !errors.Is(err, unix.ESRCH) {
			return errs.Wrap(err, errs.InternalError, "kill process %d of %s: %v", pid, g.m.Path(g.id), err)
		}
	}
	return nil
}

// Remove kills what is in the group, reaps those of it that are this process's children, and removes
// the group from every hierarchy. It returns nil only when none is left. Idempotent. Every hierarchy
// is tried even if one fails.
func (g *Group) Remove(ctx context.Context) error {
	members := make(map[int]bool)
	for wait := time.Millisecond; ; wait = min(2*wait, 50*time.Millisecond) {
		pids, err := g.Pids()
		if err != nil {
			return err
		}
		for _, pid := range pids {
			members[pid] = true
		}
		if len(pids) > 0 {
			if err := g.Kill(); err != nil {
				return err
			}
		}
		for pid := range members {
			// A child of another process, or one reaped elsewhere, is an error that means nothing here.
			_, _ = unix.Wait4(pid, nil, unix.WNOHANG, nil)
		}
		err = g.rmdirAll()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return errs.Wrap(errors.Join(ctx.Err(), err), errs.DeadlineExpired, "the control group %s still has processes; delete it again", g.m.Path(g.id))
		case <-time.After(wait):
		}
	}
}

func (g *Group) rmdirAll() error {
	var all []error
	for _, mount := range g.m.mounts() {
		if err := rmdir(g.dir(mount)); err != nil {
			all = append(all, err)
		}
	}
	return errors.Join(all...)
}

// number reads a file with one number; "max", a missing file and anything else are 0.
func number(dir, file string) uint64 {
	data, err := os.ReadFile(filepath.Join(dir, file))
	if err != nil {
		return 0
	}
	n, err := strconv.ParseUint(strings.TrimSpace(string(data)), 10, 64)
	if err != nil {
		return 0
	}
	return n
}

// keyed reads the number after a key in a file of "key value" lines.
func keyed(dir, file, key string) uint64 {
	data, err := os.ReadFile(filepath.Join(dir, file))
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(data)) {
		if k, v, ok := strings.Cut(strings.TrimSpace(line), " "); ok && k == key {
			n, err := strconv.ParseUint(v, 10, 64)
			if err != nil {
				return 0
			}
			return n
		}
	}
	return 0
}
