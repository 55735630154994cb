package app

import (
	"context"
	"log/slog"
	"slices"
	"strings"

	"github.com/dormouse-run/dormouse/agentd/internal/bulk"
	"github.com/dormouse-run/dormouse/agentd/internal/checkpoint"
	"github.com/dormouse-run/dormouse/agentd/internal/guest"
	"github.com/dormouse-run/dormouse/agentd/internal/runner"
	"github.com/dormouse-run/dormouse/agentd/internal/runtime"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/fence"
)

// tailBytes is how much is kept of each output of an ended main command: what guest init keeps itself.
const tailBytes = 256 << 10

// guests opens channels for the runner.
type guests struct {
	log  *slog.Logger
	bulk *bulk.Manager
}

func (g guests) Open(ctx context.Context, uid string, generation uint64, stdio runtime.Stdio) (runner.Guest, error) {
	conn, err := guest.Open(ctx, guest.Options{InPath: stdio.In, OutPath: stdio.Out, SandboxUID: uid, Generation: fence.Epoch(generation), Log: g.log})
	if err != nil {
		return nil, err
	}
	// A new channel is one to a sandbox that runs.
	g.bulk.Thaw(uid)
	return &channel{conn, g.bulk, uid}, nil
}

// channel is a guest.Conn as the runner sees it. Its quiet is that of the bulk transfers too.
type channel struct {
	*guest.Conn
	bulk *bulk.Manager
	uid  string
}

func (c *channel) Quiesce(ctx context.Context) error {
	c.bulk.Freeze(ctx, c.uid)
	return c.Conn.Quiesce(ctx)
}

func (c *channel) Resume(ctx context.Context) error {
	c.bulk.Thaw(c.uid)
	return c.Conn.Resume(ctx)
}

func (c *channel) Close() error {
	c.bulk.Thaw(c.uid) // nobody else would: the sandbox has ended, or has another channel from now on
	return c.Conn.Close()
}

func (c *channel) Configure(ctx context.Context, id runner.Identity) error {
	in := guest.Identity{Hostname: id.Hostname, WriteHosts: true, Hook: hooks[id.Hook]}
	if id.Nameservers != nil {
		in.DNS = &guest.DNS{Nameservers: id.Nameservers}
	}
	if id.SecretEnv != nil {
		in.SecretEnv = []string{}
		for k, v := range id.SecretEnv {
			in.SecretEnv = append(in.SecretEnv, k+"="+v)
		}
		slices.Sort(in.SecretEnv)
	}
	_, err := c.Conn.Configure(ctx, in)
	return err
}

var hooks = map[runner.Hook]guest.Hook{
	runner.HookAfterRestore: guest.HookAfterRestore, runner.HookAtClaim: guest.HookLater, runner.HookNow: guest.HookNow,
}

func (c *channel) StartMain(ctx context.Context, m runner.Main) error {
	_, err := c.Start(ctx, guest.StartRequest{ID: runner.MainID, Args: m.Argv, Env: m.Env, User: m.User, Dir: m.Dir, Main: true, OutputBytes: tailBytes})
	return err
}

func (c *channel) WaitMain(ctx context.Context) (runner.MainExit, error) {
	e, err := c.Wait(ctx, runner.MainID)
	return mainExit(e), err
}

func mainExit(e guest.Exit) runner.MainExit {
	return runner.MainExit{Code: int32(e.Code), Signal: int32(e.Signal), TimedOut: e.TimedOut, At: e.Time}
}

func (c *channel) FinalOf(ctx context.Context) (runner.Final, error) {
	p, err := c.Get(ctx, runner.MainID)
	if err != nil {
		return runner.Final{}, err
	}
	if p.Exit == nil {
		return runner.Final{}, errs.New(errs.WrongPhase, "the main command has not ended")
	}
	f := runner.Final{Argv: p.Args, Pid: int32(p.PID), StartTime: p.StartTime, Exit: mainExit(*p.Exit)}
	for which, tail := range map[guest.Output]*runner.Tail{guest.Stdout: &f.Stdout, guest.Stderr: &f.Stderr} {
		if tail.Offset, tail.Data, err = c.Tail(ctx, runner.MainID, which, tailBytes); err != nil {
			return runner.Final{}, err
		}
	}
	return f, nil
}

func (c *channel) ProcessTable(ctx context.Context) ([]checkpoint.ProcessEntry, error) {
	all, err := c.List(ctx)
	if err != nil {
		return nil, err
	}
	out := make([]checkpoint.ProcessEntry, min(len(all), tableProcesses))
	for i := range out {
		p := all[i]
		out[i] = checkpoint.ProcessEntry{ID: p.ID[:min(len(p.ID), tableID)], Pid: int32(p.PID), Argv: shortened(p.Args), StartTime: p.StartTime, Main: p.Main, Ended: p.Exit != nil}
	}
	return out, nil
}

// Bounds of a manifest's process table, which is for people: what a guest can make of it must not make a
// manifest that nobody reads.
const (
	tableProcesses = 1280
	tableID        = 64
	tableArgs      = 256 // bytes
)

// shortened gives the arguments up to so many bytes.
func shortened(args []string) []string {
	var out []string
	for left := tableArgs; len(args) > 0 && left > 0; args = args[1:] {
		arg := args[0]
		if len(arg) > left {
			arg = strings.ToValidUTF8(arg[:left], "") + "..."
		}
		out = append(out, arg)
		left -= max(len(args[0]), 1)
	}
	return out
}
