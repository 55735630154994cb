package app_test

import (
	"context"
	"testing"
	"time"

	"github.com/dormouse-run/dormouse/pkg/catalog/redis/redistest"
	"github.com/dormouse-run/dormouse/pkg/uid"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// checkpointing makes a sandbox on a node whose checkpoints begin with save.
func (r *rig) checkpointing(save func(context.Context)) (c dormousev1.SandboxServiceClient, box string) {
	r.t.Helper()
	n := newFakeNode(r.t, r.pki, "n1")
	n.save = save
	if err := n.dial(r.app.Addresses("node")[0], 20*time.Millisecond); err != nil {
		r.t.Fatal(err)
	}
	return dormousev1.NewSandboxServiceClient(r.conn(r.user)), r.create("")
}

// Nothing between the client and the node cuts a budget: a node is given all that is left of one that is longer than its own, and is
// not given less than that when it is shorter, since the operation goes on without its caller.
func TestC23RemainingBudgetTravels(t *testing.T) {
	r := newRig(t)
	r.onRedis(redistest.Start(t))
	said := make(chan time.Duration, 1)
	c, u := r.checkpointing(func(ctx context.Context) {
		left := time.Duration(-1)
		if deadline, ok := ctx.Deadline(); ok {
			left = time.Until(deadline)
		}
		said <- left
	})
	for budget, want := range map[time.Duration]bool{300 * time.Second: false, time.Hour: true} {
		ctx, cancel := context.WithTimeout(context.Background(), budget)
		_, err := c.CheckpointSandbox(ctx, &dormousev1.CheckpointSandboxRequest{OperationId: uid.New(), Uid: u})
		cancel()
		if err != nil {
			t.Fatal(err)
		}
		left := <-said
		if want && (left < budget/2 || left > budget) || !want && left != -1 && left < budget {
			t.Errorf("of a budget of %s the node was given %s", budget, left)
		}
	}
}

// A caller that goes before the publication is there finds it later, by the same operation.
func TestC23ShortBudgetEndsTheCallOnly(t *testing.T) {
	r := newRig(t)
	r.onRedis(redistest.Start(t))
	go_, began := make(chan struct{}), make(chan struct{}, 8)
	c, u := r.checkpointing(func(context.Context) {
		began <- struct{}{}
		<-go_
	})
	req := &dormousev1.CheckpointSandboxRequest{OperationId: uid.New(), Uid: u}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() {
		_, err := c.CheckpointSandbox(ctx, req)
		ended <- err
	}()
	<-began
	cancel()
	if err := <-ended; err == nil {
		t.Error("the call succeeded")
	}
	close(go_)
	long, cancel := context.WithTimeout(context.Background(), 300*time.Second)
	defer cancel()
	again, err := c.CheckpointSandbox(long, req)
	if err != nil || again.GetSnapshot().GetStatus().GetPhase() != dormousev1.SnapshotPhase_SNAPSHOT_PHASE_READY {
		t.Errorf("%v, %v", again, err)
	}
	if len(began) != 0 {
		t.Errorf("the node was asked %d times more", len(began))
	}
}
