// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package faultrun

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/dormouse-run/dormouse/pkg/client"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/uid"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
	"github.com/dormouse-run/dormouse/test/load/probe"
	"github.com/dormouse-run/dormouse/test/load/subject"
	"github.com/dormouse-run/dormouse/test/stack"
)

// begin is F01, and a snapshot that is there before.
func (r *run) begin(ctx context.Context) error {
	r.pids = r.daemons()
	old, err := r.create(ctx, 0, nil)
	if err != nil {
		return err
	}
	if _, err := old.Checkpoint(ctx, &dormousev1.CheckpointSandboxRequest{Name: "before"}); err != nil {
		return err
	}
	all, err := client.Collect(r.api.ListSnapshots(ctx, &dormousev1.ListSnapshotsRequest{}))
	if err != nil || len(all) != 1 {
		return fmt.Errorf("the snapshot that is to be there before the run is not: %v, %w", all, err)
	}
	r.before = all[0]
	if err := old.Delete(ctx, ""); err != nil {
		return err
	}
	r.subjects = make([]*one, r.Subjects)
	for i := range r.subjects {
		r.subjects[i] = &one{node: 1 + i%Nodes}
	}
	err = r.all(ctx, func(ctx context.Context, o *one) (err error) {
		o.volume, err = r.api.CreateVolume(ctx, &dormousev1.CreateVolumeRequest{Spec: &dormousev1.VolumeSpec{Node: stack.NodeName(o.node), Access: dormousev1.VolumeAccess_VOLUME_ACCESS_EXCLUSIVE}})
		if err != nil {
			return err
		}
		if o.box, err = r.create(ctx, o.node, o.volume); err != nil {
			return err
		}
		o.program, err = probe.Begin(ctx, o.box, r.want())
		return err
	})
	r.check("F01", err == nil, "live sandboxes, each with an exclusive volume, a heap, a private file, an open file at an offset and a TCP stream", "%s", r.found(err))
	return err
}

func (r *run) want() subject.Want {
	return subject.Want{Heap: int64(r.HeapMiB) * mib, File: int64(r.FileMiB) * mib, Volume: true}
}

// create makes a sandbox, on a node if it has a volume there.
func (r *run) create(ctx context.Context, node int, volume *client.Volume) (*client.Sandbox, error) {
	spec := &dormousev1.SandboxSpec{Image: r.c.Image, Resources: probe.Resources(r.want())}
	if volume != nil {
		spec.Volumes = []*dormousev1.VolumeMount{{VolumeUid: volume.UID, Path: probe.Volume}}
	}
	return r.api.CreateSandbox(ctx, &dormousev1.CreateSandboxRequest{Spec: spec})
}

// batch has every sandbox checkpointed at the same moment. begun is closed when the calls are made; ended is told of each call.
func (r *run) batch(ctx context.Context, b int, begun chan<- struct{}, ended func(*one)) error {
	gate := make(chan struct{})
	var ready sync.WaitGroup
	ready.Add(len(r.subjects))
	go func() {
		ready.Wait()
		close(gate)
		close(begun)
	}()
	return r.all(ctx, func(ctx context.Context, o *one) error {
		o.asked[b] = &dormousev1.CheckpointSandboxRequest{OperationId: uid.New(), Labels: map[string]string{"batch": fmt.Sprint(b + 1)}}
		ready.Done()
		<-gate
		defer func() {
			if ended != nil {
				ended(o)
			}
		}()
		snap, err := insist(ctx, func(ctx context.Context) (*client.Snapshot, error) { return o.box.Checkpoint(ctx, o.asked[b]) })
		if err != nil {
			return err
		}
		o.taken[b], o.asLast[b] = snap, o.program.State()
		st := snap.Last.GetStatus()
		if st.GetPhase() != dormousev1.SnapshotPhase_SNAPSHOT_PHASE_READY || len(st.GetVolumes()) != 1 || st.GetVolumes()[0].GetVolumeUid() != o.volume.UID {
			return fmt.Errorf("the snapshot is %v", snap.Last)
		}
		return nil
	})
}

// pause is how long Redis stands still in the first batch.
const pause = 1500 * time.Millisecond

