// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package load

import (
	"context"
	"fmt"

	"github.com/dormouse-run/dormouse/pkg/client"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
	"github.com/dormouse-run/dormouse/test/load/probe"
	"github.com/dormouse-run/dormouse/test/load/subject"
)

const mib = 1 << 20

// runLabel marks everything that a run makes.
const runLabel = "dormouse-load"

// one is a subject and what is known of it.
type one struct {
	index    int
	plan     *Plan
	run      string // the run's id
	image    string
	api      *client.Client
	box      *client.Sandbox
	program  *probe.Probe
	snapshot *client.Snapshot
	volume   *client.Volume
	dead     bool // a step of it failed
}

func (o *one) name(what string, round int) string {
	return fmt.Sprintf("load-%s-%s-%d-%d", o.run, what, o.index, round)
}

func (o *one) labels() map[string]string { return map[string]string{runLabel: o.run} }

// step does one step and notes what is to be known of it.
func (o *one) step(ctx context.Context, p Phase, round int, e *Event) error {
	switch p {
	case Volumes:
		return o.makeVolume(ctx, e)
	case Create:
		return o.create(ctx, e)
	case Begin:
		return o.begin(ctx)
	case Checkpoint:
		return o.checkpoint(ctx, round, e)
	case Delete:
		e.UID = o.box.UID
		return o.box.Delete(ctx, "")
	case Restore:
		return o.restore(ctx, round, e)
	case Prove:
		return o.program.Prove(ctx)
	case Forget:
		return o.forget(ctx)
	}
	return fmt.Errorf("there is no phase %q", p)
}

func (o *one) makeVolume(ctx context.Context, e *Event) (err error) {
	o.volume, err = o.api.CreateVolume(ctx, &dormousev1.CreateVolumeRequest{Name: o.name("volume", 0), Labels: o.labels()})
	if err == nil {
		e.UID = o.volume.UID
	}
	return err
}

func (o *one) create(ctx context.Context, e *Event) (err error) {
	spec := &dormousev1.SandboxSpec{Image: o.image, Resources: probe.Resources(o.want())}
	if o.volume != nil {
		spec.Volumes = []*dormousev1.VolumeMount{{VolumeUid: o.volume.UID, Path: probe.Volume}}
	}
	o.box, err = o.api.CreateSandbox(ctx, &dormousev1.CreateSandboxRequest{Name: o.name("box", 0), Labels: o.labels(), Spec: spec})
	if err == nil {
		e.started(o.box)
	}
	return err
}

// started notes which sandbox it is, and what the product says of its start.
func (e *Event) started(box *client.Sandbox) {
	st := box.Last.GetStatus()
	e.UID, e.Queued, e.Service = box.UID, milliseconds(st.GetStartQueued().AsDuration()), milliseconds(st.GetStartService().AsDuration())
}

func (o *one) want() subject.Want {
	return subject.Want{Heap: int64(o.plan.HeapMiB) * mib, File: int64(o.plan.FileMiB) * mib, Volume: o.volume != nil}
}

// begin starts the program and takes its first answer.
func (o *one) begin(ctx context.Context) (err error) {
	o.program, err = probe.Begin(ctx, o.box, o.want())
	return err
}

func (o *one) checkpoint(ctx context.Context, round int, e *Event) error {
	s, err := o.box.Checkpoint(ctx, &dormousev1.CheckpointSandboxRequest{Name: o.name("snapshot", round), Labels: o.labels()})
	if err != nil {
		return err
	}
	before := o.snapshot
	o.snapshot = s
	st := s.Last.GetStatus()
	e.UID, e.Freeze, e.Bytes = s.UID, milliseconds(st.GetFreeze().AsDuration()), st.GetSizeBytes()
	e.Queued, e.Service = milliseconds(st.GetQueued().AsDuration()), milliseconds(st.GetService().AsDuration())
	if before != nil {
		return before.Delete(ctx, "")
	}
	return nil
}

func (o *one) restore(ctx context.Context, round int, e *Event) error {
	box, err := o.snapshot.Restore(ctx, &dormousev1.RestoreSandboxRequest{Name: o.name("box", round), Labels: o.labels()})
	if err != nil {
		return err
	}
	o.box = box
	e.started(box)
	if o.program != nil {
		o.program.In(box)
	}
	return nil
}

func (o *one) forget(ctx context.Context) error {
	var err error
	if o.snapshot != nil {
		err = o.snapshot.Delete(ctx, "")
	}
	if o.volume != nil && err == nil {
		err = o.volume.Delete(ctx, "")
	}
	return err
}
