// Package runsc is the driver for gVisor: it calls the runsc of the sandbox's own bundle for everything
// that changes a sandbox, and reads files for everything that only looks.
//
// # On disk, below Options.Root
//
//	state/           runsc's --root: state files, locks, control sockets
//	launch/<id>.json the driver's record: from before the start until absence was observed
//
// # Crash points
//
//   - After the record, before runsc: List shows the id as Creating or Stopped; Delete removes it.
//   - While runsc starts the sandbox: it goes on alone, in a session of its own. As above, or the sandbox
//     runs with a record that has no pid. Delete finds its processes by their control group.
//   - After the start, before the caller persisted the handle: as above.
//   - During pause or resume (turn.go): the sandbox does what it was asked for, and holds runsc's lock meanwhile; the intent
//     is beside the record, and whoever comes next finishes it or drops it, by what the sandbox says of its init.
//   - During a save: the sandbox goes on writing what it was asked for, into files that nobody reads.
//   - During Delete: every step is idempotent; the record goes last.
//
// # How an end is seen
//
// The driver holds a pidfd of each sandbox process and one goroutine that waits on it in the poller. The
// launcher makes the agent the parent of orphaned sandboxes, so the exit status cannot be lost while the
// agent lives. It is written into the record at once, for the next driver. A sandbox that ends while no
// agent runs is Stopped with an Exit that is not Known, but for OOM, which the control group remembers.
package runsc

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dormouse-run/dormouse/agentd/internal/cgroup"
	"github.com/dormouse-run/dormouse/agentd/internal/launcher"
	"github.com/dormouse-run/dormouse/agentd/internal/runtime"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/fault"
)

const (
	driverName  = "runsc"
	stepStart   = "start"
	stepRestore = "restore"

	// cleanupTime bounds the clean-up after a failed start, which runs when the caller's time is up too.
	cleanupTime = 20 * time.Second
)

// DefaultFlags are runsc's global flags for new sandboxes. They go into the manifest of every snapshot.
//
// overlay2=none: the writable layer is asked for by annotation, and volumes must be written through.
// network=sandbox also without a network, so that a snapshot's flags do not depend on it.
func DefaultFlags() []string {
	return []string{"--platform=systrap", "--network=sandbox", "--overlay2=none"}
}

// Launcher starts runsc; *launcher.Launcher is one.
type Launcher interface {
	Run(ctx context.Context, cmd launcher.Command) (launcher.Exit, error)
}

// Options of the driver.
type Options struct {
	// Root is the driver's own folder (0700), visible under this path in the host's mount namespace.
	Root     string
	Launcher Launcher
	Cgroups  *cgroup.Manager
	Log      *slog.Logger // slog.Default() when nil
}

// Driver implements runtime.Driver.
type Driver struct {
	state, launch string
	spares        *spares
	launcher      Launcher
	cgroups       *cgroup.Manager
	log           *slog.Logger

	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	wg     sync.WaitGroup

	mu      sync.Mutex
	entries map[string]*entry
}

var _ runtime.Driver = (*Driver)(nil)

// entry is a sandbox as this driver handles it.
type entry struct {
	op    chan struct{} // holds one token while a command changes the sandbox
	watch *watch        // nil until started or recovered; guarded by Driver.mu
}

// New opens the driver's folder. It attaches to nothing: that is Recover's.
func New(opts Options) (*Driver, error) {
	if opts.Log == nil {
		opts.Log = slog.Default()
	}
	d := &Driver{
		state: filepath.Join(opts.Root, "state"), launch: filepath.Join(opts.Root, "launch"),
		launcher: opts.Launcher, cgroups: opts.Cgroups, log: opts.Log, entries: make(map[string]*entry),
	}
	for _, dir := range []string{d.state, d.launch} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return nil, errs.Wrap(err, errs.InternalError, "make the driver's folder %s: %v", dir, err)
		}
	}
	var err error
	if d.spares, err = openSpares(d.launch); err != nil {
		return nil, err
	}
	d.ctx, d.cancel = context.WithCancel(context.Background())
	return d, nil
}

// Name implements runtime.Driver.
func (d *Driver) Name() string { return driverName }

// Close implements runtime.Driver.
func (d *Driver) Close() error {
	d.cancel()
	d.wg.Wait()
	return nil
}

// Start implements runtime.Driver.
func (d *Driver) Start(ctx context.Context, cfg runtime.Config) (runtime.Handle, error) {
	return d.launchSandbox(ctx, cfg, stepStart, "run", "-detach")
}

