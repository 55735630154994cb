// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

// Package deps_test holds the import walls of the architecture: which folder must
// not import what, and why. What internal/ folders can express is left to the
// compiler.
package deps_test

import (
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const module = "github.com/dormouse-run/dormouse/"

// Import paths are matched by whole elements: "a/b" is a/b and all below it. Ours
// are written without the module.
const (
	std  = "<standard library>"
	ours = "<this module>"
)

// wall is one rule. A package of from must not import what deny names, or, where
// only is given, anything but that. A wall with reach looks through other packages
// of this module as well: what they import counts.
type wall struct {
	from   []string
	deny   []string
	only   []string
	except []string // never denied
	reach  bool
	reason string
}

var (
	bbolt   = "go.etcd.io/bbolt"
	grpc    = "google.golang.org/grpc"
	proto   = "google.golang.org/protobuf"
	goredis = "github.com/redis/go-redis"
	drivers = []string{
		"agentd/internal/runtime/runsc", "agentd/internal/runtime/runc", "agentd/internal/runtime/fake",
	}
	domain = []string{"pkg/phase", "pkg/sandbox", "pkg/snapshot", "pkg/volume", "pkg/warm"}
)

var walls = []wall{
	{
		from: []string{"agentd/cmd/agentd"}, only: []string{std, "agentd/app"},
		reason: "main only calls app, so that tests can do all that the program does",
	},
	{
		from: []string{"coordinator/cmd/coordinator"}, only: []string{std, "coordinator/app"},
		reason: "main only calls app, so that tests can do all that the program does",
	},
	{
		from: []string{"agentd"}, deny: []string{"coordinator"},
		reason: "the node agent knows the coordinator by its API only, so either can be replaced alone",
	},
	{
		from: []string{"coordinator"}, deny: []string{"agentd"},
		reason: "the coordinator knows nodes by their API only; it never touches what is on one",
	},
	{
		from: []string{"agentd/internal/api"}, deny: append([]string{bbolt}, drivers...),
		reason: "handlers decode, call and encode; state and effects belong to the runner",
	},
	{
		from: []string{"agentd/internal/runner"}, deny: append([]string{grpc}, drivers...),
		reason: "the runner's order of steps holds for every driver and every transport",
	},
	{
		from: []string{"agentd/internal/runtime"}, deny: []string{"agentd/internal/runner", "pkg/catalog"},
		reason: "a driver starts and stops sandboxes; it does not decide",
	},
	{
		from:   []string{"agentd/internal/layers", "agentd/internal/volumes", "agentd/internal/network"},
		deny:   []string{"agentd/internal/runtime"},
		reason: "what a sandbox is given does not depend on how it is run",
	},
	{
		from: []string{"agentd/internal/checkpoint"}, deny: []string{"pkg/catalog", grpc},
		reason: "an artefact is complete by itself; who knows of it is another's matter",
	},
	{
		from: []string{"agentd/internal/nodestate"}, deny: []string{"agentd", "coordinator", "pkg/catalog", "pkg/client", grpc},
		except: []string{"agentd/internal/nodestate", "agentd/internal/boltfile"},
		reason: "the node's records must be readable whatever else is broken",
	},
	{
		from: []string{"agentd/internal/reconcile"}, deny: drivers,
		reason: "reconcile compares and commands; effects are the runner's",
	},
	{
		from: []string{"coordinator/internal/api"}, deny: []string{goredis, "pkg/catalog/redis"},
		reason: "handlers work on the catalog's interface, so that they hold on every store",
	},
	{
		from: []string{"coordinator/internal/placement"}, reach: true,
		deny:   []string{"os", "net", "golang.org/x/sys", goredis, grpc, "pkg/catalog"},
		reason: "placement is a pure function: same snapshot, same decision, and a test can say so",
	},
	{
		// Not through other packages: pkg/errs knows error numbers by their names in syscall, and calls
		// nothing of it.
		from: []string{"coordinator/internal/placement"}, deny: []string{"syscall"},
		reason: "placement is a pure function: it asks the kernel nothing",
	},
	{
		from:   []string{"coordinator/internal/sessions", "coordinator/internal/publish"},
		deny:   []string{goredis, "pkg/catalog/redis", "pkg/catalog/memory"},
		reason: "fences and receipts are the store's contract, not one client's",
	},
	{
		from: domain, only: append([]string{std, "pkg/uid", "pkg/fence"}, domain...),
		reason: "states and their transitions are pure, and everything may depend on them",
	},
	{
		from: []string{"pkg/errs"}, deny: []string{grpc, proto, "proto"}, reach: true,
		reason: "the envelope is decided here and mapped to a transport in pkg/wire only",
	},
	{
		from: []string{"pkg/fence"}, only: []string{std},
		reason: "one type for every owner check, with nothing below it",
	},
	{
		from: []string{"pkg/wire"}, deny: append([]string{"agentd", "coordinator", "pkg/catalog", goredis, bbolt}, drivers...),
		reason: "mapping does not look things up",
	},
	{
		from: []string{"pkg"}, deny: []string{"agentd", "coordinator"}, reach: true,
		reason: "shared packages serve both sides and belong to neither",
	},
	{
		from: []string{"pkg/client"}, deny: []string{"pkg/catalog", goredis, bbolt},
		reason: "the SDK speaks the public API; it has no way round it",
	},
	{
		from: []string{"proto"}, deny: []string{ours}, except: []string{"proto"},
		reason: "protos are generated, and know only each other",
	},
	{
		from: []string{"agentd", "coordinator", "pkg"}, deny: []string{"test"},
		except: []string{"test/tools"},
		reason: "nothing that ships needs the development stack; packages that help tests may ask where the tools are",
	},
}

// pkg is a package and what it imports.
type pkg struct {
	ImportPath string
	Imports    []string
}

func TestWalls(t *testing.T) {
	pkgs := list(t)
	for _, v := range violations(pkgs, walls) {
		t.Error(v)
	}
	for _, w := range walls {
		for _, from := range w.from {
			if !slices.ContainsFunc(pkgs, func(p pkg) bool { return matches(p.ImportPath, from) }) {
				t.Logf("no package in %s yet", from)
			}
		}
	}
}

// list is every package of the module, with the imports of its product code under
// any build constraint. The files are read here, not by a go list of their own, so
// that go test knows what the result depends on and never repeats an old one.
func list(t *testing.T) []pkg {
	t.Helper()
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	imports := map[string][]string{}
	err = filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			return skip(root, path)
		}
		if !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return nil
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.ImportsOnly)
		if err != nil {
			return err
		}
		dir, err := filepath.Rel(root, filepath.Dir(path))
		if err != nil {
			return err
		}
		for _, spec := range file.Imports {
			imported, err := strconv.Unquote(spec.Path.Value)
			if err != nil {
				return err
			}
			imports[module+dir] = append(imports[module+dir], imported)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	var pkgs []pkg
	for _, path := range slices.Sorted(maps.Keys(imports)) {
		pkgs = append(pkgs, pkg{ImportPath: path, Imports: slices.Compact(slices.Sorted(slices.Values(imports[path])))})
	}
	return pkgs
}

