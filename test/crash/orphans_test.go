package crash

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"

	goredis "github.com/redis/go-redis/v9"

	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/client"
	"github.com/dormouse-run/dormouse/pkg/uid"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
	"github.com/dormouse-run/dormouse/test/stack"
)

// An orphan is what a node has because it came back with an older disk: it was deleted since. A daemon dies while the coordinator has it
// removed. What is done meanwhile is nobody's operation, so the next look has to find it again.

// deleted is what will be an orphan.
type deleted struct {
	kind catalog.Kind
	uid  string
	drop func(ctx context.Context) error
	// files are those on the disk that are of it, as patterns.
	files []string
}

func aSnapshot(w *world) deleted {
	snap, err := w.survivor.Checkpoint(w.ctx, &dormousev1.CheckpointSandboxRequest{})
	w.ok(err)
	return deleted{catalog.KindSnapshot, snap.UID, func(ctx context.Context) error { return snap.Delete(ctx, "") }, []string{
		w.NodeDir(1) + "/snapshots/" + snap.UID, w.LayersDir() + "/holders/*/" + snap.UID + "*"}}
}

func aVolume(w *world) deleted {
	v := w.newVolume("")
	return deleted{catalog.KindVolume, v.UID, func(ctx context.Context) error { return v.Delete(ctx, "") }, []string{w.NodeDir(1) + "/volumes/*/" + v.UID}}
}

func aSandbox(w *world) deleted {
	s := w.newSandbox()
	return deleted{catalog.KindSandbox, s.UID, func(ctx context.Context) error { return s.Delete(ctx, "") }, []string{
		w.NodeDir(1) + "/sandboxes/" + s.UID, w.NodeDir(1) + "/runsc/*/" + s.UID + "*", w.LayersDir() + "/holders/*/" + s.UID + "*"}}
}

// orphan has the daemon die while something is removed that was deleted. With traced its tombstone is forgotten, as after a week, and
// the proof is in the node's own journal. The other daemon is away until the row begins.
func orphan(daemon string, of func(*world) deleted, traced bool) scenario {
	return func(w *world) operation {
		thing := of(w)
		source := w.newSandbox()
		kept, err := source.Checkpoint(w.ctx, &dormousev1.CheckpointSandboxRequest{})
		w.ok(err)
		w.drop(source)
		w.ok(w.StopAgentd(w.ctx, 1))
		putBack := w.kept(w.TempDir(), append(thing.files, filepath.Join(w.NodeDir(1), "state.db"))...)
		w.ok(w.StartAgentdReady(w.ctx, 1))
		w.ok(thing.drop(w.ctx))
		_, err = w.journaled(w.ctx)
		w.ok(err)
		if traced {
			w.forget(thing)
		}
		w.ok(w.StopAgentd(w.ctx, 1))
		putBack()
		begin := func(ctx context.Context) error {
			return w.StartAgentd(ctx, 1, func(context.Context) error { return nil })
		}
		if daemon == agentd {
			w.ok(w.StopCoordinator(w.ctx))
			w.ok(w.StartAgentd(w.ctx, 1, func(ctx context.Context) error { _, err := w.Overview(ctx, 1); return err }))
			begin = w.StartCoordinatorReady
		}
		return operation{
			run: func(ctx context.Context) error {
				if begin != nil {
					if err := begin(ctx); err != nil {
						return err
					}
					begin = nil
				}
				return w.absent(thing)
			},
			check: func() {
				w.await("nothing is left alone", func() error {
					st, err := w.Client.CatalogStatus(w.ctx)
					if o := st.GetOrphans(); err == nil && (o.GetHeld() != 0 || o.GetUnreadNodes() != 0) {
						err = fmt.Errorf("orphans: %v", o)
					}
					return err
				})
				found, err := client.Collect(w.Client.VerifyCatalog(w.ctx))
				w.ok(err)
				for _, f := range found {
					w.Errorf("different: %v", f)
				}
				// What has a record is whole.
				s, err := kept.Restore(w.ctx, &dormousev1.RestoreSandboxRequest{})
				w.ok(err)
				w.answers(s)
				w.drop(s)
			},
			clean: func() { w.ok(gone(kept.Delete(w.ctx, ""))) },
		}
	}
}

