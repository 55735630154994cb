package runsc

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dormouse-run/dormouse/agentd/internal/launcher"
	"github.com/dormouse-run/dormouse/agentd/internal/runtime"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/fault"
	"github.com/dormouse-run/dormouse/pkg/wait"
)

// A turn makes a sandbox stand still, or go on. It is what `runsc pause` and `runsc resume` do, without a process for it: those
// two were a third of the CPU that a capture cost. In order:
//
//  1. runsc's lock on its state file is taken;
//  2. the state file as it will be is written beside the driver's record (<id>.turn): the intent;
//  3. the sandbox is asked over its control socket, with a descriptor of the lock in the call;
//  4. the intent is renamed onto the state file, and the lock is let go.
//
// The sandbox counts its stops: one stop too many and it stands still for good, one too few and it ends. So who finds an intent
// that nobody is at work on (settle) must know whether the call was done. The descriptor that travels with the call tells when that can be known:
// the lock is held for as long as the call waits in the socket or is being done, also when the agent that sent it is dead. With the lock
// taken the sandbox is asked how its init is, and the intent is finished or dropped.
//
// runsc and an agentd of another version find the same lock and state file as if runsc had done it.
type turn struct {
	step, method string
	to           string // the status that runsc's state file has afterwards
}

var (
	halt = turn{"pause", "containerManager.Pause", "paused"}
	goOn = turn{"resume", "containerManager.Resume", "running"}
)

// turnPath is where the intent of a turn is.
func (d *Driver) turnPath(id string) string { return filepath.Join(d.launch, id+".turn") }

// turn makes the sandbox stand still or go on. The caller holds the sandbox's token and knows that it is not so yet.
func (d *Driver) turn(id string, t turn) error {
	lock, err := d.lockState(d.ctx, id)
	if err != nil {
		return err
	}
	defer lock.close()
	if err := d.intendTurn(id, t); err != nil {
		return err
	}
	fault.At("runtime.turn.before")
	if err := d.call(d.ctx, id, t.method, struct{}{}, &struct{}{}, lock.fd); err != nil {
		if d.ctx.Err() != nil {
			return err // whoever comes next settles it
		}
		var own *errs.Error
		if errors.As(err, &own) { // it was not reached
			return errors.Join(err, d.dropTurn(id))
		}
		return &failure{what: t.step, exit: launcher.Exit{Known: true, Code: 1}, said: err.Error()}
	}
	fault.At("runtime.turn.after")
	defer lock.release()
	return d.finishTurn(id)
}

// intendTurn writes the state file of runsc as it will be.
func (d *Driver) intendTurn(id string, t turn) error {
	data, err := os.ReadFile(d.stateBase(id) + ".state")
	if err != nil {
		return errs.Wrap(err, errs.InternalError, "read the runtime's state file of sandbox %s: %v", id, err)
	}
	var fields map[string]json.RawMessage
	if err = json.Unmarshal(data, &fields); err == nil && fields["status"] == nil {
		err = errors.New("it has no status")
	}
	if err != nil {
		return errs.Wrap(err, errs.StateDamaged, "the runtime's state file of sandbox %s cannot be read (%v); delete the sandbox", id, err)
	}
	fields["status"] = json.RawMessage(`"` + t.to + `"`)
	if data, err = json.Marshal(fields); err == nil {
		err = os.WriteFile(d.turnPath(id), data, 0o640)
	}
	if err != nil {
		return errs.Wrap(err, errs.InternalError, "write that sandbox %s is to be %s: %v", id, t.to, err)
	}
	return nil
}

// finishTurn makes what was intended the state.
func (d *Driver) finishTurn(id string) error {
	if err := os.Rename(d.turnPath(id), d.stateBase(id)+".state"); err != nil {
		return errs.Wrap(err, errs.InternalError, "record the state of sandbox %s: %v", id, err)
	}
	fault.At("runtime.turned.after")
	return nil
}

func (d *Driver) dropTurn(id string) error {
	if err := os.Remove(d.turnPath(id)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return errs.Wrap(err, errs.InternalError, "drop what was intended with sandbox %s: %v", id, err)
	}
	fault.At("runtime.unturned.after")
	return nil
}

