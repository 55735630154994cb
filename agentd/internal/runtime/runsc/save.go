package runsc

import (
	"context"
	"errors"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/dormouse-run/dormouse/agentd/internal/launcher"
	"github.com/dormouse-run/dormouse/agentd/internal/runtime"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/fault"
)

// saved are the files of a save, in the order in which the sandbox wants them; the last has the memory's pages.
var saved = []string{"checkpoint.img", "pages_meta.img", "pages.img"}

// saveArg says how to save. Resume: the sandbox goes on afterwards, or stays paused if it was; and so it does
// when the save fails.
type saveArg struct {
	Metadata      map[string]string `json:"metadata"`
	HavePagesFile bool              `json:"have_pages_file"`
	Resume        bool
}

// save asks a paused sandbox for its image. It is asked over its control socket, and not by `runsc checkpoint`, because
// nothing that runsc keeps in files is changed, and a process less for each capture is a tenth of its CPU.
func (d *Driver) save(id string, opts runtime.SaveOptions) error {
	files := make([]int, 0, len(saved))
	defer func() {
		for _, fd := range files {
			_ = unix.Close(fd) // the sandbox has its own
		}
	}()
	for i, name := range saved {
		flags := unix.O_CREAT | unix.O_EXCL | unix.O_RDWR | unix.O_CLOEXEC | unix.O_NOFOLLOW
		if opts.Direct && i == len(saved)-1 {
			flags |= unix.O_DIRECT // whole pages alone go into it
		}
		fd, err := unix.Open(filepath.Join(opts.Dir, name), flags, 0o600)
		if err != nil {
			return &failure{what: "save", exit: launcher.Exit{Known: true, Code: 1}, said: "make " + name + ": " + err.Error()}
		}
		files = append(files, fd)
	}
	if err := d.intendSave(id, files[:len(files)-1]); err != nil {
		return err
	}
	fault.At("runtime.save.before")
	arg := saveArg{Metadata: map[string]string{"compression": "none"}, HavePagesFile: true, Resume: true}
	err := d.call(d.ctx, id, "containerManager.Checkpoint", arg, &struct{}{}, files...)
	if err != nil && d.ctx.Err() != nil {
		return err // it may go on: whoever comes next waits for its end
	}
	if endErr := d.endSave(id); err == nil || endErr != nil {
		return errors.Join(err, endErr)
	}
	var own *errs.Error
	if errors.As(err, &own) || errors.Is(err, context.Canceled) {
		return err // it was not reached
	}
	return &failure{what: "save", exit: launcher.Exit{Known: true, Code: 1}, said: err.Error()}
}
