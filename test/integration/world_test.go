package integration

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"golang.org/x/sync/errgroup"

	"github.com/dormouse-run/dormouse/pkg/client"
	"github.com/dormouse-run/dormouse/pkg/errs"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
	"github.com/dormouse-run/dormouse/test/cluster"
	"github.com/dormouse-run/dormouse/test/fabric"
	"github.com/dormouse-run/dormouse/test/images"
	"github.com/dormouse-run/dormouse/test/stack"
)

const mib = 1 << 20

// bound is how long one test may take on a busy machine.
const bound = 4 * time.Minute

// world is what one test has: the cluster, and a tenant of its own.
type world struct {
	*cluster.Cluster
	*testing.T
	ctx    context.Context //nolint:containedctx // of the test, like t.Context
	tenant string
	key    string
	api    *client.Client // as a user of the tenant
}

// enter gives a test its world. When the test ends, all of its tenant is deleted and the nodes are
// searched for what is left.
func enter(t *testing.T) *world {
	t.Helper()
	w := &world{Cluster: up(t), T: t, tenant: tenantOf(t)}
	var err error
	if w.key, err = w.NewAPIKey(w.tenant); err != nil {
		t.Fatal(err)
	}
	if w.api, err = client.Dial(client.Config{Addr: "unix://" + w.GRPCSocket(), APIKey: w.key}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), bound)
	w.ctx = ctx
	t.Cleanup(func() {
		cancel()
		w.leave()
		_ = w.api.Close()
	})
	return w
}

// leave deletes all of the tenant and searches the nodes.
func (w *world) leave() {
	ctx, cancel := context.WithTimeout(context.Background(), bound)
	defer cancel()
	if err := w.deleteAll(ctx); err != nil {
		w.Errorf("deleting what the test made: %v", err)
		return
	}
	var left error
	if err := poll(ctx, func() error { left = w.left(ctx); return left }); err != nil {
		w.Errorf("left behind: %v", left)
	}
}

func (w *world) deleteAll(ctx context.Context) error {
	sandboxes, err := client.Collect(w.api.ListSandboxes(ctx, &dormousev1.ListSandboxesRequest{}))
	if err != nil {
		return err
	}
	if err := each(sandboxes, func(s *dormousev1.Sandbox) error {
		return gone(w.api.Sandbox(s.GetMeta().GetUid()).Delete(ctx, ""))
	}); err != nil {
		return err
	}
	pools, err := client.Collect(w.api.ListPools(ctx, &dormousev1.ListPoolsRequest{}))
	if err != nil {
		return err
	}
	if err := each(pools, func(p *dormousev1.Pool) error { return gone(w.api.Pool(p.GetMeta().GetUid()).Delete(ctx, "")) }); err != nil {
		return err
	}
	templates, err := client.Collect(w.api.ListTemplates(ctx, &dormousev1.ListTemplatesRequest{}))
	if err != nil {
		return err
	}
	if err := each(templates, func(t *dormousev1.Template) error { return gone(w.api.Template(t.GetMeta().GetUid()).Delete(ctx, "")) }); err != nil {
		return err
	}
	snapshots, err := client.Collect(w.api.ListSnapshots(ctx, &dormousev1.ListSnapshotsRequest{}))
	if err != nil {
		return err
	}
	if err := each(snapshots, func(s *dormousev1.Snapshot) error {
		return gone(w.api.Snapshot(s.GetMeta().GetUid()).Delete(ctx, ""))
	}); err != nil {
		return err
	}
	volumes, err := client.Collect(w.api.ListVolumes(ctx, &dormousev1.ListVolumesRequest{}))
	if err != nil {
		return err
	}
	return each(volumes, func(v *dormousev1.Volume) error {
		return gone(w.api.Volume(v.GetMeta().GetUid()).Delete(ctx, ""))
	})
}

