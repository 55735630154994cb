package integration

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/dormouse-run/dormouse/pkg/client"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/uid"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
	"github.com/dormouse-run/dormouse/test/cluster"
	"github.com/dormouse-run/dormouse/test/stack"
)

// One operation id is one operation, whichever way it comes in.
func TestC25SameOperationOtherBody(t *testing.T) {
	w := enter(t)
	volumes := dormousev1.NewVolumeServiceClient(w.raw(w.key))
	req := &dormousev1.CreateVolumeRequest{OperationId: uid.New(), Name: "one", Labels: map[string]string{"a": "b"}}
	first, err := volumes.CreateVolume(w.ctx, req)
	w.ok(err)
	again, err := volumes.CreateVolume(w.ctx, req)
	w.ok(err)
	if !proto.Equal(first, again) {
		t.Errorf("the same call gave %v, then %v", first, again)
	}

	for name, change := range map[string]func(*dormousev1.CreateVolumeRequest){
		"name":   func(r *dormousev1.CreateVolumeRequest) { r.Name = "two" },
		"labels": func(r *dormousev1.CreateVolumeRequest) { r.Labels["a"] = "c" },
		"spec":   func(r *dormousev1.CreateVolumeRequest) { r.Spec = &dormousev1.VolumeSpec{Node: stack.NodeName(1)} },
	} {
		other := proto.CloneOf(req)
		change(other)
		_, err := volumes.CreateVolume(w.ctx, other)
		if e := w.refusal(err, errs.OperationBodyMismatch); e.OperationID != req.OperationId {
			t.Errorf("%s: operation id %q", name, e.OperationID)
		}
		body, err := protojson.Marshal(other)
		w.ok(err)
		w.refusedREST(w.rest(w.key, "POST", "/v1/volumes", string(body)), errs.OperationBodyMismatch)
	}
	// Another kind of operation under the same id is another body, too.
	_, err = dormousev1.NewSandboxServiceClient(w.raw(w.key)).CreateSandbox(w.ctx, &dormousev1.CreateSandboxRequest{OperationId: req.OperationId, Spec: w.spec()})
	w.refused(err, errs.OperationBodyMismatch)

	// REST with the first body gives the first volume.
	body, err := protojson.Marshal(req)
	w.ok(err)
	a := w.rest(w.key, "POST", "/v1/volumes", string(body))
	if a.status != 200 || !strings.Contains(string(a.body), first.GetVolume().GetMeta().GetUid()) {
		t.Errorf("REST: %d %s", a.status, a.body)
	}
	// The id is the tenant's: another tenant may use it.
	other := w.ClientOf(t, "t-c25-other")
	v, err := other.CreateVolume(w.ctx, &dormousev1.CreateVolumeRequest{OperationId: req.OperationId, Name: "three"})
	w.ok(err)
	w.ok(v.Delete(w.ctx, ""))
	if all, err := client.Collect(w.api.ListVolumes(w.ctx, &dormousev1.ListVolumesRequest{})); err != nil || len(all) != 1 {
		t.Errorf("%d volumes, %v; want the one", len(all), err)
	}
	// What was deleted is not made again by a replay.
	w.ok(w.api.Volume(first.GetVolume().GetMeta().GetUid()).Delete(w.ctx, ""))
	if again, err = volumes.CreateVolume(w.ctx, req); err == nil && !proto.Equal(first, again) {
		t.Errorf("a replay after the deletion gave %v", again)
	}
	if all, err := client.Collect(w.api.ListVolumes(w.ctx, &dormousev1.ListVolumesRequest{})); err != nil || len(all) != 0 {
		t.Errorf("a replay made %v, %v", all, err)
	}
}

// Redis is killed when the intent is recorded and the node works on it. Whatever the call said, its
// operation id tells the truth, and there is one object.
func TestC06RedisKilledDuringCreate(t *testing.T) {
	w := enter(t)
	req := &dormousev1.CreateSandboxRequest{OperationId: uid.New(), Name: "once", Spec: w.spec("sh", "-c", "echo begun >> /tmp/begun; exec sleep 100000")}
	made := w.thenKillRedis(func(ctx context.Context) (string, error) {
		s, err := dormousev1.NewSandboxServiceClient(w.raw(w.key)).CreateSandbox(ctx, req)
		return s.GetSandbox().GetMeta().GetUid(), err
	}, func() error {
		return some(client.Collect(w.api.ListSandboxes(w.ctx, &dormousev1.ListSandboxesRequest{Name: "once"})))
	})
	s, err := w.api.CreateSandbox(w.ctx, req)
	w.ok(err)
	if made != "" && made != s.UID {
		t.Errorf("the call gave %s, its replay %s", made, s.UID)
	}
	all, err := client.Collect(w.api.ListSandboxes(w.ctx, &dormousev1.ListSandboxesRequest{}))
	w.ok(err)
	if len(all) != 1 || all[0].GetMeta().GetUid() != s.UID || all[0].GetStatus().GetPhase() != dormousev1.SandboxPhase_SANDBOX_PHASE_RUNNING {
		t.Errorf("sandboxes: %v", all)
	}
	w.until("the command ran once", s, "cat /tmp/begun", "begun")
	w.succeeded(req.OperationId, s.UID)
}

