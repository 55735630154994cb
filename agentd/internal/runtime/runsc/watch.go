package runsc

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dormouse-run/dormouse/agentd/internal/launcher"
	"github.com/dormouse-run/dormouse/agentd/internal/runtime"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/fault"
)

// watch waits for the end of one sandbox. proc is nil where the end was known from the first.
type watch struct {
	proc *launcher.Process
	done chan struct{} // closed when exit is known
	gone chan struct{} // closed when the gofer has ended too
	exit runtime.Exit  // once done is closed
}

// startWatch begins to wait for the end of the process. The goroutine ends with the processes or the driver.
func (d *Driver) startWatch(rec record, p *launcher.Process) {
	w := &watch{proc: p, done: make(chan struct{}), gone: make(chan struct{})}
	d.setWatch(rec.ID, w)
	d.wg.Go(func() {
		defer p.Close()
		ended, err := p.Wait(d.ctx)
		if err != nil {
			if d.ctx.Err() == nil {
				d.log.Error("wait for a sandbox", "sandbox", rec.ID, "error", err)
			}
			return // the driver closes; Wait tells so
		}
		w.exit = d.exitOf(rec, ended)
		rec.Exit = &w.exit
		if err := d.saveRecord(rec); err != nil {
			d.log.Warn("record how a sandbox ended", "sandbox", rec.ID, "error", err)
		}
		close(w.done)
		d.awaitGofer(rec)
		close(w.gone)
	})
}

// awaitGofer waits until the gofer has ended, as it does after its sandbox, and reaps it where it is a child.
func (d *Driver) awaitGofer(rec record) {
	if rec.GoferPid == 0 {
		return
	}
	p, err := launcher.Attach(rec.GoferPid, rec.GoferTicks)
	if err == nil {
		_, err = p.Wait(d.ctx)
		_ = p.Close()
	}
	if err != nil && d.ctx.Err() == nil && !errs.Has(err, errs.ObjectNotFound) {
		d.log.Warn("wait for a sandbox's gofer", "sandbox", rec.ID, "error", err)
	}
}

func (d *Driver) setWatch(id string, w *watch) {
	e := d.entry(id)
	d.mu.Lock()
	defer d.mu.Unlock()
	e.watch = w
}

func (d *Driver) watchOf(id string) *watch {
	d.mu.Lock()
	defer d.mu.Unlock()
	if e, ok := d.entries[id]; ok {
		return e.watch
	}
	return nil
}

// exitOf adds what the control group knows to the process's end.
func (d *Driver) exitOf(rec record, ended launcher.Exit) runtime.Exit {
	exit := runtime.Exit{Known: ended.Known, Code: ended.Code, Signal: ended.Signal, At: time.Now()}
	if g, err := d.cgroups.At(rec.Cgroup); err == nil {
		exit.OOM = group{g}.oomKilled()
	}
	return exit
}

// Recover implements runtime.Driver.
func (d *Driver) Recover(ctx context.Context, h runtime.Handle) (runtime.Status, error) {
	given, err := parseHandle(h)
	if err != nil {
		return runtime.Status{}, err
	}
	rec, err := d.known(given.ID)
	if errs.Has(err, errs.StateDamaged) {
		// The handle holds the same, and was persisted elsewhere.
		rec, err = given, d.saveRecord(given)
	}
	if err != nil {
		return runtime.Status{}, err
	}
	if rec.Pid == 0 {
		rec.Pid, rec.StartTicks, rec.StartedAt = given.Pid, given.StartTicks, given.StartedAt
	}
	if d.watchOf(rec.ID) == nil {
		if err := d.recoverWatch(rec); err != nil {
			return runtime.Status{}, err
		}
	}
	if err := d.settleFirst(ctx, rec.ID); err != nil {
		return runtime.Status{}, err
	}
	return d.State(ctx, rec.ID)
}

// settleFirst is settle for who does not hold the sandbox's token.
func (d *Driver) settleFirst(ctx context.Context, id string) error {
	_, turning := os.Lstat(d.turnPath(id))
	_, saving := os.Lstat(d.savePath(id))
	if errors.Is(turning, os.ErrNotExist) && errors.Is(saving, os.ErrNotExist) {
		return nil
	}
	e := d.entry(id)
	if err := d.lockOp(ctx, e); err != nil {
		return err
	}
	defer e.unlock()
	return d.settle(ctx, id)
}

