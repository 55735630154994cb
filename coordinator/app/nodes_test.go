package app_test

import (
	"context"
	"errors"
	"io"
	"testing"
	"time"

	"github.com/dormouse-run/dormouse/coordinator/app"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/pki"
	"github.com/dormouse-run/dormouse/pkg/uid"
	nodev1 "github.com/dormouse-run/dormouse/proto/dormouse/node/v1"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

func (r *rig) nodeView(name string) *dormousev1.Node {
	r.t.Helper()
	resp, err := dormousev1.NewNodeServiceClient(r.conn(r.root)).GetNode(context.Background(), &dormousev1.GetNodeRequest{Name: name})
	if err != nil {
		r.t.Fatal(err)
	}
	return resp.GetNode()
}

func (r *rig) phase(u string) dormousev1.SandboxPhase {
	r.t.Helper()
	resp, err := dormousev1.NewSandboxServiceClient(r.conn(r.user)).GetSandbox(context.Background(), &dormousev1.GetSandboxRequest{Uid: u})
	if err != nil {
		r.t.Fatal(err)
	}
	return resp.GetSandbox().GetStatus().GetPhase()
}

func (r *rig) create(name string) string {
	r.t.Helper()
	made, err := dormousev1.NewSandboxServiceClient(r.conn(r.user)).CreateSandbox(context.Background(), box(name))
	if err != nil {
		r.t.Fatal(err)
	}
	return made.GetSandbox().GetMeta().GetUid()
}

func (n *fakeNode) report(t *testing.T, id uint64, o *nodev1.SandboxObservation) *nodev1.ReportAck {
	t.Helper()
	n.mu.Lock()
	stream, acks := n.stream, n.acks
	n.mu.Unlock()
	if err := stream.Send(&nodev1.SessionRequest{Message: &nodev1.SessionRequest_Report{Report: &nodev1.Report{Id: id, Sandbox: o}}}); err != nil {
		t.Fatal(err)
	}
	select {
	case ack := <-acks:
		if ack.GetId() != id {
			t.Fatalf("ack of %d, want %d", ack.GetId(), id)
		}
		return ack
	case <-time.After(time.Minute):
		t.Fatal("no ack")
		return nil
	}
}

func TestReportsAreCommittedThenAcknowledged(t *testing.T) {
	r := newRig(t)
	n := r.node("n1")
	u := r.create("one")
	code := int32(0)
	ack := n.report(t, 7, &nodev1.SandboxObservation{Uid: u, Tenant: "acme", Phase: dormousev1.SandboxPhase_SANDBOX_PHASE_STOPPED, ExitCode: &code, Reason: "Completed", Observation: 1000})
	if ack.GetError() != nil || r.phase(u) != dormousev1.SandboxPhase_SANDBOX_PHASE_STOPPED {
		t.Fatalf("%v, %v", ack, r.phase(u))
	}
	ack = n.report(t, 8, &nodev1.SandboxObservation{Uid: uid.New(), Tenant: "acme", Phase: dormousev1.SandboxPhase_SANDBOX_PHASE_RUNNING, Observation: 1})
	if ack.GetError().GetReason() != string(errs.ObjectNotFound) {
		t.Fatalf("a report of an unknown sandbox: %v", ack)
	}
}

func TestNodeComesBack(t *testing.T) {
	r := newRig(t)
	n := r.node("n1")
	kept, lost, ended := r.create("kept"), r.create("lost"), r.create("ended")
	c := dormousev1.NewSandboxServiceClient(r.conn(r.user))
	first := r.nodeView("n1")
	n.hangUp()
	eventually(t, "the node is away", func() bool { return !r.nodeView("n1").GetOnline() })
	if r.phase(kept) != dormousev1.SandboxPhase_SANDBOX_PHASE_RUNNING {
		t.Fatal("a node that is away says nothing of its sandboxes")
	}
	// A deletion waits for the node, and says that the outcome is unknown.
	del := &dormousev1.DeleteSandboxRequest{Uid: ended, OperationId: uid.New()}
	eventually(t, "there is the time to ask for it", func() bool {
		ctx, cancel := context.WithTimeout(context.Background(), 300*time.Millisecond)
		defer cancel()
		_, err := c.DeleteSandbox(ctx, del)
		if errs.NotStartedFor(err) {
			return false
		}
		if env := errs.From(err); env == nil || env.Outcome != errs.Unknown || env.Retry != errs.SameOperation {
			t.Fatalf("%v", err)
		}
		return true
	})
	stray := uid.New()
	n.mu.Lock()
	delete(n.sandboxes, lost)
	n.sandboxes[stray] = &nodev1.SandboxObservation{Uid: stray, Tenant: "acme", Phase: dormousev1.SandboxPhase_SANDBOX_PHASE_RUNNING}
	n.mu.Unlock()
	if err := n.dial(r.app.Addresses("node")[0], 20*time.Millisecond); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the lost one is Failed", func() bool { return r.phase(lost) == dormousev1.SandboxPhase_SANDBOX_PHASE_FAILED })
	if _, err := c.DeleteSandbox(context.Background(), del); err != nil {
		t.Fatal(err)
	}
	n.mu.Lock()
	_, strayThere := n.sandboxes[stray]
	_, keptThere := n.sandboxes[kept]
	n.mu.Unlock()
	if !strayThere || !keptThere || r.phase(kept) != dormousev1.SandboxPhase_SANDBOX_PHASE_RUNNING {
		t.Fatal("what is not recorded, or runs, was touched")
	}
	if second := r.nodeView("n1"); second.GetSessionEpoch() <= first.GetSessionEpoch() {
		t.Fatalf("session %d after %d", second.GetSessionEpoch(), first.GetSessionEpoch())
	}
	// A sandbox whose tombstone is there is removed when a node still has it.
	n.hangUp()
	n.mu.Lock()
	n.sandboxes[ended] = &nodev1.SandboxObservation{Uid: ended, Tenant: "acme", Phase: dormousev1.SandboxPhase_SANDBOX_PHASE_RUNNING}
	n.mu.Unlock()
	if err := n.dial(r.app.Addresses("node")[0], 20*time.Millisecond); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the deleted one is removed", func() bool {
		n.mu.Lock()
		defer n.mu.Unlock()
		_, there := n.sandboxes[ended]
		return !there
	})
}

