package integration

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/dormouse-run/dormouse/pkg/client"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/uid"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
	"github.com/dormouse-run/dormouse/test/cluster"
	"github.com/dormouse-run/dormouse/test/proof"
	"github.com/dormouse-run/dormouse/test/stack"
)

// f09 is a small fault run: four sandboxes that prove what they are, on two nodes.
type f09 struct {
	*world
	subjects []*provable
}

// provable is a sandbox with the subject in it, its volume and its snapshots.
type provable struct {
	volume  *client.Volume
	sandbox *client.Sandbox
	last    proof.Answer
	asked   [2]*dormousev1.CheckpointSandboxRequest // the exact calls of the two batches
	taken   [2]*client.Snapshot
}

func TestF09FourSandboxes(t *testing.T) {
	f := &f09{world: enter(t)}
	f.start(4)
	for batch := range 2 {
		f.batch(batch)
	}
	f.replay()
	f.deletionsRefused()
	f.staleVolume()

	// The first restore leaves the volumes as they were, for the second.
	for tries := 1; !f.restore(1, dormousev1.VolumePolicy_VOLUME_POLICY_CLONE, true) && tries < 5; tries++ {
		t.Log("all was restored before agentd could be killed")
	}
	f.restore(0, dormousev1.VolumePolicy_VOLUME_POLICY_SAME, false)
	f.ends()
}

// start makes n sandboxes, on both nodes in turn, each with an exclusive volume.
func (f *f09) start(n int) {
	ref := f.subject()
	f.subjects = make([]*provable, n)
	f.all(func(i int) error {
		v, err := f.api.CreateVolume(f.ctx, &dormousev1.CreateVolumeRequest{Name: fmt.Sprintf("v%d", i), Spec: &dormousev1.VolumeSpec{Node: stack.NodeName(1 + i%2), Access: dormousev1.VolumeAccess_VOLUME_ACCESS_EXCLUSIVE}})
		if err != nil {
			return err
		}
		s, err := f.api.CreateSandbox(f.ctx, &dormousev1.CreateSandboxRequest{Name: fmt.Sprintf("s%d", i), Spec: &dormousev1.SandboxSpec{
			Image: ref, Volumes: []*dormousev1.VolumeMount{mount(v, "/data")}, Resources: &dormousev1.Resources{MemoryLimitBytes: 256 * mib},
		}})
		if err != nil {
			return err
		}
		if _, err := cluster.Exec(f.ctx, s, "sh", "-c", "echo "+v.UID+" > /data/volume-uid"); err != nil {
			return err
		}
		if _, err := s.Start(f.ctx, &dormousev1.ProcessSpec{Argv: []string{"python3", proof.SubjectPath, "serve", "8", "/data"}}, ""); err != nil {
			return err
		}
		p := &provable{volume: v, sandbox: s}
		f.subjects[i] = p
		return poll(f.ctx, func() (err error) {
			p.last, err = cluster.Ask(f.ctx, s)
			return err
		})
	})
	for _, p := range f.subjects {
		if p.last.VolumeUID != p.volume.UID {
			f.Fatalf("the subject sees volume %q, want %s", p.last.VolumeUID, p.volume.UID)
		}
	}
}

// all calls fn for each subject at once and waits.
func (f *f09) all(fn func(i int) error) {
	f.Helper()
	errs := make([]error, len(f.subjects))
	var wg sync.WaitGroup
	for i := range f.subjects {
		wg.Go(func() { errs[i] = fn(i) })
	}
	wg.Wait()
	f.ok(errors.Join(errs...))
}

// batch checkpoints all at the same moment. The sources go on.
func (f *f09) batch(b int) {
	gate := make(chan struct{})
	ready := make(chan struct{}, len(f.subjects))
	go func() {
		for range f.subjects {
			<-ready
		}
		close(gate)
	}()
	f.all(func(i int) error {
		p := f.subjects[i]
		p.asked[b] = &dormousev1.CheckpointSandboxRequest{OperationId: uid.New(), Name: fmt.Sprintf("c%d-%d", b, i), Labels: map[string]string{"batch": fmt.Sprint(b)}}
		ready <- struct{}{}
		<-gate
		snap, err := p.sandbox.Checkpoint(f.ctx, p.asked[b])
		p.taken[b] = snap
		return err
	})
	f.all(func(i int) error {
		st := f.subjects[i].taken[b].Last.GetStatus()
		if st.GetPhase() != dormousev1.SnapshotPhase_SNAPSHOT_PHASE_READY || len(st.GetVolumes()) != 1 || st.GetVolumes()[0].GetVolumeUid() != f.subjects[i].volume.UID {
			return fmt.Errorf("snapshot %v", f.subjects[i].taken[b].Last)
		}
		_, err := cluster.Exec(f.ctx, f.subjects[i].sandbox, "true") // an answer would change the volume
		return err
	})
}

