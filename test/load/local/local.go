// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

// Package local gives the load harness a cluster of its own on this machine, and looks at that machine for it.
package local

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dormouse-run/dormouse/agentd/simulated"
	"github.com/dormouse-run/dormouse/test/cluster"
	"github.com/dormouse-run/dormouse/test/images"
	"github.com/dormouse-run/dormouse/test/load"
	"github.com/dormouse-run/dormouse/test/load/subject"
	"github.com/dormouse-run/dormouse/test/stack"
	"github.com/dormouse-run/dormouse/test/tools"
)

// Cluster is one that the harness started.
type Cluster struct {
	*cluster.Cluster
	Image string // of the subject, by digest

	simulated bool
	mu        sync.Mutex
	agents    []*simulated.Agent
}

// reserve is what the machine keeps for everything but sandboxes.
const reserve = 2 << 30

// Up starts a cluster with as many nodes as the plan says, and gives its nodes the subject's image.
func Up(ctx context.Context, plan load.Plan, logf func(string, ...any)) (*Cluster, error) {
	if plan.Simulated {
		return UpFleet(ctx, plan.Nodes, nil, logf)
	}
	total, err := memInfo("MemTotal")
	if err != nil {
		return nil, err
	}
	settings := cluster.Settings{LogLevel: "info", Memory: strconv.FormatInt((total-reserve)/int64(plan.Nodes), 10), RaiseLimits: true}
	c, err := cluster.UpWith(ctx, stack.Options{Nodes: plan.Nodes, Logf: logf}, settings)
	if err != nil {
		return nil, err
	}
	l := &Cluster{Cluster: c}
	if err = errors.Join(l.disk(plan), l.room(ctx, plan)); err == nil {
		l.Image, err = l.pushSubject(ctx)
	}
	if err != nil {
		return nil, errors.Join(err, l.End(ctx))
	}
	return l, nil
}

// room tells whether the nodes take as many sandboxes as the plan has: limits of the host are raised by the nodes themselves, and what they could not
// raise they say.
func (l *Cluster) room(ctx context.Context, plan load.Plan) error {
	var takes int64
	var why []string
	for n, err := range l.Client.ListNodes(ctx) {
		if err != nil {
			return err
		}
		takes += n.GetAllocatable().GetSandboxes()
		for _, c := range n.GetConditions() {
			if c.GetType() == "HostLimits" {
				why = append(why, c.GetMessage())
			}
		}
	}
	if takes < int64(plan.Subjects) {
		return fmt.Errorf("the nodes take %d sandboxes, the plan has %d; agentctl preflight --sandboxes %d says why; %s", takes, plan.Subjects, plan.Subjects, strings.Join(why, "; "))
	}
	return nil
}

// reserved is what a node leaves free on its disk, where nothing else is said: see agentd's reserve.disk.
const reserved = 1 << 30

// disk tells whether the disk of the artefacts, which the nodes share, has room for all that the plan has at its peak.
func (l *Cluster) disk(plan load.Plan) error {
	var st unix.Statfs_t
	if err := unix.Statfs(l.NodeDir(1), &st); err != nil {
		return fmt.Errorf("look at the disk of %s: %w", stack.NodeName(1), err)
	}
	return plan.CheckDisk(int64(st.Bavail)*st.Bsize, reserved) //nolint:gosec // no disk is that large
}

func (l *Cluster) pushSubject(ctx context.Context) (string, error) {
	program, err := os.ReadFile(filepath.Join(l.Bin, "loadsubject"))
	if err != nil {
		return "", fmt.Errorf("the subject is not built: %w", err)
	}
	image, err := images.FromEntries(images.Config{Env: []string{"PATH=/bin"}}, []images.Entry{
		images.Dir("bin", 0o755), images.Dir("etc", 0o755), images.Dir("tmp", 0o1777), images.Dir("var", 0o755), images.Dir("data", 0o755), images.Dir("volume", 0o755),
		images.Dir("proc", 0o755), images.Dir("sys", 0o755), images.Dir("dev", 0o755), images.Dir("root", 0o700),
		images.File(strings.TrimPrefix(subject.Path, "/"), string(program), 0o755),
	})
	if err != nil {
		return "", err
	}
	registry, err := l.Registry()
	if err != nil {
		return "", err
	}
	digest, err := registry.Push(ctx, "load/subject", image)
	if err != nil {
		return "", err
	}
	ref := registry.Ref("load/subject") + "@" + digest
	for i := 1; i <= l.Nodes; i++ {
		if _, err := l.Client.PullImage(ctx, ref, stack.NodeName(i), nil); err != nil {
			return "", err
		}
	}
	return ref, nil
}

// Reach is how clients reach it.
func (l *Cluster) Reach() load.Reach {
	return load.Reach{Addr: "unix://" + l.GRPCSocket(), APIKeyFile: l.APIKeyFile()}
}

