package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/urfave/cli/v2"

	"github.com/dormouse-run/dormouse/pkg/client"
	"github.com/dormouse-run/dormouse/pkg/command"
	"github.com/dormouse-run/dormouse/pkg/errs"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

func sandboxID(s *dormousev1.Sandbox) string { return s.GetMeta().GetUid() }

func phaseOf(s *dormousev1.Sandbox) string {
	return command.Enum(s.GetStatus().GetPhase(), "SANDBOX_PHASE_")
}

func sandboxColumns() []command.Column[*dormousev1.Sandbox] {
	type col = command.Column[*dormousev1.Sandbox]
	return []col{
		{Name: "UID", Show: sandboxID},
		{Name: "NAME", Show: func(s *dormousev1.Sandbox) string { return s.GetMeta().GetName() }},
		{Name: "PHASE", Show: func(s *dormousev1.Sandbox) string { return phaseOf(s) }},
		{Name: "NODE", Show: func(s *dormousev1.Sandbox) string { return s.GetStatus().GetNode() }},
		{Name: "IMAGE", Show: func(s *dormousev1.Sandbox) string { return shortReference(s.GetSpec().GetImage()) }},
		{Name: "AGE", Show: func(s *dormousev1.Sandbox) string { return ageOf(s.GetMeta().GetCreateTime()) }},
		{Name: "EXIT", Wide: true, Show: exitOf},
		{Name: "REASON", Wide: true, Show: why},
		{Name: "RESTORED-FROM", Wide: true, Show: func(s *dormousev1.Sandbox) string { return s.GetStatus().GetRestoredFrom() }},
	}
}

func exitOf(s *dormousev1.Sandbox) string {
	if s.GetStatus() == nil || s.GetStatus().ExitCode == nil {
		return ""
	}
	return strconv.Itoa(int(s.GetStatus().GetExitCode()))
}

// why gives the reason of the phase, or for one that waits that of the condition that does not hold.
func why(s *dormousev1.Sandbox) string {
	if r := s.GetStatus().GetReason(); r != "" {
		return r
	}
	switch s.GetStatus().GetPhase() {
	case dormousev1.SandboxPhase_SANDBOX_PHASE_PENDING, dormousev1.SandboxPhase_SANDBOX_PHASE_STARTING:
	default:
		return "" // that a capture is over, for one, is no reason of its phase
	}
	for _, c := range s.GetStatus().GetConditions() {
		if !c.GetStatus() && c.GetReason() != "" {
			return c.GetReason()
		}
	}
	return ""
}

func createCommand() *cli.Command {
	return &cli.Command{
		Name: "create", Usage: "create a sandbox and print its uid", ArgsUsage: "IMAGE [-- CMD...]",
		Flags: callFlags(true, append(specFlags(),
			&cli.StringFlag{Name: "file", Aliases: []string{"f"}, Usage: "YAML with the fields of the API instead of flags; - is standard input"},
			&cli.BoolFlag{Name: "run-image-command", Usage: "without CMD, run the image's own command"})...),
		Action: action(0, -1, func(c call) error {
			req, err := createRequest(c, c.Args().First(), c.Args().Tail())
			if err != nil {
				return err
			}
			if c.Bool("run-image-command") && req.GetSpec() != nil {
				req.Spec.RunImageCommand = true
			}
			s, err := c.client.CreateSandbox(c.ctx, req)
			if err != nil {
				return withOperation(err, req.GetOperationId())
			}
			return made(c, s)
		}),
	}
}

// withOperation puts the operation's id into an error that does not have it.
func withOperation(err error, id string) error {
	e := errs.From(err)
	if e.OperationID == "" {
		return e.WithRequest("", id)
	}
	return e
}

// made prints the uid of a sandbox that was made; one that failed is an error all the same.
func made(c call, s *client.Sandbox) error {
	var err error
	if c.print.Table() {
		_, err = fmt.Fprintln(c.App.Writer, s.UID)
	} else {
		err = command.One(c.print, s.Last, sandboxID, sandboxColumns())
	}
	if err != nil {
		return err
	}
	return failed(s.Last)
}

func failed(s *dormousev1.Sandbox) error {
	if s.GetStatus().GetPhase() != dormousev1.SandboxPhase_SANDBOX_PHASE_FAILED {
		return nil
	}
	return errs.New(errs.SandboxFailed, "sandbox %s failed: %s %s; see 'dormouse event ls --object %s'", sandboxID(s),
		s.GetStatus().GetReason(), s.GetStatus().GetMessage(), sandboxID(s)).With("uid", sandboxID(s))
}

func lsCommand() *cli.Command {
	return &cli.Command{
		Name: "ls", Usage: "list sandboxes",
		Flags: callFlags(false,
			&cli.StringFlag{Name: "node", Usage: "only those of a node"},
			&cli.StringFlag{Name: "phase", Usage: "only those in a phase, e.g. running"},
			&cli.StringSliceFlag{Name: "label", Aliases: []string{"l"}, Usage: "only those with KEY=VALUE; may be repeated"}),
		Action: action(0, 0, func(c call) error {
			req := &dormousev1.ListSandboxesRequest{Node: c.String("node"), Labels: c.StringSlice("label"), PageSize: 500}
			if p := c.String("phase"); p != "" {
				v, ok := dormousev1.SandboxPhase_value["SANDBOX_PHASE_"+strings.ToUpper(p)]
				if !ok || v == 0 {
					return command.Usage(c.Context, "--phase %q: pending, starting, running, paused, hibernated, stopped, failed or deleting", p)
				}
				req.Phase = dormousev1.SandboxPhase(v)
			}
			all, err := client.Collect(c.client.ListSandboxes(c.ctx, req))
			if err != nil {
				return err
			}
			return command.List(c.print, all, sandboxID, sandboxColumns())
		}),
	}
}

