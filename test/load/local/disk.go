// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package local

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/dormouse-run/dormouse/test/bare"
	"github.com/dormouse-run/dormouse/test/load"
)

// writes is how often dd writes as many bytes as all images have.
const writes = 3

// starters is how many bare sandboxes are started at a time, where their start is not measured.
const starters = 3

// DiskFloor measures what the throughput of checkpoints is compared with: as many bare sandboxes as the plan has, with as much in them, are
// captured a few at a time with direct writes and then all at once with default flags, and dd writes as many bytes to the same disk.
func (l *Cluster) DiskFloor(ctx context.Context, r *load.Recorder) (err error) {
	plan := r.Plan()
	f, err := l.newFloor(ctx, plan)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.clear(context.WithoutCancel(ctx))) }()
	f.boxes = make([]*bare.Box, plan.Subjects)
	if err := each(ctx, len(f.boxes), starters, func(ctx context.Context, i int) error {
		if err := f.start(ctx, f.boxes, i, ""); err != nil {
			return err
		}
		_, err := f.boxes[i].Ask(ctx, "filled") // it answers once it has its heap and its file
		return err
	}); err != nil {
		return fmt.Errorf("bare runsc, start: %w", err)
	}
	d := &load.DiskFloor{}
	for _, width := range widths {
		rate, err := f.captures(ctx, d, width)
		if err != nil {
			return fmt.Errorf("bare captures, %d at a time: %w", width, err)
		}
		if rate > d.Best {
			d.Best, d.Width = rate, width
		}
	}
	for range writes {
		rate, err := writeDirect(ctx, filepath.Join(f.runsc.Dir, "dd"), d.Bytes)
		if err != nil {
			return err
		}
		d.DD = append(d.DD, rate)
	}
	if err := f.crowd(ctx, d); err != nil {
		return fmt.Errorf("all bare captures at once: %w", err)
	}
	if d.Digest, err = f.digest(ctx, d.Bytes); err != nil {
		return err
	}
	r.AddDisk(*d)
	return nil
}

// each does n things, width at a time.
func each(ctx context.Context, n, width int, do func(ctx context.Context, i int) error) error {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(width)
	for i := range n {
		group.Go(func() error { return do(ctx, i) })
	}
	return group.Wait()
}

func (f *floor) images() string { return filepath.Join(f.runsc.Dir, "images") }

// fresh makes an empty folder for the image of each box.
func (f *floor) fresh() error {
	if err := os.RemoveAll(f.images()); err != nil {
		return err
	}
	for i := range f.boxes {
		if err := os.MkdirAll(f.image(i), 0o700); err != nil {
			return err
		}
	}
	return f.sync() // what was removed is not this measurement's
}

func (f *floor) image(i int) string { return filepath.Join(f.images(), fmt.Sprint(i)) }

// sync waits until all of the file system is on its disk.
func (f *floor) sync() error {
	d, err := os.Open(f.runsc.Dir)
	if err != nil {
		return err
	}
	return errors.Join(unix.Syncfs(int(d.Fd())), d.Close())
}

// captures gives the rate at which all boxes are captured as agentd does it, with nothing around it; it keeps how many bytes they have.
func (f *floor) captures(ctx context.Context, d *load.DiskFloor, width int) (float64, error) {
	if err := f.fresh(); err != nil {
		return 0, err
	}
	began := time.Now()
	err := each(ctx, len(f.boxes), width, func(ctx context.Context, i int) error {
		for _, args := range [][]string{{"pause"}, {"checkpoint", "-leave-running", "-direct", "-image-path=" + f.image(i)}, {"resume"}} {
			if err := f.boxes[i].Run(ctx, false, args...); err != nil {
				return err
			}
		}
		return nil
	})
	if err = errors.Join(err, f.sync()); err != nil {
		return 0, err
	}
	took := time.Since(began)
	files, err := filesBelow(f.images())
	if err != nil {
		return 0, err
	}
	d.Bytes = 0
	for _, size := range files {
		d.Bytes += size
	}
	return rateOf(d.Bytes, took), nil
}

// crowd captures all boxes at once with default flags, which ends them.
func (f *floor) crowd(ctx context.Context, d *load.DiskFloor) error {
	if err := f.fresh(); err != nil {
		return err
	}
	began := time.Now()
	err := each(ctx, len(f.boxes), len(f.boxes), func(ctx context.Context, i int) error {
		return f.boxes[i].Run(ctx, false, "checkpoint", "-image-path="+f.image(i))
	})
	said := time.Since(began)
	if err = errors.Join(err, f.sync()); err != nil {
		return err
	}
	took := time.Since(began)
	files, err := filesBelow(f.images())
	if err != nil {
		return err
	}
	var bytes int64
	for _, size := range files {
		bytes += size
	}
	d.Crowd, d.CrowdSaid = rateOf(bytes, took), rateOf(bytes, said)
	return nil
}

// digest gives the rate at which the images are read from the disk and digested.
func (f *floor) digest(ctx context.Context, bytes int64) (float64, error) {
	files, err := filesBelow(f.images())
	if err != nil {
		return 0, err
	}
	var names []string
	for name := range files {
		names = append(names, name)
		if err := forget(name); err != nil {
			return 0, err
		}
	}
	began := time.Now()
	err = each(ctx, len(names), 2, func(_ context.Context, i int) error {
		file, err := os.Open(names[i])
		if err != nil {
			return err
		}
		_, err = io.CopyBuffer(struct{ io.Writer }{sha256.New()}, struct{ io.Reader }{file}, make([]byte, 1<<20))
		return errors.Join(err, file.Close())
	})
	return rateOf(bytes, time.Since(began)), err
}

// forget takes a file out of the page cache.
func forget(name string) error {
	file, err := os.Open(name)
	if err != nil {
		return err
	}
	return errors.Join(unix.Fadvise(int(file.Fd()), 0, 0, unix.FADV_DONTNEED), file.Close())
}

// filesBelow are the sizes of all files below a folder.
func filesBelow(dir string) (map[string]int64, error) {
	all := map[string]int64{}
	return all, filepath.WalkDir(dir, func(path string, e os.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		info, err := e.Info()
		if err == nil {
			all[path] = info.Size()
		}
		return err
	})
}

// rateOf is in MB a second.
func rateOf(bytes int64, took time.Duration) float64 { return float64(bytes) / 1e6 / took.Seconds() }

// writeDirect has dd write so many bytes past the page cache, and gives the rate.
func writeDirect(ctx context.Context, path string, bytes int64) (float64, error) {
	defer func() { _ = os.Remove(path) }()
	began := time.Now()
	//nolint:gosec // the harness's own file
	out, err := exec.CommandContext(ctx, "dd", "if=/dev/zero", "of="+path, "bs=1M", "oflag=direct", "conv=fsync", fmt.Sprintf("count=%d", bytes>>20)).CombinedOutput()
	if err != nil {
		return 0, fmt.Errorf("dd: %w: %s", err, out)
	}
	return rateOf(bytes>>20<<20, time.Since(began)), nil
}
