package runsc

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"regexp"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/dormouse-run/dormouse/agentd/internal/launcher"
	"github.com/dormouse-run/dormouse/agentd/internal/runtime"
	"github.com/dormouse-run/dormouse/pkg/errs"
)

// maxOutput bounds what a runsc command may say.
const maxOutput = 64 << 10

// command is one call of the bundle's runsc.
type command struct {
	rec   record
	args  []string
	stdio []int // of the sandbox that is started; nil for any other command
	group launcher.Group
}

// failure is a runsc command that ended badly.
type failure struct {
	what string
	exit launcher.Exit
	said string // what it wrote, in one line, bounded
}

func (f *failure) Error() string {
	return fmt.Sprintf("runsc %s ended with code %d: %s", f.what, f.exit.Code, f.said)
}

// run calls runsc. The error is a *failure, or one of starting it, or the context's.
func (d *Driver) run(ctx context.Context, c command) error {
	log, err := newCapture()
	if err != nil {
		return err
	}
	defer log.close()
	null, err := unix.Open("/dev/null", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return errs.Wrap(err, errs.InternalError, "open /dev/null: %v", err)
	}
	defer unix.Close(null)
	files := []int{null, log.fd, log.fd, log.fd}
	if c.stdio != nil {
		files = append(append([]int{}, c.stdio...), log.fd)
	}
	args := append([]string{"--root=" + d.state, "--log-fd=3", "--gofer-network-namespace=new"}, c.rec.Flags...)
	cmd := launcher.Command{
		Path: filepath.Join(c.rec.BundleDir, "runsc"), Args: append(args, c.args...), Files: files, Group: c.group,
	}
	exit, err := d.launcher.Run(ctx, cmd)
	if err != nil {
		return err
	}
	if exit.Code != 0 {
		return &failure{what: c.args[0], exit: exit, said: log.said()}
	}
	return nil
}

// capture takes the output of a command in a sealed memory file: bounded by the kernel, and nobody has
// to read along or wait for an end of file that a sandbox would hold back.
type capture struct{ fd int }

func newCapture() (*capture, error) {
	fd, err := unix.MemfdCreate("runsc-log", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, errs.Wrap(err, errs.InternalError, "make a file for the runtime's messages: %v", err)
	}
	c := &capture{fd: fd}
	err = unix.Ftruncate(fd, maxOutput)
	if err == nil {
		_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_GROW|unix.F_SEAL_SHRINK)
	}
	if err != nil {
		c.close()
		return nil, errs.Wrap(err, errs.InternalError, "bound the file for the runtime's messages: %v", err)
	}
	return c, nil
}

func (c *capture) close() { _ = unix.Close(c.fd) }

// said gives what was written: the messages of runsc's log where there are any, else the bare text.
func (c *capture) said() string {
	data := make([]byte, maxOutput)
	n, err := unix.Pread(c.fd, data, 0)
	if err != nil {
		return "its messages cannot be read: " + err.Error()
	}
	return digest(bytes.TrimRight(data[:n], "\x00"))
}

// digest gives what matters of runsc's output, in one bounded line. The log and the bare text are
// in it one after the other, and either may hold braces. A sandbox whose save fails adds the stacks
// of its goroutines to the cause, which would leave no room for it.
func digest(output []byte) string {
	begin := []byte(`{"msg":`)
	var messages []string
	for rest := output; ; {
		i := bytes.Index(rest, begin)
		if i < 0 {
			break
		}
		dec := json.NewDecoder(bytes.NewReader(rest[i:]))
		var line struct {
			Msg string `json:"msg"`
		}
		if err := dec.Decode(&line); err != nil {
			rest = rest[i+len(begin):]
			continue
		}
		messages = append(messages, withoutStacks(line.Msg))
		rest = rest[i+int(dec.InputOffset()):]
	}
	text := strings.Join(messages, "; ")
	if text == "" {
		text = withoutStacks(string(output))
	}
	text = strings.Join(strings.Fields(text), " ")
	const half = 1000
	if len(text) > 2*half {
		text = strings.ToValidUTF8(text[:half]+" ... "+text[len(text)-half:], "?")
	}
	return text
}

func withoutStacks(text string) string {
	text, _, _ = strings.Cut(text, "\ngoroutine ")
	return strings.TrimSuffix(text, ":")
}

var walked = regexp.MustCompile(`failed to walk[^"]*"([^"]*)"`)

// classify turns what runsc said into a typed error. It matches texts because runsc gives nothing else
// from one process to another; each is tied to the pinned version by a test that makes it happen.
func classify(id, step string, err error) error {
	var f *failure
	if !errors.As(err, &f) {
		return err
	}
	has := func(texts ...string) bool {
		for _, t := range texts {
			if strings.Contains(f.said, t) {
				return true
			}
		}
		return false
	}
	fail := func(reason errs.Reason, format string, args ...any) *errs.Error {
		return errs.Wrap(err, reason, format, args...).With("uid", id).With("step", step)
	}
	switch {
	case has("no space left on device"):
		return fail(errs.DiskFull, "the disk was full during %s of sandbox %s; free space and try again", step, id)
	case step != stepRestore:
	case has("failed to walk", "no such file or directory") && has("ile", "gofer"):
		e := fail(errs.VolumeDiverged, "a file that the sandbox held open on a volume is no longer there; attach the volume as it was, or restore an older snapshot")
		if m := walked.FindStringSubmatch(f.said); m != nil {
			e = e.With("path", m[1])
		}
		return e
	case has("does not match across checkpoint restore", "failed to validate restore spec", "version does not match", "cannot be restored with"):
		return fail(errs.IncompatibleRuntime, "the snapshot was made by another runtime or with another spec: %s", f.said)
	case has("CPU feature", "cpuid", "FeatureSet"):
		return fail(errs.IncompatibleNode, "this node's CPU lacks a feature that the snapshot needs: %s", f.said)
	case strings.HasSuffix(f.said, "failed: EOF"):
		// The runtime died over the files; running out of memory was ruled out before.
		return fail(errs.ArtefactDamaged, "the runtime could not load the snapshot and ended; its files are damaged or not of this runtime")
	case has("unexpected EOF", "bad magic", "hash", "decod", "corrupt"):
		return fail(errs.ArtefactDamaged, "the snapshot's files are damaged: %s", f.said)
	}
	return fail(errs.SandboxFailed, "%s of sandbox %s failed: %s", step, id, f.said)
}

// openStdio opens each FIFO for the sandbox alone. The descriptors are raw on purpose: an os.File would
// switch the open file description, which the sandbox shares from then on, to blocking.
func openStdio(s runtime.Stdio) (fds []int, closeAll func(), err error) {
	closeAll = func() {
		for _, fd := range fds {
			_ = unix.Close(fd)
		}
	}
	for _, path := range []string{s.In, s.Out, s.Err} {
		fd, err := unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK|unix.O_NOFOLLOW, 0)
		if err != nil {
			closeAll()
			return nil, nil, errs.Wrap(err, errs.InvalidField, "open the FIFO %s: %v", path, err).With("field", "stdio")
		}
		fds = append(fds, fd)
		var st unix.Stat_t
		if err := unix.Fstat(fd, &st); err != nil || st.Mode&unix.S_IFMT != unix.S_IFIFO {
			closeAll()
			return nil, nil, errs.New(errs.InvalidField, "%s is not a FIFO; make it with MakeFIFOs", path).With("field", "stdio")
		}
	}
	return fds, closeAll, nil
}
