package bench

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/dormouse-run/dormouse/pkg/client"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// The subject of captures and restores.
const (
	heapMiB, fileMiB = 64, 32
	captured         = 20
)

// benchCheckpoint compares the checkpoint of many sandboxes at once with as many runsc checkpoint on the
// same sandboxes, and tells how long one stands still.
func benchCheckpoint(ctx context.Context, b *bench) ([]Row, error) {
	all, err := b.filled(ctx, captured, heapMiB, fileMiB)
	if err != nil {
		return nil, err
	}
	floor, err := b.newBare(all[0].UID)
	if err != nil {
		return nil, err
	}
	var product, its, durable, throughput, disk, freezes, bareFreezes, crowded, whole Sample
	for range b.times(3) {
		snaps, took, err := b.checkpointAll(ctx, all)
		if err != nil {
			return nil, err
		}
		product.add(took)
		var bytes int64
		for _, s := range snaps {
			bytes += s.Last.GetStatus().GetSizeBytes()
			crowded.add(s.Last.GetStatus().GetFreeze().AsDuration())
		}
		throughput = append(throughput, float64(bytes)/1e6/took.Seconds())
		if err := b.dropSnapshots(ctx, snaps); err != nil {
			return nil, err
		}
		said, synced, err := b.bareCheckpoints(ctx, floor, all)
		if err != nil {
			return nil, err
		}
		its.add(said)
		durable.add(synced)
		if took, err = writeDirect(ctx, filepath.Join(floor.Dir, "dd"), bytes); err != nil {
			return nil, err
		}
		disk = append(disk, float64(bytes)/1e6/took.Seconds())
	}
	for range b.times(12) {
		began := time.Now()
		snap, err := all[0].Checkpoint(ctx, &dormousev1.CheckpointSandboxRequest{})
		if err != nil {
			return nil, err
		}
		whole.add(time.Since(began))
		freezes.add(snap.Last.GetStatus().GetFreeze().AsDuration())
		if err := snap.Delete(ctx, ""); err != nil {
			return nil, err
		}
		took, err := b.bareFreeze(ctx, floor, all[0])
		if err != nil {
			return nil, err
		}
		bareFreezes.add(took)
	}
	rows := []Row{
		ratio(fmt.Sprintf("checkpoint of %d sandboxes with %d MiB heap + %d MiB file, wall; bare: all at once, default `runsc checkpoint`, not synced", captured, heapMiB, fileMiB), product, its, 0.4),
		ratio("the same; bare until its files are on the disk, as ours are", product, durable, 0),
		{What: "the same, save + sync throughput; bare: `dd oflag=direct bs=1M` of as many bytes", Product: megabytes(throughput), Bare: megabytes(disk),
			Value: throughput.Median() / disk.Median(), Unit: "x", AtLeast: 1},
		{What: "freeze of each of them", Product: times(crowded), Value: crowded.Median(), Unit: "ms"},
		{What: "freeze while one is checkpointed and goes on; bare: runsc pause, checkpoint -direct, resume", Product: times(freezes), Bare: times(bareFreezes), Value: freezes.Median(), Unit: "ms", AtMost: 250},
		{What: "its whole checkpoint through the API", Product: times(whole), Value: whole.Median(), Unit: "ms"},
	}
	return rows, deleteAll(ctx, all)
}

func megabytes(s Sample) string { return fmt.Sprintf("%.0f MB/s", s.Median()) }

// checkpointAll captures all sandboxes at once through the API.
func (b *bench) checkpointAll(ctx context.Context, all []*client.Sandbox) ([]*client.Snapshot, time.Duration, error) {
	snaps := make([]*client.Snapshot, len(all))
	took, err := inParallel(ctx, len(all), len(all), func(ctx context.Context, i int) (err error) {
		snaps[i], err = all[i].Checkpoint(ctx, &dormousev1.CheckpointSandboxRequest{})
		return err
	})
	return snaps, took, err
}

func (b *bench) dropSnapshots(ctx context.Context, all []*client.Snapshot) error {
	group, gctx := errgroup.WithContext(ctx)
	group.SetLimit(4)
	for _, s := range all {
		group.Go(func() error { return s.Delete(gctx, "") })
	}
	err := group.Wait()
	unix.Sync() // what is left to be written must not weigh on what comes next
	return err
}

// bareCheckpoints captures the same sandboxes all at once with runsc's defaults, but for leaving them running. It
// tells when all had been said to be done, and when their files were on the disk.
func (b *bench) bareCheckpoints(ctx context.Context, floor *bare, all []*client.Sandbox) (said, synced time.Duration, err error) {
	dirs := make([]string, len(all))
	for i, s := range all {
		dirs[i] = filepath.Join(floor.Dir, "images", s.UID)
		if err := os.Mkdir(dirs[i], 0o700); err != nil {
			return 0, 0, err
		}
	}
	began := time.Now()
	said, err = inParallel(ctx, len(all), len(all), func(ctx context.Context, i int) error {
		return b.onOurs(ctx, floor, "checkpoint", "-leave-running", "-image-path="+dirs[i], all[i].UID)
	})
	err = errors.Join(err, syncfs(floor.Dir))
	synced = time.Since(began)
	for _, dir := range dirs {
		err = errors.Join(err, os.RemoveAll(dir))
	}
	unix.Sync()
	return said, synced, err
}

// syncfs waits until all of a folder's file system is on its disk.
func syncfs(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(unix.Syncfs(int(d.Fd())), d.Close())
}

// onOurs calls bare runsc on a sandbox of agentd's.
func (b *bench) onOurs(ctx context.Context, floor *bare, args ...string) error {
	return floor.Call(ctx, filepath.Join(b.state(), "runsc", "state"), nil, args...)
}

// bareFreeze captures one sandbox as agentd does, with nothing around it.
func (b *bench) bareFreeze(ctx context.Context, floor *bare, s *client.Sandbox) (time.Duration, error) {
	dir := filepath.Join(floor.Dir, "images", s.UID)
	if err := os.Mkdir(dir, 0o700); err != nil {
		return 0, err
	}
	began := time.Now()
	for _, args := range [][]string{{"pause"}, {"checkpoint", "-leave-running", "-compression=none", "-direct", "-image-path=" + dir}, {"resume"}} {
		if err := b.onOurs(ctx, floor, append(args, s.UID)...); err != nil {
			return 0, err
		}
	}
	took := time.Since(began)
	return took, os.RemoveAll(dir)
}

// writeDirect writes so many bytes past the page cache with dd and syncs them.
func writeDirect(ctx context.Context, path string, bytes int64) (time.Duration, error) {
	defer func() { _ = os.Remove(path) }()
	began := time.Now()
	out, err := exec.CommandContext(ctx, "dd", "if=/dev/zero", "of="+path, "bs=1M", "oflag=direct", "conv=fsync", fmt.Sprintf("count=%d", bytes/mib)).CombinedOutput()
	if err != nil {
		return 0, fmt.Errorf("dd: %w: %s", err, out)
	}
	return time.Since(began), nil
}
