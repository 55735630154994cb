package crash

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/v1/mutate"

	"github.com/dormouse-run/dormouse/pkg/client"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/uid"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
	"github.com/dormouse-run/dormouse/test/cluster"
	"github.com/dormouse-run/dormouse/test/images"
)

const (
	mib = 1 << 20
	// patience is how long one step may take on a busy machine.
	patience = 2 * time.Minute
)

// subject is a program with a memory: for each line in the pipe it says who it is and how often it was asked.
const subject = `mkfifo /tmp/q; exec 3<>/tmp/q; me=$(head -c 9 /dev/urandom | base64); i=0; ` +
	`while read line <&3; do i=$((i+1)); echo "$me $i" >/tmp/b; mv /tmp/b /tmp/a; done`

const ask = `until [ -p /tmp/q ]; do sleep 0.01; done; rm -f /tmp/a; echo x >/tmp/q; until [ -e /tmp/a ]; do sleep 0.01; done; cat /tmp/a`

// world is what a test has: the cluster, a tenant of its own, and what stays while daemons are killed.
type world struct {
	*cluster.Cluster
	*testing.T
	ctx context.Context //nolint:containedctx // of the test, like t.Context
	api *client.Client

	survivor *client.Sandbox
	me       string // who the survivor is
	asked    int
	snapshot *client.Snapshot // of the survivor
	volume   *client.Volume   // of the survivor
	loose    *client.Volume   // of nobody
}

// enter gives a test its world. When the test ends, all of it is deleted and nothing may be left.
func enter(t *testing.T) *world {
	t.Helper()
	w := &world{Cluster: up(t), T: t, ctx: t.Context()}
	name := strings.ToLower(strings.NewReplacer("/", "-", "_", "-").Replace(t.Name()))
	w.api = w.ClientOf(t, name[:min(len(name), 40)])
	t.Cleanup(w.leave)
	w.loose, w.volume = w.newVolume(""), w.newVolume("")
	w.survivor = w.newSandbox(w.volume)
	w.me, w.asked = w.talk(w.survivor)
	var err error
	w.snapshot, err = w.survivor.Checkpoint(w.ctx, &dormousev1.CheckpointSandboxRequest{})
	w.ok(err)
	return w
}

func (w *world) ok(err error) {
	w.Helper()
	if err != nil {
		w.Fatal(err)
	}
}

// await is poll for a condition of the test.
func (w *world) await(what string, f func() error) {
	w.Helper()
	ctx, cancel := context.WithTimeout(w.ctx, patience)
	defer cancel()
	if err := poll(ctx, f); err != nil {
		w.Fatalf("%s: %v", what, err)
	}
}

// sub is the world for a subtest: the same objects, the subtest's own failures.
func (w *world) sub(t *testing.T) *world {
	s := *w
	s.T, s.ctx = t, t.Context()
	return &s
}

// ---- objects --------------------------------------------------------------------

func (w *world) spec(volumes ...*client.Volume) *dormousev1.SandboxSpec {
	s := &dormousev1.SandboxSpec{Image: shared.image, Command: []string{"sh", "-c", subject}, Resources: &dormousev1.Resources{MemoryLimitBytes: 64 * mib}}
	for i, v := range volumes {
		s.Volumes = append(s.Volumes, &dormousev1.VolumeMount{VolumeUid: v.UID, Path: "/data" + strconv.Itoa(i)})
	}
	return s
}

func (w *world) newSandbox(volumes ...*client.Volume) *client.Sandbox {
	w.Helper()
	s, err := w.api.CreateSandbox(w.ctx, &dormousev1.CreateSandboxRequest{Spec: w.spec(volumes...)})
	w.ok(err)
	return s
}

func (w *world) newVolume(source string) *client.Volume {
	w.Helper()
	v, err := w.api.CreateVolume(w.ctx, &dormousev1.CreateVolumeRequest{Spec: &dormousev1.VolumeSpec{SourceVolumeUid: source}})
	w.ok(err)
	return v
}

