// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package soak

import (
	"context"

	"github.com/dormouse-run/dormouse/pkg/client"
	"github.com/dormouse-run/dormouse/pkg/errs"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// move makes one random operation, or none where there is nothing for it.
func (s *soak) move(ctx context.Context) {
	switch n := s.intn(100); {
	case n < 18:
		s.create(ctx)
	case n < 38:
		s.withSubject(ctx, "ask", s.ask)
	case n < 46:
		s.withSubject(ctx, "pause", s.pause)
	case n < 54:
		s.withSubject(ctx, "hibernate", s.hibernate)
	case n < 64:
		s.withSubject(ctx, "checkpoint", s.checkpoint)
	case n < 72:
		s.restore(ctx)
	case n < 79:
		s.withSubject(ctx, "fork", s.fork)
	case n < 91:
		s.delete(ctx)
	default:
		s.forgetOne(ctx)
	}
}

func (s *soak) count1(what string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.report.Moves[what]++
}

// reserve makes room for n more subjects, or says that there is none.
func (s *soak) reserve(n int) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.count+n > s.Sandboxes {
		return false
	}
	s.count += n
	return true
}

func (s *soak) release(n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.count -= n
}

func (s *soak) put(sub *subject) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.subjects = append(s.subjects, sub)
}

// takeOne takes one at random out of a list that the soak's lock guards, or gives nil.
func takeOne[T any](s *soak, list *[]*T) *T {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(*list) == 0 {
		return nil
	}
	i := s.rand.IntN(len(*list))
	last := len(*list) - 1
	one := (*list)[i]
	(*list)[i] = (*list)[last]
	*list = (*list)[:last]
	return one
}

// withSubject does something to a subject that no other worker holds, and gives it back. One that stands
// still is woken for it, if that is not what is wanted.
func (s *soak) withSubject(ctx context.Context, what string, do func(context.Context, *subject)) {
	sub := takeOne(s, &s.subjects)
	if sub == nil {
		return
	}
	defer s.put(sub)
	if sub.still != "" && what != "pause" && what != "hibernate" {
		s.wake(ctx, sub)
	}
	do(ctx, sub)
	s.count1(what)
}

func (s *soak) create(ctx context.Context) {
	if !s.reserve(1) {
		return
	}
	sub := &subject{}
	var err error
	if s.intn(3) == 0 {
		sub.volume, err = insist(ctx, func(ctx context.Context, id string) (*client.Volume, error) {
			return s.api.CreateVolume(ctx, &dormousev1.CreateVolumeRequest{OperationId: id})
		})
		if err != nil {
			s.fail("create a volume: %v", err)
			return
		}
	}
	sub.box, err = insist(ctx, func(ctx context.Context, id string) (*client.Sandbox, error) {
		return s.api.CreateSandbox(ctx, &dormousev1.CreateSandboxRequest{OperationId: id, Spec: s.spec(sub.volume)})
	})
	if err != nil {
		s.fail("create: %v", err)
		s.dropVolume(ctx, sub.volume)
		return
	}
	s.ask(ctx, sub)
	s.put(sub)
	s.count1("create")
}

// pause leaves the subject standing still in memory; one that stands still already stays as it is.
func (s *soak) pause(ctx context.Context, sub *subject) {
	if sub.still != "" {
		return
	}
	if err := insistDone(ctx, sub.box.Pause); err != nil {
		s.fail("pause %s: %v", sub.box.UID, err)
		return
	}
	sub.still = "paused"
	s.expect(sub, dormousev1.SandboxPhase_SANDBOX_PHASE_PAUSED)
}

// hibernate leaves the subject on the disk, from memory or from a pause.
func (s *soak) hibernate(ctx context.Context, sub *subject) {
	if sub.still == "hibernated" {
		return
	}
	if err := insistDone(ctx, sub.box.Hibernate); err != nil {
		s.fail("hibernate %s, %s: %v", sub.box.UID, sub.still, err)
		return
	}
	sub.still = "hibernated"
	s.expect(sub, dormousev1.SandboxPhase_SANDBOX_PHASE_HIBERNATED)
}