// gone takes a deletion that came second for done.
func gone(err error) error {
	if errs.Has(err, errs.ObjectNotFound) || errs.Has(err, errs.StaleUID) {
		return nil
	}
	return err
}

// each calls f for all, a few at a time.
func each[T any](all []T, f func(T) error) error {
	var g errgroup.Group
	g.SetLimit(4)
	for _, v := range all {
		g.Go(func() error { return f(v) })
	}
	return g.Wait()
}

// poll repeats f until it succeeds or the context ends; then f's error is returned.
func poll(ctx context.Context, f func() error) error {
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		err := f()
		if err == nil {
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return errors.Join(err, context.Cause(ctx))
		}
	}
}

// await is poll for a condition of the test.
func (w *world) await(what string, f func() error) {
	w.Helper()
	ctx, cancel := context.WithTimeout(w.ctx, 2*time.Minute)
	defer cancel()
	if err := poll(ctx, f); err != nil {
		w.Fatalf("%s: %v", what, err)
	}
}

func (w *world) ok(err error) {
	w.Helper()
	if err != nil {
		w.Fatal(err)
	}
}

// refused is refusal for who needs no more of the error.
func (w *world) refused(err error, reason errs.Reason) {
	w.Helper()
	_ = w.refusal(err, reason) // checked there
}

// refusal checks that an error has the reason, with the meaning that the reason always has, and says something.
func (w *world) refusal(err error, reason errs.Reason) *errs.Error {
	w.Helper()
	if err == nil {
		w.Fatalf("it worked; want %s", reason)
	}
	var e *errs.Error
	if !errors.As(err, &e) || e.Reason != reason {
		w.Fatalf("got %v; want %s", err, reason)
	}
	want := errs.New(reason, "")
	if e.Code != want.Code || e.Retry != want.Retry || e.Outcome != want.Outcome {
		w.Errorf("%v: %s %s %s; %s always is %s %s %s", e, e.Code, e.Retry, e.Outcome, reason, want.Code, want.Retry, want.Outcome)
	}
	if e.Message == "" || e.RequestID == "" {
		w.Errorf("%v: no message or no request id (%q)", e, e.RequestID)
	}
	return e
}

// ---- images ---------------------------------------------------------------------

// pushed remembers the references of images that several tests use.
var pushed sync.Map

// image pushes an image once and gives its reference by digest.
func (w *world) image(repository string, make func() (v1.Image, error)) string {
	w.Helper()
	if ref, ok := pushed.Load(repository); ok {
		return ref.(string)
	}
	img, err := make()
	w.ok(err)
	reg, err := w.Registry()
	w.ok(err)
	digest, err := reg.Push(w.ctx, repository, img)
	w.ok(err)
	ref := reg.Ref(repository) + "@" + digest
	pushed.Store(repository, ref)
	return ref
}

func (w *world) busybox() string {
	w.Helper()
	return w.image("test/busybox", func() (v1.Image, error) { return images.ReadLayout(images.CachedDir("busybox")) })
}

// subject is the image of the program that proves what it is (package proof).
func (w *world) subject() string {
	w.Helper()
	if ref, ok := pushed.Load("test/subject"); ok {
		return ref.(string)
	}
	ref, err := w.PushSubject(w.ctx, "test/subject")
	w.ok(err)
	pushed.Store("test/subject", ref)
	return ref
}

// ---- objects --------------------------------------------------------------------

// spec is a small sandbox of busybox.
func (w *world) spec(command ...string) *dormousev1.SandboxSpec {
	w.Helper()
	return &dormousev1.SandboxSpec{Image: w.busybox(), Command: command, Resources: &dormousev1.Resources{MemoryLimitBytes: 64 * mib}}
}

func (w *world) create(spec *dormousev1.SandboxSpec) *client.Sandbox {
	w.Helper()
	s, err := w.api.CreateSandbox(w.ctx, &dormousev1.CreateSandboxRequest{Spec: spec})
	w.ok(err)
	return s
}

