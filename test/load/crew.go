// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package load

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"
)

// crew is the client processes of a run.
type crew struct {
	r     *Recorder
	hands []*hand
}

type hand struct {
	cmd  *exec.Cmd
	in   io.WriteCloser
	told *json.Encoder
	said *json.Decoder
}

// hire starts the client processes and gives each its share.
func hire(ctx context.Context, r *Recorder, opts Options) (_ *crew, err error) {
	c := &crew{r: r}
	defer func() {
		if err != nil {
			err = errors.Join(err, c.dismiss())
		}
	}()
	for i := range opts.Plan.Clients {
		//nolint:gosec // the harness's own program
		cmd := exec.CommandContext(ctx, opts.Command[0], opts.Command[1:]...)
		cmd.Stderr = os.Stderr
		// The terminal's interrupt is for the harness, which ends its clients itself.
		cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
		cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
		cmd.WaitDelay = 10 * time.Second
		in, err := cmd.StdinPipe()
		if err != nil {
			return nil, err
		}
		out, err := cmd.StdoutPipe()
		if err != nil {
			return nil, err
		}
		if err := cmd.Start(); err != nil {
			return nil, fmt.Errorf("start a client process: %w", err)
		}
		h := &hand{cmd: cmd, in: in, told: json.NewEncoder(in), said: json.NewDecoder(bufio.NewReader(out))}
		c.hands = append(c.hands, h)
		if err := h.told.Encode(Share{Run: r.who.ID, Plan: opts.Plan, Image: opts.Image, Worker: i, Reach: opts.Reach}); err != nil {
			return nil, fmt.Errorf("tell client %d its share: %w", i, err)
		}
	}
	return c, nil
}

// phase has all clients do a phase and returns when the last of them has done it.
func (c *crew) phase(ctx context.Context, p command) error {
	c.r.begin(p)
	group, _ := errgroup.WithContext(ctx)
	for i, h := range c.hands {
		if err := h.told.Encode(p); err != nil {
			return fmt.Errorf("client %d has ended: %w", i, err)
		}
		group.Go(func() error {
			for {
				var s said
				if err := h.said.Decode(&s); err != nil {
					return fmt.Errorf("client %d ended in the middle of %s: %w", i, p.Phase, err)
				}
				switch {
				case s.Event != nil:
					c.r.Add(*s.Event)
				case s.Done != nil:
					return nil
				}
			}
		})
	}
	err := group.Wait()
	c.r.end(p)
	return err
}

// dismiss ends the client processes.
func (c *crew) dismiss() error {
	var all []error
	for i, h := range c.hands {
		_ = h.in.Close() // it ends at the end of its input
		_, _ = io.Copy(io.Discard, h.said.Buffered())
		if err := h.cmd.Wait(); err != nil {
			all = append(all, fmt.Errorf("client %d: %w", i, err))
		}
	}
	return errors.Join(all...)
}
