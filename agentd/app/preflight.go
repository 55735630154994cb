package app

import (
	"context"
	"fmt"
	"log/slog"

	"github.com/dormouse-run/dormouse/agentd/internal/bundle"
	"github.com/dormouse-run/dormouse/agentd/internal/preflight"
	"github.com/dormouse-run/dormouse/agentd/internal/room"
)

// Report is what preflight found.
type Report struct {
	// Wanted is how many sandboxes were asked about, Sandboxes how many of them the host allows; 0 where it runs none.
	Wanted    int64             `json:"wanted"`
	Sandboxes int64             `json:"sandboxes"`
	Checks    []preflight.Check `json:"checks"`
}

// Preflight looks, without an agentd, whether this host can carry so many sandboxes of the configuration; 0 is as many as it is to take. With raise it
// raises the limits that are too low.
func Preflight(ctx context.Context, cfg Config, sandboxes int64, raise bool) (Report, error) {
	cfg.fill()
	if sandboxes == 0 {
		sandboxes = cfg.Limits.Sandboxes
	}
	machine, err := room.ReadMachine("/proc")
	if err != nil {
		return Report{}, err
	}
	memory := machine.Total
	if cfg.Limits.Memory > 0 {
		memory = int64(cfg.Limits.Memory)
	}
	want := preflight.Want{Sandboxes: sandboxes, Outbound: cfg.Network.CIDR != ""}
	checks := preflight.Limits(preflight.Host{}, want)
	if raise {
		checks, _ = preflight.RaiseAll(preflight.Host{}, checks)
	}
	checks = append(checks, preflight.Examine(ctx, preflight.Parts{
		StateDir: cfg.StateDir, LayersDir: cfg.Layers.Root, DiskReserve: int64(cfg.Reserve.Disk), Direct: cfg.Snapshot.Direct, Mkfs: cfg.Layers.Mkfs,
		Containerd: cfg.Containerd.Socket, Memory: memory - int64(cfg.Reserve.Memory),
		Bundle: func() (string, error) {
			b, err := bundle.Open(cfg.Bundle.Dir)
			if err != nil {
				return "", err
			}
			return b.RunscVersion, nil
		},
	}, want)...)
	r := Report{Wanted: sandboxes, Checks: checks}
	r.Sandboxes, _ = preflight.Waterline(checks, sandboxes)
	if preflight.Refusal(checks) != nil {
		r.Sandboxes = 0
	}
	return r, nil
}

// ready raises the host's limits, where it may, and gives how many sandboxes the host allows, with what bounds them if that is less than the node is to
// take. A host that can run none is refused.
func ready(ctx context.Context, cfg Config, host preflight.Host, log *slog.Logger) (sandboxes int64, notice string, err error) {
	checks := preflight.Limits(host, preflight.Want{Sandboxes: cfg.Limits.Sandboxes, Outbound: cfg.Network.CIDR != ""})
	if cfg.RaiseLimits {
		var raised []preflight.Raised
		checks, raised = preflight.RaiseAll(host, checks)
		for _, r := range raised {
			log.InfoContext(ctx, "raised a limit of the host", "limit", r.Name, "old", r.Old, "new", r.New)
		}
	}
	if err := preflight.Refusal(checks); err != nil {
		return 0, "", err
	}
	sandboxes, by := preflight.Waterline(checks, cfg.Limits.Sandboxes)
	if by == nil {
		return sandboxes, "", nil
	}
	notice = fmt.Sprintf("%s is %s: that is enough for %d sandboxes, and the node is to take %d; %s", by.Name, by.Found, sandboxes, cfg.Limits.Sandboxes, by.Remedy)
	log.WarnContext(ctx, "the host's limits allow fewer sandboxes", "limit", by.Name, "found", by.Found, "needed", by.Needed, "sandboxes", sandboxes, "remedy", by.Remedy)
	return sandboxes, notice, nil
}