// firstBatch is F02's first half and F03.
func (r *run) firstBatch(ctx context.Context) error {
	begun := make(chan struct{})
	var volumes []*client.Volume
	var created error
	var wg sync.WaitGroup
	wg.Go(func() {
		<-begun
		if created = r.fault("Redis stands still for 1.5 s", r.c.PauseRedis); created != nil {
			return
		}
		var mu sync.Mutex
		var unrelated sync.WaitGroup
		var failed []error
		for range len(r.subjects) {
			unrelated.Go(func() {
				req := &dormousev1.CreateVolumeRequest{OperationId: uid.New()}
				v, err := insist(ctx, func(ctx context.Context) (*client.Volume, error) { return r.api.CreateVolume(ctx, req) })
				mu.Lock()
				defer mu.Unlock()
				if err != nil {
					failed = append(failed, err)
					return
				}
				volumes = append(volumes, v)
			})
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
		}
		err := r.fault("Redis goes on", r.c.ResumeRedis)
		unrelated.Wait()
		created = errors.Join(append(failed, err)...)
	})
	err := r.batch(ctx, 0, begun, nil)
	wg.Wait()
	r.check("F02", err == nil, "checkpoints of the first batch, all at once", "%s", r.found(err))
	r.check("F03", created == nil && len(volumes) == len(r.subjects), "unrelated volumes created while Redis stood still", "%d of %d%s", len(volumes), len(r.subjects), because(created))
	for _, v := range volumes {
		if gone := v.Delete(ctx, ""); gone != nil {
			return gone
		}
	}
	return err
}

// replay is F04.
func (r *run) replay(ctx context.Context) error {
	err := r.all(ctx, func(ctx context.Context, o *one) error {
		again, err := o.box.Checkpoint(ctx, o.asked[0])
		if err != nil {
			return err
		}
		if !proto.Equal(again.Last, o.taken[0].Last) {
			return fmt.Errorf("replayed: %v, first: %v", again.Last, o.taken[0].Last)
		}
		return nil
	})
	r.check("F04", err == nil, "the same operation id and body give the same snapshot", "%s", r.found(err))
	return nil
}

// refusedDeletions is F05: the volumes are held by their sandboxes; once these are gone, their snapshots refer to them.
func (r *run) refusedDeletions(ctx context.Context) error {
	err := r.volumesStay(ctx, errs.AlreadyAttached)
	r.check("F05", err == nil, "deletions of attached volumes are refused", "%s", r.found(err))
	return nil
}

func (r *run) volumesStay(ctx context.Context, reason errs.Reason) error {
	return r.all(context.WithValue(ctx, expected{}, true), func(ctx context.Context, o *one) error {
		if err := o.volume.Delete(ctx, ""); !errs.Has(err, reason) {
			return fmt.Errorf("the deletion of its volume gives %w, not %s", err, reason)
		}
		if err := o.volume.Refresh(ctx); err != nil {
			return err
		}
		if phase := o.volume.Last.GetStatus().GetPhase(); phase != dormousev1.VolumePhase_VOLUME_PHASE_READY {
			return fmt.Errorf("a refused deletion left its volume %s", phase)
		}
		return nil
	})
}

// staleVolume is F06.
func (r *run) staleVolume(ctx context.Context) error {
	old, err := r.api.CreateVolume(ctx, &dormousev1.CreateVolumeRequest{Name: "again"})
	if err != nil {
		return err
	}
	if err := old.Delete(ctx, ""); err != nil {
		return err
	}
	fresh, err := r.api.CreateVolume(ctx, &dormousev1.CreateVolumeRequest{Name: "again"})
	if err != nil {
		return err
	}
	_, err = r.create(context.WithValue(ctx, expected{}, true), 0, old)
	var e *errs.Error
	right := errors.As(err, &e) && e.Code == errs.Conflict && e.Outcome == errs.NotStarted && e.Retry == errs.Never && fresh.UID != old.UID
	r.check("F06", right, "the stale uid of a volume that was recreated by name is refused: conflict, not started, never", "%v", err)
	if err := fresh.Refresh(ctx); err != nil {
		return err
	}
	st := fresh.Last.GetStatus()
	r.check("F06", len(st.GetAttachments()) == 0 && st.GetSnapshotCount() == 0, "the new volume has no occupancy and no references", "%d attachments, %d snapshots", len(st.GetAttachments()), st.GetSnapshotCount())
	return fresh.Delete(ctx, "")
}