func getCommand() *cli.Command {
	return &cli.Command{
		Name: "get", Usage: "show sandboxes", ArgsUsage: "SANDBOX...", Flags: callFlags(false),
		Action: action(1, -1, func(c call) error { return getSandboxes(c) }),
	}
}

func getSandboxes(c call) error {
	var found []*dormousev1.Sandbox
	failures := each(c, func(ref string) error {
		s, err := c.client.FindSandbox(c.ctx, ref)
		if err == nil {
			found = append(found, s.Last)
		}
		return err
	})
	if len(found) == 0 {
		return failures
	}
	var err error
	if len(found) == 1 && c.Args().Len() == 1 {
		err = command.One(c.print, found[0], sandboxID, sandboxColumns())
	} else {
		err = command.List(c.print, found, sandboxID, sandboxColumns())
	}
	if err != nil {
		return err
	}
	return failures
}

func inspectCommand() *cli.Command {
	return &cli.Command{
		Name: "inspect", Usage: "show all of a sandbox, as JSON", ArgsUsage: "SANDBOX...", Flags: callFlags(false),
		Before: func(c *cli.Context) error {
			if c.IsSet("output") {
				return nil
			}
			return c.Set("output", "json")
		},
		Action: action(1, -1, func(c call) error { return getSandboxes(c) }),
	}
}

func waitCommand() *cli.Command {
	return &cli.Command{
		Name: "wait", Usage: "wait until sandboxes ended and print their exit codes", ArgsUsage: "SANDBOX...",
		Flags: callFlags(false, &cli.StringFlag{Name: "for", Usage: "ended, running or deleted", Value: "ended"}),
		Action: action(1, -1, func(c call) error {
			what := c.String("for")
			if what != "ended" && what != "running" && what != "deleted" {
				return command.Usage(c.Context, "--for %q: ended, running or deleted", what)
			}
			return each(c, func(ref string) error { return waitFor(c, ref, what) })
		}),
	}
}

func waitFor(c call, ref, what string) error {
	s, err := c.client.FindSandbox(c.ctx, ref)
	if err != nil {
		if what == "deleted" && notThere(err) {
			return nil
		}
		return err
	}
	err = s.Await(c.ctx, func(seen *dormousev1.Sandbox) bool {
		phase := seen.GetStatus().GetPhase()
		ended := phase == dormousev1.SandboxPhase_SANDBOX_PHASE_STOPPED || phase == dormousev1.SandboxPhase_SANDBOX_PHASE_FAILED
		switch what {
		case "deleted":
			return seen == nil
		case "running":
			return phase == dormousev1.SandboxPhase_SANDBOX_PHASE_RUNNING || ended
		}
		return ended
	})
	if errors.Is(err, context.DeadlineExceeded) || errs.Has(err, errs.DeadlineExpired) {
		return errs.New(errs.DeadlineExpired, "sandbox %s is still %s", s.UID, strings.ToLower(phaseOf(s.Last))).With("uid", s.UID).WithOutcome(errs.NotStarted, errs.Never)
	}
	if err != nil || what == "deleted" {
		return err
	}
	if err := failed(s.Last); err != nil {
		return err
	}
	if what == "ended" {
		_, err = fmt.Fprintln(c.App.Writer, exitOf(s.Last))
		return err
	}
	if s.Last.GetStatus().GetPhase() != dormousev1.SandboxPhase_SANDBOX_PHASE_RUNNING {
		return errs.New(errs.WrongPhase, "sandbox %s ended before it was seen running", s.UID).With("uid", s.UID).With("phase", phaseOf(s.Last))
	}
	return nil
}

func rmCommand() *cli.Command {
	return &cli.Command{
		Name: "rm", Usage: "delete sandboxes", ArgsUsage: "SANDBOX...",
		Flags: callFlags(true,
			&cli.BoolFlag{Name: "force", Aliases: []string{"f"}, Usage: "those that are not there are no error"},
			&cli.BoolFlag{Name: "all", Usage: "every sandbox of the tenant"}),
		Action: action(0, -1, func(c call) error {
			if c.Bool("all") == c.Args().Present() {
				return command.Usage(c.Context, "name sandboxes, or give --all")
			}
			if c.Bool("all") {
				return rmAll(c)
			}
			return removeEach(c, func(ref string) (remover, string, error) {
				s, err := c.client.FindSandbox(c.ctx, ref)
				if err != nil {
					return nil, "", err
				}
				return s, s.UID, nil
			})
		}),
	}
}

func rmAll(c call) error {
	all, err := client.Collect(c.client.ListSandboxes(c.ctx, &dormousev1.ListSandboxesRequest{PageSize: 500}))
	if err != nil {
		return err
	}
	var failures []error
	for _, s := range all {
		if err := c.client.Sandbox(sandboxID(s)).Delete(c.ctx, ""); err != nil && !notThere(err) {
			failures = append(failures, err)
			continue
		}
		fmt.Fprintln(c.App.Writer, sandboxID(s))
	}
	if len(failures) > 0 {
		return several(failures)
	}
	return nil
}
