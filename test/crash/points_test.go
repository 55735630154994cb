package crash

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/dormouse-run/dormouse/pkg/fault"
)

// source is a function of the daemons, by package and name.
type source struct {
	where  string
	points []string // literal names of fault points in it
	change string   // a call that changes what outlives the process; empty for none
}

// changes are the calls that change files, mounts, processes or records. writeJSON, removeDurably and
// stageRecord are the packages' own ways to write a file, update nodestate's to write a record.
var changes = map[string]bool{
	"os.Mkdir": true, "os.MkdirAll": true, "os.MkdirTemp": true, "os.Rename": true, "os.Remove": true, "os.RemoveAll": true, "os.WriteFile": true,
	"os.CreateTemp": true, "os.Link": true, "os.Symlink": true, "os.Chown": true, "unix.Rename": true, "unix.Mkfifo": true, "unix.Mount": true,
	"unix.Unmount": true, "unix.Kill": true, "unix.PidfdSendSignal": true, "syscall.Kill": true, "db.Update": true,
	"durable.WriteJSON": true, "durable.WriteFile": true, "durable.Remove": true, "durable.DropUnfinished": true, "d.stageRecord": true, "spares.stage": true, "unix.Renameat2": true, "s.update": true, "Store.Commit": true,
}

// elsewhere says why a function that changes something has no point: it runs while a daemon starts (and is
// done again by the next start), or it is a part of a step whose points are those named.
var elsewhere = map[string]string{
	"agentd/internal/activity.keep":               "start", // ages of sandboxes, which a crash makes two seconds older at most
	"agentd/app.openState":                        "start",
	"agentd/internal/volumes.New":                 "start",
	"agentd/internal/volumes.Recover":             "recover.volumes.before recover.volumes.after",
	"agentd/internal/volumes.create":              "volume.fill.after volume.rename.after",
	"agentd/internal/volumes.nextProject":         "volume.stage.after volume.fill.after",
	"agentd/internal/runtime.MakeFIFOs":           "start.folder.before start.folder.after",
	"agentd/internal/runtime/runsc.deleteRuntime": "runtime.killed.after runtime.deleted.after",
	"agentd/internal/runtime/runsc.createRecord":  "runtime.recorded.after",
	"agentd/internal/runtime/runsc.intendTurn":    "runtime.turn.before",
	"agentd/internal/runtime/runsc.intendSave":    "runtime.save.before",
	"agentd/internal/runtime/runsc.endSave":       "runtime.save.before checkpoint.save.after",
	"agentd/internal/runtime/runsc.saveRecord":    "runtime.launched.after runtime.attached.after",
	"agentd/internal/runtime/runsc.stageRecord":   "runtime.recorded.after runtime.attached.after",
	"agentd/internal/runtime/runsc.removeRecord":  "runtime.ungrouped.after runtime.forgotten.after",
	"agentd/internal/runtime/runsc.New":           "start",
	"agentd/internal/runtime/runsc.openSpares":    "start", // of what an earlier driver left
	"agentd/internal/runtime/runsc.stage":         "runtime.recorded.after runtime.launched.after",
	"agentd/internal/runtime/runsc.give":          "runtime.recorded.after runtime.attached.after",
	"agentd/internal/runtime/runsc.link":          "runtime.recorded.after",
	"agentd/internal/runtime/runsc.replace":       "runtime.launched.after runtime.attached.after",
	"agentd/internal/runtime/runsc.retire":        "runtime.ungrouped.after runtime.forgotten.after",
	"agentd/internal/runtime/runsc.writeSpec":     "runtime.recorded.after runtime.group.after",
	"agentd/internal/runner.furnish":              "start.folder.before start.folder.after",
	"agentd/internal/runner.take":                 "start.folder.before start.folder.after",
	"agentd/internal/runner.stock":                "start", // of the shelf, which the next start empties
	"agentd/internal/runner.openShelf":            "start",
	"agentd/internal/runner.removeFolder":         "delete.folder.before delete.folder.after",
	"agentd/internal/runner.makeSpec":             "start.spec.before start.spec.after",
	"agentd/internal/runner.keepFinal":            "stop.record.before",
	"agentd/internal/runner.New":                  "start",
	"agentd/internal/network.setSysctl":           "network.table.after network.link.after",
	"agentd/internal/bundle.Install":              "start",
	"agentd/internal/bundle.copyBundle":           "start",
	"agentd/internal/journal.Open":                "start",
	"agentd/internal/journal.open":                "start",
	"agentd/internal/layers.clearStaging":         "recover.images.before recover.images.after",
	"agentd/internal/layers.dropBadRecords":       "recover.images.before recover.images.after",
	"agentd/internal/layers.recoverFiles":         "recover.images.before recover.images.after",
	"agentd/internal/layers.dropRecords":          "image.unrecord.after",
	"agentd/internal/layers.unlink":               "image.unrecord.after image.unlink.after",
	"agentd/internal/layers.stage":                "image.stage.after",
	"agentd/internal/layers.make":                 "start",
	"agentd/internal/bundle.removeStaged":         "start",
	"agentd/internal/cgroup.Kill":                 "runtime.killed.after",
	"agentd/internal/layers/flatten.nameless":     "image.stage.after image.build.after",
	"agentd/internal/layers.release":              "image.release.after",
	"agentd/internal/runtime/runsc.numbersFree":   "runtime.killed.after runtime.deleted.after", // only asks
	"coordinator/app.bindNow":                     "start",
	"agentd/internal/cgroup.move":                 "start", // of agentd's own group, which the next start finds
	"agentd/internal/preflight.write":             "start", // of a limit, which the next start finds
	"agentd/internal/preflight.direct":            "start", // an empty file of agentctl's, which it removes
	"agentd/internal/cgroup.Create":               "runtime.recorded.after runtime.group.after",
	"agentd/internal/launcher.Signal":             "delete.runtime.before runtime.killed.after",
	"agentd/internal/checkpoint.makeFolders":      "start",
	"agentd/internal/checkpoint.Sweep":            "recover.artefacts.before recover.artefacts.after",
	"agentd/internal/nodestate.migrate":           "start",
	"agentd/internal/nodestate.Close":             "start",
	"agentd/internal/nodestate.update":            "start.intent.before start.intent.after",
	"agentd/internal/nodestate.PutVolume":         "volume.record.after",
	"agentd/internal/nodestate.PutSandbox":        "start.intent.after start.running.after delete.intent.after checkpoint.freezing.after stop.record.after",
	"agentd/internal/nodestate.PutSnapshot":       "checkpoint.intent.after checkpoint.record.after snapshot.intent.after",
	"agentd/internal/nodestate.RemoveSandbox":     "delete.record.after",
	"agentd/internal/nodestate.remove":            "snapshot.record.after volume.forget.after",
	"agentd/internal/nodestate.PutCommand":        "command.keep.before command.keep.after",
	"agentd/internal/nodestate.AdmitCoordinator":  "command.admit.after",
	"agentd/internal/nodestate.SetSession":        "session.epoch.after",
}

