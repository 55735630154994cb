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
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/uid"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
	"github.com/dormouse-run/dormouse/test/cluster"
)

// disk is a file system of the test's own at a folder of the node. It is in memory, supports O_DIRECT, and
// takes only what is written to it from the machine.
type disk struct {
	*testing.T
	at string
}

const roomy = "size=4g,nr_inodes=100000"

// without runs change while the node, which has nothing, is without its agentd.
func without(t *testing.T, c *cluster.Cluster, change func() error) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), patience)
	defer cancel()
	err := c.StopAgentd(ctx, 1)
	return errors.Join(err, change(), c.StartAgentdReady(ctx, 1))
}

// artefactDisk puts a disk at the folder of the snapshots, until the test ends. Call it before enter.
func artefactDisk(t *testing.T) *disk {
	t.Helper()
	c := up(t)
	d := &disk{t, filepath.Join(c.NodeDir(1), "snapshots")}
	t.Cleanup(func() {
		if err := without(t, c, func() error { return unmount(d.at) }); err != nil {
			t.Errorf("taking the disk away: %v", err)
		}
	})
	if err := without(t, c, func() error { return unix.Mount("tmpfs", d.at, "tmpfs", 0, roomy+",mode=0700") }); err != nil {
		t.Fatal(err)
	}
	return d
}

// stateDisk moves the whole state of the node to a disk, until the test ends. containerd, which has its folder
// in there and runs, keeps the folder that it has. Call it before enter.
func stateDisk(t *testing.T) *disk {
	t.Helper()
	c := up(t)
	d := &disk{t, c.NodeDir(1)}
	other := filepath.Join(c.Dir, "other-disk")
	inner := filepath.Join(d.at, "containerd")
	t.Cleanup(func() {
		// What was there before is there again: a node that has nothing either.
		if err := without(t, c, func() error { return errors.Join(unmount(inner), unmount(d.at), os.RemoveAll(other)) }); err != nil {
			t.Errorf("taking the disk away: %v", err)
		}
	})
	err := without(t, c, func() error {
		if err := os.Mkdir(other, 0o700); err != nil {
			return err
		}
		if err := unix.Mount("tmpfs", other, "tmpfs", 0, roomy+",mode=0700"); err != nil {
			return err
		}
		entries, err := os.ReadDir(d.at)
		if err != nil {
			return err
		}
		for _, e := range entries {
			if e.Name() == filepath.Base(inner) {
				err = os.Mkdir(filepath.Join(other, e.Name()), 0o700)
			} else if e.Type() != os.ModeSocket {
				err = exec.CommandContext(t.Context(), "cp", "-a", filepath.Join(d.at, e.Name()), other).Run()
			}
			if err != nil {
				return errors.Join(fmt.Errorf("moving %s: %w", e.Name(), err), unmount(other))
			}
		}
		if err := unix.Mount(inner, filepath.Join(other, filepath.Base(inner)), "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
			return errors.Join(err, unmount(other))
		}
		return unix.Mount(other, d.at, "", unix.MS_MOVE, "")
	})
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// unmount takes away what is mounted at the folder, if anything is. What has just ended may still hold it.
func unmount(at string) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	err := poll(ctx, func() error {
		if err := unix.Unmount(at, unix.UMOUNT_NOFOLLOW); !errors.Is(err, unix.EINVAL) {
			return err
		}
		return nil // nothing is mounted there
	})
	if err != nil {
		return fmt.Errorf("unmount %s: %w", at, errors.Join(err, unix.Unmount(at, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)))
	}
	return nil
}

// limit gives the disk so much room besides what is used.
func (d *disk) limit(bytes, inodes uint64) {
	d.Helper()
	ctx, cancel := context.WithTimeout(d.Context(), patience)
	defer cancel()
	// Who writes meanwhile makes the kernel refuse; then it is as full as that.
	err := poll(ctx, func() error {
		var st unix.Statfs_t
		if err := unix.Statfs(d.at, &st); err != nil {
			return err
		}
		size := (st.Blocks-st.Bfree)*uint64(st.Bsize) + bytes
		return unix.Mount("tmpfs", d.at, "tmpfs", unix.MS_REMOUNT, fmt.Sprintf("size=%d,nr_inodes=%d", size, st.Files-st.Ffree+inodes))
	})
	if err != nil {
		d.Fatal(err)
	}
}

func (d *disk) room() {
	d.Helper()
	if err := unix.Mount("tmpfs", d.at, "tmpfs", unix.MS_REMOUNT, roomy); err != nil {
		d.Fatal(err)
	}
}

