// Package reconcile compares what a node has written down with what is there, and says what to do. The
// comparisons are pure functions of two inventories; what they find is done by the runner, which owns
// the sandboxes.
//
// # At start
//
// Plan goes by the records alone, because everything on the node was announced by a record before it
// was made: kept sandboxes are attached to, unfinished ones and deletions are removed, snapshots are
// brought together with their artefacts. What has no record is left alone at start; it can only come
// from a lost state file, and then it may be somebody's.
//
// # Doctor
//
// Diff names every difference. Fix removes only what is provably the node's own (it is below the node's
// folders, control group or under the node's name) and provably unowned (no record names it).
//
// # Invariants
//
//   - The node is looked at before the records are read. A thing that was made in between has a record
//     then; a thing whose record went in between is gone already. So nothing that is alive is ever taken for
//     an orphan, although the runner goes on meanwhile.
//   - An inventory that cannot be read is an error, never an empty inventory.
//   - Artefacts of snapshots are never removed by Fix: they may be the only copy of something.
package reconcile

import (
	"context"
	"errors"
	"fmt"
	"log/slog"

	"golang.org/x/sync/errgroup"

	"github.com/dormouse-run/dormouse/agentd/internal/nodestate"
	"github.com/dormouse-run/dormouse/pkg/fault"
)

// Action is what the runner is to do.
type Action string

// The actions.
const (
	Reattach       Action = "reattach"
	Remove         Action = "remove"
	FinishSnapshot Action = "finish-snapshot"
)

// Command is one action on one object, and why.
type Command struct {
	Action Action
	UID    string
	Why    string
}

// Records is what the node has written down.
type Records struct {
	Sandboxes []nodestate.Sandbox
	Snapshots []nodestate.Snapshot
}

// Plan gives what is to be done when agentd starts: snapshots first, so that what a removed sandbox
// was captured into is settled before.
func Plan(rec Records) []Command {
	var out []Command
	for _, s := range rec.Snapshots {
		if s.State != nodestate.SnapshotReady {
			out = append(out, Command{FinishSnapshot, s.UID, "it was left " + string(s.State)})
		}
	}
	for _, s := range rec.Sandboxes {
		switch s.Intent {
		case nodestate.IntentKeep:
			out = append(out, Command{Reattach, s.UID, "it is kept"})
		case nodestate.IntentDelete:
			out = append(out, Command{Remove, s.UID, "its deletion was not finished"})
		default:
			out = append(out, Command{Remove, s.UID, "its " + string(s.Intent) + " was not finished"})
		}
	}
	return out
}

// Runner does what Plan says. Each method is idempotent.
type Runner interface {
	Reattach(ctx context.Context, uid string) error
	Remove(ctx context.Context, uid string) error
	FinishSnapshot(ctx context.Context, uid string) error
}

// width is how many commands go on at a time: what they do is short and mostly waiting.
const width = 8

// Apply does the commands, few at a time, snapshots before sandboxes. One that fails does not keep the
// others from being done; all errors are joined.
func Apply(ctx context.Context, r Runner, commands []Command, log *slog.Logger) error {
	var phases [2][]Command
	for _, c := range commands {
		i := 1
		if c.Action == FinishSnapshot {
			i = 0
		}
		phases[i] = append(phases[i], c)
	}
	var all []error
	for _, phase := range phases {
		failed := make([]error, len(phase))
		var group errgroup.Group
		group.SetLimit(width)
		for i, c := range phase {
			group.Go(func() error {
				failed[i] = apply(ctx, r, c, log)
				return nil
			})
		}
		_ = group.Wait() // the errors are in failed
		all = append(all, failed...)
	}
	return errors.Join(all...)
}

func apply(ctx context.Context, r Runner, c Command, log *slog.Logger) error {
	do := map[Action]func(context.Context, string) error{Reattach: r.Reattach, Remove: r.Remove, FinishSnapshot: r.FinishSnapshot}[c.Action]
	if err := do(ctx, c.UID); err != nil {
		return fmt.Errorf("%s %s: %w", c.Action, c.UID, err)
	}
	if c.Action == FinishSnapshot {
		fault.At("recover.snapshot.after")
	} else {
		fault.At("recover.sandbox.after")
	}
	log.InfoContext(ctx, "reconciled", "action", string(c.Action), "uid", c.UID, "why", c.Why)
	return nil
}
