package deletion

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"

	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/snapshot"
	"github.com/dormouse-run/dormouse/pkg/wait"
	nodev1 "github.com/dormouse-run/dormouse/proto/dormouse/node/v1"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
	"github.com/dormouse-run/dormouse/test/stack"
)

// watch stands before each node's API.
type watch struct {
	look func(ctx context.Context, node string, req *nodev1.DeleteSnapshotRequest) error

	mu       sync.Mutex
	going    map[string]int // removals, by node
	most     int
	checked  map[string]bool
	restores chan struct{} // these wait for it; nil: none does
	removals chan struct{}
	waiting  int // restores
	failures []error
}

func newWatch() *watch { return &watch{going: make(map[string]int), checked: make(map[string]bool)} }

// node gives what stands before a node.
func (w *watch) node(name string) grpc.UnaryServerInterceptor {
	return func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
		switch req := req.(type) {
		case *nodev1.RestoreSandboxRequest:
			if err := w.pass(ctx, &w.restores, &w.waiting); err != nil {
				return nil, err
			}
		case *nodev1.DeleteSnapshotRequest:
			return w.removal(ctx, name, req, next)
		}
		return next(ctx, req)
	}
}

func (w *watch) removal(ctx context.Context, node string, req *nodev1.DeleteSnapshotRequest, next grpc.UnaryHandler) (any, error) {
	w.mu.Lock()
	w.going[node]++
	w.most = max(w.most, w.going[node])
	w.mu.Unlock()
	defer func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.going[node]--
	}()
	if err := w.pass(ctx, &w.removals, new(int)); err != nil {
		return nil, err
	}
	resp, err := next(ctx, req)
	if err != nil {
		return resp, err
	}
	looked := w.look(ctx, node, req)
	if ctx.Err() != nil { // whoever asked is dead
		return resp, err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.checked[req.GetUid()] = true
	if looked != nil {
		w.failures = append(w.failures, looked)
	}
	return resp, err
}

// idle tells whether a node is removing something.
func (w *watch) idle() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	for node, n := range w.going {
		if n > 0 {
			return fmt.Errorf("node %s removes %d", node, n)
		}
	}
	return nil
}

func (w *watch) figures() (most, checked int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.most, len(w.checked)
}

func (w *watch) failed() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	all := w.failures
	if w.most > Width {
		all = append(all, fmt.Errorf("a node was asked for %d removals at a time, more than %d", w.most, Width))
	}
	return errors.Join(all...)
}

// hold has restores wait at their nodes, stall removals.
func (w *watch) hold()    { w.shut(&w.restores) }
func (w *watch) release() { w.open(&w.restores) }
func (w *watch) stall()   { w.shut(&w.removals) }
func (w *watch) goOn()    { w.open(&w.removals) }

func (w *watch) shut(gate *chan struct{}) {
	w.mu.Lock()
	defer w.mu.Unlock()
	*gate = make(chan struct{})
}

func (w *watch) open(gate *chan struct{}) {
	w.mu.Lock()
	defer w.mu.Unlock()
	close(*gate)
	*gate = nil
}

// pass waits until the gate is open.
func (w *watch) pass(ctx context.Context, gate *chan struct{}, waiting *int) error {
	w.mu.Lock()
	wait := *gate
	*waiting++
	w.mu.Unlock()
	defer func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		*waiting--
	}()
	if wait == nil {
		return nil
	}
	select {
	case <-wait:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// held tells whether so many restores wait.
func (w *watch) held(n int) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.waiting != n {
		return fmt.Errorf("%d restores wait", w.waiting)
	}
	return nil
}

// look looks at a node's disk and at the catalog when the node has removed an artefact and has not said so: it is gone, and its record is there, so that nothing
// else can have taken its place.
func (r *run) look(ctx context.Context, node string, req *nodev1.DeleteSnapshotRequest) error {
	key := catalog.Key{Tenant: req.GetCommand().GetTenant(), Kind: catalog.KindSnapshot, UID: req.GetUid()}
	rec, err := r.store.Get(ctx, key)
	if err != nil || rec.Phase != string(snapshot.Deleting) {
		return fmt.Errorf("node %s removed snapshot %s, whose record is %q: %w", node, key.UID, rec.Phase, err)
	}
	for i := 1; i <= r.Options.Nodes; i++ {
		if stack.NodeName(i) != node {
			continue
		}
		for _, below := range []string{"", ".staging", ".trash"} {
			if _, err := os.Lstat(filepath.Join(r.Disk(i), "snapshots", below, key.UID)); !errors.Is(err, fs.ErrNotExist) {
				return fmt.Errorf("node %s says that it removed snapshot %s, and has it in %q: %w", node, key.UID, below, err)
			}
		}
	}
	return nil
}

// ---- what an operator sees --------------------------------------------------------

func pending(st *dormousev1.CatalogStatus) *dormousev1.DeletionProgress {
	for _, d := range st.GetDeletions() {
		if d.GetKind() == string(catalog.KindSnapshot) {
			return d
		}
	}
	return nil
}

// progress looks at the status until it is over.
func (r *run) progress(ctx context.Context, over <-chan struct{}) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-over:
			return nil
		default:
		}
		if st, err := r.Client.CatalogStatus(ctx); err == nil { // else nobody leads
			d := pending(st)
			r.figures.Pending, r.figures.Active = max(r.figures.Pending, int(d.GetPending())), max(r.figures.Active, int(d.GetActive()))
			if most := Width * r.Options.Nodes; int(d.GetActive()) > most {
				return fmt.Errorf("%d deletions are active, with %d turns", d.GetActive(), most)
			}
		}
		if wait.For(ctx, 20*time.Millisecond) != nil {
			return nil
		}
	}
}

// seen looks, while many are pending and none ends, at what the command line and the metrics say.
func (r *run) seen(ctx context.Context) error {
	metric := r.measured(ctx)
	if r.figures.Seen = r.said(ctx); r.figures.Seen == "" || metric == "" {
		return fmt.Errorf("progress is not visible: the command line says %q, the metrics %q", r.figures.Seen, metric)
	}
	return nil
}

// said is the line of the command line about snapshots that are being deleted; "" while there are none or nobody leads.
func (r *run) said(ctx context.Context) string {
	cmd := exec.CommandContext(ctx, filepath.Join(r.Bin, "dormouse"), "admin", "catalog", "status")
	cmd.Env = append(os.Environ(), r.Env()...)
	out, err := cmd.Output()
	if err != nil {
		return ""
	}
	for line := range strings.Lines(string(out)) {
		if strings.HasPrefix(line, "Deleting:") && strings.Contains(line, " snapshots,") && !strings.Contains(line, " 0 snapshots,") {
			return strings.TrimSpace(strings.TrimPrefix(line, "Deleting:"))
		}
	}
	return ""
}

// measured is the line of the metrics about them.
func (r *run) measured(ctx context.Context) string {
	var text strings.Builder
	if err := stack.FetchAdmin(ctx, r.AdminSocket(), "/metrics", &text); err != nil {
		return ""
	}
	for line := range strings.Lines(text.String()) {
		if n, ok := strings.CutPrefix(line, `dormouse_catalog_deletions_pending{kind="snapshot"} `); ok && strings.TrimSpace(n) != "0" {
			return strings.TrimSpace(line)
		}
	}
	return ""
}