// skip leaves out what go does: hidden folders, test data, and other modules.
func skip(root, dir string) error {
	name := filepath.Base(dir)
	if dir == root {
		return nil
	}
	if strings.HasPrefix(name, ".") || strings.HasPrefix(name, "_") || name == "testdata" {
		return fs.SkipDir
	}
	if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
		return fs.SkipDir
	}
	return nil
}

// violations says, for each import through a wall, who imports what, and why not.
func violations(pkgs []pkg, walls []wall) []string {
	byPath := map[string]pkg{}
	for _, p := range pkgs {
		byPath[p.ImportPath] = p
	}
	var found []string
	for _, w := range walls {
		for _, p := range pkgs {
			if !slices.ContainsFunc(w.from, func(from string) bool { return matches(p.ImportPath, from) }) {
				continue
			}
			for _, chain := range imports(p, byPath, w.reach) {
				if w.forbids(chain[len(chain)-1]) {
					found = append(found, strings.ReplaceAll(strings.Join(chain, " imports "), module, "")+": "+w.reason)
				}
			}
		}
	}
	return found
}

// imports are the chains of imports that begin with p: one for each direct import,
// and, with reach, one for each package reached through this module.
func imports(p pkg, byPath map[string]pkg, reach bool) [][]string {
	var chains [][]string
	seen := map[string]bool{p.ImportPath: true}
	queue := [][]string{{p.ImportPath}}
	for len(queue) > 0 {
		chain := queue[0]
		queue = queue[1:]
		for _, imported := range byPath[chain[len(chain)-1]].Imports {
			if seen[imported] {
				continue
			}
			seen[imported] = true
			next := append(slices.Clone(chain), imported)
			chains = append(chains, next)
			if _, own := byPath[imported]; own && reach {
				queue = append(queue, next)
			}
		}
	}
	return chains
}

func (w wall) forbids(path string) bool {
	match := func(pattern string) bool { return matches(path, pattern) }
	if slices.ContainsFunc(w.except, match) {
		return false
	}
	if len(w.only) > 0 {
		return !slices.ContainsFunc(w.only, match)
	}
	return slices.ContainsFunc(w.deny, match)
}

func matches(path, pattern string) bool {
	first, _, _ := strings.Cut(path, "/")
	switch pattern {
	case std:
		return !strings.Contains(first, ".")
	case ours:
		return strings.HasPrefix(path, module)
	}
	path = strings.TrimPrefix(path, module)
	return path == pattern || strings.HasPrefix(path, pattern+"/")
}

// The walls are worth what their check is worth.
func TestViolations(t *testing.T) {
	pkgs := []pkg{
		{ImportPath: module + "a", Imports: []string{"os", module + "b", "example.org/x"}},
		{ImportPath: module + "b", Imports: []string{"net", "example.org/y/z"}},
	}
	for name, tc := range map[string]struct {
		wall wall
		want []string
	}{
		"denied":             {wall{from: []string{"a"}, deny: []string{"b"}}, []string{"a imports b: "}},
		"not denied":         {wall{from: []string{"a"}, deny: []string{"net"}}, nil},
		"denied by reach":    {wall{from: []string{"a"}, deny: []string{"net"}, reach: true}, []string{"a imports b imports net: "}},
		"below a name":       {wall{from: []string{"b"}, deny: []string{"example.org/y"}}, []string{"b imports example.org/y/z: "}},
		"not a longer name":  {wall{from: []string{"b"}, deny: []string{"example.org/y/zz", "ne"}}, nil},
		"only":               {wall{from: []string{"a"}, only: []string{std, ours}}, []string{"a imports example.org/x: "}},
		"excepted":           {wall{from: []string{"a"}, deny: []string{ours}, except: []string{"b"}}, nil},
		"folder that is not": {wall{from: []string{"c"}, deny: []string{"b"}}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			if got := violations(pkgs, []wall{tc.wall}); !slices.Equal(got, tc.want) {
				t.Errorf("violations = %q, want %q", got, tc.want)
			}
		})
	}
}
