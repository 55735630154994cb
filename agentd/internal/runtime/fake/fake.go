// Package fake is a runtime driver in memory, for tests of what stands on the driver: it keeps the
// contract of package runtime (the conformance suite runs on it), and delays and failures can be put in
// at every method.
//
// A Host stands for the machine: the sandboxes live in it, and any number of Drivers open it one after
// another or at once, as agents that come and go. A sandbox's memory is a Guest: a process id, a nonce
// and a counter, which Save writes and Restore reads.
package fake

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/dormouse-run/dormouse/agentd/internal/runtime"
	"github.com/dormouse-run/dormouse/pkg/errs"
)

const (
	driverName    = "fake"
	handleVersion = 1
	imageFile     = "checkpoint.json"
	firstPid      = 1000
)

// Op names a driver's method for Hook.
type Op string

// The methods that a Hook sees.
const (
	OpStart   Op = "start"
	OpRestore Op = "restore"
	OpRecover Op = "recover"
	OpPause   Op = "pause"
	OpSave    Op = "save"
	OpResume  Op = "resume"
	OpKill    Op = "kill"
	OpDelete  Op = "delete"
	OpState   Op = "state"
	OpExec    Op = "exec"
	OpStats   Op = "stats"
	OpList    Op = "list"
)

// Hook runs before a method acts. It may wait (and should heed ctx) and may fail the method, which then
// has no effect. Where a test wants the effect and an error, it wraps the driver.
type Hook func(ctx context.Context, op Op, id string) error

// Guest is the memory of a sandbox.
type Guest struct {
	Pid     int    `json:"pid"`
	Nonce   string `json:"nonce"`
	Counter int    `json:"counter"`
}

// Host is the machine that sandboxes live on. The zero value is not usable; NewHost makes one.
type Host struct {
	mu        sync.Mutex
	sandboxes map[string]*sandbox
	nextPid   int
	hook      Hook
	programs  map[string]RunProgram
}

type sandbox struct {
	cfg     runtime.Config
	phase   runtime.Phase
	pid     int
	started time.Time
	guest   Guest
	exit    runtime.Exit
	done    chan struct{}
	execs   map[*process]bool
	trims   int
}

// NewHost makes an empty machine.
func NewHost() *Host {
	return &Host{sandboxes: make(map[string]*sandbox), nextPid: firstPid}
}

// SetHook puts in a hook for all drivers of the host; nil takes it out.
func (h *Host) SetHook(hook Hook) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.hook = hook
}

// Count adds one to the counter of the sandbox's guest and gives its memory; false when it does not run.
func (h *Host) Count(id string) (Guest, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	s, ok := h.sandboxes[id]
	if !ok || s.phase != runtime.Running {
		return Guest{}, false
	}
	s.guest.Counter++
	return s.guest, true
}

// Trims tells how often the sandbox's runtime was asked to give memory back.
func (h *Host) Trims(id string) int {
	h.mu.Lock()
	defer h.mu.Unlock()
	if s, ok := h.sandboxes[id]; ok {
		return s.trims
	}
	return 0
}

// Exit ends the sandbox as its init would. It does nothing to a sandbox that has ended or is unknown.
func (h *Host) Exit(id string, exit runtime.Exit) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if s, ok := h.sandboxes[id]; ok {
		s.end(exit)
	}
}

// Config gives the config that the sandbox was started or restored with.
func (h *Host) Config(id string) (runtime.Config, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	s, ok := h.sandboxes[id]
	if !ok {
		return runtime.Config{}, false
	}
	return s.cfg, true
}

// IDs gives all sandboxes that the host has, ended ones too.
func (h *Host) IDs() []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	ids := make([]string, 0, len(h.sandboxes))
	for id := range h.sandboxes {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	return ids
}

func (s *sandbox) end(exit runtime.Exit) {
	if s.phase == runtime.Stopped {
		return
	}
	exit.At = time.Now()
	s.phase, s.exit, s.pid = runtime.Stopped, exit, 0
	for p := range s.execs {
		p.end(0, errs.New(errs.SandboxFailed, "the sandbox ended before its program did"))
	}
	close(s.done)
}

// Driver implements runtime.Driver on a Host.
type Driver struct {
	host   *Host
	closed chan struct{}
	once   sync.Once

	mu       sync.Mutex
	attached map[string]*sandbox
}

var _ runtime.Driver = (*Driver)(nil)

// Open gives a new driver of the host, attached to nothing.
func (h *Host) Open() *Driver {
	return &Driver{host: h, closed: make(chan struct{}), attached: make(map[string]*sandbox)}
}

// Name implements runtime.Driver.
func (d *Driver) Name() string { return driverName }

// Close implements runtime.Driver.
func (d *Driver) Close() error {
	d.once.Do(func() { close(d.closed) })
	return nil
}