// wake has a subject that stands still run, and answer for itself.
func (s *soak) wake(ctx context.Context, sub *subject) {
	if sub.still == "" {
		return
	}
	if err := insistDone(ctx, sub.box.Resume); err != nil {
		s.fail("resume %s, %s: %v", sub.box.UID, sub.still, err)
		return
	}
	s.expect(sub, dormousev1.SandboxPhase_SANDBOX_PHASE_RUNNING)
	was := sub.still
	sub.still = ""
	s.ask(ctx, sub)
	s.count1("resume-" + was)
}

// expect compares what the last call answered.
func (s *soak) expect(sub *subject, want dormousev1.SandboxPhase) {
	if got := sub.box.Last.GetStatus().GetPhase(); got != want {
		s.fail("%s is said to be %s; want %s", sub.box.UID, got, want)
	}
}

func (s *soak) checkpoint(ctx context.Context, sub *subject) {
	snap, err := insist(ctx, func(ctx context.Context, id string) (*client.Snapshot, error) {
		return sub.box.Checkpoint(ctx, &dormousev1.CheckpointSandboxRequest{OperationId: id})
	})
	if err != nil {
		s.fail("checkpoint %s: %v", sub.box.UID, err)
		return
	}
	s.mu.Lock()
	s.captures = append(s.captures, &capture{snapshot: snap, me: sub.me, lo: sub.lo, hi: sub.hi, volume: sub.volume != nil})
	s.mu.Unlock()
	s.ask(ctx, sub)
}

// adopt makes a subject of what came from a capture.
func (s *soak) adopt(ctx context.Context, box *client.Sandbox, from capture) {
	sub := &subject{box: box, me: from.me, lo: from.lo, hi: from.hi}
	for _, m := range box.Last.GetSpec().GetVolumes() {
		sub.volume = s.api.Volume(m.GetVolumeUid())
	}
	s.ask(ctx, sub)
	s.put(sub)
}

func (s *soak) restore(ctx context.Context) {
	c := takeOne(s, &s.captures)
	if c == nil {
		return
	}
	defer func() {
		s.mu.Lock()
		s.captures = append(s.captures, c)
		s.mu.Unlock()
	}()
	if !s.reserve(1) {
		return
	}
	req := &dormousev1.RestoreSandboxRequest{}
	if c.volume {
		req.Volumes = []*dormousev1.VolumeBinding{{Path: "/data", Policy: dormousev1.VolumePolicy_VOLUME_POLICY_CLONE}}
	}
	box, err := insist(ctx, func(ctx context.Context, id string) (*client.Sandbox, error) {
		req.OperationId = id
		return c.snapshot.Restore(ctx, req)
	})
	if err != nil {
		s.fail("restore %s: %v", c.snapshot.UID, err)
		return
	}
	s.adopt(ctx, box, *c)
	s.count1("restore")
}

type forked struct {
	boxes    []*client.Sandbox
	snapshot string
}

func (s *soak) fork(ctx context.Context, sub *subject) {
	n := 1 + s.intn(3)
	if !s.reserve(n) {
		return
	}
	made, err := insist(ctx, func(ctx context.Context, id string) (forked, error) {
		boxes, snapshot, err := s.api.Fork(ctx, &dormousev1.ForkSandboxRequest{OperationId: id, SandboxUid: sub.box.UID, Count: int32(n)}) //nolint:gosec // at most 3
		return forked{boxes, snapshot}, err
	})
	if err != nil {
		s.fail("fork %s: %v", sub.box.UID, err)
		return
	}
	from := capture{snapshot: s.api.Snapshot(made.snapshot), me: sub.me, lo: sub.lo, hi: sub.hi, volume: sub.volume != nil}
	for _, box := range made.boxes {
		s.adopt(ctx, box, from)
	}
	s.mu.Lock()
	s.captures = append(s.captures, &from)
	s.mu.Unlock()
	s.ask(ctx, sub)
}

func (s *soak) delete(ctx context.Context) {
	sub := takeOne(s, &s.subjects)
	if sub == nil {
		return
	}
	s.remove(ctx, sub)
	s.release(1)
	s.count1("delete")
}

func (s *soak) forgetOne(ctx context.Context) {
	c := takeOne(s, &s.captures)
	if c == nil {
		return
	}
	s.forget(ctx, c)
	if err := c.snapshot.Refresh(ctx); err == nil || !errs.Has(err, errs.ObjectNotFound) {
		s.fail("a deleted snapshot: %v, %v", c.snapshot.Last, err)
	}
	s.count1("delete-snapshot")
}
