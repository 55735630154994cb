package main

import (
	"context"
	"fmt"
	"iter"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/dormouse-run/dormouse/pkg/client"
	"github.com/dormouse-run/dormouse/pkg/command"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/uid"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// remover is what can be deleted.
type remover interface {
	Delete(ctx context.Context, operationID string) error
}

// removeEach deletes every argument and prints the uids of those that are gone. With --force those
// that are not there are no error.
func removeEach(c call, find func(ref string) (remover, string, error)) error {
	op, err := operationOf(c.Context)
	if err != nil {
		return err
	}
	if c.IsSet("operation-id") && c.Args().Len() > 1 {
		return command.Usage(c.Context, "--operation-id is for one object")
	}
	return each(c, func(ref string) error {
		r, uid, err := find(ref)
		if err == nil {
			id := op
			if c.Args().Len() > 1 {
				id = ""
			}
			err = r.Delete(c.ctx, id)
		}
		if err != nil {
			if c.Bool("force") && notThere(err) {
				return nil
			}
			return err
		}
		_, err = fmt.Fprintln(c.App.Writer, uid)
		return err
	})
}

// maxParallel bounds how many deletions one command asks for at a time.
const maxParallel = 64

// removeSnapshots deletes those that are named, or those that the flags select, several at a time.
func removeSnapshots(c call) error {
	selects, op, err := removal(c)
	if err != nil {
		return err
	}
	var mu sync.Mutex
	var failed []error
	remove := func(ref string) {
		u, err := removeSnapshot(c, ref, op)
		mu.Lock()
		defer mu.Unlock()
		if err == nil && u != "" {
			_, err = fmt.Fprintln(c.App.Writer, u)
		}
		if err != nil {
			failed = append(failed, err)
		}
	}
	var group errgroup.Group
	group.SetLimit(c.Int("parallel"))
	var selection error
	refs := slices.Values(c.Args().Slice())
	if selects {
		refs = selected(c, &selection)
	}
	for ref := range refs {
		if c.ctx.Err() != nil {
			break
		}
		group.Go(func() error {
			remove(ref)
			return nil
		})
	}
	_ = group.Wait() // the errors are in failed
	if selection != nil {
		failed = append(failed, selection)
	}
	if len(failed) > 0 {
		return several(failed)
	}
	return nil
}

// removal checks the flags: whether they select, and the operation's id if it is for one.
func removal(c call) (selects bool, op string, err error) {
	selects = c.Bool("all") || c.IsSet("source") || c.IsSet("older-than")
	many := selects || c.Args().Len() > 1
	switch op, err = operationOf(c.Context); {
	case err != nil:
	case selects == c.Args().Present():
		err = command.Usage(c.Context, "name snapshots, or select them with --all, --source or --older-than")
	case c.IsSet("older-than") && c.Duration("older-than") <= 0:
		err = command.Usage(c.Context, "--older-than: more than 0")
	case c.Int("parallel") < 1 || c.Int("parallel") > maxParallel:
		err = command.Usage(c.Context, "--parallel: 1 to %d", maxParallel)
	case c.IsSet("operation-id") && many:
		err = command.Usage(c.Context, "--operation-id is for one object")
	case many:
		op = "" // one for each
	}
	return selects, op, err
}

// selected gives the uids that the flags select, page by page; err is set at the end.
func selected(c call, failed *error) iter.Seq[string] {
	var before time.Time
	if d := c.Duration("older-than"); d > 0 {
		before = now().Add(-d)
	}
	return func(yield func(string) bool) {
		for s, err := range c.client.ListSnapshots(c.ctx, &dormousev1.ListSnapshotsRequest{SourceSandboxUid: c.String("source"), PageSize: 500}) {
			if err != nil {
				*failed = err
				return
			}
			switch s.GetStatus().GetPhase() {
			case dormousev1.SnapshotPhase_SNAPSHOT_PHASE_READY, dormousev1.SnapshotPhase_SNAPSHOT_PHASE_FAILED:
			default:
				continue // it is being made, or deleted
			}
			if !before.IsZero() && !s.GetMeta().GetCreateTime().AsTime().Before(before) {
				continue
			}
			if !yield(snapshotID(s)) {
				return
			}
		}
	}
}

// removeSnapshot deletes one and gives its uid, or none if it was gone and that is no error. A queue that is full is waited
// for: it is what deletes the others.
func removeSnapshot(c call, ref, op string) (string, error) {
	s, err := snapshotOf(c, ref)
	if err == nil {
		if op == "" {
			op = uid.New()
		}
		for err = s.Delete(c.ctx, op); errs.Has(err, errs.QueueFull); err = s.Delete(c.ctx, op) {
			select {
			case <-time.After(queueWait):
			case <-c.ctx.Done():
				return "", err
			}
		}
	}
	switch {
	case err == nil:
		return s.UID, nil
	case notThere(err) && (c.Bool("force") || !c.Args().Present()):
		return "", nil
	}
	return "", err
}

// queueWait is how long a full queue is left alone.
const queueWait = time.Second

// snapshotOf finds what is named; what was selected is a uid already.
func snapshotOf(c call, ref string) (*client.Snapshot, error) {
	if !c.Args().Present() {
		return c.client.Snapshot(ref), nil
	}
	return c.client.FindSnapshot(c.ctx, ref)
}
