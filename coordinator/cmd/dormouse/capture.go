package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/urfave/cli/v2"

	"github.com/dormouse-run/dormouse/pkg/client"
	"github.com/dormouse-run/dormouse/pkg/command"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/uid"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

func checkpointCommand() *cli.Command {
	return &cli.Command{
		Name: "checkpoint", Usage: "take a snapshot of a running sandbox and print its uid", ArgsUsage: "SANDBOX",
		Flags: callFlags(true, append(metaFlags(), &cli.BoolFlag{Name: "hibernate", Usage: "pause the sandbox for the snapshot, then hibernate it: it goes on from that instant"})...),
		Action: action(1, 1, func(c call) error {
			op, err := operationOf(c.Context)
			if err != nil {
				return err
			}
			labels, err := pairs(c.Context, "label", false)
			if err != nil {
				return err
			}
			s, err := c.client.FindSandbox(c.ctx, c.Args().First())
			if err != nil {
				return err
			}
			take := checkpointed
			if c.Bool("hibernate") {
				take = checkpointedAndHibernated
			}
			snap, err := take(c, s, &dormousev1.CheckpointSandboxRequest{OperationId: op, Name: c.String("name"), Labels: labels})
			if snap != nil {
				err = errors.Join(err, showSnapshot(c, snap))
			}
			if err != nil {
				return withOperation(err, op)
			}
			return nil
		}),
	}
}

// showSnapshot prints a snapshot that was taken.
func showSnapshot(c call, snap *client.Snapshot) error {
	if !c.print.Table() {
		return command.One(c.print, snap.Last, snapshotID, snapshotColumns())
	}
	if terminal(c.App.ErrWriter) {
		fmt.Fprintf(c.App.ErrWriter, "frozen for %s\n", snap.Last.GetStatus().GetFreeze().AsDuration())
	}
	_, err := fmt.Fprintln(c.App.Writer, snap.UID)
	return err
}

func checkpointed(c call, s *client.Sandbox, req *dormousev1.CheckpointSandboxRequest) (*client.Snapshot, error) {
	return s.Checkpoint(c.ctx, req)
}

// goOnTime bounds letting a sandbox go on after a failure, also when the call's own time has run out.
const goOnTime = 30 * time.Second

// checkpointedAndHibernated takes the snapshot of a sandbox that stands still, so that it shows what is hibernated. If that fails the sandbox
// runs again, if it ran, unless it may be hibernated all the same. A snapshot that was taken is returned with the error.
func checkpointedAndHibernated(c call, s *client.Sandbox, req *dormousev1.CheckpointSandboxRequest) (*client.Snapshot, error) {
	ran := s.Last.GetStatus().GetPhase() == dormousev1.SandboxPhase_SANDBOX_PHASE_RUNNING
	goOn := func(err error) error {
		if !ran {
			return err
		}
		ctx, cancel := context.WithTimeout(context.WithoutCancel(c.ctx), goOnTime)
		defer cancel()
		if failed := s.Resume(ctx, ""); failed != nil {
			fmt.Fprintf(c.App.ErrWriter, "%s may still be paused, resume it: %s\n", s.UID, failed)
		}
		return err
	}
	if err := s.Pause(c.ctx, ""); err != nil {
		return nil, err
	}
	snap, err := s.Checkpoint(c.ctx, req)
	if err != nil {
		return nil, goOn(err)
	}
	if err := s.Hibernate(c.ctx, ""); err != nil {
		if e := errs.From(err); e.Outcome != errs.Unknown || e.IsAnswer() {
			err = goOn(err)
		}
		return snap, err
	}
	return snap, nil
}

func bindingFlag() cli.Flag {
	return &cli.StringSliceFlag{Name: "volume", Aliases: []string{"v"}, Usage: "PATH=same, PATH=clone or PATH=VOLUME; may be repeated"}
}

