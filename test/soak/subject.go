// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package soak

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/dormouse-run/dormouse/pkg/client"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/uid"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
	"github.com/dormouse-run/dormouse/test/cluster"
)

// program answers each question, which has a name of its own, in a file of that name, so that a question
// whose asker is gone disturbs no other.
const program = `mkfifo /tmp/q; exec 3<>/tmp/q; me=$(head -c 9 /dev/urandom | base64); i=0; : >/tmp/log; ` +
	`while read name <&3; do i=$((i+1)); echo $name >>/tmp/log; echo "$$ $me $i $(wc -l </tmp/log)" >/tmp/.$name; mv /tmp/.$name /tmp/$name; done`

const question = `until [ -p /tmp/q ]; do sleep 0.02; done; echo $0 >/tmp/q; until [ -e /tmp/$0 ]; do sleep 0.02; done; cat /tmp/$0; rm /tmp/$0`

// subject is a sandbox and what is known of it.
type subject struct {
	box    *client.Sandbox
	volume *client.Volume // its own, or nil
	me     string         // pid and nonce; empty before the first answer
	lo, hi int            // how often it was asked
	still  string         // "paused", "hibernated", or empty: it runs
}

// capture is a snapshot and what is known of the subject at that moment.
type capture struct {
	snapshot *client.Snapshot
	me       string
	lo, hi   int
	volume   bool // it refers to a volume, which a restore clones
}

// insist asks under one operation id until the answer is final.
func insist[T any](ctx context.Context, call func(ctx context.Context, id string) (T, error)) (T, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	id := uid.New()
	for {
		v, err := call(ctx, id)
		var e *errs.Error
		if err == nil || errors.As(err, &e) && e.Retry == errs.Never {
			return v, err
		}
		select {
		case <-time.After(50 * time.Millisecond):
		case <-ctx.Done():
			return v, errors.Join(err, context.Cause(ctx))
		}
	}
}

// insistDone is insist for calls that answer nothing.
func insistDone(ctx context.Context, call func(ctx context.Context, id string) error) error {
	_, err := insist(ctx, func(ctx context.Context, id string) (struct{}, error) { return struct{}{}, call(ctx, id) })
	return err
}

// ask has the subject answer, and checks what it says.
func (s *soak) ask(ctx context.Context, sub *subject) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		sub.hi++
		try, stop := context.WithTimeout(ctx, 20*time.Second)
		out, err := cluster.Exec(try, sub.box, "sh", "-c", question, uid.New())
		stop()
		if err == nil {
			s.heard(sub, string(out))
			return
		}
		var e *errs.Error
		if !errors.As(err, &e) || e.Retry == errs.Never {
			_ = sub.box.Refresh(ctx)
			s.fail("ask %s: %v; it is %v", sub.box.UID, err, sub.box.Last.GetStatus())
			return
		}
		select {
		case <-time.After(50 * time.Millisecond):
		case <-ctx.Done():
			s.fail("ask %s: %v", sub.box.UID, err)
			return
		}
	}
}

// heard compares an answer with the model.
func (s *soak) heard(sub *subject, out string) {
	var pid, count, lines int
	var nonce string
	if n, err := fmt.Sscan(out, &pid, &nonce, &count, &lines); n != 4 {
		s.fail("%s answers %q: %v", sub.box.UID, out, err)
		return
	}
	me := fmt.Sprintf("pid %d %s", pid, nonce)
	if sub.me == "" {
		sub.me = me
	}
	switch {
	case sub.me != me:
		s.fail("%s was %s and is %s", sub.box.UID, sub.me, me)
	case count <= sub.lo || count > sub.hi:
		s.fail("%s was asked %d to %d times, and counts %d", sub.box.UID, sub.lo+1, sub.hi, count)
	case lines != count:
		s.fail("%s counts %d, and its file has %d lines", sub.box.UID, count, lines)
	}
	sub.lo = count
}

func (s *soak) spec(volume *client.Volume) *dormousev1.SandboxSpec {
	spec := &dormousev1.SandboxSpec{
		Image: s.Image, Command: []string{"sh", "-c", program},
		Resources: &dormousev1.Resources{CpuRequestMillis: 10, MemoryRequestBytes: 32 << 20, MemoryLimitBytes: 64 << 20, DiskLimitBytes: 16 << 20},
	}
	if volume != nil {
		spec.Volumes = []*dormousev1.VolumeMount{{VolumeUid: volume.UID, Path: "/data"}}
	}
	return spec
}

// remove deletes a subject and its volume.
func (s *soak) remove(ctx context.Context, sub *subject) {
	if err := insistDone(ctx, sub.box.Delete); err != nil && !errs.Has(err, errs.ObjectNotFound) {
		s.fail("delete %s: %v", sub.box.UID, err)
	}
	if err := sub.box.Refresh(ctx); err == nil {
		s.fail("deleted, and there: %v", sub.box.Last)
	}
	s.dropVolume(ctx, sub.volume)
}

// dropVolume deletes a volume, or leaves it to the snapshots that refer to it: forget tries again.
func (s *soak) dropVolume(ctx context.Context, v *client.Volume) {
	if v == nil {
		return
	}
	err := insistDone(ctx, v.Delete)
	switch {
	case errs.Has(err, errs.StillReferenced):
		s.mu.Lock()
		s.loose = append(s.loose, v)
		s.mu.Unlock()
	case err != nil && !errs.Has(err, errs.ObjectNotFound):
		s.fail("delete volume %s: %v", v.UID, err)
	}
}

// forget deletes a capture, and the volumes that nothing but captures referred to.
func (s *soak) forget(ctx context.Context, c *capture) {
	if err := insistDone(ctx, c.snapshot.Delete); err != nil && !errs.Has(err, errs.ObjectNotFound) {
		s.fail("delete snapshot %s: %v", c.snapshot.UID, err)
	}
	s.mu.Lock()
	loose := s.loose
	s.loose = nil
	s.mu.Unlock()
	for _, v := range loose {
		s.dropVolume(ctx, v)
	}
}
