// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package faultrun

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"

	"github.com/dormouse-run/dormouse/pkg/client"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
	"github.com/dormouse-run/dormouse/test/stack"
)

// cgroups is where the hierarchy is that every sandbox is in.
const cgroups = "/sys/fs/cgroup/memory"

// group is the control group of a node's sandboxes.
func (r *run) group(node int) string { return filepath.Join(cgroups, r.c.CgroupParent(node)) }

// processes are those of a node's sandboxes.
func (r *run) processes(node int) (pids []int, err error) {
	err = filepath.WalkDir(r.group(node), func(path string, d fs.DirEntry, err error) error {
		if errors.Is(err, os.ErrNotExist) {
			return nil // it went while we looked, or there was none yet
		}
		if err != nil || d.Name() != "cgroup.procs" {
			return err
		}
		data, err := os.ReadFile(path)
		if errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.ENODEV) {
			return nil
		}
		for line := range strings.Lines(string(data)) {
			pid, err := strconv.Atoi(strings.TrimSpace(line))
			if err != nil {
				return err
			}
			pids = append(pids, pid)
		}
		return err
	})
	return pids, err
}

// loseNode kills a node's agentd, and with it all that runs in its sandboxes.
func (r *run) loseNode(ctx context.Context, node int) error {
	if err := r.c.KillAgentd(ctx, node); err != nil {
		return err
	}
	for ctx.Err() == nil {
		pids, err := r.processes(node)
		if err != nil || len(pids) == 0 {
			return err
		}
		for _, pid := range pids {
			if err := syscall.Kill(pid, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
				return err
			}
		}
	}
	return context.Cause(ctx)
}

// daemons are the processes of the cluster's parts.
func (r *run) daemons() map[string]int {
	all := map[string]int{}
	for _, name := range r.c.RunningParts() {
		all[name] = r.c.PID(name)
	}
	return all
}

// end is F11 and F11b.
func (r *run) end(ctx context.Context) error {
	if err := r.all(ctx, func(ctx context.Context, o *one) error {
		err := o.box.Delete(ctx, "")
		for _, s := range o.taken {
			err = errors.Join(err, s.Delete(ctx, ""))
		}
		return errors.Join(err, o.volume.Delete(ctx, ""))
	}); err != nil {
		return err
	}
	if err := r.emptyCatalog(ctx); err != nil {
		return err
	}
	if err := r.emptyHost(ctx); err != nil {
		return err
	}
	now, began := r.daemons(), r.pids
	var anew []string
	for _, name := range slices.Sorted(maps.Keys(began)) {
		if now[name] != began[name] {
			anew = append(anew, name)
		}
	}
	want := []string{"agentd" + strconv.Itoa(Nodes), "coordinator", "redis"}
	var unknown []string
	for _, part := range []string{"agentd", "coordinator", "runsc", "guest init", "redis"} {
		if r.report.Executables[part] == "" {
			unknown = append(unknown, part)
		}
	}
	r.check("F11b", len(unknown) == 0, "the digests of what ran are recorded", "%d of them; not of %v", len(r.report.Executables), unknown)
	r.check("F11b", slices.Equal(anew, want), "only the daemons that the run started anew were started anew", "%v", anew)
	return nil
}

func (r *run) emptyCatalog(ctx context.Context) error {
	boxes, err := client.Collect(r.api.ListSandboxes(ctx, &dormousev1.ListSandboxesRequest{}))
	volumes, err2 := client.Collect(r.api.ListVolumes(ctx, &dormousev1.ListVolumesRequest{}))
	snaps, err3 := client.Collect(r.api.ListSnapshots(ctx, &dormousev1.ListSnapshotsRequest{IncludeDeleted: true}))
	if err := errors.Join(err, err2, err3); err != nil {
		return err
	}
	r.check("F11", len(boxes) == 0 && len(volumes) == 0, "no sandbox and no volume", "%d sandboxes, %d volumes", len(boxes), len(volumes))
	tombstones := 0
	var old *dormousev1.Snapshot
	for _, s := range snaps {
		st := s.GetStatus()
		if s.GetMeta().GetUid() == r.before.GetMeta().GetUid() {
			old = s
			continue
		}
		if st.GetPhase() == dormousev1.SnapshotPhase_SNAPSHOT_PHASE_DELETED && len(st.GetVolumes())+len(st.GetNodes())+len(st.GetFiles()) == 0 {
			tombstones++
		}
	}
	want := 2 * len(r.subjects)
	r.check("F11", tombstones == want && len(snaps) == want+1, "each snapshot of the run is a tombstone without references", "%d of %d", tombstones, want)
	found := r.before.GetMeta().GetUid()
	same := proto.Equal(old, r.before)
	if !same {
		found = "it changed: " + cmp.Diff(r.before, old, protocmp.Transform())
	}
	r.check("F11", same, "the snapshot that was there before is unchanged", "%s", found)
	return nil
}