// newImage pushes an image that no node has, and gives its reference by tag.
func (w *world) newImage() string {
	w.Helper()
	id := uid.New()
	layer, err := images.Layer(images.File("stamp", id, 0o644))
	w.ok(err)
	img, err := mutate.AppendLayers(images.Busybox(w.T), layer)
	w.ok(err)
	registry, err := w.Registry()
	w.ok(err)
	_, err = registry.Push(w.ctx, "crash/"+id, img)
	w.ok(err)
	return registry.Ref("crash/" + id)
}

// talk asks the subject who it is and how often it was asked.
func (w *world) talk(s *client.Sandbox) (me string, asked int) {
	w.Helper()
	w.await("sandbox "+s.UID+" answers", func() error {
		ctx, cancel := context.WithTimeout(w.ctx, 30*time.Second)
		defer cancel()
		out, err := cluster.Exec(ctx, s, "sh", "-c", ask)
		if err != nil {
			return err
		}
		if n, err := fmt.Sscan(string(out), &me, &asked); n != 2 {
			return fmt.Errorf("it says %q: %w", out, err)
		}
		return nil
	})
	return me, asked
}

// lives checks that the survivor is the process that it was, with its memory.
func (w *world) lives() {
	w.Helper()
	me, asked := w.talk(w.survivor)
	if me != w.me || asked <= w.asked {
		w.Fatalf("the survivor is %s, asked %d times; it was %s, asked %d times", me, asked, w.me, w.asked)
	}
	w.asked = asked
}

// ---- what there is --------------------------------------------------------------

// settled checks that catalog and node have exactly what the world keeps, and that the doctor is content.
func (w *world) settled() {
	w.Helper()
	w.await("everything is as recorded", func() error {
		keep := map[string]int{"sandboxes": 1, "snapshots": 1, "volumes": 2}
		if w.survivor == nil {
			keep = map[string]int{}
		}
		return w.holds(keep)
	})
}

func (w *world) holds(keep map[string]int) error {
	ctx, cancel := context.WithTimeout(w.ctx, 30*time.Second)
	defer cancel()
	over, err := w.Overview(ctx, 1)
	if err != nil {
		return err
	}
	has, err := w.recorded(ctx)
	if err != nil {
		return err
	}
	for kind, n := range map[string]int32{"sandboxes": over.GetSandboxes(), "snapshots": over.GetSnapshots(), "volumes": over.GetVolumes()} {
		if int(n) != keep[kind] || has[kind] != keep[kind] {
			return fmt.Errorf("there are to be %d %s; the node has %d, the catalog %d", keep[kind], kind, n, has[kind])
		}
	}
	found, err := w.Doctor(ctx, 1)
	if err != nil || len(found) > 0 {
		return fmt.Errorf("the doctor finds %v (%w)", found, err)
	}
	for _, dir := range []string{"snapshots/.staging", "snapshots/.trash", "volumes/staging", "volumes/trash"} {
		entries, err := os.ReadDir(filepath.Join(w.NodeDir(1), dir))
		if err != nil || len(entries) > 0 {
			return fmt.Errorf("%s holds %v (%w)", dir, entries, err)
		}
	}
	return w.folders(keep)
}

// folders compares what is on the disk and in the kernel.
func (w *world) folders(keep map[string]int) error {
	for pattern, n := range map[string]int{
		w.NodeDir(1) + "/sandboxes/*":         keep["sandboxes"],
		w.NodeDir(1) + "/runsc/launch/[^.]*":  keep["sandboxes"],
		w.NodeDir(1) + "/runsc/state/*.state": keep["sandboxes"],
		w.NodeDir(1) + "/snapshots/[^.]*":     keep["snapshots"],
		w.NodeDir(1) + "/volumes/volumes/*":   keep["volumes"],
		w.LayersDir() + "/holders/*/*":        keep["sandboxes"] + keep["snapshots"],
		w.LayersDir() + "/staging/*":          0,
	} {
		found, err := filepath.Glob(pattern)
		if err != nil {
			return err
		}
		if len(found) != n {
			return fmt.Errorf("%s: %d are to be there, not %v", pattern, n, found)
		}
	}
	// Each hierarchy that is used has a group for each sandbox, and no more.
	for _, pattern := range []string{"/sys/fs/cgroup" + w.CgroupParent(1) + "/*/", "/sys/fs/cgroup/*" + w.CgroupParent(1) + "/*/"} {
		found, err := filepath.Glob(pattern)
		if err != nil {
			return err
		}
		groups := map[string]bool{}
		for _, dir := range found {
			groups[filepath.Base(dir)] = true
		}
		if len(groups) > keep["sandboxes"] {
			return fmt.Errorf("%d control groups are to be there, not %v", keep["sandboxes"], found)
		}
	}
	return nil
}