func TestSilentNodeIsAway(t *testing.T) {
	r := newRig(t, func(c *app.Config) { c.Nodes.Missed = 3 })
	n := newFakeNode(t, r.pki, "n1")
	if err := n.dial(r.app.Addresses("node")[0], time.Hour); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the node is away", func() bool { return !r.nodeView("n1").GetOnline() })
}

func TestSecondSessionFencesTheFirst(t *testing.T) {
	r := newRig(t)
	n := r.node("n1")
	n.mu.Lock()
	old := n.stream
	n.mu.Unlock()
	twin := newFakeNode(t, r.pki, "n1")
	if err := twin.dial(r.app.Addresses("node")[0], 20*time.Millisecond); err != nil {
		t.Fatal(err)
	}
	select {
	case <-old.Context().Done():
	case <-time.After(time.Minute):
		t.Fatal("the first session goes on")
	}
	r.create("one")
	if len(twin.sandboxes) != 1 || len(n.sandboxes) != 0 {
		t.Fatal("the fenced session was used")
	}
}

func TestCordon(t *testing.T) {
	r := newRig(t)
	r.node("n1")
	c := dormousev1.NewNodeServiceClient(r.conn(r.root))
	ctx := context.Background()
	got, err := c.CordonNode(ctx, &dormousev1.CordonNodeRequest{Name: "n1", OperationId: uid.New()})
	if err != nil || !got.GetNode().GetCordoned() {
		t.Fatalf("%v, %v", got, err)
	}
	_, err = dormousev1.NewSandboxServiceClient(r.conn(r.user)).CreateSandbox(ctx, box(""))
	wantReason(t, err, errs.NoNodeFits)
	r.app.Stop()
	r.start()
	if !r.nodeView("n1").GetCordoned() {
		t.Fatal("the intent was forgotten")
	}
	c = dormousev1.NewNodeServiceClient(r.conn(r.root))
	if got, err := c.UncordonNode(ctx, &dormousev1.UncordonNodeRequest{Name: "n1"}); err != nil || got.GetNode().GetCordoned() {
		t.Fatalf("%v, %v", got, err)
	}
	_, err = c.CordonNode(ctx, &dormousev1.CordonNodeRequest{Name: "nowhere"})
	wantReason(t, err, errs.ObjectNotFound)
}

