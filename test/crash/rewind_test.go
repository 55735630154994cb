package crash

import (
	"context"
	"fmt"
	"path/filepath"

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
