package integration

import (
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/dormouse-run/dormouse/pkg/errs"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// A repair goes on without a node, which comes back. What only that node knew is left alone and shown. It is in the way of a deletion, which says so and names the
// command; an operator takes back what is worth it, drops the rest, and the deletion ends.
func TestC21WhatARepairGaveUp(t *testing.T) {
	w := enter(t)
	old := w.volume("node-2")
	w.journalsReach()
	kept := filepath.Join(t.TempDir(), "redis")
	w.ok(w.KillRedis(w.ctx))
	w.ok(w.CopyRedis(kept))
	w.ok(w.StartRedis(w.ctx))
	w.nodesOnline()
	made := w.volume("node-2")
	spec := w.spec()
	spec.Volumes = []*dormousev1.VolumeMount{mount(old, "/data")}
	holder := w.create(spec)
	spec.Volumes = []*dormousev1.VolumeMount{mount(made, "/data")}
	writer := w.create(spec)
	w.sh(writer, "echo mine > /data/file")
	before := w.journalsReach().GetHead().GetIncarnation()

	w.ok(w.KillAgentd(w.ctx, 2))
	w.rewindRedis(kept)
	w.await("the loss is noticed", func() error {
		st, err := w.Client.CatalogStatus(w.ctx)
		if err == nil && st.GetSuspended() == nil {
			err = fmt.Errorf("in service: %v", st)
		}
		return err
	})
	op := w.sub(t)
	op.key = w.operatorKey()
	w.await("it goes on without the node", func() error {
		out, _ := op.dormouse("admin", "catalog", "repair", "--accept-loss", "--without", "node-2")
		st, err := w.Client.CatalogStatus(w.ctx)
		if err == nil && (st.GetSuspended() != nil || st.GetHead().GetIncarnation() == before) {
			err = errors.New(out)
		}
		return err
	})
	w.ok(w.StartAgentdReady(w.ctx, 2))
	w.nodesOnline()
	w.journalsReach()

	out, code := op.dormouse("admin", "catalog", "verify")
	for _, u := range []string{holder.UID, made.UID, writer.UID} {
		if !strings.Contains(out, `"dormouse admin catalog adopt --node node-2 `+u+`"`) {
			t.Errorf("verify does not show %s", u)
		}
	}
	if code != 1 || t.Failed() {
		t.Fatalf("verify gave %d:\n%s", code, out)
	}
	err := old.Delete(w.ctx, "")
	if e := errs.From(err); !errs.Has(err, errs.StillReferenced) || e.Outcome != errs.Unknown || !strings.Contains(e.Message, "dormouse admin catalog drop --node node-2 "+holder.UID) {
		t.Errorf("a deletion in whose way it is: %+v", e)
	}
	// What refers to what is being deleted cannot come back; the rest can, volumes first.
	said := func(succeeds bool, want string, args ...string) {
		t.Helper()
		w.await(strings.Join(args, " "), func() error { // while the coordinator leads anew the node may be away
			out, code := op.dormouse(append([]string{"admin", "catalog"}, args...)...)
			if succeeds != (code == 0) || !strings.Contains(out, want) {
				return fmt.Errorf("it gave %d: %s", code, out)
			}
			return nil
		})
	}
	said(false, string(errs.WrongPhase), "adopt", "--node", "node-2", holder.UID)
	said(true, "adopted volume "+made.UID, "adopt", "--node", "node-2", made.UID)
	said(true, "adopted sandbox "+writer.UID, "adopt", "--node", "node-2", writer.UID)
	said(false, string(errs.WrongPhase), "drop", "--node", "node-2", writer.UID) // it has a record again
	said(true, "dropped sandbox "+holder.UID, "drop", "--node", "node-2", holder.UID)
	w.await("the deletion ends", func() error {
		if err := old.Refresh(w.ctx); !errs.Has(err, errs.ObjectNotFound) {
			return fmt.Errorf("it is there: %w", err)
		}
		return nil
	})
	w.nodesOnline()
	if got := w.sh(writer, "cat /data/file"); got != "mine" {
		t.Errorf("what was taken back says %q", got)
	}
	w.ok(writer.Delete(w.ctx, ""))
	w.ok(made.Delete(w.ctx, ""))
	w.journalsReach()
	said(true, "", "verify")
}
