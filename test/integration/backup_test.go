package integration

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/uid"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
	"github.com/dormouse-run/dormouse/test/cluster"
)

// A backup is taken, the server is lost wholly, and an empty one gets the backup: with what the nodes' journals have of what came after it
// the catalog is what it was. These are the commands of docs/operating.md.
func TestBackupIsRestoredIntoAnEmptyServer(t *testing.T) {
	w := enter(t)
	op := w.sub(t)
	op.key = w.operatorKey()
	secret := cluster.NewPassword()
	s, err := w.api.CreateSandbox(w.ctx, &dormousev1.CreateSandboxRequest{OperationId: uid.New(), Name: "before", Spec: w.spec(), SecretEnv: map[string]string{"TOKEN": secret}})
	w.ok(err)
	old := w.volume("")
	snap := w.checkpoint(s)

	file := filepath.Join(t.TempDir(), "catalog.backup")
	op.said(0, "admin", "catalog", "backup", file)
	if info, err := os.Stat(file); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the file's mode: %v, %v", info, err)
	}
	text, err := os.ReadFile(file)
	w.ok(err)
	if !strings.Contains(string(text), s.UID) || strings.Contains(string(text), secret) {
		t.Error("the backup lacks the sandbox, or has its secret")
	}
	if entries, err := os.ReadDir(filepath.Dir(file)); err != nil || len(entries) != 1 {
		t.Errorf("beside the backup: %v, %v", entries, err)
	}
	if out := op.said(0, "admin", "catalog", "restore", "--check", file); !strings.Contains(out, "whole") {
		t.Errorf("check: %s", out)
	}
	if out, code := op.dormouse("admin", "catalog", "restore", file); code != 4 || !strings.Contains(out, string(errs.CatalogNotEmpty)) {
		t.Errorf("into the catalog that is there: %d %s", code, out)
	}
	if out, code := w.dormouse("admin", "catalog", "backup", "-"); code == 0 || !strings.Contains(out, string(errs.NotAllowed)) {
		t.Errorf("a user takes a backup: %d\n%s", code, out)
	}

	req := &dormousev1.CreateSandboxRequest{OperationId: uid.New(), Name: "since", Spec: w.spec()}
	since, err := w.api.CreateSandbox(w.ctx, req)
	w.ok(err)
	w.ok(old.Delete(w.ctx, ""))
	before := w.journalsReach()
	for i := 1; i <= w.Nodes; i++ {
		w.ok(w.KillAgentd(w.ctx, i)) // else their journals alone rebuild it
	}
	w.rewindRedis(t.TempDir())
	w.await("the loss is noticed", func() error {
		st, err := w.Client.CatalogStatus(w.ctx)
		if err == nil && st.GetSuspended() == nil {
			err = fmt.Errorf("in service: %v", st)
		}
		return err
	})
	op.said(0, "admin", "catalog", "restore", file)
	if out := op.said(0, "admin", "catalog", "status"); !strings.Contains(out, "SUSPENDED") {
		t.Errorf("status:\n%s", out)
	}
	w.ok(s.Refresh(w.ctx))                          // it is there, and can be read
	op.said(0, "admin", "catalog", "restore", file) // again, which changes nothing
	for i := 1; i <= w.Nodes; i++ {
		w.ok(w.StartAgentd(w.ctx, i, func(context.Context) error { return nil })) // it is online once the catalog is in service
	}
	w.await("it is in service", func() error {
		st, err := w.Client.CatalogStatus(w.ctx)
		if err == nil && (st.GetSuspended() != nil || st.GetHead().GetIncarnation() == before.GetHead().GetIncarnation()) {
			err = fmt.Errorf("%v", st)
		}
		return err
	})
	w.nodesOnline()

	w.sh(s, "true")
	w.sh(since, "true")
	again, err := w.api.CreateSandbox(w.ctx, req)
	w.ok(err)
	if again.UID != since.UID {
		t.Errorf("the operation made %s, its replay %s", since.UID, again.UID)
	}
	if err := old.Refresh(w.ctx); errs.ReasonOf(err) != errs.ObjectNotFound {
		t.Errorf("what was deleted: %v", err)
	}
	w.ok(snap.Refresh(w.ctx))
	w.journalsReach()
	op.said(0, "admin", "catalog", "verify") // 1 if it finds anything
	w.ok(snap.Delete(w.ctx, ""))
}