// enter runs the hook and checks that the driver may act.
func (d *Driver) enter(ctx context.Context, op Op, id string) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	select {
	case <-d.closed:
		return errs.New(errs.ShuttingDown, "the runtime driver is closed")
	default:
	}
	if op != OpList {
		if err := runtime.CheckID(id); err != nil {
			return err
		}
	}
	d.host.mu.Lock()
	hook := d.host.hook
	d.host.mu.Unlock()
	if hook == nil {
		return nil
	}
	return hook(ctx, op, id)
}

// with runs fn on the sandbox under the host's lock.
func (d *Driver) with(id string, fn func(*sandbox) error) error {
	d.host.mu.Lock()
	defer d.host.mu.Unlock()
	s, ok := d.host.sandboxes[id]
	if !ok {
		return notFound(id)
	}
	return fn(s)
}

func notFound(id string) error {
	return errs.New(errs.ObjectNotFound, "the runtime has no sandbox %s", id).With("kind", "sandbox").With("uid", id)
}

// Start implements runtime.Driver.
func (d *Driver) Start(ctx context.Context, cfg runtime.Config) (runtime.Handle, error) {
	if err := d.enter(ctx, OpStart, cfg.ID); err != nil {
		return nil, err
	}
	return d.add(cfg, Guest{Pid: 1, Nonce: rand.Text()})
}

// Restore implements runtime.Driver.
func (d *Driver) Restore(ctx context.Context, cfg runtime.Config, img runtime.Image) (runtime.Handle, error) {
	if err := d.enter(ctx, OpRestore, cfg.ID); err != nil {
		return nil, err
	}
	data, err := os.ReadFile(filepath.Join(img.Dir, imageFile))
	if err != nil {
		return nil, errs.Wrap(err, errs.ArtefactDamaged, "the snapshot's folder has no readable %s", imageFile).With("file", imageFile)
	}
	var g Guest
	if err := json.Unmarshal(data, &g); err != nil {
		return nil, errs.Wrap(err, errs.ArtefactDamaged, "the snapshot's files are damaged: %v", err).With("file", imageFile)
	}
	return d.add(cfg, g)
}

func (d *Driver) add(cfg runtime.Config, g Guest) (runtime.Handle, error) {
	data, err := json.Marshal(handle{Driver: driverName, Version: handleVersion, ID: cfg.ID})
	if err != nil {
		return nil, errs.Wrap(err, errs.InternalError, "encode the handle: %v", err)
	}
	h := d.host
	h.mu.Lock()
	defer h.mu.Unlock()
	if _, ok := h.sandboxes[cfg.ID]; ok {
		return nil, errs.New(errs.NameTaken, "the runtime already has a sandbox %s; an id is never used twice", cfg.ID).With("uid", cfg.ID)
	}
	h.nextPid++
	s := &sandbox{cfg: cfg, phase: runtime.Running, pid: h.nextPid, started: time.Now(), guest: g, done: make(chan struct{})}
	h.sandboxes[cfg.ID] = s
	d.attach(cfg.ID, s)
	return data, nil
}

func (d *Driver) attach(id string, s *sandbox) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.attached[id] = s
}

type handle struct {
	Driver  string `json:"driver"`
	Version int    `json:"version"`
	ID      string `json:"id"`
}

// Recover implements runtime.Driver.
func (d *Driver) Recover(ctx context.Context, h runtime.Handle) (runtime.Status, error) {
	var v handle
	if err := json.Unmarshal(h, &v); err != nil || v.Driver != driverName || v.Version != handleVersion {
		return runtime.Status{}, errs.New(errs.IncompatibleRuntime, "the handle is of driver %q, version %d; this one reads %q, version %d", v.Driver, v.Version, driverName, handleVersion)
	}
	if err := d.enter(ctx, OpRecover, v.ID); err != nil {
		return runtime.Status{}, err
	}
	var st runtime.Status
	err := d.with(v.ID, func(s *sandbox) error {
		d.attach(v.ID, s)
		st = s.status(v.ID)
		return nil
	})
	return st, err
}

func (s *sandbox) status(id string) runtime.Status {
	st := runtime.Status{ID: id, Phase: s.phase, Pid: s.pid, BundleDigest: s.cfg.Bundle.Digest}
	if s.phase != runtime.Stopped {
		st.StartedAt = s.started
	}
	return st
}

// turn moves the sandbox from one phase to another; being there already is fine.
func (d *Driver) turn(id string, from, to runtime.Phase) error {
	return d.with(id, func(s *sandbox) error {
		if s.phase != from && s.phase != to {
			return wrongPhase(id, s.phase)
		}
		s.phase = to
		return nil
	})
}

func wrongPhase(id string, has runtime.Phase) error {
	return errs.New(errs.WrongPhase, "sandbox %s is %s", id, has).With("uid", id).With("phase", string(has))
}

