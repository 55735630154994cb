package runsc

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"path/filepath"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dormouse-run/dormouse/pkg/errs"
)

const (
	// controlTime bounds a call that the sandbox answers at once.
	controlTime = 10 * time.Second
	// maxReply bounds what the sandbox may say to a call. Of a save that failed it tells with the stacks of all its
	// goroutines.
	maxReply = 4 << 20
)

// call asks the sandbox over its control socket: one JSON object there, with the descriptors beside its
// first byte, and one back. Only what changes no state that runsc keeps in files is asked this way.
//
// The names of methods and fields are those of the pinned runsc; the conformance suite holds them to it.
func (d *Driver) call(ctx context.Context, id, method string, arg, result any, files ...int) error {
	conn, err := d.dialControl(ctx, id)
	if err != nil {
		return err
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	err = exchange(conn, method, arg, result, files)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return err
}

// refusal is what the sandbox said of a call that it did not do.
type refusal struct{ method, said string }

func (r *refusal) Error() string { return r.method + ": " + r.said }

func exchange(conn *net.UnixConn, method string, arg, result any, files []int) error {
	data, err := json.Marshal(struct {
		Method string `json:"method"`
		Arg    any    `json:"arg"`
	}{method, arg})
	if err != nil {
		return errs.Wrap(err, errs.InternalError, "encode a control call: %v", err)
	}
	var rights []byte
	if len(files) > 0 {
		rights = unix.UnixRights(files...)
	}
	n, _, err := conn.WriteMsgUnix(data, rights, nil)
	if err == nil && n < len(data) {
		_, err = conn.Write(data[n:])
	}
	if err != nil {
		return err
	}
	reply := struct {
		Success bool   `json:"success"`
		Err     string `json:"err"`
		Result  any    `json:"result"`
	}{Result: result}
	if err := json.NewDecoder(io.LimitReader(conn, maxReply)).Decode(&reply); err != nil {
		return err
	}
	if !reply.Success {
		said := withoutStacks(reply.Err)
		if len(said) > 1000 {
			said = said[:1000]
		}
		return &refusal{method, strconv.QuoteToASCII(said)}
	}
	return nil
}

// dialControl connects to the sandbox's control socket, by a descriptor of it: the path may be longer
// than an address can be.
func (d *Driver) dialControl(ctx context.Context, id string) (*net.UnixConn, error) {
	fd, err := unix.Open(filepath.Join(d.state, "runsc-"+id+".sock"), unix.O_PATH|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0)
	if errors.Is(err, unix.ENOENT) {
		return nil, errs.New(errs.SandboxFailed, "sandbox %s has no control socket; it has ended, or is only being started", id).With("step", "control")
	}
	if err != nil {
		return nil, errs.Wrap(err, errs.InternalError, "open the control socket of sandbox %s: %v", id, err)
	}
	defer unix.Close(fd)
	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, "unix", "/proc/self/fd/"+strconv.Itoa(fd))
	if err != nil {
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		return nil, errs.Wrap(err, errs.SandboxFailed, "the runtime of sandbox %s does not listen: %v", id, err).With("step", "control")
	}
	return conn.(*net.UnixConn), nil
}
