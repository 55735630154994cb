package bench

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/dormouse-run/dormouse/pkg/client"
	"github.com/dormouse-run/dormouse/pkg/wait"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
	barerunsc "github.com/dormouse-run/dormouse/test/bare"
)

// restores is a snapshot that is restored both ways.
type restores struct {
	*bench
	floor *bare
	spec  *specs.Spec
	snap  *client.Snapshot
	image string
}

// benchRestore compares RestoreSandbox with runsc restore of the same image, in and out of the page cache; and the rates of small ones.
func benchRestore(ctx context.Context, b *bench) ([]Row, error) {
	rows, err := b.restoreTimes(ctx)
	if err != nil {
		return nil, err
	}
	more, err := b.restoreRates(ctx)
	return append(rows, more...), err
}

// restores takes a snapshot of a new sandbox, and leaves nothing else.
func (b *bench) restores(ctx context.Context, heapMiB, fileMiB int) (*restores, error) {
	all, err := b.filled(ctx, 1, heapMiB, fileMiB)
	if err != nil {
		return nil, err
	}
	r := &restores{bench: b}
	if r.floor, err = b.newBare(all[0].UID); err != nil {
		return nil, err
	}
	if r.snap, err = all[0].Checkpoint(ctx, &dormousev1.CheckpointSandboxRequest{}); err != nil {
		return nil, err
	}
	r.image = filepath.Join(b.state(), "snapshots", r.snap.UID)
	model, err := r.snap.Restore(ctx, &dormousev1.RestoreSandboxRequest{})
	if err != nil {
		return nil, err
	}
	if r.spec, err = b.spec(model.UID); err != nil {
		return nil, err
	}
	return r, deleteAll(ctx, append(all, model))
}

// restoreRates compares several restores at a time.
func (b *bench) restoreRates(ctx context.Context) ([]Row, error) {
	const heap, file = 2, 1
	r, err := b.restores(ctx, heap, file)
	if err != nil {
		return nil, err
	}
	var rows []Row
	all, err := b.rates(ctx, "restore", contest{
		product: func(ctx context.Context) (*client.Sandbox, error) {
			return r.snap.Restore(ctx, &dormousev1.RestoreSandboxRequest{})
		},
		prepare: func() (*barerunsc.Box, error) { return r.floor.Prepare(r.spec) },
		bare: func(ctx context.Context, x *barerunsc.Box) error {
			_, _, err := x.Restore(ctx, r.image)
			return err
		},
	})
	if err != nil {
		return nil, err
	}
	for _, r := range all {
		rows = append(rows, r.row(fmt.Sprintf("restores of %d MiB heap + %d MiB file per second, %d at a time; bare until guest init answers", heap, file, r.width)))
	}
	rows = append(rows, best(all).row("the same, each at its best width"))
	return rows, r.snap.Delete(ctx, "")
}

func (b *bench) restoreTimes(ctx context.Context) ([]Row, error) {
	r, err := b.restores(ctx, heapMiB, fileMiB)
	if err != nil {
		return nil, err
	}
	var warm, cold [3]Sample
	var ignored [3]Sample
	if err := r.both(ctx, &ignored, false); err != nil {
		return nil, err
	}
	for range b.times(20) {
		if err := r.both(ctx, &warm, false); err != nil {
			return nil, err
		}
	}
	for range b.times(8) {
		if err := r.both(ctx, &cold, true); err != nil {
			return nil, err
		}
	}
	what := fmt.Sprintf("restore of %d MiB heap + %d MiB file to Running", heapMiB, fileMiB)
	return []Row{
		ratio(what+"; bare `runsc restore` until guest init answers", warm[0], warm[2], 1.25),
		ratio("the same; bare until `runsc restore -detach` returns", warm[0], warm[1], 0),
		ratio("the same, pages not in the page cache; bare until guest init answers", cold[0], cold[2], 0),
	}, r.snap.Delete(ctx, "")
}

// both restores and removes one sandbox each way: the product's time, bare's until runsc was done and
// until guest init had answered.
func (r *restores) both(ctx context.Context, into *[3]Sample, cold bool) error {
	if cold {
		if err := dropPages(r.image); err != nil {
			return err
		}
	}
	if err := wait.For(ctx, breath); err != nil {
		return err
	}
	began := time.Now()
	s, err := r.snap.Restore(ctx, &dormousev1.RestoreSandboxRequest{})
	if err != nil {
		return err
	}
	into[0].add(time.Since(began))
	if err := s.Delete(ctx, ""); err != nil {
		return err
	}
	if cold {
		if err := dropPages(r.image); err != nil {
			return err
		}
	}
	x, err := r.floor.Prepare(r.spec)
	if err != nil {
		return err
	}
	if err := wait.For(ctx, breath); err != nil {
		return err
	}
	started, answered, err := x.Restore(ctx, r.image)
	if err != nil {
		return err
	}
	into[1].add(started)
	into[2].add(answered)
	return x.Remove(ctx)
}

// dropPages takes the files of a folder out of the page cache.
func dropPages(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		f, err := os.Open(filepath.Join(dir, e.Name()))
		if err != nil {
			return err
		}
		err = unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED)
		_ = f.Close()
		if err != nil {
			return err
		}
	}
	return nil
}