// secondBatch is F02's second half, F07 and F08.
func (r *run) secondBatch(ctx context.Context) error {
	begun := make(chan struct{})
	left := make(chan struct{}) // closed when the last call on the node that is lost has been answered
	var mu sync.Mutex
	there := 0
	for _, o := range r.subjects {
		if o.node == Nodes {
			there++
		}
	}
	stop := r.reach(ctx)
	var faults error
	var wg sync.WaitGroup
	wg.Go(func() {
		<-begun
		faults = errors.Join(
			r.fault("Redis is killed", func() error { return r.c.KillRedis(ctx) }),
			r.fault("Redis comes back on the same data", func() error { return r.c.StartRedis(ctx) }),
			r.fault("the coordinator is killed", func() error { return r.c.KillCoordinator(ctx) }),
			r.fault("the coordinator comes back", func() error { return r.c.StartCoordinatorReady(ctx) }),
		)
		select {
		case <-left:
		case <-ctx.Done():
			return
		}
		faults = errors.Join(faults, r.fault("a node is lost, with its sandboxes", func() error { return r.loseNode(ctx, Nodes) }))
	})
	err := r.batch(ctx, 1, begun, func(o *one) {
		mu.Lock()
		defer mu.Unlock()
		if o.node == Nodes {
			if there--; there == 0 {
				close(left)
			}
		}
	})
	wg.Wait()
	r.check("F02", err == nil, "checkpoints of the second batch, all at once, while Redis, the coordinator and a node are lost", "%s", r.found(err))
	r.check("F07", faults == nil, "Redis killed and back on the same data, coordinator started anew, a node lost", "done%s", because(faults))
	usable := r.all(ctx, func(ctx context.Context, o *one) error {
		if o.node == Nodes {
			return nil
		}
		return r.stat(ctx, o)
	})
	r.report.LongestGapMS = stop()
	r.check("F08", usable == nil, "sources on the surviving nodes stay usable", "%s; the longest gap was %.0f ms", r.found(usable), r.report.LongestGapMS)
	if faults != nil {
		return faults
	}
	return err
}

// stat reaches into a sandbox without changing what its subject will say.
func (r *run) stat(ctx context.Context, o *one) error {
	_, err := o.box.Files().Stat(ctx, probe.Folder+"/private")
	return err
}

// reach looks into the sources on the surviving nodes all the time; stop ends that and gives the longest time, in milliseconds, in
// which one of them was not reached.
func (r *run) reach(ctx context.Context) (stop func() float64) {
	ctx, cancel := context.WithCancel(ctx)
	gaps := make([]time.Duration, len(r.subjects))
	var wg sync.WaitGroup
	for i, o := range r.subjects {
		if o.node == Nodes {
			continue
		}
		wg.Go(func() {
			last := time.Now()
			for ctx.Err() == nil {
				try, end := context.WithTimeout(ctx, 10*time.Second)
				err := r.stat(try, o)
				end()
				if err == nil {
					gaps[i], last = max(gaps[i], time.Since(last)), time.Now()
				}
				select {
				case <-time.After(50 * time.Millisecond):
				case <-ctx.Done():
				}
			}
			gaps[i] = max(gaps[i], time.Since(last))
		})
	}
	return func() float64 {
		cancel()
		wg.Wait()
		var longest time.Duration
		for _, g := range gaps {
			longest = max(longest, g)
		}
		return float64(longest.Microseconds()) / 1000
	}
}

// restoreAll is F09: the sources end, and every snapshot of the second batch comes back.
func (r *run) restoreAll(ctx context.Context) error {
	if err := r.fault("the lost node comes back, without its sandboxes", func() error { return r.c.StartAgentdReady(ctx, Nodes) }); err != nil {
		return err
	}
	if err := r.all(ctx, func(ctx context.Context, o *one) error { return o.box.Delete(ctx, "") }); err != nil {
		return fmt.Errorf("end the sources: %w", err)
	}
	stay := r.volumesStay(ctx, errs.StillReferenced)
	r.check("F05", stay == nil, "deletions of volumes that snapshots refer to are refused", "%s", r.found(stay))
	err := r.all(ctx, func(ctx context.Context, o *one) error {
		box, err := o.taken[1].Restore(ctx, &dormousev1.RestoreSandboxRequest{})
		if err != nil {
			return err
		}
		o.box = box
		o.program.Resume(box, o.asLast[1])
		if err := o.program.Prove(ctx); err != nil {
			return err
		}
		if err := box.Refresh(ctx); err != nil {
			return err
		}
		if v := box.Last.GetSpec().GetVolumes(); len(v) != 1 || v[0].GetVolumeUid() != o.volume.UID {
			return fmt.Errorf("it has volumes %v, not %s", v, o.volume.UID)
		}
		return nil
	})
	r.check("F09", err == nil, "restored, and each is the original process with its nonce, heap, offset, stream, file and volume", "%s", r.found(err))
	return nil
}

// points is F10.
func (r *run) points(ctx context.Context) error {
	if r.Points == nil {
		return nil
	}
	found, err := r.Points(ctx)
	if err != nil {
		found += fmt.Sprintf(" (%v)", err)
	}
	r.check("F10", err == nil, "agentd killed at its crash points and started again: every sandbox is as it was, or cleanly gone", "%s", found)
	return nil
}