// recorded counts the tenant's objects.
func (w *world) recorded(ctx context.Context) (map[string]int, error) {
	sandboxes, err1 := client.Collect(w.api.ListSandboxes(ctx, &dormousev1.ListSandboxesRequest{}))
	snapshots, err2 := client.Collect(w.api.ListSnapshots(ctx, &dormousev1.ListSnapshotsRequest{}))
	volumes, err3 := client.Collect(w.api.ListVolumes(ctx, &dormousev1.ListVolumesRequest{}))
	return map[string]int{"sandboxes": len(sandboxes), "snapshots": len(snapshots), "volumes": len(volumes)}, errors.Join(err1, err2, err3)
}

// leave deletes all of the tenant, and nothing may be left.
func (w *world) leave() {
	ctx, cancel := context.WithTimeout(context.Background(), 4*time.Minute)
	defer cancel()
	w.ctx = ctx
	if err := w.deleteAll(ctx, nil); err != nil {
		w.Errorf("deleting what the test made: %v", err)
		return
	}
	w.survivor = nil
	if err := poll(ctx, func() error { return w.holds(nil) }); err != nil {
		w.Errorf("left behind: %v", err)
	}
}

func (w *world) deleteAll(ctx context.Context, keep map[string]bool) error {
	pools, err := client.Collect(w.api.ListPools(ctx, &dormousev1.ListPoolsRequest{}))
	for _, p := range pools {
		err = errors.Join(err, gone(w.api.Pool(p.GetMeta().GetUid()).Delete(ctx, "")))
	}
	templates, listErr := client.Collect(w.api.ListTemplates(ctx, &dormousev1.ListTemplatesRequest{}))
	err = errors.Join(err, listErr)
	for _, t := range templates {
		err = errors.Join(err, gone(w.api.Template(t.GetMeta().GetUid()).Delete(ctx, "")))
	}
	sandboxes, listErr := client.Collect(w.api.ListSandboxes(ctx, &dormousev1.ListSandboxesRequest{}))
	err = errors.Join(err, listErr)
	for _, s := range sandboxes {
		if id := s.GetMeta().GetUid(); !keep[id] {
			err = errors.Join(err, gone(w.api.Sandbox(id).Delete(ctx, "")))
		}
	}
	snapshots, listErr := client.Collect(w.api.ListSnapshots(ctx, &dormousev1.ListSnapshotsRequest{}))
	err = errors.Join(err, listErr)
	for _, s := range snapshots {
		if id := s.GetMeta().GetUid(); !keep[id] {
			err = errors.Join(err, gone(w.api.Snapshot(id).Delete(ctx, "")))
		}
	}
	volumes, listErr := client.Collect(w.api.ListVolumes(ctx, &dormousev1.ListVolumesRequest{}))
	err = errors.Join(err, listErr)
	for _, v := range volumes {
		if id := v.GetMeta().GetUid(); !keep[id] {
			err = errors.Join(err, gone(w.api.Volume(id).Delete(ctx, "")))
		}
	}
	return err
}

// gone takes a deletion that came second for done.
func gone(err error) error {
	if errs.Has(err, errs.ObjectNotFound) || errs.Has(err, errs.StaleUID) || errs.Has(err, errs.ImageNotFound) {
		return nil
	}
	return err
}