// Pause implements runtime.Driver.
func (d *Driver) Pause(ctx context.Context, id string) error {
	if err := d.enter(ctx, OpPause, id); err != nil {
		return err
	}
	return d.turn(id, runtime.Running, runtime.Paused)
}

// Resume implements runtime.Driver.
func (d *Driver) Resume(ctx context.Context, id string) error {
	if err := d.enter(ctx, OpResume, id); err != nil {
		return err
	}
	return d.turn(id, runtime.Paused, runtime.Running)
}

// Save implements runtime.Driver.
func (d *Driver) Save(ctx context.Context, id string, opts runtime.SaveOptions) error {
	if err := d.enter(ctx, OpSave, id); err != nil {
		return err
	}
	entries, err := os.ReadDir(opts.Dir)
	if err != nil || len(entries) > 0 {
		return errs.New(errs.InvalidField, "the snapshot's folder %s must exist and be empty", opts.Dir).With("field", "dir")
	}
	var data []byte
	err = d.with(id, func(s *sandbox) error {
		if s.phase != runtime.Paused {
			return wrongPhase(id, s.phase)
		}
		var err error
		data, err = json.Marshal(s.guest)
		return err
	})
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(opts.Dir, imageFile), data, 0o600); err != nil {
		reason := errs.InternalError
		if errors.Is(err, syscall.ENOSPC) {
			reason = errs.DiskFull
		}
		return errs.Wrap(err, reason, "write the snapshot of sandbox %s: %v", id, err)
	}
	return nil
}

// Trim implements runtime.Driver: it is only counted.
func (d *Driver) Trim(id string) error {
	return d.with(id, func(s *sandbox) error {
		s.trims++
		return nil
	})
}

// Kill implements runtime.Driver. Any signal ends the guest.
func (d *Driver) Kill(ctx context.Context, id string, sig syscall.Signal) error {
	if err := d.enter(ctx, OpKill, id); err != nil {
		return err
	}
	err := d.with(id, func(s *sandbox) error {
		exit := runtime.Exit{Known: true, Code: 128 + int(sig)}
		if sig == syscall.SIGKILL {
			exit.Signal = sig
		}
		s.end(exit)
		return nil
	})
	if errs.Has(err, errs.ObjectNotFound) {
		return nil
	}
	return err
}

// Wait implements runtime.Driver.
func (d *Driver) Wait(ctx context.Context, id string) (runtime.Exit, error) {
	d.mu.Lock()
	s, ok := d.attached[id]
	d.mu.Unlock()
	if !ok {
		return runtime.Exit{}, notFound(id)
	}
	select {
	case <-s.done:
		return s.exit, nil
	default:
	}
	select {
	case <-s.done:
		return s.exit, nil
	case <-ctx.Done():
		return runtime.Exit{}, ctx.Err()
	case <-d.closed:
		return runtime.Exit{}, errs.New(errs.ShuttingDown, "the runtime driver is closed; the sandbox goes on")
	}
}

// Delete implements runtime.Driver.
func (d *Driver) Delete(ctx context.Context, id string) error {
	if err := d.enter(ctx, OpDelete, id); err != nil {
		return err
	}
	d.host.mu.Lock()
	if s, ok := d.host.sandboxes[id]; ok {
		s.end(runtime.Exit{Known: true, Code: 128 + int(syscall.SIGKILL), Signal: syscall.SIGKILL})
		delete(d.host.sandboxes, id)
	}
	d.host.mu.Unlock()
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.attached, id)
	return nil
}

// State implements runtime.Driver.
func (d *Driver) State(ctx context.Context, id string) (runtime.Status, error) {
	if err := d.enter(ctx, OpState, id); err != nil {
		return runtime.Status{}, err
	}
	var st runtime.Status
	err := d.with(id, func(s *sandbox) error { st = s.status(id); return nil })
	return st, err
}

// Stats implements runtime.Driver.
func (d *Driver) Stats(ctx context.Context, id string) (runtime.Stats, error) {
	if err := d.enter(ctx, OpStats, id); err != nil {
		return runtime.Stats{}, err
	}
	var st runtime.Stats
	err := d.with(id, func(s *sandbox) error {
		st = runtime.Stats{At: time.Now(), CPU: time.Millisecond, MemoryBytes: 1 << 20, Pids: 1}
		return nil
	})
	return st, err
}

// List implements runtime.Driver.
func (d *Driver) List(ctx context.Context) ([]runtime.Status, error) {
	if err := d.enter(ctx, OpList, ""); err != nil {
		return nil, err
	}
	var list []runtime.Status
	d.host.mu.Lock()
	defer d.host.mu.Unlock()
	for id, s := range d.host.sandboxes {
		list = append(list, s.status(id))
	}
	slices.SortFunc(list, func(a, b runtime.Status) int {
		if a.ID < b.ID {
			return -1
		}
		return 1
	})
	return list, nil
}