// Restore implements runtime.Driver.
func (d *Driver) Restore(ctx context.Context, cfg runtime.Config, img runtime.Image) (runtime.Handle, error) {
	for _, name := range []string{"checkpoint.img", "pages.img", "pages_meta.img"} {
		if _, err := os.Stat(filepath.Join(img.Dir, name)); err != nil {
			return nil, errs.Wrap(err, errs.ArtefactDamaged, "the snapshot's folder has no readable %s", name).With("file", name)
		}
	}
	args := []string{"restore", "-detach", "-image-path=" + img.Dir}
	if img.Direct {
		args = append(args, "-direct")
	}
	return d.launchSandbox(ctx, cfg, stepRestore, args...)
}

// launchSandbox is Start and Restore: record, group, runsc, attach. Failing steps undo all of it.
func (d *Driver) launchSandbox(ctx context.Context, cfg runtime.Config, step string, args ...string) (runtime.Handle, error) {
	rec, group, err := d.prepare(cfg)
	if err != nil {
		return nil, err
	}
	e := d.entry(cfg.ID)
	if err := d.lockOp(ctx, e); err != nil {
		return nil, err
	}
	defer e.unlock()
	if err := d.createRecord(rec); err != nil {
		return nil, err
	}
	fault.At("runtime.recorded.after")
	h, err := d.launchRecorded(ctx, cfg, &rec, group, step, args)
	if err == nil {
		return h, nil
	}
	oom := group.oomKilled()
	// Also when the caller's time is up: what was begun is undone, within a time of its own.
	undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTime)
	defer cancel()
	if undoErr := d.remove(undo, e, rec, true); undoErr != nil {
		d.log.Warn("clean up after a failed start", "sandbox", cfg.ID, "error", undoErr)
	}
	if ctx.Err() != nil && errors.Is(err, ctx.Err()) {
		return nil, err
	}
	if oom {
		return nil, errs.Wrap(err, errs.SandboxFailed, "%s of sandbox %s ran out of the sandbox's memory limit; raise it", step, cfg.ID).
			With("step", step).With("uid", cfg.ID).With("oom", "true")
	}
	return nil, classify(cfg.ID, step, err)
}

type group struct{ *cgroup.Group }

func (g group) oomKilled() bool {
	s, err := g.Stats()
	return err == nil && s.OOMKills > 0
}

// prepare checks the config and gives the record of what is about to be started.
func (d *Driver) prepare(cfg runtime.Config) (record, group, error) {
	if err := d.ctx.Err(); err != nil {
		return record{}, group{}, errs.New(errs.ShuttingDown, "the runtime driver is closed")
	}
	if err := runtime.CheckID(cfg.ID); err != nil {
		return record{}, group{}, err
	}
	if cfg.Spec == nil || cfg.Spec.Linux == nil {
		return record{}, group{}, errs.New(errs.InvalidField, "the sandbox has no OCI spec").With("field", "spec")
	}
	if _, err := os.Stat(filepath.Join(cfg.Bundle.Dir, "runsc")); err != nil {
		return record{}, group{}, errs.Wrap(err, errs.IncompatibleRuntime, "the runtime bundle %s is not at %s", cfg.Bundle.Digest, cfg.Bundle.Dir).With("want", cfg.Bundle.Digest)
	}
	g, err := d.cgroups.At(cfg.Cgroup)
	if err != nil {
		return record{}, group{}, err
	}
	return record{
		Version: handleVersion, ID: cfg.ID, Dir: cfg.Dir, BundleDigest: cfg.Bundle.Digest, BundleDir: cfg.Bundle.Dir,
		Flags: slices.Clone(cfg.Flags), Cgroup: cfg.Cgroup,
	}, group{g}, nil
}

func (d *Driver) launchRecorded(ctx context.Context, cfg runtime.Config, rec *record, g group, step string, args []string) (runtime.Handle, error) {
	if err := writeSpec(cfg); err != nil {
		return nil, err
	}
	fds, closeStdio, err := openStdio(cfg.Stdio)
	if err != nil {
		return nil, err
	}
	defer closeStdio()
	if err := g.Create(cfg.Spec.Linux.Resources); err != nil {
		return nil, err
	}
	fault.At("runtime.group.after")
	args = append(slices.Clone(args), "-bundle="+cfg.Dir, cfg.ID)
	if err := d.run(ctx, command{rec: *rec, args: args, stdio: fds, group: g.Group}); err != nil {
		return nil, err
	}
	fault.At("runtime.launched.after")
	return d.attach(rec, step)
}