func TestC06RedisKilledDuringCheckpoint(t *testing.T) {
	w := enter(t)
	s := w.create(w.spec())
	req := &dormousev1.CheckpointSandboxRequest{Uid: s.UID, OperationId: uid.New(), Name: "once"}
	made := w.thenKillRedis(func(ctx context.Context) (string, error) {
		r, err := dormousev1.NewSandboxServiceClient(w.raw(w.key)).CheckpointSandbox(ctx, req)
		return r.GetSnapshot().GetMeta().GetUid(), err
	}, func() error {
		return some(client.Collect(w.api.ListSnapshots(w.ctx, &dormousev1.ListSnapshotsRequest{Name: "once"})))
	})
	snap, err := s.Checkpoint(w.ctx, req)
	w.ok(err)
	if made != "" && made != snap.UID {
		t.Errorf("the call gave %s, its replay %s", made, snap.UID)
	}
	if all, err := client.Collect(w.api.ListSnapshots(w.ctx, &dormousev1.ListSnapshotsRequest{IncludeDeleted: true})); err != nil || len(all) != 1 {
		t.Errorf("snapshots: %v, %v", all, err)
	}
	w.succeeded(req.OperationId, snap.UID)
	w.sh(s, "true") // the source goes on
	r, err := snap.Restore(w.ctx, &dormousev1.RestoreSandboxRequest{})
	w.ok(err)
	w.sh(r, "true")
}

// thenKillRedis makes a call, kills Redis once begun says that the call has left a trace, and starts Redis
// again. It gives what the call gave; a call that failed must have said that it does not know or that
// it may be made again.
func (w *world) thenKillRedis(call func(context.Context) (string, error), begun func() error) string {
	w.Helper()
	type result struct {
		uid string
		err error
	}
	done := make(chan result, 1)
	go func() {
		u, err := call(w.ctx)
		done <- result{u, err}
	}()
	w.await("the call leaves a trace", begun)
	w.ok(w.KillRedis(w.ctx))
	w.ok(w.StartRedis(w.ctx))
	r := <-done
	w.nodesOnline()
	if r.err == nil {
		return r.uid
	}
	if e := errs.From(r.err); e.Retry == errs.Never || e.Outcome == errs.Terminal {
		w.Errorf("the call failed for good: %v", r.err)
	} else {
		w.Logf("the call said: %v", r.err)
	}
	return ""
}

func some[T any](all []T, err error) error {
	if err == nil && len(all) == 0 {
		err = errors.New("there is none yet")
	}
	return err
}

func (w *world) succeeded(operation, object string) {
	w.Helper()
	op, err := w.api.GetOperation(w.ctx, operation)
	w.ok(err)
	if op.GetState() != dormousev1.OperationState_OPERATION_STATE_SUCCEEDED || len(op.GetUids()) != 1 || op.GetUids()[0] != object {
		w.Errorf("operation %v; want success with %s", op, object)
	}
}

// Without Redis a mutation is refused before anything is begun, and reads fail as what they are:
// nothing is said not to be there.
func TestC05RedisAway(t *testing.T) {
	w := enter(t)
	s := w.create(w.spec())
	cc := w.raw(w.key)
	w.ok(w.KillRedis(w.ctx))
	req := &dormousev1.CreateVolumeRequest{OperationId: uid.New(), Name: "later"}
	_, err := dormousev1.NewVolumeServiceClient(cc).CreateVolume(w.ctx, req)
	if e := errs.From(err); err == nil || e.Code != errs.Unavailable && e.Code != errs.OutcomeUnknown {
		t.Errorf("a mutation without Redis: %v", err)
	}
	_, err = dormousev1.NewSandboxServiceClient(cc).GetSandbox(w.ctx, &dormousev1.GetSandboxRequest{Uid: s.UID})
	if e := errs.From(err); err != nil && e.Code != errs.Unavailable {
		t.Errorf("a read without Redis: %v", err)
	}
	w.ok(w.StartRedis(w.ctx))
	w.nodesOnline()
	v, err := w.api.CreateVolume(w.ctx, req)
	w.ok(err)
	if all, err := client.Collect(w.api.ListVolumes(w.ctx, &dormousev1.ListVolumesRequest{})); err != nil || len(all) != 1 || all[0].GetMeta().GetUid() != v.UID {
		t.Errorf("volumes: %v, %v", all, err)
	}
	w.sh(s, "true")
}

// While Redis stands still, nodes stay online with new heartbeats, what is read from memory is
// answered, and what waits for Redis goes on when it does.
func TestC07RedisPaused(t *testing.T) {
	w := enter(t)
	s := w.create(w.spec())
	node := s.Last.GetStatus().GetNode()
	before, err := w.Client.GetNode(w.ctx, node)
	w.ok(err)
	w.ok(w.PauseRedis())
	resumed := false
	defer func() {
		if !resumed {
			w.ok(w.ResumeRedis())
		}
	}()
	made := make(chan error, 1)
	go func() {
		_, err := w.api.CreateVolume(w.ctx, &dormousev1.CreateVolumeRequest{Name: "waits"})
		made <- err
	}()
	// Two heartbeats, half a second apart each: a small part of what the lease has left.
	for seen := 0; seen < 2; {
		w.await("a heartbeat", func() error {
			n, err := w.Client.GetNode(w.ctx, node)
			if err != nil {
				return err
			}
			if !n.GetOnline() || n.GetSessionEpoch() != before.GetSessionEpoch() {
				w.Fatalf("the node lost its session: %v", n)
			}
			if !n.GetLastHeartbeat().AsTime().After(before.GetLastHeartbeat().AsTime()) {
				return fmt.Errorf("none after %s", before.GetLastHeartbeat().AsTime())
			}
			before = n
			return nil
		})
		if _, err := client.Collect(w.api.ListImages(w.ctx)); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Overview(w.ctx, w.nodeOf(s)); err != nil {
			t.Fatal(err)
		}
		seen++
	}
	w.ok(w.ResumeRedis())
	resumed = true
	w.ok(<-made)
	if _, err := cluster.Exec(w.ctx, s, "true"); err != nil {
		t.Error(err)
	}
}
