package app_test

import (
	"context"
	"testing"
	"time"

	"google.golang.org/grpc"

	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/uid"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// following opens the output of a process, and gives what checks the next word of it.
func (r *rig) following(sandboxUID, process string) func(word string) {
	r.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	r.t.Cleanup(cancel)
	s, err := dormousev1.NewProcessServiceClient(r.conn(r.user)).ReadOutput(ctx, &dormousev1.ReadOutputRequest{SandboxUid: sandboxUID, ProcessId: process, Follow: true})
	if err != nil {
		r.t.Fatal(err)
	}
	return func(word string) {
		r.t.Helper()
		msg, err := s.Recv()
		if err != nil || string(msg.GetOutput().GetData()) != word {
			r.t.Fatalf("%v, %v; want %q", msg, err, word)
		}
	}
}

// TestGatewayOnEveryReplica: a standby passes calls on as the leader does, and neither the end of a term nor of a
// leader cuts a stream through another, or through the one that stays.
func TestGatewayOnEveryReplica(t *testing.T) {
	r := newRig(t)
	n := r.node("n1")
	u := r.create("one")
	through := map[string]func(string){"p1": r.following(u, "p1")} // over the leader
	leader := r.app
	cfg := r.cfg
	cfg.Admin, cfg.Holder, cfg.Lease.TTL = "", "standby", 5*time.Second // it asks often; the leader's lease is long
	r.app = startStandby(t, r, cfg)
	through["p2"] = r.following(u, "p2")
	say := func(word string) {
		t.Helper()
		for process, hears := range through {
			n.words[process] <- word
			hears(word)
		}
	}
	say("before")

	c := dormousev1.NewProcessServiceClient(r.conn(r.other))
	_, err := c.ListProcesses(context.Background(), &dormousev1.ListProcessesRequest{SandboxUid: u})
	absent := uid.New()
	_, never := c.ListProcesses(context.Background(), &dormousev1.ListProcessesRequest{SandboxUid: absent})
	if wantEnvelope(t, err, errs.ObjectNotFound).Message != "there is no sandbox "+u || wantEnvelope(t, never, errs.ObjectNotFound).Message != "there is no sandbox "+absent {
		t.Errorf("another tenant's sandbox: %v; one that never was: %v", err, never)
	}

	// A node that has seen a higher epoch ends the leader's term; somebody leads again.
	other := newFakeNode(t, r.pki, "n2")
	other.epoch = 41
	eventually(t, "the term has ended and another begun", func() bool {
		for _, a := range []string{leader.Addresses("node")[0], r.app.Addresses("node")[0]} {
			if other.dial(a, r.cfg.Nodes.Heartbeat) == nil {
				return true
			}
		}
		return false
	})
	say("after the term")

	delete(through, "p1")
	leader.Stop()
	eventually(t, "the standby leads", r.app.Leading)
	say("after the leader")
}

// TestGatewayWithoutTheNode: a node that cannot be reached is said to be away, and nothing was done.
func TestGatewayWithoutTheNode(t *testing.T) {
	r := newRig(t)
	n := r.node("n1")
	u := r.create("one")
	n.srv.Stop()
	_, err := dormousev1.NewProcessServiceClient(r.conn(r.user)).StartProcess(context.Background(),
		&dormousev1.StartProcessRequest{SandboxUid: u, Spec: &dormousev1.ProcessSpec{Argv: []string{"hello"}}}, grpc.WaitForReady(true))
	if e := wantEnvelope(t, err, errs.NodeAway); e.Outcome != errs.NotStarted || e.Details["node"] != "n1" {
		t.Errorf("%+v", e)
	}
}