// absent tells whether files and record are gone.
func (w *world) absent(thing deleted) error {
	for _, pattern := range thing.files {
		found, err := filepath.Glob(pattern)
		if err != nil || len(found) > 0 {
			return fmt.Errorf("there are %v (%w)", found, err)
		}
	}
	return nil
}

// kept copies what patterns match to a folder, and gives what puts it back.
func (w *world) kept(folder string, patterns ...string) (putBack func()) {
	w.Helper()
	var all []string
	for _, pattern := range patterns {
		found, err := filepath.Glob(pattern)
		w.ok(err)
		if len(found) == 0 {
			w.Fatalf("nothing matches %s", pattern)
		}
		all = append(all, found...)
	}
	copied := func(from, to string) {
		w.Helper()
		if out, err := exec.CommandContext(w.ctx, "cp", "-aT", from, to).CombinedOutput(); err != nil {
			w.Fatalf("cp %s %s: %v: %s", from, to, err, out)
		}
	}
	aside := func(i int) string { return filepath.Join(folder, strconv.Itoa(i)) }
	for i, path := range all {
		copied(path, aside(i))
	}
	return func() {
		w.Helper()
		for i, path := range all {
			copied(aside(i), path)
		}
	}
}

// forget takes a tombstone out of the catalog, as retention does.
func (w *world) forget(thing deleted) {
	w.Helper()
	store := goredis.NewClient(&goredis.Options{Network: "unix", Addr: w.RedisSocket()})
	defer func() { w.ok(store.Close()) }()
	keys, err := store.Keys(w.ctx, "*:t:*/"+string(thing.kind)).Result()
	w.ok(err)
	var gone int64
	for _, key := range keys {
		n, err := store.ZRemRangeByLex(w.ctx, key, "["+thing.uid, "("+thing.uid+"\xff").Result()
		w.ok(err)
		gone += n
	}
	if gone != 1 {
		w.Fatalf("%d tombstones of %s were forgotten", gone, thing.uid)
	}
}

// fixing has the doctor remove what no record names: the folder of a sandbox and its hold of an image, another's folder, and what a capture left.
func fixing(w *world) operation {
	one, two, three := uid.New(), uid.New(), uid.New()
	files, err := filepath.Glob(w.LayersDir() + "/holders/*")
	w.ok(err)
	if len(files) == 0 {
		w.Fatal("no image is held")
	}
	for _, dir := range []string{"sandboxes/" + one + "/stdio", "sandboxes/" + two, "snapshots/.staging/" + three, "snapshots/.trash/" + three} {
		w.ok(os.MkdirAll(filepath.Join(w.NodeDir(1), dir), 0o700))
	}
	w.ok(os.WriteFile(filepath.Join(files[0], one+"@"+stack.NodeName(1)), []byte("{}"), 0o600))
	found, err := w.Doctor(w.ctx, 1)
	w.ok(err)
	if len(found) < 4 {
		w.Fatalf("the doctor finds %v", found)
	}
	return operation{
		run: func(ctx context.Context) error {
			found, err := w.Fix(ctx, 1)
			for _, f := range found {
				if !f.GetFixed() {
					err = errors.Join(err, fmt.Errorf("not removed: %v", f))
				}
			}
			return err
		},
		check: func() {
			found, err := w.Doctor(w.ctx, 1)
			w.ok(err)
			for _, f := range found {
				w.Errorf("it is there still: %v", f)
			}
		},
		clean: func() {},
	}
}