func (d *Driver) recoverWatch(rec record) error {
	if rec.Exit == nil {
		p, err := launcher.Attach(rec.Pid, rec.StartTicks)
		if err == nil {
			d.startWatch(rec, p)
			return nil
		}
		if !errs.Has(err, errs.ObjectNotFound) {
			return err
		}
		exit := d.exitOf(rec, launcher.Exit{})
		rec.Exit = &exit
		if err := d.saveRecord(rec); err != nil {
			return err
		}
	}
	w := &watch{done: make(chan struct{}), gone: make(chan struct{}), exit: *rec.Exit}
	close(w.done)
	close(w.gone)
	d.setWatch(rec.ID, w)
	return nil
}

// Wait implements runtime.Driver.
func (d *Driver) Wait(ctx context.Context, id string) (runtime.Exit, error) {
	w := d.watchOf(id)
	if w == nil {
		return runtime.Exit{}, notFound(id)
	}
	select {
	case <-w.done:
		return w.exit, nil
	default:
	}
	select {
	case <-w.done:
		return w.exit, nil
	case <-ctx.Done():
		return runtime.Exit{}, ctx.Err()
	case <-d.ctx.Done():
		return runtime.Exit{}, errs.New(errs.ShuttingDown, "the runtime driver is closed; the sandbox goes on")
	}
}

// victims are the processes of a sandbox that is being ended, other than those that a watch waits for.
// They are held from before the kill, so that they can be waited for and, where an earlier agent's death
// or a start that was cut short made them children of this process, reaped.
type victims []*launcher.Process

// kill kills the sandbox process, the right one or none, and whatever else belongs to the sandbox.
func (d *Driver) kill(rec record) (victims, error) {
	var v victims
	var all []error
	pids := make(map[int]bool)
	watched := d.watchOf(rec.ID)
	g, err := d.cgroups.At(rec.Cgroup)
	if err != nil {
		return nil, err
	}
	members, err := g.Pids()
	all = append(all, err)
	if rec.Pid == 0 {
		// An agent died while it started the sandbox: its runsc may still be at it, outside the group.
		starting, err := d.starters(rec.ID)
		all = append(all, err)
		members = append(members, starting...)
	}
	for _, pid := range members {
		pids[pid] = true
	}
	if watched != nil {
		delete(pids, rec.Pid)
		delete(pids, rec.GoferPid)
		if watched.proc != nil {
			if err := watched.proc.Signal(unix.SIGKILL); !errors.Is(err, os.ErrClosed) {
				all = append(all, err)
			}
		}
	} else if rec.Pid != 0 && launcher.Alive(rec.Pid, rec.StartTicks) {
		pids[rec.Pid] = true
	}
	delete(pids, os.Getpid())
	for pid := range pids {
		if p := hold(pid); p != nil {
			all = append(all, p.Signal(unix.SIGKILL))
			if len(v) == maxHeld {
				all = append(all, p.Close())
				continue
			}
			v = append(v, p)
		}
	}
	return v, errors.Join(all...)
}

// killAll kills until a look finds nothing more: what was being started may have forked between a look and
// the kill. The group's kill at one stroke would do it too, but would leave the latest born unreaped.
func (d *Driver) killAll(ctx context.Context, rec record) error {
	for {
		v, err := d.kill(rec)
		if err == nil {
			err = v.await(ctx)
		}
		v.close()
		if err != nil || len(v) == 0 {
			return err
		}
	}
}

// maxHeld is how many of a sandbox's processes are waited for at a time: a guest that forks without end
// must not cost a descriptor for each. The rest are killed all the same, and found by the next look if
// they have not ended.
const maxHeld = 64

// hold takes hold of a process that was just seen; nil when it is gone.
func hold(pid int) *launcher.Process {
	ticks, err := launcher.StartTime(pid)
	if err != nil {
		return nil
	}
	p, err := launcher.Attach(pid, ticks)
	if err != nil {
		return nil
	}
	return p
}

func (v victims) close() {
	for _, p := range v {
		_ = p.Close()
	}
}

// await waits until all of them have ended.
func (v victims) await(ctx context.Context) error {
	for _, p := range v {
		if _, err := p.Wait(ctx); err != nil {
			return err
		}
	}
	return nil
}