// full checks that an error says that the disk is full, and what to do.
func (w *world) full(what string, err error) {
	w.Helper()
	var e *errs.Error
	if !errors.As(err, &e) || e.Reason != errs.DiskFull {
		w.Fatalf("%s on a full disk: %v", what, err)
	}
}

// fullNode is full for what is placed: the node says DISK_FULL, or its heartbeat came first and the
// coordinator asks no node whose disk is full.
func (w *world) fullNode(what string, err error) {
	w.Helper()
	var e *errs.Error
	if errors.As(err, &e) && e.Reason == errs.NoNodeFits && strings.Contains(e.Message, "DiskPressure") {
		return
	}
	w.full(what, err)
}

// onlyThat checks that the snapshots' folder has the world's own and nothing half done.
func (w *world) onlyThat() {
	w.Helper()
	for pattern, n := range map[string]int{"[^.]*": 1, ".staging/*": 0, ".trash/*": 0} {
		if found, err := filepath.Glob(filepath.Join(w.NodeDir(1), "snapshots", pattern)); err != nil || len(found) != n {
			w.Fatalf("a checkpoint that failed left %v (%v)", found, err)
		}
	}
}

// A checkpoint that the disk has no room for fails with the reason; its source goes on, nothing is left of it.
func TestB05ArtefactDiskFull(t *testing.T) {
	d := artefactDisk(t)
	w := enter(t)
	fails := func(id string) (details map[string]string) {
		t.Helper()
		_, err := w.survivor.Checkpoint(w.ctx, &dormousev1.CheckpointSandboxRequest{OperationId: id})
		w.full("a checkpoint", err)
		w.onlyThat()
		w.lives()
		return errs.From(err).Details
	}
	d.limit(4*mib, 1000) // far below what is kept free
	id := uid.New()
	said := fails(id)
	asked, err1 := strconv.ParseInt(said["asked"], 10, 64)
	left, err2 := strconv.ParseInt(said["left"], 10, 64)
	if err1 != nil || err2 != nil || asked <= left {
		t.Errorf("refused with asked %q and left %q", said["asked"], said["left"])
	}
	d.room()
	_ = fails(id) // what an operation came to is its answer
	w.settled()

	// Room by the look of it, but no file more can be made: at each of the files in turn.
	for n := uint64(0); ; n++ {
		d.limit(2<<30, n)
		snap, err := w.survivor.Checkpoint(w.ctx, &dormousev1.CheckpointSandboxRequest{OperationId: uid.New()})
		if err == nil {
			if n < 4 {
				t.Fatalf("a checkpoint was made with room for %d files", n)
			}
			w.ok(snap.Delete(w.ctx, ""))
			break
		}
		w.full(fmt.Sprintf("a checkpoint with room for %d files", n), err)
		w.onlyThat()
		w.lives()
	}
	d.room()
	o := capture(w)
	w.ok(w.insist(o.run))
	o.check()
	o.clean()
	w.settled()
}

