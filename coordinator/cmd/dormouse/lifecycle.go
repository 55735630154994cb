package main

import (
	"context"
	"fmt"
	"maps"

	"github.com/urfave/cli/v2"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/fieldmaskpb"

	"github.com/dormouse-run/dormouse/pkg/client"
	"github.com/dormouse-run/dormouse/pkg/command"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

func updateCommand() *cli.Command {
	return &cli.Command{
		Name: "update", Usage: "change labels, timers and the egress policy of a sandbox and print its uid", ArgsUsage: "SANDBOX",
		Flags: callFlags(true,
			&cli.StringSliceFlag{Name: "label", Aliases: []string{"l"}, Usage: "KEY=VALUE to set, KEY= to remove; may be repeated"},
			&cli.DurationFlag{Name: "idle-timeout", Usage: "how long it may be unused; 0 is for ever"},
			&cli.StringFlag{Name: "on-idle", Usage: "what happens then: pause, hibernate or delete"},
			&cli.DurationFlag{Name: "lifetime", Usage: "delete the sandbox this long after its creation; 0 is never"},
			&cli.BoolFlag{Name: "wake-on-use", Usage: "exec, files and ports resume it; --wake-on-use=false: they are refused"},
			&cli.StringFlag{Name: "egress", Usage: "YAML file with what it may reach from now on (EgressPolicy of the API); see docs/network.md"},
			&cli.BoolFlag{Name: "no-egress-policy", Usage: "it may reach all but what is always blocked"},
			&cli.Uint64Flag{Name: "if-revision", Usage: "only if the sandbox still has this revision"}),
		Action: action(1, 1, func(c call) error {
			s, err := c.client.FindSandbox(c.ctx, c.Args().First())
			if err != nil {
				return err
			}
			req, err := updateRequest(c, s)
			if err != nil {
				return err
			}
			if err := s.Update(c.ctx, req); err != nil {
				return withOperation(err, req.GetOperationId())
			}
			return changed(c, s)
		}),
	}
}

// updateRequest has what the flags name. Labels are changed one by one at the revision that they were read at, so that nobody
// else's change is lost.
func updateRequest(c call, s *client.Sandbox) (*dormousev1.UpdateSandboxRequest, error) {
	op, err := operationOf(c.Context)
	if err != nil {
		return nil, err
	}
	req := &dormousev1.UpdateSandboxRequest{OperationId: op, IfRevision: c.Uint64("if-revision"), UpdateMask: &fieldmaskpb.FieldMask{}}
	if c.IsSet("label") {
		set, err := pairs(c.Context, "label", false)
		if err != nil {
			return nil, err
		}
		req.Labels = maps.Clone(s.Last.GetMeta().GetLabels())
		if req.Labels == nil {
			req.Labels = make(map[string]string)
		}
		for k, v := range set {
			req.Labels[k] = v
			if v == "" {
				delete(req.Labels, k)
			}
		}
		if req.IfRevision == 0 {
			req.IfRevision = s.Last.GetMeta().GetRevision()
		}
		req.UpdateMask.Paths = append(req.UpdateMask.Paths, "labels")
	}
	if c.IsSet("idle-timeout") {
		req.IdleTimeout = durationpb.New(c.Duration("idle-timeout"))
		req.UpdateMask.Paths = append(req.UpdateMask.Paths, "idle_timeout")
	}
	if c.IsSet("on-idle") {
		if req.OnIdle, err = idleActionOf(c.Context); err != nil {
			return nil, err
		}
		req.UpdateMask.Paths = append(req.UpdateMask.Paths, "on_idle")
	}
	if c.IsSet("lifetime") {
		req.Lifetime = durationpb.New(c.Duration("lifetime"))
		req.UpdateMask.Paths = append(req.UpdateMask.Paths, "lifetime")
	}
	if c.IsSet("wake-on-use") {
		req.WakeOnUse = c.Bool("wake-on-use")
		req.UpdateMask.Paths = append(req.UpdateMask.Paths, "wake_on_use")
	}
	if c.IsSet("egress") || c.Bool("no-egress-policy") {
		if req.Egress, err = newEgress(c); err != nil {
			return nil, err
		}
		req.UpdateMask.Paths = append(req.UpdateMask.Paths, "egress")
	}
	if len(req.UpdateMask.Paths) == 0 {
		return nil, command.Usage(c.Context, "say what is to change: --label, --idle-timeout, --on-idle, --lifetime, --wake-on-use, --egress or --no-egress-policy")
	}
	return req, nil
}

// newEgress is the policy that the flags name; nil for none.
func newEgress(c call) (*dormousev1.EgressPolicy, error) {
	file := c.String("egress")
	switch {
	case c.IsSet("egress") && c.Bool("no-egress-policy"):
		return nil, command.Usage(c.Context, "--egress and --no-egress-policy exclude each other")
	case !c.IsSet("egress"):
		return nil, nil //nolint:nilnil // no policy is one
	case file == "":
		return nil, command.Usage(c.Context, "--egress: name a file, or use --no-egress-policy")
	}
	policy := new(dormousev1.EgressPolicy)
	return policy, readFile(c, "egress", file, policy)
}

// changed prints the uid of a sandbox, or all of it.
func changed(c call, s *client.Sandbox) error {
	if !c.print.Table() {
		return command.One(c.print, s.Last, sandboxID, sandboxColumns())
	}
	_, err := fmt.Fprintln(c.App.Writer, s.UID)
	return err
}

func pauseCommand() *cli.Command {
	return turnCommand("pause", "freeze sandboxes in memory and print their uids", (*client.Sandbox).Pause)
}

func hibernateCommand() *cli.Command {
	return turnCommand("hibernate", "keep sandboxes on their node's disk alone and print their uids", (*client.Sandbox).Hibernate)
}

func resumeCommand() *cli.Command {
	return turnCommand("resume", "let paused or hibernated sandboxes run again and print their uids", (*client.Sandbox).Resume)
}

// turnCommand changes the phase of each sandbox that is named.
func turnCommand(name, usage string, turn func(*client.Sandbox, context.Context, string) error) *cli.Command {
	return &cli.Command{
		Name: name, Usage: usage, ArgsUsage: "SANDBOX...", Flags: callFlags(true),
		Action: action(1, -1, func(c call) error {
			op, err := operationOf(c.Context)
			if err != nil {
				return err
			}
			if c.IsSet("operation-id") && c.Args().Len() > 1 {
				return command.Usage(c.Context, "--operation-id is for one object")
			}
			return each(c, func(ref string) error {
				s, err := c.client.FindSandbox(c.ctx, ref)
				if err != nil {
					return err
				}
				id := op
				if c.Args().Len() > 1 {
					id = ""
				}
				if err := turn(s, c.ctx, id); err != nil {
					return withOperation(err, id)
				}
				return changed(c, s)
			})
		}),
	}
}
