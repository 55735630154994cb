//go:build !race

// What takes a minute is not done once more under the race detector, which finds nothing in waiting.

package app_test

import (
	"context"
	"testing"
	"time"

	"github.com/dormouse-run/dormouse/coordinator/app"
	"github.com/dormouse-run/dormouse/pkg/catalog/redis/redistest"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/uid"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// A publication that truly takes a minute, within a budget of 300 s: no timer on the way ends it, and none has it done twice.
func TestC23PublicationOfAMinute(t *testing.T) {
	t.Parallel()
	r := newRig(t) // with a lease that no busy machine loses: what a lost one does is not asked here
	r.onRedis(redistest.Start(t))
	asked := make(chan struct{}, 8)
	c, u := r.checkpointing(func(ctx context.Context) {
		asked <- struct{}{}
		minute := time.NewTimer(time.Minute)
		defer minute.Stop()
		select {
		case <-minute.C:
		case <-ctx.Done():
			t.Error("the node's call was cut:", errs.From(ctx.Err()))
		}
	})
	ctx, cancel := context.WithTimeout(context.Background(), 300*time.Second)
	defer cancel()
	made, err := c.CheckpointSandbox(ctx, &dormousev1.CheckpointSandboxRequest{OperationId: uid.New(), Uid: u})
	if err != nil || made.GetSnapshot().GetStatus().GetPhase() != dormousev1.SnapshotPhase_SNAPSHOT_PHASE_READY {
		t.Fatalf("%v, %v", made, err)
	}
	if len(asked) != 1 {
		t.Errorf("the node was asked %d times", len(asked))
	}
}

// A true minute, under the default settings: how long the takeover took is in the log.
func TestC22PausedForAMinute(t *testing.T) {
	t.Parallel()
	pausedCoordinator(t, app.DefaultConfig().Lease.TTL, time.Minute)
}