// attach takes hold of a sandbox that runsc has just started and writes down which process it is.
func (d *Driver) attach(rec *record, step string) (runtime.Handle, error) {
	st, ok, err := d.loadState(rec.ID)
	if err != nil {
		return nil, err
	}
	if !ok || st.Sandbox.Pid == 0 {
		return nil, errs.New(errs.SandboxFailed, "the runtime says that sandbox %s is started, but keeps no state of it", rec.ID).With("step", step)
	}
	ticks, err := launcher.StartTime(st.Sandbox.Pid)
	if err != nil {
		return nil, errs.Wrap(err, errs.SandboxFailed, "sandbox %s was gone as soon as it was started", rec.ID).With("step", step)
	}
	p, err := launcher.Attach(st.Sandbox.Pid, ticks)
	if err != nil {
		return nil, err
	}
	rec.Pid, rec.StartTicks, rec.StartedAt = st.Sandbox.Pid, ticks, time.Now()
	if st.GoferPid != 0 {
		// A gofer that is gone already took the sandbox with it, and the watch tells.
		if ticks, err := launcher.StartTime(st.GoferPid); err == nil {
			rec.GoferPid, rec.GoferTicks = st.GoferPid, ticks
		}
	}
	h, err := rec.handle()
	if err == nil {
		err = d.saveRecord(*rec)
	}
	if err != nil {
		return nil, errors.Join(err, p.Close())
	}
	fault.At("runtime.attached.after")
	d.startWatch(*rec, p)
	return h, nil
}

// writeSpec writes config.json. The sandbox's root is an annotation; runsc wants a folder's name all the same.
func writeSpec(cfg runtime.Config) error {
	spec := *cfg.Spec
	linux := *spec.Linux
	linux.CgroupsPath = cfg.Cgroup
	spec.Linux = &linux
	data, err := json.Marshal(&spec)
	if err != nil {
		return errs.Wrap(err, errs.InternalError, "encode the spec of sandbox %s: %v", cfg.ID, err)
	}
	if err := os.WriteFile(filepath.Join(cfg.Dir, runtime.ConfigName), data, 0o600); err != nil {
		return errs.Wrap(err, errs.InternalError, "write the spec of sandbox %s: %v", cfg.ID, err)
	}
	return nil
}

// entry gives the sandbox's entry, a new one where there is none.
func (d *Driver) entry(id string) *entry {
	d.mu.Lock()
	defer d.mu.Unlock()
	e, ok := d.entries[id]
	if !ok {
		e = &entry{op: make(chan struct{}, 1)}
		d.entries[id] = e
	}
	return e
}

// lockOp waits until no command changes the sandbox.
func (d *Driver) lockOp(ctx context.Context, e *entry) error {
	select {
	case e.op <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-d.ctx.Done():
		return errs.New(errs.ShuttingDown, "the runtime driver is closed")
	}
}

func (e *entry) unlock() { <-e.op }

// Pause implements runtime.Driver.
func (d *Driver) Pause(ctx context.Context, id string) error {
	return d.change(ctx, id, change{step: halt.step, call: func() error { return d.turn(id, halt) }, from: []runtime.Phase{runtime.Running}, done: runtime.Paused})
}

// Resume implements runtime.Driver.
func (d *Driver) Resume(ctx context.Context, id string) error {
	return d.change(ctx, id, change{step: goOn.step, call: func() error { return d.turn(id, goOn) }, from: []runtime.Phase{runtime.Paused}, done: runtime.Running})
}

// Save implements runtime.Driver.
func (d *Driver) Save(ctx context.Context, id string, opts runtime.SaveOptions) error {
	if _, err := d.known(id); err != nil {
		return err
	}
	entries, err := os.ReadDir(opts.Dir)
	if err != nil || len(entries) > 0 {
		return errs.Wrap(err, errs.InvalidField, "the snapshot's folder %s must exist and be empty", opts.Dir).With("field", "dir")
	}
	err = d.change(ctx, id, change{step: "save", call: func() error { return d.save(id, opts) }, from: []runtime.Phase{runtime.Paused}, failed: func() { d.emptyFiles(id, opts.Dir) }})
	if !errs.Has(err, errs.SandboxFailed) {
		return err
	}
	// What the sandbox had open, or the folder, may be the cause, and may pass; unless it ended, it goes on.
	if status, stateErr := d.State(ctx, id); stateErr != nil || status.Phase == runtime.Stopped {
		return err
	}
	return errs.Wrap(err, errs.SaveFailed, "%s; the sandbox goes on, try again later", errs.From(err).Message).With("uid", id).With("step", "save")
}

