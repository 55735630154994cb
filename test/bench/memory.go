package bench

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/dormouse-run/dormouse/pkg/client"
	"github.com/dormouse-run/dormouse/pkg/wait"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
	"github.com/dormouse-run/dormouse/test/stack"
)

const (
	// idle is how many sandboxes of a kind are measured together, crowd how many the daemons are measured with.
	idle, crowd = 40, 100
	// settle is longer than runsc takes to give back what a start or a restore left in its heap.
	settle = 26 * time.Second
)

// benchMemory tells what an idle sandbox costs, everything counted, and what the daemons take with many.
func benchMemory(ctx context.Context, b *bench) ([]Row, error) {
	var rows []Row
	plain, row, err := b.cost(ctx, "idle sandbox, without a volume", 10, b.plain)
	if err != nil {
		return nil, err
	}
	rows = append(rows, row)
	if row, err = b.costOfInit(ctx, plain); err != nil {
		return nil, err
	}
	rows = append(rows, row)
	if row, err = b.costOfRestored(ctx, plain[0]); err != nil {
		return nil, err
	}
	rows = append(rows, row)
	volumes, row, err := b.cost(ctx, "idle sandbox, with a volume", 16, b.withVolume)
	if err != nil {
		return nil, err
	}
	rows = append(rows, row)
	if err := deleteAll(ctx, volumes); err != nil {
		return nil, err
	}
	more, err := b.many(ctx, crowd-idle, b.plain)
	if err != nil {
		return nil, err
	}
	if err := wait.For(ctx, 5*time.Second); err != nil {
		return nil, err
	}
	for _, d := range []struct {
		name string
		most float64
	}{{"agentd", 60}, {"coordinator", 40}} {
		m, err := b.daemon(d.name)
		if err != nil {
			return nil, err
		}
		rows = append(rows, Row{What: fmt.Sprintf("%s with %d sandboxes, resident", d.name, crowd),
			Product: fmt.Sprintf("%.1f MB anonymous, %.1f MB of files", m.anonymous, m.files), Value: m.anonymous + m.files, Unit: "MB", AtMost: d.most})
	}
	return rows, deleteAll(ctx, append(plain, more...))
}

func (b *bench) plain(ctx context.Context) (*client.Sandbox, error) {
	return b.create(ctx, startMemory, nil)
}

func (b *bench) withVolume(ctx context.Context) (*client.Sandbox, error) {
	v, err := b.cluster.Client.CreateVolume(ctx, &dormousev1.CreateVolumeRequest{Spec: &dormousev1.VolumeSpec{Node: stack.NodeName(1)}})
	if err != nil {
		return nil, err
	}
	return b.create(ctx, startMemory, func(s *dormousev1.SandboxSpec) {
		s.Volumes = []*dormousev1.VolumeMount{{VolumeUid: v.UID, Path: "/data"}}
	})
}

func (b *bench) many(ctx context.Context, n int, make1 func(context.Context) (*client.Sandbox, error)) ([]*client.Sandbox, error) {
	all := make([]*client.Sandbox, n)
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(3)
	for i := range all {
		group.Go(func() (err error) {
			all[i], err = make1(ctx)
			return err
		})
	}
	return all, group.Wait()
}

// cost makes sandboxes, lets them settle, and shares out what they and the daemons' growth take.
func (b *bench) cost(ctx context.Context, what string, atMost float64, make1 func(context.Context) (*client.Sandbox, error)) ([]*client.Sandbox, Row, error) {
	before, err := b.bothDaemons()
	if err != nil {
		return nil, Row{}, err
	}
	all, err := b.many(ctx, idle, make1)
	if err != nil {
		return nil, Row{}, err
	}
	if err := wait.For(ctx, settle); err != nil {
		return nil, Row{}, err
	}
	after, err := b.bothDaemons()
	if err != nil {
		return nil, Row{}, err
	}
	var own Sample
	processes := 0
	for _, s := range all {
		mb, n, err := b.processes(s.UID)
		if err != nil {
			return nil, Row{}, err
		}
		own = append(own, mb)
		processes += n
	}
	growth := max(after-before, 0) / idle
	return all, Row{
		What:    what + ": PSS of its processes + the daemons' growth",
		Product: fmt.Sprintf("%.1f / %.1f MB PSS in %d host processes, %.2f MB in agentd and coordinator", own.Median(), own.at(0.95), processes/len(all), growth),
		Value:   own.Median() + growth, Unit: "MB", AtMost: atMost,
	}, nil
}

