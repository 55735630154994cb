package main

import (
	"fmt"
	"iter"
	"strconv"
	"strings"

	"github.com/urfave/cli/v2"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/fieldmaskpb"

	"github.com/dormouse-run/dormouse/pkg/command"
	"github.com/dormouse-run/dormouse/pkg/config"
	"github.com/dormouse-run/dormouse/pkg/errs"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

func templateID(t *dormousev1.Template) string { return t.GetMeta().GetUid() }

func templateColumns() []command.Column[*dormousev1.Template] {
	type col = command.Column[*dormousev1.Template]
	return []col{
		{Name: "UID", Show: templateID},
		{Name: "NAME", Show: func(t *dormousev1.Template) string { return t.GetMeta().GetName() }},
		{Name: "PHASE", Show: func(t *dormousev1.Template) string { return command.Enum(t.GetStatus().GetPhase(), "TEMPLATE_PHASE_") }},
		{Name: "IMAGE", Show: func(t *dormousev1.Template) string { return shortReference(t.GetSpec().GetSandbox().GetImage()) }},
		{Name: "SETUP", Show: func(t *dormousev1.Template) string {
			return fmt.Sprintf("%d/%d", t.GetStatus().GetSetupDone(), len(t.GetSpec().GetSetup()))
		}},
		{Name: "AGE", Show: func(t *dormousev1.Template) string { return ageOf(t.GetMeta().GetCreateTime()) }},
		{Name: "SNAPSHOT", Wide: true, Show: func(t *dormousev1.Template) string { return t.GetStatus().GetSnapshotUid() }},
		{Name: "NODE", Wide: true, Show: func(t *dormousev1.Template) string { return t.GetStatus().GetNode() }},
		{Name: "REASON", Wide: true, Show: func(t *dormousev1.Template) string { return t.GetStatus().GetReason() }},
	}
}

var templates = kind[*dormousev1.Template]{name: "template", id: templateID, columns: templateColumns,
	find: func(c call, ref string) (found[*dormousev1.Template], error) {
		t, err := c.client.FindTemplate(c.ctx, ref)
		if err != nil {
			return found[*dormousev1.Template]{}, err
		}
		return found[*dormousev1.Template]{t, t.UID, t.Last}, nil
	}}

// templateFlags describe the sandbox that is set up: those of create that a template can have.
func templateFlags() []cli.Flag {
	var flags []cli.Flag
	for _, f := range specFlags() {
		switch f.Names()[0] {
		case "volume", "hostname", "secret-env":
		default:
			flags = append(flags, f)
		}
	}
	return append(flags,
		&cli.StringSliceFlag{Name: "setup", Usage: "a line for /bin/sh -c inside; may be repeated, they run in order"},
		&cli.DurationFlag{Name: "setup-timeout", Usage: "how long each may take (10m without it)"},
		&cli.StringFlag{Name: "ready", Usage: "a line for /bin/sh -c that is asked until it exits with 0"},
		&cli.DurationFlag{Name: "ready-timeout", Usage: "how long that may take (1m without it)"},
		&cli.StringFlag{Name: "file", Aliases: []string{"f"}, Usage: "YAML with the fields of the API instead of flags; - is standard input"})
}

func templateCommands() *cli.Command {
	return &cli.Command{Name: "template", Usage: "create, list, show and delete templates: sandboxes that are set up once, to be claimed", Subcommands: []*cli.Command{
		{
			Name: "create", Usage: "set up a sandbox, keep its golden snapshot and print the template's uid", ArgsUsage: "IMAGE [-- CMD...]",
			Description: "When a command fails the template is Failed, and the end of what the command said goes to standard error.",
			Flags:       callFlags(true, templateFlags()...),
			Action:      action(0, -1, createTemplate),
		},
		templates.ls(func(c call) iter.Seq2[*dormousev1.Template, error] {
			return c.client.ListTemplates(c.ctx, &dormousev1.ListTemplatesRequest{PageSize: 500})
		}),
		templates.get(),
		templates.rm("delete templates that no pool is of, with their golden snapshots"),
	}}
}

func createTemplate(c call) error {
	req, err := templateRequest(c)
	if err != nil {
		return err
	}
	t, err := c.client.CreateTemplate(c.ctx, req)
	if err != nil {
		if e := errs.From(err); e.Reason == errs.SetupFailed && e.Details["output_tail"] != "" {
			fmt.Fprintln(c.App.ErrWriter, strings.TrimRight(e.Details["output_tail"], "\n"))
		}
		return withOperation(err, req.GetOperationId())
	}
	return templates.made(c, t.Last)
}

func templateRequest(c call) (*dormousev1.CreateTemplateRequest, error) {
	op, err := operationOf(c.Context)
	if err != nil {
		return nil, err
	}
	if file := c.String("file"); file != "" {
		return templateFromFile(c, file, op)
	}
	if !c.Args().Present() {
		return nil, command.Usage(c.Context, "name an image, or give a file with -f")
	}
	labels, err := pairs(c.Context, "label", false)
	if err != nil {
		return nil, err
	}
	spec := &dormousev1.TemplateSpec{}
	if spec.Sandbox, err = specOf(c, c.Args().First(), c.Args().Tail()); err != nil {
		return nil, err
	}
	for _, line := range c.StringSlice("setup") {
		step := &dormousev1.SetupCommand{Argv: []string{"/bin/sh", "-c", line}}
		if c.IsSet("setup-timeout") {
			step.Timeout = durationpb.New(c.Duration("setup-timeout"))
		}
		spec.Setup = append(spec.Setup, step)
	}
	if line := c.String("ready"); line != "" {
		spec.Readiness = &dormousev1.ReadinessCheck{Argv: []string{"/bin/sh", "-c", line}}
		if c.IsSet("ready-timeout") {
			spec.Readiness.Timeout = durationpb.New(c.Duration("ready-timeout"))
		}
	} else if c.IsSet("ready-timeout") {
		return nil, command.Usage(c.Context, "--ready-timeout: only with --ready")
	}
	return &dormousev1.CreateTemplateRequest{OperationId: op, Name: c.String("name"), Labels: labels, Spec: spec}, nil
}

func templateFromFile(c call, file, op string) (*dormousev1.CreateTemplateRequest, error) {
	if c.Args().Present() {
		return nil, command.Usage(c.Context, "with -f the image and the command are in the file")
	}
	for _, f := range templateFlags() {
		if name := f.Names()[0]; name != "file" && c.IsSet(name) {
			return nil, command.Usage(c.Context, "--%s: with -f everything about the template is in the file", name)
		}
	}
	req := &dormousev1.CreateTemplateRequest{}
	if err := readFile(c, "file", file, req); err != nil {
		return nil, err
	}
	if req.GetOperationId() == "" || c.IsSet("operation-id") {
		req.OperationId = op
	}
	return req, nil
}

func poolID(p *dormousev1.Pool) string { return p.GetMeta().GetUid() }

func poolColumns() []command.Column[*dormousev1.Pool] {
	type col = command.Column[*dormousev1.Pool]
	number := func(n int32) string { return strconv.Itoa(int(n)) }
	return []col{
		{Name: "UID", Show: poolID},
		{Name: "NAME", Show: func(p *dormousev1.Pool) string { return p.GetMeta().GetName() }},
		{Name: "TEMPLATE", Show: func(p *dormousev1.Pool) string { return p.GetSpec().GetTemplateUid() }},
		{Name: "READY", Show: func(p *dormousev1.Pool) string {
			return number(p.GetStatus().GetReady()) + "/" + number(p.GetSpec().GetSize())
		}},
		{Name: "FILLING", Show: func(p *dormousev1.Pool) string { return number(p.GetStatus().GetFilling()) }},
		{Name: "CLAIMED", Show: func(p *dormousev1.Pool) string { return strconv.FormatInt(p.GetStatus().GetClaimedCount(), 10) }},
		{Name: "STATE", Show: poolState},
		{Name: "AGE", Show: func(p *dormousev1.Pool) string { return ageOf(p.GetMeta().GetCreateTime()) }},
		{Name: "DRAINING", Wide: true, Show: func(p *dormousev1.Pool) string { return number(p.GetStatus().GetDraining()) }},
		{Name: "MEMORY", Wide: true, Show: func(p *dormousev1.Pool) string { return config.FormatBytes(p.GetStatus().GetMemoryBytes()) }},
		{Name: "LAST-ERROR", Wide: true, Show: func(p *dormousev1.Pool) string { return p.GetStatus().GetLastError() }},
	}
}

var pools = kind[*dormousev1.Pool]{name: "pool", id: poolID, columns: poolColumns,
	find: func(c call, ref string) (found[*dormousev1.Pool], error) {
		p, err := c.client.FindPool(c.ctx, ref)
		if err != nil {
			return found[*dormousev1.Pool]{}, err
		}
		return found[*dormousev1.Pool]{p, p.UID, p.Last}, nil
	}}

// poolState is why the pool is not full, or that it is.
func poolState(p *dormousev1.Pool) string {
	if p.GetStatus().GetPhase() == dormousev1.PoolPhase_POOL_PHASE_DELETING {
		return "Deleting"
	}
	for _, c := range p.GetStatus().GetConditions() {
		if c.GetType() == "Filled" {
			return c.GetReason()
		}
	}
	return ""
}

func poolFlags() []cli.Flag {
	return []cli.Flag{
		&cli.IntFlag{Name: "size", Usage: "how many are kept ready, 0 to 1000"},
		&cli.IntFlag{Name: "max-members", Usage: "how many there may be in all; 0: size + 2"},
		&cli.StringFlag{Name: "max-memory", Usage: "what the memory requests of all may come to, e.g. 2Gi; 0: no bound of its own"},
	}
}

// maxMemory reads --max-memory.
func maxMemory(c call) (int64, error) {
	text := c.String("max-memory")
	if text == "" || text == "0" {
		return 0, nil
	}
	n, err := config.ParseBytes(text)
	if err != nil {
		return 0, command.Usage(c.Context, "--max-memory: %s", err)
	}
	return n, nil
}

// small bounds what goes into a field of 32 bits; the server says what is too much.
func small(c call, flag string) (int32, error) {
	n := c.Int(flag)
	if n < 0 || n > 1<<30 {
		return 0, command.Usage(c.Context, "--%s: %d cannot be", flag, n)
	}
	return int32(n), nil
}

func poolCommands() *cli.Command {
	return &cli.Command{Name: "pool", Usage: "create, list, show, change and delete pools: sandboxes of a template that are kept ready", Subcommands: []*cli.Command{
		{
			Name: "create", Usage: "keep sandboxes of a template ready and print the pool's uid", ArgsUsage: "TEMPLATE",
			Flags:  callFlags(true, append(metaFlags(), poolFlags()...)...),
			Action: action(1, 1, createPool),
		},
		pools.ls(func(c call) iter.Seq2[*dormousev1.Pool, error] {
			return c.client.ListPools(c.ctx, &dormousev1.ListPoolsRequest{PageSize: 500})
		}),
		pools.get(),
		{
			Name: "set", Usage: "change a pool", ArgsUsage: "POOL",
			Flags: callFlags(true, append(poolFlags(),
				&cli.StringFlag{Name: "template", Usage: "another template: members of the earlier one are replaced, those that were claimed stay"},
				&cli.StringSliceFlag{Name: "label", Aliases: []string{"l"}, Usage: "KEY=VALUE, may be repeated; replaces all labels"})...),
			Action: action(1, 1, setPool),
		},
		pools.rm("delete pools and their members; what was claimed stays"),
	}}
}

func createPool(c call) error {
	op, err := operationOf(c.Context)
	if err != nil {
		return err
	}
	labels, err := pairs(c.Context, "label", false)
	if err != nil {
		return err
	}
	spec := &dormousev1.PoolSpec{}
	if spec.Size, err = small(c, "size"); err != nil {
		return err
	}
	if spec.MaxMembers, err = small(c, "max-members"); err != nil {
		return err
	}
	if spec.MaxMemoryBytes, err = maxMemory(c); err != nil {
		return err
	}
	t, err := c.client.FindTemplate(c.ctx, c.Args().First())
	if err != nil {
		return err
	}
	spec.TemplateUid = t.UID
	p, err := c.client.CreatePool(c.ctx, &dormousev1.CreatePoolRequest{OperationId: op, Name: c.String("name"), Labels: labels, Spec: spec})
	if err != nil {
		return withOperation(err, op)
	}
	return pools.made(c, p.Last)
}

func setPool(c call) error {
	op, err := operationOf(c.Context)
	if err != nil {
		return err
	}
	req := &dormousev1.UpdatePoolRequest{OperationId: op, UpdateMask: &fieldmaskpb.FieldMask{}}
	names := func(flag, path string) bool {
		if c.IsSet(flag) {
			req.UpdateMask.Paths = append(req.UpdateMask.Paths, path)
		}
		return c.IsSet(flag)
	}
	if names("size", "size") {
		if req.Size, err = small(c, "size"); err != nil {
			return err
		}
	}
	if names("max-members", "max_members") {
		if req.MaxMembers, err = small(c, "max-members"); err != nil {
			return err
		}
	}
	if names("max-memory", "max_memory_bytes") {
		if req.MaxMemoryBytes, err = maxMemory(c); err != nil {
			return err
		}
	}
	if names("label", "labels") {
		if req.Labels, err = pairs(c.Context, "label", false); err != nil {
			return err
		}
	}
	if names("template", "template_uid") {
		t, err := c.client.FindTemplate(c.ctx, c.String("template"))
		if err != nil {
			return err
		}
		req.TemplateUid = t.UID
	}
	if len(req.GetUpdateMask().GetPaths()) == 0 {
		return command.Usage(c.Context, "say what is to change: --size, --max-members, --max-memory, --template or --label")
	}
	p, err := c.client.FindPool(c.ctx, c.Args().First())
	if err != nil {
		return err
	}
	if err := p.Update(c.ctx, req); err != nil {
		return withOperation(err, op)
	}
	return pools.made(c, p.Last)
}

func claimCommand() *cli.Command {
	return &cli.Command{
		Name: "claim", Usage: "take a sandbox of a template that is ready and print its uid", ArgsUsage: "TEMPLATE|POOL",
		Description: "A template's: a ready member of any of its pools. Lifetime and idle settings are the template's where they are not given; the lifetime begins now.",
		Flags: callFlags(true, append(metaFlags(),
			&cli.StringSliceFlag{Name: "env", Aliases: []string{"e"}, Usage: "KEY=VALUE, or KEY to pass it on, for what is started from now on; may be repeated"},
			&cli.StringFlag{Name: "fallback", Usage: "when none is ready: restore the golden snapshot, or refuse", Value: "restore"},
			&cli.DurationFlag{Name: "lifetime", Usage: "delete the sandbox this long after the claim, e.g. 8h"},
			&cli.DurationFlag{Name: "idle-timeout", Usage: "how long it may be unused, e.g. 15m"},
			&cli.StringFlag{Name: "on-idle", Usage: "what happens then: pause (the default), hibernate or delete"},
			&cli.BoolFlag{Name: "wake-on-use", Usage: "exec, files and ports resume it when it is paused or hibernated"})...),
		Action: action(1, 1, func(c call) error {
			req, err := claimRequest(c)
			if err != nil {
				return err
			}
			from, err := c.client.FindClaimable(c.ctx, c.Args().First())
			if err != nil {
				return err
			}
			s, err := from.Claim(c.ctx, req)
			if err != nil {
				return withOperation(err, req.GetOperationId())
			}
			return made(c, s)
		}),
	}
}

func claimRequest(c call) (*dormousev1.ClaimSandboxRequest, error) {
	op, err := operationOf(c.Context)
	if err != nil {
		return nil, err
	}
	labels, err := pairs(c.Context, "label", false)
	if err != nil {
		return nil, err
	}
	env, err := pairs(c.Context, "env", true)
	if err != nil {
		return nil, err
	}
	req := &dormousev1.ClaimSandboxRequest{OperationId: op, Name: c.String("name"), Labels: labels, Env: env}
	v, ok := dormousev1.ClaimFallback_value["CLAIM_FALLBACK_"+strings.ToUpper(c.String("fallback"))]
	if !ok || v == 0 {
		return nil, command.Usage(c.Context, "--fallback %q: restore or refuse", c.String("fallback"))
	}
	req.Fallback = dormousev1.ClaimFallback(v)
	if req.OnIdle, err = idleActionOf(c.Context); err != nil {
		return nil, err
	}
	if c.IsSet("lifetime") {
		req.Lifetime = durationpb.New(c.Duration("lifetime"))
	}
	if c.IsSet("idle-timeout") {
		req.IdleTimeout = durationpb.New(c.Duration("idle-timeout"))
	}
	if c.IsSet("wake-on-use") {
		on := c.Bool("wake-on-use")
		req.WakeOnUse = &on
	}
	return req, nil
}