// orphanRows are the deaths of a daemon while what has no record is removed.
func orphanRows() (all []row) {
	add := func(daemon, name string, do scenario, points ...string) {
		for _, p := range points {
			// Nobody waits for what the coordinator does last.
			all = append(all, row{name: name, daemon: daemon, do: do, points: strings.Split(p, "+"), late: true})
		}
	}
	add(agentd, "orphan-snapshot", orphan(agentd, aSnapshot, false), "snapshot.intent.after", "snapshot.trash.after", "snapshot.artefact.after", "snapshot.image.after",
		"snapshot.record.after", "command.keep.before", "command.keep.after", "snapshot.intent.after+snapshot.trash.after+recover.snapshot.after")
	add(agentd, "orphan-volume", orphan(agentd, aVolume, false), "volume.trash.before", "volume.trash.after", "volume.emptied.after", "volume.forget.after", "command.keep.before")
	add(agentd, "orphan-sandbox", orphan(agentd, aSandbox, false), "delete.intent.before", "delete.intent.after", "delete.runtime.after", "delete.folder.before", "delete.folder.after",
		"delete.image.after", "delete.record.after", "command.keep.before", "delete.intent.after+delete.runtime.after+recover.sandbox.after")
	add(agentd, "orphan-traced", orphan(agentd, aSnapshot, true), "snapshot.intent.after", "snapshot.artefact.after", "snapshot.record.after", "command.keep.before")
	add(agentd, "doctor-fix", fixing, "doctor.fix.before", "doctor.fix.after", "doctor.fix.after#2", "delete.folder.before", "delete.folder.after", "image.release.after",
		"snapshot.trash.after", "doctor.fix.after+doctor.fix.before")
	for _, of := range []struct {
		name   string
		do     func(*world) deleted
		traced bool
	}{{"orphan-snapshot", aSnapshot, false}, {"orphan-volume", aVolume, false}, {"orphan-sandbox", aSandbox, false}, {"orphan-traced", aSnapshot, true}} {
		points := []string{"orphan.proof.after", "orphan.remove.before", "orphan.remove.after", "orphan.event.after", "orphan.proof.after+orphan.remove.before"}
		if of.traced {
			points = append(points, "orphan.suspect.after", "orphan.suspect.after+orphan.suspect.after+orphan.proof.after")
		}
		add(coordinator, of.name, orphan(coordinator, of.do, of.traced), points...)
	}
	add(coordinator, "given-up-drop", givenUp(false), "orphan.remove.before", "orphan.remove.after", "orphan.event.after")
	add(coordinator, "given-up-adopt", givenUp(true), "orphan.adopt.before", "orphan.adopt.after", "orphan.adopt.before+orphan.adopt.after")
	add(agentd, "given-up-drop", givenUp(false), "volume.trash.before", "volume.trash.after", "volume.forget.after", "command.keep.before")
	return all
}

// givenUp has a daemon die while an operator drops, or adopts, what a repair went on without: a volume that only the node knew, which was away. Orphans are
// looked for all the time meanwhile, and it is none of theirs.
func givenUp(adopt bool) scenario {
	return func(w *world) operation {
		kept := filepath.Join(w.TempDir(), "redis")
		w.ok(w.KillRedis(w.ctx))
		w.ok(w.CopyRedis(kept))
		w.ok(w.StartRedis(w.ctx))
		w.online()
		thing := aVolume(w)
		before, err := w.journaled(w.ctx)
		w.ok(err)
		w.ok(w.StopAgentd(w.ctx, 1))
		w.ok(w.KillRedis(w.ctx))
		w.ok(w.RewindRedis(kept))
		w.ok(w.StartRedis(w.ctx))
		w.await("it goes on without the node", func() error {
			st, err := w.Client.CatalogStatus(w.ctx)
			if err != nil || st.GetSuspended() == nil && st.GetHead().GetIncarnation() != before {
				return err
			}
			_, err = w.Client.RepairCatalog(w.ctx, true, stack.NodeName(1))
			return errors.Join(err, errors.New("it is not in service yet"))
		})
		w.ok(w.StartAgentdReady(w.ctx, 1))
		w.online()
		_, err = w.journaled(w.ctx)
		w.ok(err)
		return operation{
			run: func(ctx context.Context) error {
				if adopt {
					_, err := w.Client.AdoptOrphan(ctx, stack.NodeName(1), thing.uid)
					return err
				}
				_, err := w.Client.DropOrphan(ctx, stack.NodeName(1), thing.uid, false)
				return err
			},
			check: func() {
				w.online()
				if err := w.absent(thing); adopt == (err == nil) {
					w.Errorf("adopted %v: %v", adopt, err)
				}
				if adopt {
					w.ok(thing.drop(w.ctx))
				}
				w.await("nothing differs", func() error {
					found, err := client.Collect(w.Client.VerifyCatalog(w.ctx))
					if err == nil && len(found) > 0 {
						err = fmt.Errorf("different: %v", found)
					}
					return err
				})
			},
			clean: func() {},
		}
	}
}