// settle waits for the end of a save that goes on, and brings the state file and the sandbox together after a turn that was cut short: by the death of an agent, or
// because the driver was closed. The caller holds the sandbox's token. A sandbox that has ended has nothing to settle.
func (d *Driver) settle(ctx context.Context, id string) error {
	if err := d.saveEnds(ctx, id); err != nil {
		return err
	}
	data, err := os.ReadFile(d.turnPath(id))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return errs.Wrap(err, errs.InternalError, "read what was intended with sandbox %s: %v", id, err)
	}
	var meant stateFile
	if json.Unmarshal(data, &meant) != nil {
		return d.dropTurn(id) // half an intent: the call had not been made
	}
	if now, err := d.observe(id); err != nil || now.Phase == runtime.Stopped {
		return err
	}
	lock, err := d.lockState(ctx, id)
	if err != nil {
		return err
	}
	defer lock.close()
	stands, err := d.standsStill(ctx, id)
	if err != nil {
		if now, stateErr := d.observe(id); stateErr == nil && now.Phase == runtime.Stopped {
			return nil
		}
		return err
	}
	if stands == (meant.Status == halt.to) {
		return d.finishTurn(id)
	}
	return d.dropTurn(id)
}

// looks and lookPause bound how long a sandbox whose init seems to stand still is watched: while it runs, init is for moments in a state that looks the
// same from outside, when it starts a program.
const (
	looks     = 40
	lookPause = 10 * time.Millisecond
)

// standsStill asks the sandbox for the state of its init. Asking changes nothing, and is possible in both cases.
func (d *Driver) standsStill(ctx context.Context, id string) (bool, error) {
	pause := time.NewTicker(lookPause)
	defer pause.Stop()
	for range looks {
		state, err := d.initState(ctx, id)
		if err != nil {
			return false, err
		}
		switch state {
		case 'D':
		case 'T', 't':
			return false, errs.New(errs.SandboxFailed, "init of sandbox %s was stopped from inside; it cannot be told whether the sandbox is paused", id).With("step", "settle")
		default:
			return false, nil
		}
		select {
		case <-pause.C:
		case <-ctx.Done():
			return false, ctx.Err()
		}
	}
	return true, nil
}

// initState gives the state of the sandbox's init as the sandbox's kernel shows it in /proc.
func (d *Driver) initState(ctx context.Context, id string) (byte, error) {
	ctx, cancel := context.WithTimeout(ctx, controlTime)
	defer cancel()
	r, w, err := os.Pipe()
	if err != nil {
		return 0, errs.Wrap(err, errs.InternalError, "make a pipe: %v", err)
	}
	defer r.Close()
	arg := struct {
		Files []string `json:"files"`
	}{[]string{"/proc/1/stat"}}
	err = d.call(ctx, id, "Fs.Cat", arg, &struct{}{}, int(w.Fd()))
	if err = errors.Join(err, w.Close()); err != nil {
		return 0, err
	}
	// The sandbox closes its own end once it has answered.
	if err := r.SetReadDeadline(time.Now().Add(controlTime)); err != nil {
		return 0, err
	}
	data, err := io.ReadAll(io.LimitReader(r, 4<<10))
	end := bytes.LastIndexByte(data, ')')
	if err != nil || end < 0 || len(data) < end+3 {
		return 0, errs.Wrap(err, errs.SandboxFailed, "the runtime of sandbox %s does not tell how its init is", id).With("step", "settle")
	}
	return data[end+2], nil
}

// stateLock is runsc's lock on a state file.
type stateLock struct{ fd int }

// lockWait is the longest pause between two tries to take a lock. Nobody else takes it but for an operator's runsc and a
// turn that an earlier agent left on its way.
const lockWait = 20 * time.Millisecond

// lockState takes runsc's lock.
func (d *Driver) lockState(ctx context.Context, id string) (stateLock, error) {
	fd, err := unix.Open(d.stateBase(id)+".lock", unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0)
	if err != nil {
		return stateLock{}, errs.Wrap(err, errs.SandboxFailed, "the runtime keeps no lock for sandbox %s: %v", id, err).With("step", "lock")
	}
	for pause := time.Millisecond; ; pause = min(2*pause, lockWait) {
		err := unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return stateLock{fd}, nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) {
			_ = unix.Close(fd)
			return stateLock{}, errs.Wrap(err, errs.InternalError, "take the runtime's lock for sandbox %s: %v", id, err)
		}
		if err := wait.For(ctx, pause); err != nil {
			_ = unix.Close(fd)
			return stateLock{}, err
		}
	}
}

// release lets the lock go, although the sandbox may have its copy of the descriptor for a moment longer.
func (l stateLock) release() { _ = unix.Flock(l.fd, unix.LOCK_UN) }

// close lets the lock go, or leaves it to a call that is still on its way with a copy of the descriptor.
func (l stateLock) close() { _ = unix.Close(l.fd) }
