package runsc

import (
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/dormouse-run/dormouse/agentd/internal/runtime"
	"github.com/dormouse-run/dormouse/pkg/errs"
)

// handleVersion is of the handle and of the record on disk, which hold the same.
const handleVersion = 1

// record is what the driver knows about a sandbox beyond the runtime's own state file. It is on disk
// under launch/<id>.json from before the sandbox is started until its absence has been observed.
// It is not synced: it has to outlive the agent, and the sandbox itself does not outlive the machine.
type record struct {
	Version      int       `json:"version"`
	ID           string    `json:"id"`
	Dir          string    `json:"dir"`
	BundleDigest string    `json:"bundle_digest"`
	BundleDir    string    `json:"bundle_dir"`
	Flags        []string  `json:"flags"`
	Cgroup       string    `json:"cgroup"`
	Pid          int       `json:"pid,omitempty"`         // 0 until started
	StartTicks   uint64    `json:"start_ticks,omitempty"` // with Pid, names the process
	StartedAt    time.Time `json:"started_at,omitzero"`
	GoferPid     int       `json:"gofer_pid,omitempty"` // 0 where no volume needs one
	GoferTicks   uint64    `json:"gofer_ticks,omitempty"`
	// Exit is set once the driver has seen the end, so that a later driver knows it too.
	Exit *runtime.Exit `json:"exit,omitempty"`
}

type handle struct {
	Driver  string `json:"driver"`
	Version int    `json:"version"`
	Record  record `json:"record"`
}

func (r record) handle() (runtime.Handle, error) {
	data, err := json.Marshal(handle{Driver: driverName, Version: handleVersion, Record: r})
	if err != nil {
		return nil, errs.Wrap(err, errs.InternalError, "encode the handle of sandbox %s: %v", r.ID, err)
	}
	return data, nil
}

func parseHandle(h runtime.Handle) (record, error) {
	var v handle
	if err := json.Unmarshal(h, &v); err != nil {
		return record{}, errs.Wrap(err, errs.IncompatibleRuntime, "the handle is not one of this driver's: %v", err)
	}
	if v.Driver != driverName || v.Version != handleVersion {
		return record{}, errs.New(errs.IncompatibleRuntime, "the handle is of driver %q, version %d; this one reads %q, version %d", v.Driver, v.Version, driverName, handleVersion)
	}
	return v.Record, nil
}

func (d *Driver) recordPath(id string) string { return filepath.Join(d.launch, id+".json") }

// createRecord writes the record of a new sandbox, or fails when the driver knows the id.
func (d *Driver) createRecord(r record) error {
	staged, err := d.stageRecord(r)
	if err != nil {
		return err
	}
	err = d.spares.link(staged, d.recordPath(r.ID))
	if errors.Is(err, fs.ErrExist) {
		return errs.New(errs.NameTaken, "the runtime already has a sandbox %s; an id is never used twice", r.ID).With("uid", r.ID)
	}
	if err != nil {
		return errs.Wrap(err, errs.InternalError, "record the start of sandbox %s: %v", r.ID, err)
	}
	return nil
}

// saveRecord replaces the record.
func (d *Driver) saveRecord(r record) error {
	staged, err := d.stageRecord(r)
	if err != nil {
		return err
	}
	if err := d.spares.replace(staged, d.recordPath(r.ID)); err != nil {
		return errs.Wrap(err, errs.InternalError, "replace the record of sandbox %s: %v", r.ID, err)
	}
	return nil
}

func (d *Driver) stageRecord(r record) (string, error) {
	data, err := json.Marshal(r)
	if err != nil {
		return "", errs.Wrap(err, errs.InternalError, "encode the record of sandbox %s: %v", r.ID, err)
	}
	staged, err := d.spares.stage(data)
	if err != nil {
		return "", errs.Wrap(err, errs.InternalError, "write the record of sandbox %s: %v", r.ID, err)
	}
	return staged, nil
}

// loadRecord reads the record; false when there is none.
func (d *Driver) loadRecord(id string) (record, bool, error) {
	data, err := d.spares.read(d.recordPath(id))
	if errors.Is(err, fs.ErrNotExist) {
		return record{}, false, nil
	}
	if err != nil {
		return record{}, false, errs.Wrap(err, errs.InternalError, "read the record of sandbox %s: %v", id, err)
	}
	var r record
	if err := json.Unmarshal(data, &r); err != nil || r.Version != handleVersion || r.ID != id {
		return record{}, false, errs.New(errs.StateDamaged, "the record of sandbox %s (%s) cannot be read; delete the sandbox", id, d.recordPath(id))
	}
	return r, true, nil
}

// removeRecord ends what the driver knows of the sandbox.
func (d *Driver) removeRecord(id string) error {
	// An agentd of before kept what it was about to write under that name.
	for _, path := range []string{d.turnPath(id), d.savePath(id), d.recordPath(id) + ".new"} {
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return errs.Wrap(err, errs.InternalError, "remove the record of sandbox %s: %v", id, err)
		}
	}
	if err := d.spares.retire(d.recordPath(id)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return errs.Wrap(err, errs.InternalError, "remove the record of sandbox %s: %v", id, err)
	}
	return nil
}

// stateFile is what the driver reads of runsc's own state file.
type stateFile struct {
	Status   string    `json:"status"`
	Created  time.Time `json:"createdAt"`
	GoferPid int       `json:"goferPid"`
	Sandbox  struct {
		Pid int `json:"pid"`
	} `json:"sandbox"`
}

func (d *Driver) stateBase(id string) string {
	return filepath.Join(d.state, id+"_sandbox:"+id)
}

// loadState reads runsc's state file; false when there is none. runsc rewrites the file in place, so a
// torn read is read again; the lock is not taken, since a command that waits for the sandbox holds it.
func (d *Driver) loadState(id string) (stateFile, bool, error) {
	var err error
	for range 20 {
		var data []byte
		data, err = os.ReadFile(d.stateBase(id) + ".state")
		if errors.Is(err, fs.ErrNotExist) {
			return stateFile{}, false, nil
		}
		var s stateFile
		if err == nil {
			if err = json.Unmarshal(data, &s); err == nil {
				return s, true, nil
			}
		}
		time.Sleep(time.Millisecond)
	}
	return stateFile{}, false, errs.Wrap(err, errs.StateDamaged, "the runtime's state file of sandbox %s cannot be read (%v); delete the sandbox", id, err)
}

// runtimeFiles are all files that runsc keeps for a sandbox.
func (d *Driver) runtimeFiles(id string) []string {
	return []string{d.stateBase(id) + ".state", d.stateBase(id) + ".lock", filepath.Join(d.state, "runsc-"+id+".sock")}
}

// idsOnDisk gives the ids that have a record or a file of runsc's.
func (d *Driver) idsOnDisk() (map[string]bool, error) {
	ids := make(map[string]bool)
	for _, dir := range []string{d.launch, d.state} {
		entries, err := os.ReadDir(dir)
		if err != nil {
			return nil, errs.Wrap(err, errs.InternalError, "list the sandboxes in %s: %v", dir, err)
		}
		for _, e := range entries {
			name := strings.TrimPrefix(e.Name(), "runsc-")
			if len(name) > runtime.IDLen && (name[runtime.IDLen] == '.' || name[runtime.IDLen] == '_') {
				ids[name[:runtime.IDLen]] = true
			}
		}
	}
	return ids, nil
}