func (w *world) volume(node string) *client.Volume {
	w.Helper()
	v, err := w.api.CreateVolume(w.ctx, &dormousev1.CreateVolumeRequest{Spec: &dormousev1.VolumeSpec{Node: node}})
	w.ok(err)
	return v
}

func (w *world) checkpoint(s *client.Sandbox) *client.Snapshot {
	w.Helper()
	snap, err := s.Checkpoint(w.ctx, &dormousev1.CheckpointSandboxRequest{})
	w.ok(err)
	return snap
}

// sh runs a shell command in a sandbox and gives its output without the last newline.
func (w *world) sh(s *client.Sandbox, script string) string {
	w.Helper()
	out, err := cluster.Exec(w.ctx, s, "sh", "-c", script)
	w.ok(err)
	return strings.TrimRight(string(out), "\n")
}

// until repeats a shell command in a sandbox until it succeeds and its output, without the last newline, is what is wanted: what the sandbox's own
// command does is not done yet when its start is answered.
func (w *world) until(what string, s *client.Sandbox, script, want string) {
	w.Helper()
	w.await(what, func() error {
		out, err := cluster.Exec(w.ctx, s, "sh", "-c", script)
		if got := strings.TrimRight(string(out), "\n"); err == nil && got != want {
			err = fmt.Errorf("%s says %q, not %q", script, got, want)
		}
		return err
	})
}

func mount(v *client.Volume, path string) *dormousev1.VolumeMount {
	return &dormousev1.VolumeMount{VolumeUid: v.UID, Path: path}
}

// restartAgentd kills the agentd of node i and waits until its successor is in session.
func (w *world) restartAgentd(i int) {
	w.Helper()
	w.ok(w.KillAgentd(w.ctx, i))
	w.ok(w.StartAgentdReady(w.ctx, i))
}

// nodeOf is the number of the node that a sandbox is on.
func (w *world) nodeOf(s *client.Sandbox) int {
	w.Helper()
	var i int
	if _, err := fmt.Sscanf(s.Last.GetStatus().GetNode(), "node-%d", &i); err != nil {
		w.Fatalf("sandbox %s is on node %q", s.UID, s.Last.GetStatus().GetNode())
	}
	return i
}

// ---- what is left -----------------------------------------------------------------

// left says what the nodes still have although nothing is recorded.
func (w *world) left(ctx context.Context) error {
	var all []error
	for i := 1; i <= w.Nodes; i++ {
		all = append(all, w.leftOn(ctx, i))
	}
	all = append(all, leftMounts(w.Dir), leftProcesses(w.Dir), w.leftNamespaces())
	return errors.Join(all...)
}

func (w *world) leftOn(ctx context.Context, i int) error {
	over, err := w.Overview(ctx, i)
	if err != nil {
		return err
	}
	if n := over.GetSandboxes() + over.GetSnapshots() + over.GetVolumes(); n > 0 {
		return fmt.Errorf("node %d records %d sandboxes, %d snapshots, %d volumes", i, over.GetSandboxes(), over.GetSnapshots(), over.GetVolumes())
	}
	found, err := w.Doctor(ctx, i)
	if err != nil {
		return err
	}
	if len(found) > 0 {
		return fmt.Errorf("the doctor of node %d finds %v", i, found)
	}
	for _, dir := range []string{"sandboxes", "snapshots/.staging", "snapshots/.trash", "volumes/volumes", "volumes/staging", "volumes/trash", "runsc/state"} {
		if err := empty(filepath.Join(w.NodeDir(i), dir)); err != nil {
			return err
		}
	}
	for _, dir := range []string{"snapshots", "runsc/launch"} { // beside folders of their own, and files that wait to be records
		kept, err := filepath.Glob(filepath.Join(w.NodeDir(i), dir, "[^.]*"))
		if err != nil || len(kept) > 0 {
			return fmt.Errorf("%s of node %d keeps %v (%w)", dir, i, kept, err)
		}
	}
	return leftCgroups(w.CgroupParent(i))
}