// starters gives every runsc of this driver's folder that is called for the sandbox.
func (d *Driver) starters(id string) ([]int, error) {
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		return nil, errs.Wrap(err, errs.InternalError, "list the processes: %v", err)
	}
	var pids []int
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			continue // it has ended
		}
		args := strings.Split(strings.TrimRight(string(data), "\x00"), "\x00")
		if !slices.Contains(args, "--root="+d.state) || args[len(args)-1] != id {
			continue
		}
		if pid, err := strconv.Atoi(filepath.Base(filepath.Dir(file))); err == nil {
			pids = append(pids, pid)
		}
	}
	return pids, nil
}

// Delete implements runtime.Driver.
func (d *Driver) Delete(ctx context.Context, id string) error {
	if err := runtime.CheckID(id); err != nil {
		return err
	}
	rec, known, err := d.loadRecord(id)
	if err != nil && !errs.Has(err, errs.StateDamaged) {
		return err
	}
	if !known {
		// Nothing says where it was; its group's name and runsc's files follow from the id.
		rec = record{Version: handleVersion, ID: id, Cgroup: d.cgroups.Path(id)}
	}
	// Before the token: a command that waits for the sandbox ends when the sandbox does.
	v, killErr := d.kill(rec)
	defer v.close()
	e := d.entry(id)
	if err := d.lockOp(ctx, e); err != nil {
		return err
	}
	defer e.unlock()
	return errors.Join(killErr, v.await(ctx), d.remove(ctx, e, rec, known))
}

// remove runs every step of the teardown and then looks. The caller holds the sandbox's token.
func (d *Driver) remove(ctx context.Context, e *entry, rec record, known bool) error {
	var all []error
	step := func(err error) {
		if err != nil {
			all = append(all, err)
		}
	}
	step(d.killAll(ctx, rec))
	fault.At("runtime.killed.after")
	step(d.awaitEnd(ctx, rec))
	step(d.deleteRuntime(ctx, rec, known))
	fault.At("runtime.deleted.after")
	if g, err := d.cgroups.At(rec.Cgroup); err != nil {
		step(err)
	} else {
		step(g.Remove(ctx))
		fault.At("runtime.ungrouped.after")
	}
	for _, path := range d.runtimeFiles(rec.ID) {
		if _, err := os.Lstat(path); err == nil {
			step(errs.New(errs.InternalError, "%s is still there; delete sandbox %s again", filepath.Base(path), rec.ID))
		}
	}
	if len(all) > 0 {
		return errors.Join(all...)
	}
	if err := d.removeRecord(rec.ID); err != nil {
		return err
	}
	fault.At("runtime.forgotten.after")
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.entries[rec.ID] == e {
		delete(d.entries, rec.ID)
	}
	return nil
}

// awaitEnd waits until the watch has seen the end, before the group that knows about memory is removed.
func (d *Driver) awaitEnd(ctx context.Context, rec record) error {
	w := d.watchOf(rec.ID)
	if w == nil {
		return nil
	}
	select {
	case <-w.gone:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-d.ctx.Done():
		return errs.New(errs.ShuttingDown, "the runtime driver is closed")
	}
}

// deleteRuntime removes what runsc keeps. runsc does it itself where that is safe: it kills the process
// numbers that it wrote down, and by now they may be those of strangers. Where they are in use, or runsc
// is not at hand or cannot read its own file, its files are removed here, which is all that is left to do
// once the processes are gone.
func (d *Driver) deleteRuntime(ctx context.Context, rec record, known bool) error {
	st, ok, err := d.loadState(rec.ID)
	if ok && err == nil && known && numbersFree(st.Sandbox.Pid, st.GoferPid) {
		err := d.run(ctx, command{rec: rec, args: []string{"delete", "-force", rec.ID}})
		if err == nil {
			return nil
		}
		if ctx.Err() != nil {
			return err
		}
		d.log.Warn("runsc could not delete a sandbox that has ended; its files are removed instead", "sandbox", rec.ID, "error", err)
	}
	var all []error
	for _, path := range d.runtimeFiles(rec.ID) {
		if err := os.Remove(path); err != nil && !os.IsNotExist(err) {
			all = append(all, errs.Wrap(err, errs.InternalError, "remove %s: %v", path, err))
		}
	}
	return errors.Join(all...)
}

// numbersFree tells whether no process has any of the numbers.
func numbersFree(pids ...int) bool {
	for _, pid := range pids {
		if pid != 0 && !errors.Is(unix.Kill(pid, 0), unix.ESRCH) {
			return false
		}
	}
	return true
}
