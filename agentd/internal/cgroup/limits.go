package cgroup

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/dormouse-run/dormouse/pkg/errs"
)

// The files of what is left to a group when memory is short, in v2 and v1.
const (
	low       = "memory.low"
	softLimit = "memory.soft_limit_in_bytes"
)

// wanted are the v2 controllers that limits need.
var wanted = []string{"cpu", "memory", "pids"}

// enableV2 hands the controllers down from the root to the group's parent.
func (g *Group) enableV2() error {
	dir := g.m.unified
	for _, part := range append([]string{""}, strings.Split(strings.Trim(g.m.parent, "/"), "/")...) {
		dir = filepath.Join(dir, part)
		has, err := os.ReadFile(filepath.Join(dir, "cgroup.controllers"))
		if err != nil {
			return errs.Wrap(err, errs.InternalError, "read the controllers of %s: %v", dir, err)
		}
		for _, c := range wanted {
			if !slices.Contains(strings.Fields(string(has)), c) {
				return errs.New(errs.NotSupported, "the control group %s lacks the controller %s; enable it in its parent's cgroup.subtree_control", dir, c).With("feature", "cgroup "+c)
			}
		}
		if err := write(dir, "cgroup.subtree_control", "+"+strings.Join(wanted, " +")); err != nil {
			return err
		}
	}
	return nil
}

func (g *Group) limitV2(res *specs.LinuxResources) error {
	dir, _ := g.unifiedDir()
	if m := res.Memory; m != nil && m.Reservation != nil {
		if err := write(dir, low, strconv.FormatInt(*m.Reservation, 10)); err != nil {
			return err
		}
	}
	if m := res.Memory; m != nil && m.Limit != nil {
		if err := write(dir, "memory.max", limitText(*m.Limit)); err != nil {
			return err
		}
		// No swap: a limit is a promise about memory, and swapped sandboxes answer to nobody in time.
		if err := writeIfThere(dir, "memory.swap.max", "0"); err != nil {
			return err
		}
		if err := writeIfThere(dir, "memory.oom.group", "1"); err != nil {
			return err
		}
	}
	if c := res.CPU; c != nil {
		if c.Quota != nil {
			if err := write(dir, "cpu.max", fmt.Sprintf("%s %d", limitText(*c.Quota), period(c))); err != nil {
				return err
			}
		}
		if c.Shares != nil && *c.Shares > 0 {
			if err := write(dir, "cpu.weight", strconv.FormatUint(weight(*c.Shares), 10)); err != nil {
				return err
			}
		}
	}
	if p := res.Pids; p != nil && p.Limit != nil {
		return write(dir, "pids.max", limitText(*p.Limit))
	}
	return nil
}

func (g *Group) limitV1(res *specs.LinuxResources) error {
	if m := res.Memory; m != nil {
		if err := g.memoryV1(m); err != nil {
			return err
		}
	}
	if c := res.CPU; c != nil && (c.Quota != nil || c.Shares != nil) {
		dir, ok := g.v1dir("cpu")
		if !ok {
			return lacking("cpu")
		}
		if c.Shares != nil && *c.Shares > 0 {
			if err := write(dir, "cpu.shares", strconv.FormatUint(*c.Shares, 10)); err != nil {
				return err
			}
		}
		if c.Quota != nil {
			if err := write(dir, "cpu.cfs_period_us", strconv.FormatUint(period(c), 10)); err != nil {
				return err
			}
			if err := write(dir, "cpu.cfs_quota_us", strconv.FormatInt(*c.Quota, 10)); err != nil {
				return err
			}
		}
	}
	if p := res.Pids; p != nil && p.Limit != nil {
		dir, ok := g.v1dir("pids")
		if !ok {
			return lacking("pids")
		}
		return write(dir, "pids.max", limitText(*p.Limit))
	}
	return nil
}

// memoryV1 sets the soft limit, which is where the kernel goes last when memory is short, the memory limit and the same limit for memory and swap together, in
// the order that the kernel accepts: it refuses a memory limit above that of both.
func (g *Group) memoryV1(m *specs.LinuxMemory) error {
	dir, ok := g.v1dir("memory")
	if !ok {
		return lacking("memory")
	}
	if m.Reservation != nil {
		if err := write(dir, softLimit, strconv.FormatInt(*m.Reservation, 10)); err != nil {
			return err
		}
	}
	if m.Limit == nil {
		return nil
	}
	value := strconv.FormatInt(*m.Limit, 10)
	first := write(dir, "memory.limit_in_bytes", value)
	if err := writeIfThere(dir, "memory.memsw.limit_in_bytes", value); err != nil {
		return err
	}
	if first != nil {
		return write(dir, "memory.limit_in_bytes", value)
	}
	return nil
}

func lacking(controller string) error {
	return errs.New(errs.NotSupported, "a %s limit is asked for, but the %s controller is not mounted", controller, controller).With("feature", "cgroup "+controller)
}

func writeIfThere(dir, file, value string) error {
	if _, err := os.Stat(filepath.Join(dir, file)); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return write(dir, file, value)
}

// limitText is a v2 limit (and v1's pids.max): negative is none.
func limitText(n int64) string {
	if n < 0 {
		return "max"
	}
	return strconv.FormatInt(n, 10)
}

func period(c *specs.LinuxCPU) uint64 {
	if c.Period != nil && *c.Period > 0 {
		return *c.Period
	}
	return 100_000
}

// weight maps v1's shares (2..262144, 1024 usual) to v2's weight (1..10000, 100 usual) so that the
// usual values and both ends meet.
func weight(shares uint64) uint64 {
	w := shares * 100 / 1024
	return min(max(w, 1), 10_000)
}