// emptyHost looks for what the run left on the nodes.
func (r *run) emptyHost(ctx context.Context) error {
	var left []string
	for node := 1; node <= Nodes; node++ {
		found, err := r.c.Doctor(ctx, node)
		if err != nil {
			return err
		}
		for _, f := range found {
			left = append(left, fmt.Sprintf("%s: %v", stack.NodeName(node), f))
		}
		pids, err := r.processes(node)
		if err != nil {
			return err
		}
		groups, err := subfolders(r.group(node))
		if err != nil {
			return err
		}
		artefacts, err := r.artefacts(node)
		if err != nil {
			return err
		}
		boxes, err := subfolders(filepath.Join(r.c.NodeDir(node), "sandboxes"))
		if err != nil {
			return err
		}
		mounts, err := mountsOf(filepath.Join(r.c.NodeDir(node), "sandboxes"))
		if err != nil {
			return err
		}
		for what, n := range map[string]int{"processes": len(pids), "checkpoint folders": len(artefacts), "sandboxes' folders": len(boxes), "mounts": mounts} {
			if n > 0 {
				left = append(left, fmt.Sprintf("%s: %d %s", stack.NodeName(node), n, what))
			}
		}
		for _, g := range groups {
			if len(g) == len(r.before.GetMeta().GetUid()) {
				left = append(left, fmt.Sprintf("%s: control group %s", stack.NodeName(node), g))
			}
		}
	}
	loops, err := loopDevices(r.c.Dir)
	if err != nil {
		return err
	}
	left = append(left, loops...)
	r.check("F11", len(left) == 0, "no checkpoint folder, runsc process, network namespace, mount, control group or loop device is left", "%d left %v", len(left), left)
	return nil
}

// artefacts are the folders of a node's snapshots, but for the one that is older than the run: those that are whole, those that
// are being written, and those that are being removed.
func (r *run) artefacts(node int) (names []string, err error) {
	root := filepath.Join(r.c.NodeDir(node), "snapshots")
	kinds, err := subfolders(root)
	if err != nil {
		return nil, err
	}
	for _, kind := range kinds {
		all, err := subfolders(filepath.Join(root, kind))
		if err != nil {
			return nil, err
		}
		for _, name := range all {
			if !strings.Contains(name, r.before.GetMeta().GetUid()) {
				names = append(names, filepath.Join(kind, name))
			}
		}
	}
	return names, nil
}

// subfolders of a folder that may not be there.
func subfolders(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	var names []string
	for _, e := range entries {
		if e.IsDir() {
			names = append(names, e.Name())
		}
	}
	return names, err
}

// mountsOf counts what is mounted below a folder.
func mountsOf(dir string) (n int, err error) {
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return 0, err
	}
	defer func() { _ = f.Close() }() // only read
	scan := bufio.NewScanner(f)
	for scan.Scan() {
		if fields := strings.Fields(scan.Text()); len(fields) > 4 && strings.HasPrefix(fields[4], dir+"/") {
			n++
		}
	}
	return n, scan.Err()
}

// loopDevices are those whose file is below a folder.
func loopDevices(dir string) ([]string, error) {
	files, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		return nil, err
	}
	var all []string
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err == nil && strings.HasPrefix(string(data), dir+"/") {
			all = append(all, fmt.Sprintf("loop device of %s", strings.TrimSpace(string(data))))
		}
	}
	return all, nil
}
