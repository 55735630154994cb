package runsc

import (
	"context"
	"slices"
	"time"

	"github.com/dormouse-run/dormouse/agentd/internal/cgroup"
	"github.com/dormouse-run/dormouse/agentd/internal/launcher"
	"github.com/dormouse-run/dormouse/agentd/internal/runtime"
	"github.com/dormouse-run/dormouse/pkg/errs"
)

// State implements runtime.Driver. It reads files only.
func (d *Driver) State(ctx context.Context, id string) (runtime.Status, error) {
	if err := ctx.Err(); err != nil {
		return runtime.Status{}, err
	}
	if err := runtime.CheckID(id); err != nil {
		return runtime.Status{}, err
	}
	status, err := d.observe(id)
	if err != nil {
		return runtime.Status{}, err
	}
	if status.Phase == "" {
		return runtime.Status{}, notFound(id)
	}
	return status, nil
}

// observe gives the status of an id, with an empty phase when nothing of it is there. Damaged records
// hide nothing: the processes are then looked for in the group that the id names.
func (d *Driver) observe(id string) (runtime.Status, error) {
	rec, known, recErr := d.loadRecord(id)
	st, hasState, stErr := d.loadState(id)
	for _, err := range []error{recErr, stErr} {
		if err != nil && !errs.Has(err, errs.StateDamaged) {
			return runtime.Status{}, err
		}
	}
	g := d.cgroups.Group(id)
	s := runtime.Status{ID: id, BundleDigest: rec.BundleDigest}
	if !known && !hasState && recErr == nil && stErr == nil {
		s.Phase = groupPhase(g)
		return s, nil
	}
	if rec.Exit != nil {
		s.Phase = runtime.Stopped
		return s, nil
	}
	pid, alive, err := d.process(rec, st, g.Pids)
	if err != nil {
		return runtime.Status{}, err
	}
	unborn := rec.Pid == 0 && known && !hasState && d.starting(id)
	switch {
	case !alive && !unborn:
		s.Phase = runtime.Stopped
		return s, nil
	case alive && st.Status == "running":
		s.Phase = runtime.Running
	case alive && st.Status == "paused":
		s.Phase = runtime.Paused
	default:
		s.Phase = runtime.Creating
	}
	if alive {
		s.Pid, s.StartedAt = pid, rec.StartedAt
	}
	return s, nil
}

// groupPhase is the phase of an id of which at most a group is left; "" when not even that.
func groupPhase(g *cgroup.Group) runtime.Phase {
	if !g.Exists() {
		return ""
	}
	if pids, err := g.Pids(); err != nil || len(pids) > 0 {
		return runtime.Creating
	}
	return runtime.Stopped
}

// process gives the sandbox process and whether it lives. Its number is believed only with the start
// time of the record or as a member of the sandbox's own group.
func (d *Driver) process(rec record, st stateFile, members func() ([]int, error)) (int, bool, error) {
	if rec.Pid != 0 && (st.Sandbox.Pid == 0 || st.Sandbox.Pid == rec.Pid) {
		return rec.Pid, launcher.Alive(rec.Pid, rec.StartTicks), nil
	}
	pids, err := members()
	if err != nil {
		return 0, false, err
	}
	if st.Sandbox.Pid != 0 {
		return st.Sandbox.Pid, slices.Contains(pids, st.Sandbox.Pid), nil
	}
	return 0, len(pids) > 0, nil
}

// starting tells whether this driver is starting the sandbox right now.
func (d *Driver) starting(id string) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	e, ok := d.entries[id]
	return ok && len(e.op) > 0
}

// List implements runtime.Driver. It also names groups that nothing else is left of.
func (d *Driver) List(ctx context.Context) ([]runtime.Status, error) {
	ids, err := d.idsOnDisk()
	if err != nil {
		return nil, err
	}
	groups, err := d.cgroups.List()
	if err != nil {
		return nil, err
	}
	for _, id := range groups {
		if runtime.CheckID(id) == nil {
			ids[id] = true
		}
	}
	list := make([]runtime.Status, 0, len(ids))
	for id := range ids {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		s, err := d.observe(id)
		if err != nil {
			return nil, err
		}
		if s.Phase != "" {
			list = append(list, s)
		}
	}
	slices.SortFunc(list, func(a, b runtime.Status) int {
		if a.ID < b.ID {
			return -1
		}
		return 1
	})
	return list, nil
}

// Stats implements runtime.Driver.
func (d *Driver) Stats(ctx context.Context, id string) (runtime.Stats, error) {
	if err := ctx.Err(); err != nil {
		return runtime.Stats{}, err
	}
	rec, err := d.known(id)
	if err != nil {
		return runtime.Stats{}, err
	}
	g, err := d.cgroups.At(rec.Cgroup)
	if err != nil {
		return runtime.Stats{}, err
	}
	s, err := g.Stats()
	if errs.Has(err, errs.ObjectNotFound) {
		return runtime.Stats{}, notFound(id)
	}
	if err != nil {
		return runtime.Stats{}, err
	}
	return runtime.Stats{
		At: time.Now(), CPU: s.CPU, MemoryBytes: s.MemoryBytes, MemoryPeakBytes: s.MemoryPeakBytes,
		MemoryLimitBytes: s.MemoryLimitBytes, Pids: s.Pids, OOMKills: s.OOMKills,
	}, nil
}