func (b *bench) costOfRestored(ctx context.Context, source *client.Sandbox) (Row, error) {
	snap, err := source.Checkpoint(ctx, &dormousev1.CheckpointSandboxRequest{})
	if err != nil {
		return Row{}, err
	}
	all, row, err := b.cost(ctx, "idle sandbox after a restore", 14, func(ctx context.Context) (*client.Sandbox, error) {
		return snap.Restore(ctx, &dormousev1.RestoreSandboxRequest{})
	})
	if err != nil {
		return Row{}, err
	}
	if err := deleteAll(ctx, all); err != nil {
		return Row{}, err
	}
	return row, snap.Delete(ctx, "")
}

// processes gives the PSS, in MB, of all processes in the sandbox's control group, and how many they are. Memory that several processes have as
// one, as runsc's threads for a guest's tasks do, is counted once.
func (b *bench) processes(uid string) (float64, int, error) {
	pids, err := b.pids(uid)
	if err != nil {
		return 0, 0, err
	}
	total := 0.0
	for i, pid := range pids {
		if slices.ContainsFunc(pids[:i], func(other int) bool { return oneMemory(pid, other) }) {
			continue
		}
		fields, err := kilobytes(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
		if err != nil {
			return 0, 0, err
		}
		total += fields["Pss"]
	}
	return total, len(pids), nil
}

// oneMemory tells whether two processes have the same address space; each says then what all have. A kernel that cannot
// tell makes the figures too high.
func oneMemory(a, b int) bool {
	const kcmpVM = 1
	order, _, err := unix.Syscall6(unix.SYS_KCMP, uintptr(a), uintptr(b), kcmpVM, 0, 0, 0)
	return err == 0 && order == 0
}

// pids looks for the sandbox's group in every hierarchy: which one has it depends on the machine.
func (b *bench) pids(uid string) ([]int, error) {
	below := filepath.Join(b.cluster.CgroupParent(1), uid, "cgroup.procs")
	found, err := filepath.Glob("/sys/fs/cgroup/*" + below)
	if err != nil {
		return nil, err
	}
	for _, path := range append(found, "/sys/fs/cgroup"+below) {
		data, err := os.ReadFile(path)
		if err != nil {
			continue
		}
		var pids []int
		for _, field := range strings.Fields(string(data)) {
			pid, err := strconv.Atoi(field)
			if err != nil {
				return nil, err
			}
			pids = append(pids, pid)
		}
		if len(pids) > 0 {
			return pids, nil
		}
	}
	return nil, fmt.Errorf("no control group of sandbox %s has processes", uid)
}

type resident struct{ anonymous, files float64 }

// daemon gives the resident memory of a daemon in MB.
func (b *bench) daemon(name string) (resident, error) {
	pid := b.cluster.PID("coordinator")
	if name == "agentd" {
		pid = b.cluster.AgentdPID(1)
	}
	fields, err := kilobytes(fmt.Sprintf("/proc/%d/status", pid))
	return resident{fields["RssAnon"], fields["RssFile"] + fields["RssShmem"]}, err
}

func (b *bench) bothDaemons() (float64, error) {
	a, err := b.daemon("agentd")
	if err != nil {
		return 0, err
	}
	c, err := b.daemon("coordinator")
	return a.anonymous + a.files + c.anonymous + c.files, err
}

// kilobytes reads the lines "Name: n kB" of a file of /proc, in MB.
func kilobytes(path string) (map[string]float64, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	all := make(map[string]float64)
	scan := bufio.NewScanner(f)
	for scan.Scan() {
		name, rest, ok := strings.Cut(scan.Text(), ":")
		number, isKB := strings.CutSuffix(rest, " kB")
		if !ok || !isKB {
			continue
		}
		if n, err := strconv.ParseFloat(strings.TrimSpace(number), 64); err == nil {
			all[name] = n * 1024 / 1e6
		}
	}
	return all, scan.Err()
}
