package runsc

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dormouse-run/dormouse/agentd/internal/runtime"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/wait"
)

// A save outlives the agent that asked for it, and takes from the guest's channel what was sent before it came to that: the guest reads it in the
// end, but is not woken for it. So who finds a sandbox that may still be saving waits for the end of it, before anything is resumed or said.
//
// The files that are being written are noted beside the driver's record (<id>.saving) before the sandbox is asked. It has each of them open
// until it is done with all of them, also when they were removed meanwhile, as what a dead agent was writing is.
//
// The last file, with the pages, is none of these: the sandbox may keep that open for good.

// savePath is where the files of a save are noted.
func (d *Driver) savePath(id string) string { return filepath.Join(d.launch, id+".saving") }

// inode names a file.
type inode struct {
	Device, Number uint64
}

func inodeOf(st *unix.Stat_t) inode { return inode{st.Dev, st.Ino} }

// intendSave notes the files that the sandbox is going to write.
func (d *Driver) intendSave(id string, files []int) error {
	noted := make([]inode, 0, len(files))
	for _, fd := range files {
		var st unix.Stat_t
		if err := unix.Fstat(fd, &st); err != nil {
			return errs.Wrap(err, errs.InternalError, "look at a file of the save of sandbox %s: %v", id, err)
		}
		noted = append(noted, inodeOf(&st))
	}
	data, err := json.Marshal(noted)
	if err == nil {
		err = os.WriteFile(d.savePath(id), data, 0o600)
	}
	if err != nil {
		return errs.Wrap(err, errs.InternalError, "note that sandbox %s is being saved: %v", id, err)
	}
	return nil
}

// endSave forgets a save that has ended.
func (d *Driver) endSave(id string) error {
	if err := os.Remove(d.savePath(id)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return errs.Wrap(err, errs.InternalError, "forget the save of sandbox %s: %v", id, err)
	}
	return nil
}

// saveEnds waits for the end of a save that a dead agent, or a closed driver, asked for. The caller holds the sandbox's token.
func (d *Driver) saveEnds(ctx context.Context, id string) error {
	data, err := os.ReadFile(d.savePath(id))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return errs.Wrap(err, errs.InternalError, "read what is saved of sandbox %s: %v", id, err)
	}
	var noted []inode
	if json.Unmarshal(data, &noted) != nil {
		return d.endSave(id) // half a note: the sandbox had not been asked
	}
	// Calls are taken in the order in which they came, each by itself then: once two more are answered, the save has begun.
	for range 2 {
		if _, err := d.initState(ctx, id); err != nil && ctx.Err() != nil {
			return err
		}
	}
	for pause := time.Millisecond; ; pause = min(2*pause, lockWait) {
		now, err := d.observe(id)
		if err != nil || now.Phase == runtime.Stopped {
			return err
		}
		open, err := hasOpen(now.Pid, noted)
		if err != nil {
			return errs.Wrap(err, errs.InternalError, "look at what the runtime of sandbox %s has open: %v", id, err)
		}
		if !open {
			return d.endSave(id)
		}
		if err := wait.For(ctx, pause); err != nil {
			return err
		}
	}
}

// hasOpen tells whether the process has one of the files open. One that is gone has none.
func hasOpen(pid int, files []inode) (bool, error) {
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	for _, e := range entries {
		var st unix.Stat_t
		if unix.Stat(filepath.Join(dir, e.Name()), &st) == nil && slices.Contains(files, inodeOf(&st)) {
			return true, nil
		}
	}
	return false, nil
}