// functions reads the daemons' sources.
func functions(t *testing.T) []source {
	t.Helper()
	var all []source
	for _, top := range []string{"agentd/app", "agentd/internal", "coordinator/app", "coordinator/internal", "pkg/catalog/redis"} {
		err := filepath.WalkDir(filepath.Join(root(), top), func(path string, d fs.DirEntry, err error) error {
			switch {
			case err != nil:
				return err
			case d.IsDir() && slices.Contains([]string{"testdata", "fake", "runtimetest", "guestinit", "bulkguest", "redistest"}, d.Name()):
				return filepath.SkipDir
			case d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go"):
				return nil
			}
			file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
			if err != nil {
				return err
			}
			pkg, err := filepath.Rel(root(), filepath.Dir(path))
			if err != nil {
				return err
			}
			for _, decl := range file.Decls {
				if f, ok := decl.(*ast.FuncDecl); ok {
					all = append(all, look(pkg+"."+f.Name.Name, f))
				}
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return all
}

func look(where string, f *ast.FuncDecl) source {
	s := source{where: where}
	ast.Inspect(f, func(n ast.Node) bool {
		call, ok := n.(*ast.CallExpr)
		if !ok {
			return true
		}
		name := callee(call.Fun)
		if changes[name] {
			s.change = name
		}
		if (name == "fault.At" || strings.HasSuffix(name, ".fault")) && len(call.Args) == 1 {
			if lit, ok := call.Args[0].(*ast.BasicLit); ok {
				if point, err := strconv.Unquote(lit.Value); err == nil {
					s.points = append(s.points, point)
				}
			} else {
				s.points = append(s.points, "") // made of the step's name
			}
		}
		return true
	})
	return s
}

// callee is the last two names of what is called.
func callee(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.Ident:
		return e.Name
	case *ast.SelectorExpr:
		switch x := e.X.(type) {
		case *ast.Ident:
			return x.Name + "." + e.Sel.Name
		case *ast.SelectorExpr:
			return x.Sel.Name + "." + e.Sel.Name
		}
	}
	return ""
}

// TestEveryChangeHasAFaultPoint: a function that changes a file, a record, a process or the catalog has a
// fault point in it, or says which step's points it lies between.
func TestEveryChangeHasAFaultPoint(t *testing.T) {
	known := slices.Concat(fault.Agentd(), fault.Coordinator())
	used := map[string]bool{}
	for _, f := range functions(t) {
		if f.change == "" || len(f.points) > 0 {
			continue
		}
		why, ok := elsewhere[f.where]
		used[f.where] = true
		if !ok {
			t.Errorf("%s calls %s and has no fault point", f.where, f.change)
		}
		for _, point := range strings.Fields(why) {
			if point != "start" && !slices.Contains(known, point) {
				t.Errorf("%s names the fault point %s, which is none", f.where, point)
			}
		}
	}
	for where := range elsewhere {
		if !used[where] {
			t.Errorf("%s changes nothing any more, or has a point of its own: take it out of the list", where)
		}
	}
}

// TestFaultPointsAgree: lists, code and matrix have the same points, and a build without the tag has none.
func TestFaultPointsAgree(t *testing.T) {
	if fault.Enabled {
		t.Error("a build without the tag has fault points")
	}
	code := map[string]bool{}
	for _, f := range functions(t) {
		for _, p := range f.points {
			if p != "" {
				code[p] = true
			}
		}
	}
	// The points that are made of names: the runner's steps and the coordinator's commands to a node.
	for _, step := range runnerSteps(t) {
		for _, verb := range []string{"start", "restore", "delete"} {
			code[verb+"."+step+".before"], code[verb+"."+step+".after"] = true, true
		}
	}
	for _, verb := range []string{"start", "restore"} {
		code[verb+".intent.before"], code[verb+".intent.after"] = true, true
	}
	for _, verb := range nodeCommands(t) {
		code["node."+verb+".before"], code["node."+verb+".after"] = true, true
	}
	listed := map[string]bool{}
	for _, p := range slices.Concat(fault.Agentd(), fault.Coordinator()) {
		if listed[p] {
			t.Errorf("%s is listed twice", p)
		}
		listed[p] = true
	}
	inMatrix := map[string]bool{}
	for _, r := range matrix() {
		for _, p := range r.points {
			p, _, _ = strings.Cut(p, "#")
			inMatrix[p] = true
		}
	}
	same(t, "code", code, listed)
	same(t, "matrix", inMatrix, listed)
}

func same(t *testing.T, what string, has, listed map[string]bool) {
	t.Helper()
	for _, p := range slices.Sorted(maps.Keys(has)) {
		if !listed[p] {
			t.Errorf("%s is in the %s and in no list", p, what)
		}
	}
	for _, p := range slices.Sorted(maps.Keys(listed)) {
		if !has[p] {
			t.Errorf("%s is in a list and not in the %s", p, what)
		}
	}
}

// runnerSteps reads the names of the runner's steps.
func runnerSteps(t *testing.T) []string {
	t.Helper()
	var names []string
	walk(t, "agentd/internal/runner/steps.go", func(n ast.Node) {
		kv, ok := n.(*ast.KeyValueExpr)
		if !ok {
			return
		}
		if key, ok := kv.Key.(*ast.Ident); !ok || key.Name != "name" {
			return
		}
		switch v := kv.Value.(type) {
		case *ast.BasicLit:
			names = append(names, strings.Trim(v.Value, `"`))
		case *ast.Ident:
			names = append(names, strings.ToLower(strings.TrimSuffix(v.Name, "Step")))
		}
	})
	return names
}

// nodeCommands reads the verbs of the coordinator's commands: strings that end with a colon before a uid.
func nodeCommands(t *testing.T) []string {
	t.Helper()
	found := map[string]bool{}
	for _, file := range []string{"run.go", "checkpoint.go", "delete.go", "volume.go", "turn.go", "update.go", "template.go", "fill.go", "given.go"} {
		walk(t, "coordinator/internal/operations/"+file, func(n ast.Node) {
			if b, ok := n.(*ast.BinaryExpr); ok && b.Op == token.ADD {
				if lit, ok := b.X.(*ast.BasicLit); ok && strings.HasSuffix(lit.Value, `:"`) {
					found[strings.Trim(lit.Value, `":`)] = true
				}
			}
		})
	}
	return slices.Sorted(maps.Keys(found))
}

func walk(t *testing.T, path string, visit func(ast.Node)) {
	t.Helper()
	file, err := parser.ParseFile(token.NewFileSet(), filepath.Join(root(), path), nil, parser.SkipObjectResolution)
	if err != nil {
		t.Fatal(err)
	}
	ast.Inspect(file, func(n ast.Node) bool { visit(n); return true })
}
