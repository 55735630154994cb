package runner

import (
	"context"

	"github.com/dormouse-run/dormouse/agentd/internal/runtime"
)

// faultyMachine has the fault points of a freeze. Once one has struck, nothing more is done to the
// sandbox, not even what a deferred resume would do: the process is "dead".
type faultyMachine struct{ n *Node }

func (m faultyMachine) Pause(ctx context.Context, id string) error {
	if err := m.n.fault("checkpoint.pause.before"); err != nil {
		return err
	}
	if err := m.n.Driver.Pause(ctx, id); err != nil {
		return err
	}
	return m.n.fault("checkpoint.pause.after")
}

func (m faultyMachine) Save(ctx context.Context, id string, opts runtime.SaveOptions) error {
	if err := m.n.Driver.Save(ctx, id, opts); err != nil {
		return err
	}
	return m.n.fault("checkpoint.save.after")
}

func (m faultyMachine) Resume(ctx context.Context, id string) error {
	if err := m.n.fault("checkpoint.resume.before"); err != nil {
		return err
	}
	if err := m.n.Driver.Resume(ctx, id); err != nil {
		return err
	}
	return m.n.fault("checkpoint.resume.after")
}
