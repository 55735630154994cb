package bench

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// ticksPerSecond is the kernel's unit of CPU time in /proc, the same on every architecture that Go runs on.
const ticksPerSecond = 100

// cpuUse is CPU time by who took it, in milliseconds.
type cpuUse map[string]float64

// Names in a cpuUse beside those of the stack's parts. "runsc" are the daemon's commands that have ended; what they did within a sandbox's
// control group is counted with the sandboxes too.
const (
	cpuIdle, cpuBusy     = "idle", "all"
	cpuClient, cpuBare   = "client", "bare commands"
	cpuBoxes, cpuCommand = "sandboxes", "runsc"
)

// cpu tells what was used until now.
func (b *bench) cpu() (cpuUse, error) {
	use := cpuUse{}
	parts := map[string]string{"agentd1": "agentd", "containerd1": "containerd"}
	for _, name := range b.cluster.RunningParts() {
		own, children, err := processCPU(b.cluster.PID(name))
		if err != nil {
			return nil, err
		}
		as := parts[name]
		if as == "" {
			as = name
		}
		use[as] = own
		if strings.HasPrefix(name, "agentd") {
			use[cpuCommand] = children
		}
	}
	var err error
	if use[cpuClient], use[cpuBare], err = processCPU(os.Getpid()); err != nil {
		return nil, err
	}
	if data, err := os.ReadFile(filepath.Join("/sys/fs/cgroup/cpuacct", b.cluster.CgroupParent(1), "cpuacct.usage")); err == nil {
		ns, _ := strconv.ParseFloat(strings.TrimSpace(string(data)), 64)
		use[cpuBoxes] = ns / 1e6
	}
	data, err := os.ReadFile("/proc/stat")
	if err != nil {
		return nil, err
	}
	line, _, _ := strings.Cut(string(data), "\n")
	for i, f := range strings.Fields(line)[1:] {
		if i >= 8 { // guests' time is counted before
			break
		}
		v, err := strconv.ParseFloat(f, 64)
		if err != nil {
			return nil, err
		}
		name := cpuBusy
		if i == 3 || i == 4 {
			name = cpuIdle
		}
		use[name] += v * 1000 / ticksPerSecond
	}
	return use, nil
}

// processCPU is what a process used, and what those of its children that it has waited for did.
func processCPU(pid int) (own, children float64, err error) {
	if pid == os.Getpid() {
		var mine, theirs unix.Rusage
		if err := unix.Getrusage(unix.RUSAGE_SELF, &mine); err != nil {
			return 0, 0, err
		}
		if err := unix.Getrusage(unix.RUSAGE_CHILDREN, &theirs); err != nil {
			return 0, 0, err
		}
		ms := func(u unix.Rusage) float64 { return float64(u.Utime.Nano()+u.Stime.Nano()) / 1e6 }
		return ms(mine), ms(theirs), nil
	}
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, 0, err
	}
	f := strings.Fields(string(data[bytes.LastIndexByte(data, ')')+1:]))
	if len(f) < 15 {
		return 0, 0, fmt.Errorf("the kernel says little of process %d: %q", pid, data)
	}
	at := func(i int) float64 {
		v, _ := strconv.ParseFloat(f[i], 64)
		return v * 1000 / ticksPerSecond
	}
	return at(11) + at(12), at(13) + at(14), nil
}

func (u cpuUse) since(before cpuUse) cpuUse {
	d := cpuUse{}
	for k, v := range u {
		d[k] = v - before[k]
	}
	return d
}

func (u cpuUse) add(d cpuUse) {
	for k, v := range d {
		u[k] += v
	}
}

// counted is inParallel, and adds what CPU it took.
func (b *bench) counted(ctx context.Context, into cpuUse, width, n int, do func(ctx context.Context, i int) error) (time.Duration, error) {
	before, err := b.cpu()
	if err != nil {
		return 0, err
	}
	took, err := inParallel(ctx, width, n, do)
	if err != nil {
		return 0, err
	}
	after, err := b.cpu()
	if err != nil {
		return 0, err
	}
	into.add(after.since(before))
	return took, nil
}

// each is a line of what each of n took.
func (u cpuUse) each(n int) string {
	names := make([]string, 0, len(u))
	for k, v := range u {
		if v >= 0.05*float64(n) {
			names = append(names, k)
		}
	}
	slices.SortFunc(names, func(a, b string) int { return cmp.Compare(u[b], u[a]) })
	for i, k := range names {
		names[i] = fmt.Sprintf("%s %.1f", k, u[k]/float64(n))
	}
	return strings.Join(names, ", ") + " ms"
}
