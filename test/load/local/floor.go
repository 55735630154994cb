// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package local

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sync/errgroup"

	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
	"github.com/dormouse-run/dormouse/test/bare"
	"github.com/dormouse-run/dormouse/test/load"
	"github.com/dormouse-run/dormouse/test/load/probe"
	"github.com/dormouse-run/dormouse/test/load/subject"
)

// widths that bare runsc is tried with, and how many it does before it changes to the next: so each width meets every residency.
var widths = []int{2, 3, 4}

const block = 16

// floorTarget is what each rate of the product must reach of bare runsc's.
const floorTarget = 0.85

// Floor does with bare runsc what the run did: as many sandboxes resident, all of them captured, removed and restored. Each is a
// sandbox of the product's spec whose init is the subject itself, so that a bare start includes the filling of its memory.
//
// A bare capture is pause and checkpoint with direct writes; it is neither synced nor verified, as the product's is.
func (l *Cluster) Floor(ctx context.Context, r *load.Recorder) (err error) {
	plan := r.Plan()
	f, err := l.newFloor(ctx, plan)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.clear(context.WithoutCancel(ctx))) }()
	boxes := make([]*bare.Box, plan.Subjects)
	images := make([]string, plan.Subjects)
	for i := range images {
		images[i] = filepath.Join(f.runsc.Dir, "images", strconv.Itoa(i))
		if err := os.Mkdir(images[i], 0o700); err != nil {
			return err
		}
	}
	steps := []struct {
		phase load.Phase
		do    func(ctx context.Context, i int) error
	}{
		{load.Create, func(ctx context.Context, i int) error { return f.start(ctx, boxes, i, "") }},
		{load.Checkpoint, func(ctx context.Context, i int) error {
			if err := boxes[i].Run(ctx, false, "pause"); err != nil {
				return err
			}
			return boxes[i].Run(ctx, false, "checkpoint", "-leave-running", "-direct", "-image-path="+images[i])
		}},
		{load.Delete, func(ctx context.Context, i int) error { return boxes[i].Remove(ctx) }},
		{load.Restore, func(ctx context.Context, i int) error { return f.start(ctx, boxes, i, images[i]) }},
	}
	f.boxes = boxes
	for _, s := range steps {
		rate, width, err := rates(ctx, plan.Subjects, s.do)
		if err != nil {
			return fmt.Errorf("bare runsc, %s: %w", s.phase, err)
		}
		if s.phase == load.Delete {
			clear(boxes)
			continue
		}
		r.AddFloor(s.phase, rate, width, floorTarget)
	}
	return nil
}

// floor is bare runsc at work.
type floor struct {
	runsc *bare.Runsc
	spec  *specs.Spec
	boxes []*bare.Box
}

// newFloor takes the spec of a sandbox of the product that it makes and removes.
func (l *Cluster) newFloor(ctx context.Context, plan load.Plan) (_ *floor, err error) {
	want := subject.Want{Heap: int64(plan.HeapMiB) << 20, File: int64(plan.FileMiB) << 20}
	model, err := l.Client.CreateSandbox(ctx, &dormousev1.CreateSandboxRequest{Spec: &dormousev1.SandboxSpec{Image: l.Image, Resources: probe.Resources(want)}})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, model.Delete(ctx, "")) }()
	f := &floor{}
	if f.runsc, err = bare.New(filepath.Join(l.Dir, "bare"), l.NodeDir(1), model.UID, l.CgroupParent(1), l.ID); err != nil {
		return nil, err
	}
	if f.spec, err = bare.Spec(l.NodeDir(1), model.UID); err != nil {
		return nil, err
	}
	f.spec.Process.Args = []string{subject.Path, strconv.FormatInt(want.Heap, 10), strconv.FormatInt(want.File, 10), probe.Folder}
	f.spec.Process.Env = []string{"PATH=/bin", "GOMAXPROCS=1"}
	return f, nil
}

// start makes box i from nothing, or from an image.
func (f *floor) start(ctx context.Context, boxes []*bare.Box, i int, image string) error {
	x, err := f.runsc.Prepare(f.spec)
	if err != nil {
		return err
	}
	boxes[i] = x
	if image == "" {
		return x.Run(ctx, true, "run", "-detach")
	}
	return x.Run(ctx, true, "restore", "-detach", "-image-path="+image)
}

// clear removes what is left of the boxes.
func (f *floor) clear(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(4)
	for _, x := range f.boxes {
		if x != nil {
			group.Go(func() error { return x.Remove(ctx) })
		}
	}
	return errors.Join(group.Wait(), os.RemoveAll(f.runsc.Dir))
}

// rates does n things, a block at one width and the next at another, and gives the rate of the width that was the fastest in all.
func rates(ctx context.Context, n int, do func(ctx context.Context, i int) error) (best float64, width int, err error) {
	took, done := make([]time.Duration, len(widths)), make([]int, len(widths))
	for first, turn := 0, 0; first < n; first, turn = first+block, (turn+1)%len(widths) {
		last := min(first+block, n)
		group, ctx := errgroup.WithContext(ctx)
		group.SetLimit(widths[turn])
		began := time.Now()
		for i := first; i < last; i++ {
			group.Go(func() error { return do(ctx, i) })
		}
		if err := group.Wait(); err != nil {
			return 0, 0, err
		}
		took[turn] += time.Since(began)
		done[turn] += last - first
	}
	for i, d := range done {
		if rate := float64(d) / took[i].Seconds(); d > 0 && rate > best {
			best, width = rate, widths[i]
		}
	}
	return best, width, nil
}