func restoreCommand() *cli.Command {
	return &cli.Command{
		Name: "restore", Usage: "make a sandbox of a snapshot and print its uid", ArgsUsage: "SNAPSHOT",
		Flags: callFlags(true, append(metaFlags(), bindingFlag())...),
		Action: action(1, 1, func(c call) error {
			op, err := operationOf(c.Context)
			if err != nil {
				return err
			}
			labels, err := pairs(c.Context, "label", false)
			if err != nil {
				return err
			}
			bindings, err := bindingsOf(c)
			if err != nil {
				return err
			}
			snap, err := c.client.FindSnapshot(c.ctx, c.Args().First())
			if err != nil {
				return err
			}
			s, err := snap.Restore(c.ctx, &dormousev1.RestoreSandboxRequest{OperationId: op, Name: c.String("name"), Labels: labels, Volumes: bindings})
			if err != nil {
				return withOperation(err, op)
			}
			return made(c, s)
		}),
	}
}

func forkCommand() *cli.Command {
	return &cli.Command{
		Name: "fork", Usage: "make copies of a sandbox or a snapshot and print their uids", ArgsUsage: "SANDBOX|SNAPSHOT",
		Flags: callFlags(true, bindingFlag(),
			&cli.IntFlag{Name: "count", Aliases: []string{"n"}, Usage: "how many", Value: 1},
			&cli.StringFlag{Name: "name-prefix", Usage: "name the copies PREFIX-0, PREFIX-1 ..."},
			&cli.StringSliceFlag{Name: "label", Aliases: []string{"l"}, Usage: "KEY=VALUE, may be repeated"}),
		Action: action(1, 1, func(c call) error {
			req, err := forkRequest(c)
			if err != nil {
				return err
			}
			copies, snapshot, err := c.client.Fork(c.ctx, req)
			if err != nil {
				return withOperation(err, req.GetOperationId())
			}
			var all []*dormousev1.Sandbox
			for _, s := range copies {
				all = append(all, s.Last)
			}
			if !c.print.Table() {
				return command.List(c.print, all, sandboxID, sandboxColumns())
			}
			if terminal(c.App.ErrWriter) {
				fmt.Fprintf(c.App.ErrWriter, "from snapshot %s\n", snapshot)
			}
			var failures []error
			for _, s := range all {
				fmt.Fprintln(c.App.Writer, sandboxID(s))
				if err := failed(s); err != nil {
					failures = append(failures, err)
				}
			}
			if len(failures) > 0 {
				return several(failures)
			}
			return nil
		}),
	}
}

func forkRequest(c call) (*dormousev1.ForkSandboxRequest, error) {
	op, err := operationOf(c.Context)
	if err != nil {
		return nil, err
	}
	if n := c.Int("count"); n < 1 || n > 64 {
		return nil, command.Usage(c.Context, "-n %d: 1 to 64", n)
	}
	labels, err := pairs(c.Context, "label", false)
	if err != nil {
		return nil, err
	}
	bindings, err := bindingsOf(c)
	if err != nil {
		return nil, err
	}
	req := &dormousev1.ForkSandboxRequest{
		OperationId: op, Count: int32(c.Int("count")), NamePrefix: c.String("name-prefix"), Labels: labels, Volumes: bindings, //nolint:gosec // 1 to 64
	}
	return req, forkSource(c, c.Args().First(), req)
}

// forkSource finds out whether the argument is a sandbox or a snapshot; a name that is both is refused.
func forkSource(c call, ref string, req *dormousev1.ForkSandboxRequest) error {
	s, err := c.client.FindSandbox(c.ctx, ref)
	if err != nil && !notThere(err) {
		return err
	}
	if err == nil && uid.Check(ref) == nil {
		req.SandboxUid = s.UID
		return nil
	}
	var snap *client.Snapshot
	snap, snapErr := c.client.FindSnapshot(c.ctx, ref)
	switch {
	case snapErr != nil && !notThere(snapErr):
		return snapErr
	case err == nil && snapErr == nil:
		return errs.New(errs.AmbiguousName, "%q is a sandbox (%s) and a snapshot (%s); give the uid", ref, s.UID, snap.UID).With("name", ref)
	case err == nil:
		req.SandboxUid = s.UID
	case snapErr == nil:
		req.SnapshotUid = snap.UID
	default:
		return errs.New(errs.ObjectNotFound, "there is no sandbox and no snapshot %q", ref).With("name", ref)
	}
	return nil
}