// TestStandby answers reads by itself, and passes on to the leader what only that can do.
func TestStandby(t *testing.T) {
	r := newRig(t)
	r.node("n1")
	u := r.create("one")
	leader := r.app
	standby := r.cfg
	standby.Admin, standby.Holder, standby.Lease.TTL = "", "standby", 5*time.Second // it asks often; the leader's lease is long
	b := startStandby(t, r, standby)
	r.app = b
	c := dormousev1.NewSandboxServiceClient(r.conn(r.user))
	if _, err := c.GetSandbox(context.Background(), &dormousev1.GetSandboxRequest{Uid: u}); err != nil {
		t.Fatal(err)
	}
	req := box("two")
	made, err := c.CreateSandbox(context.Background(), req)
	if err != nil {
		t.Fatal(err)
	}
	again, err := dormousev1.NewSandboxServiceClient(r.conn(r.user)).CreateSandbox(context.Background(), req)
	if err != nil || again.GetSandbox().GetMeta().GetUid() != made.GetSandbox().GetMeta().GetUid() {
		t.Fatalf("%v, %v", again, err)
	}
	_, err = c.CreateSandbox(context.Background(), box("two"))
	wantReason(t, err, errs.NameTaken) // the leader's own refusal
	list, err := dormousev1.NewNodeServiceClient(r.conn(r.root)).ListNodes(context.Background(), &dormousev1.ListNodesRequest{})
	if err != nil || len(list.GetNodes()) != 1 || !list.GetNodes()[0].GetOnline() {
		t.Fatalf("%v, %v", list, err)
	}
	_, err = dormousev1.NewNodeServiceClient(r.conn(r.user)).ListNodes(context.Background(), &dormousev1.ListNodesRequest{})
	wantReason(t, err, errs.NotAllowed)
	pull, err := dormousev1.NewImageServiceClient(r.conn(r.user)).PullImage(context.Background(), &dormousev1.PullImageRequest{Reference: "registry.test/base:1"})
	if err != nil {
		t.Fatal(err)
	}
	for err == nil {
		_, err = pull.Recv()
	}
	if !errors.Is(err, io.EOF) {
		t.Fatal(err)
	}
	// A coordinator's certificate alone says nothing of a caller.
	bare := dormousev1.NewSandboxServiceClient(r.connTLS(r.pki.source(t, pki.Identity{Role: pki.RoleCoordinator, Name: "c3"}).Client(pki.RoleCoordinator, "")))
	_, err = bare.ListSandboxes(context.Background(), &dormousev1.ListSandboxesRequest{})
	wantReason(t, err, errs.NotAllowed)
	leader.Stop()
	if _, err := dormousev1.NewNodeServiceClient(r.conn(r.root)).ListNodes(context.Background(), &dormousev1.ListNodesRequest{}); err != nil || !b.Leading() {
		t.Fatalf("a call while nobody leads waits until somebody does: %v", err)
	}
}

func TestHigherEpochMakesTheLeaderLeadAgain(t *testing.T) {
	r := newRig(t)
	n := newFakeNode(t, r.pki, "n1")
	n.epoch = 41
	eventually(t, "the node is let in under a higher epoch", func() bool { return n.dial(r.app.Addresses("node")[0], 20*time.Millisecond) == nil })
	if n.epoch <= 41 {
		t.Fatalf("epoch %d", n.epoch)
	}
	r.create("one")
}