// replay is F04 and C24: the same operation gives the same snapshot, also from a coordinator that has
// only the records.
func (f *f09) replay() {
	f.Helper()
	again := func() {
		f.Helper()
		f.all(func(i int) error {
			p := f.subjects[i]
			for b := range p.asked {
				snap, err := p.sandbox.Checkpoint(f.ctx, p.asked[b])
				if err != nil {
					return err
				}
				if !proto.Equal(snap.Last, p.taken[b].Last) {
					return fmt.Errorf("replayed: %v\nwant %v", snap.Last, p.taken[b].Last)
				}
			}
			return nil
		})
	}
	again()
	f.ok(f.KillCoordinator(f.ctx))
	f.ok(f.StartCoordinatorReady(f.ctx))
	again()
	f.nodesOnline()

	other := proto.CloneOf(f.subjects[0].asked[0])
	other.Name = "other"
	_, err := f.subjects[0].sandbox.Checkpoint(f.ctx, other)
	f.refused(err, errs.OperationBodyMismatch)
	if all, err := client.Collect(f.api.ListSnapshots(f.ctx, &dormousev1.ListSnapshotsRequest{IncludeDeleted: true})); err != nil || len(all) != 2*len(f.subjects) {
		f.Fatalf("%d snapshots, %v; want %d", len(all), err, 2*len(f.subjects))
	}
}

// deletionsRefused is F05 and C26. The sources are deleted in between.
func (f *f09) deletionsRefused() {
	for _, p := range f.subjects {
		if e := f.refusal(p.volume.Delete(f.ctx, ""), errs.AlreadyAttached); e.Details["holder"] != p.sandbox.UID {
			f.Errorf("the holder is %q, want %s", e.Details["holder"], p.sandbox.UID)
		}
	}
	f.all(func(i int) error { return f.subjects[i].sandbox.Delete(f.ctx, "") })
	for _, p := range f.subjects {
		e := f.refusal(p.volume.Delete(f.ctx, ""), errs.StillReferenced)
		for _, snap := range p.taken {
			if !strings.Contains(e.Details["references"], snap.UID) {
				f.Errorf("the refusal names %q, not snapshot %s", e.Details["references"], snap.UID)
			}
		}
		if e.Details["count"] != "2" {
			f.Errorf("count %q, want 2", e.Details["count"])
		}
		f.ok(p.volume.Refresh(f.ctx))
		if st := p.volume.Last.GetStatus(); st.GetPhase() != dormousev1.VolumePhase_VOLUME_PHASE_READY || st.GetSnapshotCount() != 2 || len(st.GetAttachments()) != 0 {
			f.Errorf("a refused deletion left %v", st)
		}
	}
}

// staleVolume is F06 and C27.
func (f *f09) staleVolume() {
	old, err := f.api.CreateVolume(f.ctx, &dormousev1.CreateVolumeRequest{Name: "again"})
	f.ok(err)
	f.ok(old.Delete(f.ctx, ""))
	fresh, err := f.api.CreateVolume(f.ctx, &dormousev1.CreateVolumeRequest{Name: "again"})
	f.ok(err)
	if fresh.UID == old.UID {
		f.Fatal("a uid came back")
	}
	_, err = f.api.CreateSandbox(f.ctx, &dormousev1.CreateSandboxRequest{Spec: &dormousev1.SandboxSpec{Image: f.subject(), Volumes: []*dormousev1.VolumeMount{mount(old, "/data")}}})
	f.stale(err, fresh)
	_, err = f.subjects[0].taken[0].Restore(f.ctx, &dormousev1.RestoreSandboxRequest{Volumes: []*dormousev1.VolumeBinding{{
		Path: "/data", Policy: dormousev1.VolumePolicy_VOLUME_POLICY_REPLACE, ReplaceWith: old.UID}}})
	f.stale(err, fresh)
	f.stale(old.Delete(f.ctx, ""), fresh)

	f.ok(fresh.Refresh(f.ctx))
	if st := fresh.Last.GetStatus(); st.GetPhase() != dormousev1.VolumePhase_VOLUME_PHASE_READY || len(st.GetAttachments()) != 0 || st.GetSnapshotCount() != 0 {
		f.Errorf("the new volume is occupied: %v", st)
	}
	if all, err := client.Collect(f.api.ListSandboxes(f.ctx, &dormousev1.ListSandboxesRequest{})); err != nil || len(all) != 0 {
		f.Errorf("refused calls made sandboxes: %v, %v", all, err)
	}
	f.ok(fresh.Delete(f.ctx, ""))
}

