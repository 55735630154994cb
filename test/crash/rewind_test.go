package crash

import (
	"bytes"
	"context"
	"fmt"
	"path/filepath"
	"slices"

	"github.com/dormouse-run/dormouse/pkg/catalog/backup"
	"github.com/dormouse-run/dormouse/pkg/client"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/uid"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// rewind gives Redis the data that it had before a sandbox was made and a volume was deleted. The catalog is noticed to be
// older and rebuilt from the journals of the nodes: by itself, or by an operator where the coordinator that knew the nodes died.
func rewind(w *world) operation {
	old := w.newVolume("")
	kept := filepath.Join(w.TempDir(), "redis")
	w.ok(w.KillRedis(w.ctx))
	w.ok(w.CopyRedis(kept))
	w.ok(w.StartRedis(w.ctx))
	w.online()
	var made *client.Sandbox
	var before string // the incarnation that is lost; empty until it is
	req := &dormousev1.CreateSandboxRequest{OperationId: uid.New(), Spec: w.spec()}
	return operation{
		run: func(ctx context.Context) (err error) {
			if before == "" {
				if made, err = w.api.CreateSandbox(ctx, req); err != nil {
					return err
				}
				if err := gone(old.Delete(ctx, "")); err != nil {
					return err
				}
				if before, err = w.journaled(ctx); err != nil {
					return err
				}
				w.ok(w.KillRedis(w.ctx))
				w.ok(w.RewindRedis(kept))
				w.ok(w.StartRedis(w.ctx))
			}
			st, err := w.Client.CatalogStatus(ctx)
			if err != nil {
				return err
			}
			if st.GetSuspended() != nil {
				_, err = w.Client.RepairCatalog(ctx, true) // which waits for the nodes
				return err
			}
			if st.GetHead().GetIncarnation() == before {
				return fmt.Errorf("it was not repaired: %v", st.GetHead())
			}
			return nil
		},
		check: func() {
			w.online()
			w.answers(made)
			again, err := w.api.CreateSandbox(w.ctx, req)
			w.ok(err)
			if again.UID != made.UID {
				w.Errorf("the operation made %s, its replay %s", made.UID, again.UID)
			}
			if err := old.Refresh(w.ctx); !errs.Has(err, errs.ObjectNotFound) {
				w.Errorf("what was deleted: %v", err)
			}
			found, err := client.Collect(w.Client.VerifyCatalog(w.ctx))
			w.ok(err)
			for _, f := range found {
				w.Errorf("still different: %v", f)
			}
		},
		clean: func() { w.drop(made) },
	}
}

// newServer makes a sandbox through a Redis that was started anew.
func newServer(w *world) operation {
	var made *client.Sandbox
	started := false
	req := &dormousev1.CreateSandboxRequest{OperationId: uid.New(), Spec: w.spec()}
	return operation{
		id: req.GetOperationId(),
		run: func(ctx context.Context) (err error) {
			if !started {
				w.ok(w.KillRedis(w.ctx))
				w.ok(w.StartRedis(w.ctx))
				started = true
			}
			made, err = w.api.CreateSandbox(ctx, req)
			return err
		},
		check: func() {
			w.online()
			w.answers(made)
		},
		clean: func() { w.drop(made) },
	}
}

// journaled gives the incarnation once every node has all that concerns it.
func (w *world) journaled(ctx context.Context) (string, error) {
	st, err := w.Client.CatalogStatus(ctx)
	if err != nil {
		return "", err
	}
	want := st.GetHead()
	err = poll(ctx, func() error {
		st, err := w.Client.CatalogStatus(ctx)
		if err != nil {
			return err
		}
		for _, j := range st.GetJournals() {
			if p := j.GetPoint(); p.GetIncarnation() != want.GetIncarnation() || p.GetSeq() < want.GetSeq() {
				return fmt.Errorf("node %s has %v, want %v", j.GetNode(), p, want)
			}
		}
		return nil
	})
	return want.GetIncarnation(), err
}

// backedUp takes a backup of the catalog.
func (w *world) backedUp() *backup.File {
	w.Helper()
	var b bytes.Buffer
	out := backup.NewWriter(&b)
	for msg, err := range w.Client.BackupCatalog(w.ctx) {
		w.ok(err)
		if msg.GetHeader() != nil {
			w.ok(out.Header(msg.GetHeader()))
		}
		for _, e := range msg.GetEntries() {
			w.ok(out.Entry(e))
		}
		if msg.GetEnd() != nil {
			_, err = out.End(msg.GetEnd())
			w.ok(err)
		}
	}
	f, err := backup.Open(bytes.NewReader(b.Bytes()))
	w.ok(err)
	return f
}

// putBack loses the whole server and puts a backup into an empty one, which has neither the sandbox that was made since nor the deletion of
// a volume: those come from the journals.
func putBack(w *world) operation {
	old := w.newVolume("")
	file := w.backedUp()
	var made *client.Sandbox
	var before string
	return operation{
		run: func(ctx context.Context) (err error) {
			if before == "" {
				if made, err = w.api.CreateSandbox(ctx, &dormousev1.CreateSandboxRequest{Spec: w.spec()}); err != nil {
					return err
				}
				if err := gone(old.Delete(ctx, "")); err != nil {
					return err
				}
				if before, err = w.journaled(ctx); err != nil {
					return err
				}
				for i := 1; i <= w.Nodes; i++ {
					w.ok(w.KillAgentd(w.ctx, i)) // else the journals alone rebuild it
				}
				w.ok(w.KillRedis(w.ctx))
				w.ok(w.RewindRedis(w.TempDir()))
				w.ok(w.StartRedis(w.ctx))
			}
			st, err := w.Client.CatalogStatus(ctx)
			switch {
			case err != nil:
				return err
			case st.GetSuspended() == nil && st.GetHead().GetIncarnation() != before && w.Running(agentd):
				return nil
			case !w.Running(agentd):
				if err := w.restoreAll(ctx, file); err != nil {
					return err
				}
				for i := 1; i <= w.Nodes; i++ {
					w.ok(w.StartAgentd(w.ctx, i, func(context.Context) error { return nil })) // it is online once the catalog is in service
				}
			}
			_, err = w.Client.RepairCatalog(ctx, true) // which waits for the nodes
			return err
		},
		check: func() {
			w.online()
			w.answers(made)
			if err := old.Refresh(w.ctx); !errs.Has(err, errs.ObjectNotFound) {
				w.Errorf("what was deleted: %v", err)
			}
			found, err := client.Collect(w.Client.VerifyCatalog(w.ctx))
			w.ok(err)
			for _, f := range found {
				w.Errorf("still different: %v", f)
			}
		},
		clean: func() { w.drop(made) },
	}
}

func (w *world) restoreAll(ctx context.Context, f *backup.File) error {
	if err := w.Client.BeginCatalogRestore(ctx, &dormousev1.BeginCatalogRestoreRequest{BackupId: f.ID, Point: f.End.GetPoint(),
		CoordinatorEpoch: f.Header.GetCoordinatorEpoch(), Ancestors: f.Header.GetAncestors()}); err != nil {
		return err
	}
	var left []*dormousev1.CatalogRecord
	for r, err := range f.Entries() {
		if err != nil {
			return err
		}
		left = append(left, r)
	}
	for len(left) > 0 {
		var again []*dormousev1.CatalogRecord
		for chunk := range slices.Chunk(left, 100) {
			waiting, err := w.Client.RestoreCatalogRecords(ctx, f.ID, chunk)
			if err != nil {
				return err
			}
			for _, i := range waiting {
				again = append(again, chunk[i])
			}
		}
		left = again
	}
	return w.Client.EndCatalogRestore(ctx, &dormousev1.EndCatalogRestoreRequest{BackupId: f.ID, Records: f.Records, Sum: f.Sum})
}
