package app

import (
	"context"
	"log/slog"
	"slices"

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
type guests struct{ log *slog.Logger }

func (g guests) Open(ctx context.Context, uid string, generation uint64, stdio runtime.Stdio) (runner.Guest, error) {
	conn, err := guest.Open(ctx, guest.Options{InPath: stdio.In, OutPath: stdio.Out, SandboxUID: uid, Generation: fence.Epoch(generation), Log: g.log})
	if err != nil {
		return nil, err
	}
	return &channel{conn}, nil
}

// channel is a guest.Conn as the runner sees it.
type channel struct{ *guest.Conn }

func (c *channel) Configure(ctx context.Context, id runner.Identity) error {
	in := guest.Identity{Hostname: id.Hostname, WriteHosts: true}
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
	out := make([]checkpoint.ProcessEntry, len(all))
	for i, p := range all {
		out[i] = checkpoint.ProcessEntry{ID: p.ID, Pid: int32(p.PID), Argv: p.Args, StartTime: p.StartTime, Main: p.Main, Ended: p.Exit != nil}
	}
	return out, nil
}