func empty(dir string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) || err == nil && len(entries) == 0 {
		return nil
	}
	return fmt.Errorf("%s holds %v (%w)", dir, entries, err)
}

func leftCgroups(parent string) error {
	for _, pattern := range []string{"/sys/fs/cgroup" + parent + "/*/", "/sys/fs/cgroup/*" + parent + "/*/"} {
		groups, err := filepath.Glob(pattern)
		if err != nil || len(groups) > 0 {
			return fmt.Errorf("control groups %v (%w)", groups, err)
		}
	}
	return nil
}

func leftMounts(dir string) error {
	data, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(data)) {
		if strings.Contains(line, dir+"/") {
			return fmt.Errorf("mount %s", line)
		}
	}
	return nil
}

// leftProcesses finds runsc's processes by their command lines, which name the node's folder.
func leftProcesses(dir string) error {
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		return err
	}
	for _, f := range files {
		data, err := os.ReadFile(f)
		if err != nil {
			continue // it has ended
		}
		line := strings.ReplaceAll(string(data), "\x00", " ")
		if strings.Contains(line, dir+"/") && strings.Contains(line, "runsc") {
			return fmt.Errorf("process %s: %s", filepath.Base(filepath.Dir(f)), line)
		}
	}
	return nil
}

func (w *world) leftNamespaces() error {
	names, err := fabric.List(w.ID)
	if err != nil || len(names) != 1+w.Nodes {
		return fmt.Errorf("network namespaces %v (%w)", names, err)
	}
	return nil
}

// nodesOnline waits until all nodes have a session with the coordinator that leads.
func (w *world) nodesOnline() {
	w.Helper()
	w.await("all nodes online", func() error {
		nodes, err := client.Collect(w.Client.ListNodes(w.ctx))
		if err != nil {
			return err
		}
		online := 0
		for _, n := range nodes {
			if n.GetOnline() {
				online++
			}
		}
		if online != w.Nodes {
			return fmt.Errorf("%d of %d nodes are online", online, w.Nodes)
		}
		return nil
	})
}

// away waits until the coordinator knows that a node's agentd is gone: until then it may still ask it for something.
func (w *world) away(node int) {
	w.Helper()
	w.await("the node is away", func() error {
		n, err := w.Client.GetNode(w.ctx, stack.NodeName(node))
		if err == nil && n.GetOnline() {
			err = errors.New("it is online")
		}
		return err
	})
}

// sub is the world for a subtest: the same tenant, the subtest's own failures.
func (w *world) sub(t *testing.T) *world {
	s := *w
	s.T = t
	return &s
}

// holdNothing checks that besides some sandboxes there are only records of ones that failed, which are on
// no node and have no name, and that no volume is attached to any of these.
func (w *world) holdNothing(but ...*client.Sandbox) {
	w.Helper()
	known := map[string]bool{}
	for _, s := range but {
		known[s.UID] = true
	}
	all, err := client.Collect(w.api.ListSandboxes(w.ctx, &dormousev1.ListSandboxesRequest{}))
	w.ok(err)
	for _, s := range all {
		if !known[s.GetMeta().GetUid()] && (s.GetStatus().GetPhase() != dormousev1.SandboxPhase_SANDBOX_PHASE_FAILED || s.GetStatus().GetNode() != "") {
			w.Errorf("a refused call left %v", s)
		}
	}
	volumes, err := client.Collect(w.api.ListVolumes(w.ctx, &dormousev1.ListVolumesRequest{}))
	w.ok(err)
	for _, v := range volumes {
		for _, a := range v.GetStatus().GetAttachments() {
			if !known[a.GetSandboxUid()] {
				w.Errorf("a refused call left volume %s attached to %s", v.GetMeta().GetUid(), a.GetSandboxUid())
			}
		}
	}
}
