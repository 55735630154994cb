package operations_test

import (
	"context"
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/dormouse-run/dormouse/coordinator/internal/operations"
	"github.com/dormouse-run/dormouse/coordinator/internal/publish"
	"github.com/dormouse-run/dormouse/coordinator/internal/records"
	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/fence"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
	"github.com/dormouse-run/dormouse/pkg/snapshot"
	"github.com/dormouse-run/dormouse/pkg/uid"
	"github.com/dormouse-run/dormouse/pkg/volume"
	"github.com/dormouse-run/dormouse/pkg/warm"
)

// move asks the table of the kind. Where a record goes away, to is what its tombstone stands for.
func move(kind catalog.Kind, from, to string, tombstone bool) error {
	switch kind {
	case catalog.KindSandbox:
		if from == "" && to == string(sandbox.Starting) {
			from = string(sandbox.Pending) // accepted and placed in one commit
		}
		return sandbox.Move(sandbox.Phase(from), sandbox.Phase(to))
	case catalog.KindSnapshot:
		if tombstone {
			to = string(snapshot.Deleted)
		}
		return snapshot.Move(snapshot.Phase(from), snapshot.Phase(to))
	case catalog.KindVolume:
		if tombstone {
			to = string(volume.Deleted)
		}
		return volume.Move(volume.Phase(from), volume.Phase(to))
	case catalog.KindTemplate:
		return warm.MoveTemplate(warm.TemplatePhase(from), warm.TemplatePhase(to))
	case catalog.KindPool:
		return warm.MovePool(warm.PoolPhase(from), warm.PoolPhase(to))
	}
	return nil
}

// watchPhases checks each commit of every test in this package against the tables of phases.
func (w *world) watchPhases(build publish.Build) publish.Build {
	return func(ctx context.Context, r catalog.Reader) (catalog.Commit, error) {
		c, err := build(ctx, r)
		if err != nil {
			return c, err
		}
		look := func(key catalog.Key, expected uint64, to string, tombstone bool) error {
			rec, err := r.Get(ctx, key)
			if err != nil && !errs.Has(err, errs.ObjectNotFound) {
				return err
			}
			if rec.Revision != expected {
				return nil // another commit was quicker: this one will be refused
			}
			if err := move(key.Kind, rec.Phase, to, tombstone); err != nil {
				w.t.Errorf("a commit moves %s %s: %v", key.Kind, key.UID, err)
			}
			return nil
		}
		adopted := slices.ContainsFunc(c.Puts, func(p catalog.Put) bool { // it was in that phase before its record was lost
			ev, err := records.EventOf(p.Record)
			return p.Record.Kind == catalog.KindEvent && err == nil && ev.Reason == "Adopted"
		})
		for _, p := range c.Puts {
			if adopted && p.ExpectRevision == 0 {
				continue
			}
			if err := look(p.Record.Key, p.ExpectRevision, p.Record.Phase, false); err != nil {
				return c, err
			}
		}
		for _, d := range c.Deletes {
			if err := look(d.Key, d.ExpectRevision, "", d.Tombstone); err != nil {
				return c, err
			}
		}
		return c, nil
	}
}

// A record that says what no table leads away from: the decision is refused, with what was to be done, and nothing is committed.
func TestAMoveThatNoTableHasIsRefused(t *testing.T) {
	w := newWorld(t)
	e := w.lead()
	defer e.stop()
	snap := &records.Snapshot{}
	snap.UID, snap.Tenant, snap.Created = uid.New(), tenant, time.Now()
	snap.Status.Phase = "Dreaming"
	v := &records.Volume{}
	v.UID, v.Tenant, v.Created = uid.New(), tenant, time.Now()
	v.Status.Phase = "Dreaming"
	sb := &records.Sandbox{}
	sb.UID, sb.Tenant, sb.Created, sb.Spec = uid.New(), tenant, time.Now(), spec()
	sb.Status.Phase = "Dreaming"
	tpl := &records.Template{Builder: uid.New(), Golden: uid.New()}
	tpl.UID, tpl.Tenant, tpl.Created = uid.New(), tenant, time.Now()
	tpl.Status.Phase = "Dreaming"
	pool := &records.Pool{}
	pool.UID, pool.Tenant, pool.Created, pool.Spec.TemplateUID = uid.New(), tenant, time.Now(), tpl.UID
	pool.Status.Phase = "Dreaming"
	for _, c := range []struct {
		key  catalog.Key
		put  func() (catalog.Put, error)
		drop func(context.Context, operations.Call, operations.Delete) (*operations.Operation, error)
	}{
		{records.SnapshotKey(tenant, snap.UID), snap.Put, e.DeleteSnapshot},
		{records.VolumeKey(tenant, v.UID), v.Put, e.DeleteVolume},
		{records.SandboxKey(tenant, sb.UID), sb.Put, e.DeleteSandbox},
		{records.TemplateKey(tenant, tpl.UID), tpl.Put, e.DeleteTemplate},
		{records.PoolKey(tenant, pool.UID), pool.Put, e.DeletePool},
	} {
		put := must(c.put())(t)
		must(e.queue.Publish(t.Context(), func(context.Context, catalog.Reader) (catalog.Commit, error) {
			return catalog.Commit{Owner: fence.Owner{Coordinator: 1}, Puts: []catalog.Put{put}}, nil
		}))(t)
		before := must(w.store.Get(t.Context(), c.key))(t)
		_, err := c.drop(t.Context(), call(uid.New()), operations.Delete{UID: c.key.UID})
		env := errs.From(err)
		if env.Reason != errs.InvariantBroken || env.Retry != errs.Never || env.Details["from"] != "Dreaming" || env.Details["to"] != "Deleting" ||
			env.Details["uid"] != c.key.UID || env.Details["kind"] != string(c.key.Kind) {
			t.Errorf("%s: %v %v", c.key.Kind, env, env.Details)
		}
		if after := must(w.store.Get(t.Context(), c.key))(t); after.Revision != before.Revision {
			t.Errorf("%s was changed: %+v", c.key.Kind, after)
		}
	}
}

// Nobody sets a phase, but what asks the table.
func TestPhasesAreSetInOnePlace(t *testing.T) {
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	set := 0
	for _, name := range files {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		fset := token.NewFileSet()
		file, err := parser.ParseFile(fset, name, nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(file, func(n ast.Node) bool {
			a, ok := n.(*ast.AssignStmt)
			if !ok {
				return true
			}
			for _, to := range a.Lhs {
				s, ok := to.(*ast.SelectorExpr)
				if !ok || s.Sel.Name != "Phase" && s.Sel.Name != "Status" {
					continue
				}
				if set++; name != "phases.go" {
					t.Errorf("%s: a phase is set past its table; see phases.go", fset.Position(a.Pos()))
				}
			}
			return true
		})
	}
	if set == 0 {
		t.Error("nothing is set anywhere: the test looks at the wrong thing")
	}
}