// emptyFiles gives the space of a failed save back: the sentry keeps a file of it open for as long as it
// lives, so removing the file alone would not.
func (d *Driver) emptyFiles(id, dir string) {
	entries, err := os.ReadDir(dir)
	for _, e := range entries {
		err = errors.Join(err, os.Truncate(filepath.Join(dir, e.Name()), 0))
	}
	if err != nil {
		d.log.Warn("empty the files of a failed save", "sandbox", id, "dir", dir, "error", err)
	}
}

// change is what changes a sandbox and is not to be cut in two.
type change struct {
	step   string
	call   func() error    // a *failure is the sandbox's own
	from   []runtime.Phase // the phases that it is for
	done   runtime.Phase   // the phase in which there is nothing to do; "" for none
	failed func()          // runs when the sandbox says that it failed; may be nil
}

// change makes the change once no other is made to the sandbox. When ctx ends it goes on, holding the
// sandbox's token, and whoever comes next waits for it.
func (d *Driver) change(ctx context.Context, id string, c change) error {
	if _, err := d.known(id); err != nil {
		return err
	}
	e := d.entry(id)
	if err := d.lockOp(ctx, e); err != nil {
		return err
	}
	if err := d.settle(ctx, id); err != nil {
		e.unlock()
		return err
	}
	status, err := d.State(ctx, id)
	if err != nil || status.Phase == c.done || !slices.Contains(c.from, status.Phase) {
		e.unlock()
		if err == nil && status.Phase != c.done {
			err = errs.New(errs.WrongPhase, "%s: sandbox %s is %s", c.step, id, status.Phase).With("uid", id).With("phase", string(status.Phase))
		}
		return err
	}
	done := make(chan error, 1)
	d.wg.Go(func() {
		defer e.unlock()
		err := c.call()
		var f *failure
		if errors.As(err, &f) && c.failed != nil {
			c.failed()
		}
		done <- err
	})
	select {
	case err := <-done:
		return classify(id, c.step, err)
	case <-ctx.Done():
		return ctx.Err()
	}
}

// known gives the record of a sandbox that has to be there.
func (d *Driver) known(id string) (record, error) {
	if err := runtime.CheckID(id); err != nil {
		return record{}, err
	}
	rec, ok, err := d.loadRecord(id)
	if err != nil {
		return record{}, err
	}
	if !ok {
		return record{}, notFound(id)
	}
	return rec, nil
}

func notFound(id string) error {
	return errs.New(errs.ObjectNotFound, "the runtime has no sandbox %s", id).With("kind", "sandbox").With("uid", id)
}

// trimSignal asks the bundle's own main of runsc (build/runsc/trim.go) to trim its heap. One that does not know it ignores it, as Go's
// runtime does with every real-time signal.
const trimSignal = unix.Signal(50)

// Trim implements runtime.Driver.
func (d *Driver) Trim(id string) error {
	w := d.watchOf(id)
	if w == nil {
		return notFound(id)
	}
	if w.proc == nil {
		return nil
	}
	if err := w.proc.Signal(trimSignal); err != nil && !errors.Is(err, os.ErrClosed) {
		return errs.Wrap(err, errs.InternalError, "ask the runtime of sandbox %s to trim its memory: %v", id, err)
	}
	return nil
}

// Kill implements runtime.Driver.
func (d *Driver) Kill(ctx context.Context, id string, sig syscall.Signal) error {
	status, err := d.State(ctx, id)
	if errs.Has(err, errs.ObjectNotFound) || (err == nil && status.Phase == runtime.Stopped) {
		return nil
	}
	if err != nil {
		return err
	}
	rec, err := d.known(id)
	if err != nil {
		return err
	}
	if sig == unix.SIGKILL {
		v, err := d.kill(rec)
		v.close()
		return err
	}
	err = d.run(ctx, command{rec: rec, args: []string{"kill", id, unix.SignalName(sig)}})
	if now, stateErr := d.State(ctx, id); err != nil && stateErr == nil && now.Phase == runtime.Stopped {
		return nil // it ended on its own meanwhile
	}
	return classify(id, "kill", err)
}