// A full state disk: what needs room is refused, what runs goes on, what makes room may be done.
func TestF10StateDiskFull(t *testing.T) {
	d := stateDisk(t)
	w := enter(t)
	doomed := w.newSandbox()
	snap, err := w.survivor.Checkpoint(w.ctx, &dormousev1.CheckpointSandboxRequest{})
	w.ok(err)
	d.limit(0, 1000)
	// What failed is to be undone, and what is to go is to be recorded as going: where the disk does not let that be done
	// either, the call says at its deadline that its operation id will tell.
	type call struct {
		what string
		ask  func(ctx context.Context) error
	}
	var calls []call
	for n := range 3 {
		req := &dormousev1.CreateSandboxRequest{OperationId: uid.New(), Spec: w.spec()}
		calls = append(calls, call{fmt.Sprintf("a create (%d)", n), func(ctx context.Context) error { _, err := w.api.CreateSandbox(ctx, req); return err }})
	}
	capture := &dormousev1.CheckpointSandboxRequest{OperationId: uid.New()}
	calls = append(calls, call{"a checkpoint", func(ctx context.Context) error { _, err := w.survivor.Checkpoint(ctx, capture); return err }})
	// These come last: they make room, with which the others may go well.
	for what, del := range map[string]func(context.Context, string) error{"a sandbox": doomed.Delete, "a snapshot": snap.Delete} {
		id := uid.New()
		calls = append(calls, call{"the deletion of " + what, func(ctx context.Context) error { return gone(del(ctx, id)) }})
	}
	for _, c := range calls {
		ctx, cancel := context.WithTimeout(w.ctx, 2*time.Second)
		err := c.ask(ctx)
		cancel()
		var e *errs.Error
		late := errors.As(err, &e) && e.Reason == errs.DeadlineExpired && e.Retry == errs.SameOperation
		if !late && (err != nil || !strings.HasPrefix(c.what, "the deletion")) {
			w.fullNode(c.what, err)
		}
		w.lives()
	}
	// An agentd that is started now serves, or says why it does not.
	w.ok(w.KillAgentd(w.ctx, 1))
	if err := w.StartAgentdReady(w.ctx, 1); err == nil {
		w.lives()
	} else if !strings.Contains(err.Error(), "the disk is full: free some room") {
		t.Errorf("an agentd on a full disk ended with %v", err)
	}
	d.room()
	w.ok(w.KillAgentd(w.ctx, 1))
	w.restart(agentd)
	w.online()
	w.lives()
	for _, c := range calls {
		var e *errs.Error
		if err := w.insist(c.ask); err != nil && (!errors.As(err, &e) || !e.IsAnswer() && e.Retry != errs.Never) {
			t.Errorf("%s, asked again: %v", c.what, err)
		}
	}
	w.ok(w.deleteAll(w.ctx, map[string]bool{w.survivor.UID: true, w.snapshot.UID: true, w.volume.UID: true, w.loose.UID: true}))
	w.drop(w.newSandbox())
	w.settled()
}

// A state disk that became read-only: agentd says so, running or started; sandboxes go on.
func TestF10StateDiskReadOnly(t *testing.T) {
	w := enter(t)
	node := w.NodeDir(1)
	writable := func() {
		if err := unmount(node); err != nil {
			t.Error(err)
		}
	}
	mounted := false
	t.Cleanup(func() {
		if mounted {
			writable()
			if !w.Running(agentd) {
				w.ctx = context.WithoutCancel(w.ctx)
				w.restart(agentd)
			}
		}
	})
	// As after an error of the disk, all that is written by name fails, and what is open is as it was. The
	// machine would refuse to do it to the file system itself, because files are open for writing.
	w.ok(unix.Mount(node, node, "", unix.MS_BIND, ""))
	mounted = true
	w.ok(unix.Mount(node, node, "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY, ""))
	// A create that failed is to be undone, which the disk does not let be done either: so the call says at its
	// deadline that its operation id will tell, and does once the disk is well.
	create := &dormousev1.CreateSandboxRequest{OperationId: uid.New(), Spec: w.spec()}
	checkpoint := &dormousev1.CheckpointSandboxRequest{OperationId: uid.New()}
	calls := map[string]func(ctx context.Context) error{
		"a create":     func(ctx context.Context) error { _, err := w.api.CreateSandbox(ctx, create); return err },
		"a checkpoint": func(ctx context.Context) error { _, err := w.survivor.Checkpoint(ctx, checkpoint); return err },
	}
	for what, call := range calls {
		ctx, cancel := context.WithTimeout(w.ctx, 2*time.Second)
		err := call(ctx)
		cancel()
		var e *errs.Error
		if !errors.As(err, &e) || !strings.Contains(e.Message, "read-only") && (e.Reason != errs.DeadlineExpired || e.Retry != errs.SameOperation) {
			t.Errorf("%s on a read-only disk: %v", what, err)
		}
	}
	w.lives()
	w.ok(w.KillAgentd(w.ctx, 1))
	err := w.StartAgentd(w.ctx, 1, func(context.Context) error { return errors.New("it is not to be ready") })
	if err == nil || !strings.Contains(err.Error(), "the disk is read-only") || !strings.Contains(err.Error(), node) {
		t.Errorf("an agentd on a read-only disk ended with %v", err)
	}
	w.ok(w.KillAgentd(w.ctx, 1))
	writable()
	mounted = false
	w.restart(agentd)
	w.online()
	w.lives()
	for what, call := range calls {
		ctx, cancel := context.WithTimeout(w.ctx, patience)
		if err := call(ctx); errs.Has(err, errs.DeadlineExpired) {
			t.Errorf("%s has no end once the disk is writable: %v", what, err)
		}
		cancel()
	}
	w.ok(w.deleteAll(w.ctx, map[string]bool{w.survivor.UID: true, w.snapshot.UID: true, w.volume.UID: true, w.loose.UID: true}))
	w.drop(w.newSandbox())
	w.settled()
}