// End ends the cluster.
func (l *Cluster) End(ctx context.Context) error {
	down, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Minute)
	defer cancel()
	return errors.Join(l.stopAgents(), l.Client.Close(), l.Down(down))
}

// Debt is what the doctors of the nodes find.
func (l *Cluster) Debt(ctx context.Context) ([]string, error) {
	var all []string
	if l.simulated {
		return nil, nil
	}
	for i := 1; i <= l.Nodes; i++ {
		found, err := l.Doctor(ctx, i)
		if err != nil {
			return all, err
		}
		for _, f := range found {
			all = append(all, fmt.Sprintf("%s: %v", stack.NodeName(i), f))
		}
	}
	return all, nil
}

// Look implements load.Machine.
func (l *Cluster) Look() (s load.Sample, err error) {
	s = load.Sample{At: time.Now(), Resident: map[string]int64{}}
	for _, name := range l.daemons() {
		if s.Resident[name], err = resident(l.PID(name)); err != nil {
			return s, err
		}
	}
	for i := 1; i <= l.Nodes && !l.simulated; i++ {
		name := "sandboxes" + strconv.Itoa(i)
		if s.Resident[name], err = number(filepath.Join("/sys/fs/cgroup/memory", l.CgroupParent(i), "memory.usage_in_bytes")); errors.Is(err, os.ErrNotExist) {
			err = nil // no sandbox yet
		}
		if err != nil {
			return s, err
		}
	}
	if s.Available, err = memInfo("MemAvailable"); err != nil {
		return s, err
	}
	if s.OOMKills, err = field("/proc/vmstat", "oom_kill", " "); err != nil {
		return s, err
	}
	s.Load, s.Tasks, err = loadAverage()
	return s, err
}

func (l *Cluster) daemons() []string {
	all := []string{"coordinator", "redis"}
	for i := 1; i <= l.Nodes && !l.simulated; i++ {
		all = append(all, "agentd"+strconv.Itoa(i))
	}
	return all
}

// Parts implements load.Machine.
func (l *Cluster) Parts() (map[string]string, error) {
	redis, err := tools.Find("redis-server")
	if err != nil {
		return nil, err
	}
	all := map[string]string{}
	files := map[string]string{"coordinator": filepath.Join(l.Bin, "coordinator"), "redis": redis}
	if !l.simulated {
		files["agentd"], files["subject"] = filepath.Join(l.Bin, "agentd"), filepath.Join(l.Bin, "loadsubject")
		files["runsc"], files["guest init"] = filepath.Join(l.Bin, "bundle", "runsc"), filepath.Join(l.Bin, "bundle", "guestinit.erofs")
	}
	for name, file := range files {
		if all[name], err = digest(file); err != nil {
			return nil, err
		}
	}
	return all, nil
}

func digest(file string) (string, error) {
	f, err := os.Open(file)
	if err != nil {
		return "", err
	}
	defer func() { _ = f.Close() }() // only read
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return "", err
	}
	return "sha256:" + hex.EncodeToString(h.Sum(nil)), nil
}

// resident is what a process has in memory; 0 while it is not there.
func resident(pid int) (int64, error) {
	kb, err := field(fmt.Sprintf("/proc/%d/status", pid), "VmRSS:", "kB")
	if errors.Is(err, os.ErrNotExist) {
		return 0, nil
	}
	return kb << 10, err
}

func memInfo(name string) (int64, error) {
	kb, err := field("/proc/meminfo", name+":", "kB")
	return kb << 10, err
}

// field reads the number of a line "name number unit" of a file of the kernel.
func field(file, name, unit string) (int64, error) {
	f, err := os.Open(file)
	if err != nil {
		return 0, err
	}
	defer func() { _ = f.Close() }() // only read
	scan := bufio.NewScanner(f)
	for scan.Scan() {
		if rest, ok := strings.CutPrefix(scan.Text(), name); ok {
			return strconv.ParseInt(strings.TrimSpace(strings.TrimSuffix(rest, unit)), 10, 64)
		}
	}
	return 0, fmt.Errorf("%s has no %q (%w)", file, name, errors.Join(scan.Err(), os.ErrNotExist))
}

func number(file string) (int64, error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return 0, err
	}
	return strconv.ParseInt(strings.TrimSpace(string(data)), 10, 64)
}

// loadAverage of the last minute, and how many threads there are.
func loadAverage() (load float64, tasks int, err error) {
	data, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return 0, 0, err
	}
	var five, fifteen float64
	var running, last int
	_, err = fmt.Sscanf(string(data), "%f %f %f %d/%d %d", &load, &five, &fifteen, &running, &tasks, &last)
	return load, tasks, err
}