func (f *f09) stale(err error, fresh *client.Volume) {
	f.Helper()
	e := f.refusal(err, errs.StaleUID)
	if e.Code != errs.Conflict || e.Outcome != errs.NotStarted || e.Retry != errs.Never || e.Details["current_uid"] != fresh.UID {
		f.Errorf("%v %v", e, e.Details)
	}
}

// restore brings back the snapshots of a batch and has each prove that it is the process that was
// frozen. With lose, the agentd of node 1 is killed while it restores, and started again; it tells whether that was
// done before all were restored.
func (f *f09) restore(b int, policy dormousev1.VolumePolicy, lose bool) (inTime bool) {
	f.Helper()
	lost, all := make(chan error, 1), make(chan struct{})
	if lose {
		go func() {
			var err error
			inTime, err = f.loseAgentd(all)
			lost <- err
		}()
	} else {
		lost <- nil
	}
	restored := make([]*client.Sandbox, len(f.subjects))
	f.all(func(i int) (err error) {
		restored[i], err = f.subjects[i].taken[b].Restore(f.ctx, &dormousev1.RestoreSandboxRequest{
			Name: fmt.Sprintf("r%d-%d", b, i), Volumes: []*dormousev1.VolumeBinding{{Path: "/data", Policy: policy}},
		})
		return err
	})
	close(all)
	f.ok(<-lost)
	f.all(func(i int) error {
		p := f.subjects[i]
		now, err := cluster.Ask(f.ctx, restored[i])
		if err != nil {
			return err
		}
		if bad := proof.Failed(proof.Compare(p.last, now)); len(bad) > 0 {
			return fmt.Errorf("subject %d of batch %d is not who it was: %+v", i, b, bad)
		}
		if now.Identity == nil || now.Identity.UID != restored[i].UID {
			return fmt.Errorf("subject %d takes itself for %v, want %s", i, now.Identity, restored[i].UID)
		}
		return nil
	})
	f.all(func(i int) error { return restored[i].Delete(f.ctx, "") })
	return inTime
}

// loseAgentd kills the agentd of node 1 once it restores something, unless all was restored before that was seen.
func (f *f09) loseAgentd(restored <-chan struct{}) (inTime bool, err error) {
	ctx, cancel := context.WithTimeout(f.ctx, time.Minute)
	defer cancel()
	late := false
	err = poll(ctx, func() error {
		select {
		case <-restored:
			late = true
			return nil
		default:
		}
		all, err := client.Collect(f.api.ListSandboxes(ctx, &dormousev1.ListSandboxesRequest{Node: stack.NodeName(1), Phase: dormousev1.SandboxPhase_SANDBOX_PHASE_STARTING}))
		if err == nil && len(all) == 0 {
			err = errors.New("nothing is being restored on node 1")
		}
		return err
	})
	if err != nil || late {
		return false, err
	}
	if err := f.KillAgentd(ctx, 1); err != nil {
		return false, err
	}
	return true, f.StartAgentdReady(ctx, 1)
}

// ends is F11, smaller: all is deleted, and of the snapshots there are tombstones without references.
func (f *f09) ends() {
	f.ok(f.deleteAll(f.ctx))
	sandboxes, err := client.Collect(f.api.ListSandboxes(f.ctx, &dormousev1.ListSandboxesRequest{}))
	f.ok(err)
	volumes, err := client.Collect(f.api.ListVolumes(f.ctx, &dormousev1.ListVolumesRequest{}))
	f.ok(err)
	snapshots, err := client.Collect(f.api.ListSnapshots(f.ctx, &dormousev1.ListSnapshotsRequest{}))
	f.ok(err)
	if len(sandboxes)+len(volumes)+len(snapshots) > 0 {
		f.Errorf("left: %v, %v, %v", sandboxes, volumes, snapshots)
	}
	tombstones, err := client.Collect(f.api.ListSnapshots(f.ctx, &dormousev1.ListSnapshotsRequest{IncludeDeleted: true}))
	f.ok(err)
	if len(tombstones) != 2*len(f.subjects) {
		f.Errorf("%d tombstones, want %d", len(tombstones), 2*len(f.subjects))
	}
	for _, s := range tombstones {
		if st := s.GetStatus(); st.GetPhase() != dormousev1.SnapshotPhase_SNAPSHOT_PHASE_DELETED || len(st.GetVolumes()) != 0 || len(st.GetNodes()) != 0 || len(st.GetFiles()) != 0 {
			f.Errorf("tombstone %v", s)
		}
	}
}
