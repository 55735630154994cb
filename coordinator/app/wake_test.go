package app_test

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/dormouse-run/dormouse/coordinator/app"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/uid"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// sleeper makes a sandbox that is paused.
func (r *rig) sleeper(wake bool) string {
	r.t.Helper()
	req := box("")
	req.Spec.WakeOnUse = wake
	made, err := dormousev1.NewSandboxServiceClient(r.conn(r.user)).CreateSandbox(context.Background(), req)
	if err != nil {
		r.t.Fatal(err)
	}
	u := made.GetSandbox().GetMeta().GetUid()
	r.pause(u)
	return u
}

func (r *rig) pause(u string) {
	r.t.Helper()
	got, err := dormousev1.NewSandboxServiceClient(r.conn(r.user)).PauseSandbox(context.Background(), &dormousev1.PauseSandboxRequest{Uid: u, OperationId: uid.New()})
	if err != nil || got.GetSandbox().GetStatus().GetPhase() != dormousev1.SandboxPhase_SANDBOX_PHASE_PAUSED {
		r.t.Fatalf("paused it is %v: %v", got, err)
	}
}

// uses are calls into a sandbox, one of each kind that gRPC has.
func (r *rig) uses() map[string]func(ctx context.Context, u string) error {
	c := dormousev1.NewProcessServiceClient(r.conn(r.user))
	return map[string]func(ctx context.Context, u string) error{
		"a call": func(ctx context.Context, u string) error {
			_, err := c.ListProcesses(ctx, &dormousev1.ListProcessesRequest{SandboxUid: u})
			return err
		},
		"a stream from the sandbox": func(ctx context.Context, u string) error {
			s, err := c.RunProcess(ctx, &dormousev1.RunProcessRequest{SandboxUid: u, Spec: &dormousev1.ProcessSpec{Argv: []string{"hello"}}})
			if err == nil {
				_, err = s.Recv()
			}
			return err
		},
		"a stream both ways": func(ctx context.Context, u string) error {
			s, err := c.AttachProcess(ctx)
			if err != nil {
				return err
			}
			open := &dormousev1.AttachProcessRequest{Event: &dormousev1.AttachProcessRequest_Open{Open: &dormousev1.AttachOpen{SandboxUid: u, ProcessId: "p1"}}}
			err = s.Send(open)
			if got, rerr := s.Recv(); rerr != nil || got.GetOpened() == nil {
				err = errors.Join(err, rerr)
			}
			return err
		},
	}
}

// TestWakeOnEveryReplica: a call that comes to a standby wakes the sandbox as one that comes to the leader does, also when the leader
// has just gone.
func TestWakeOnEveryReplica(t *testing.T) {
	r := newRig(t)
	n := r.node("n1")
	u, other := r.sleeper(true), r.sleeper(false)
	leader := r.app
	cfg := r.cfg
	cfg.Admin, cfg.Holder = "", "standby"
	standby := startStandby(t, r, cfg)
	for who, a := range map[string]*app.App{"the leader": leader, "the standby": standby} {
		r.app = a
		for name, use := range r.uses() {
			ctx, cancel := context.WithCancel(context.Background())
			if err := use(ctx, u); err != nil {
				t.Errorf("%s through %s: %v", name, who, err)
			}
			if err := use(ctx, other); !errs.Has(err, errs.SandboxPaused) {
				t.Errorf("%s through %s of one that is not to be woken: %v", name, who, err)
			}
			cancel()
			r.pause(u)
		}
	}
	n.mu.Lock()
	resumed := len(slices.DeleteFunc(slices.Clone(n.turns), func(p dormousev1.SandboxPhase) bool {
		return p != dormousev1.SandboxPhase_SANDBOX_PHASE_RUNNING
	}))
	n.mu.Unlock()
	if resumed != 6 {
		t.Errorf("the node resumed %d times, not once for each use", resumed)
	}
	leader.Stop()
	r.app = standby
	if err := n.dial(standby.Addresses("node")[0], 20*time.Millisecond); err != nil {
		eventually(t, "the standby takes the node", func() bool { return n.dial(standby.Addresses("node")[0], 20*time.Millisecond) == nil })
	}
	if err := r.uses()["a stream both ways"](t.Context(), u); err != nil || !standby.Leading() {
		t.Errorf("after the leader: %v", err)
	}
}

// TestStopDuringAWake: a coordinator that is stopped does not wait for a wake that hangs; who used the sandbox is told.
func TestStopDuringAWake(t *testing.T) {
	r := newRig(t)
	n := r.node("n1")
	u := r.sleeper(true)
	n.hold = make(chan struct{})
	cfg := r.cfg
	cfg.Admin, cfg.Holder = "", "standby"
	leader, standby := r.app, startStandby(t, r, cfg)
	r.app = standby
	use := r.uses()["a stream both ways"]
	told := make(chan error, 1)
	go func() { told <- use(context.Background(), u) }()
	eventually(t, "the node is asked", func() bool {
		n.mu.Lock()
		defer n.mu.Unlock()
		return n.asked > 0
	})
	standby.Stop()
	if err := <-told; !errs.Has(err, errs.ShuttingDown) && !errs.Has(err, errs.ReplyLost) {
		t.Errorf("who used it was told %v", err)
	}
	close(n.hold)
	r.app = leader
}

// TestWakeOfOneJustPaused: a node that has just paused a sandbox, of which its record does not tell yet, refuses what comes for it. A call whose
// sandbox is to be woken is made again then, whatever its kind: at most twice, and never once it began.
func TestWakeOfOneJustPaused(t *testing.T) {
	r := newRig(t)
	n := r.node("n1")
	waking := func(wake bool) string {
		req := box("")
		req.Spec.WakeOnUse = wake
		made, err := dormousev1.NewSandboxServiceClient(r.conn(r.user)).CreateSandbox(context.Background(), req)
		if err != nil {
			t.Fatal(err)
		}
		return made.GetSandbox().GetMeta().GetUid()
	}
	u, other := waking(true), waking(false)
	resumed := func() int {
		n.mu.Lock()
		defer n.mu.Unlock()
		asked := n.asked
		n.asked = 0
		return asked
	}
	for name, use := range r.uses() {
		ctx, cancel := context.WithCancel(context.Background())
		n.yawns.Store(1)
		if err := use(ctx, u); err != nil || resumed() != 1 {
			t.Errorf("%s: %v", name, err)
		}
		n.yawns.Store(1)
		if err := use(ctx, other); !errs.Has(err, errs.SandboxPaused) || resumed() != 0 {
			t.Errorf("%s of one that is not to be woken: %v", name, err)
		}
		n.yawns.Store(3)
		if err := use(ctx, u); !errs.Has(err, errs.SandboxPaused) || resumed() != 2 {
			t.Errorf("%s of one that goes to sleep again and again: %v", name, err)
		}
		n.yawns.Store(0)
		cancel()
	}
	attach := func(process string) (dormousev1.ProcessService_AttachProcessClient, error) {
		ctx, cancel := context.WithCancel(context.Background())
		t.Cleanup(cancel)
		s, err := dormousev1.NewProcessServiceClient(r.conn(r.user)).AttachProcess(ctx)
		if err == nil {
			err = s.Send(&dormousev1.AttachProcessRequest{Event: &dormousev1.AttachProcessRequest_Open{Open: &dormousev1.AttachOpen{SandboxUid: u, ProcessId: process, Input: true}}})
		}
		if err == nil {
			err = s.Send(&dormousev1.AttachProcessRequest{Event: &dormousev1.AttachProcessRequest_Input{Input: &dormousev1.InputChunk{Data: []byte("said before it was open")}}})
		}
		return s, err
	}
	n.yawns.Store(1)
	late, err := attach("late")
	if err != nil {
		t.Fatal(err)
	}
	for said := ""; said != "said before it was open"; {
		got, err := late.Recv()
		if err != nil {
			t.Fatalf("what was sent before the refusal: %q, then %v", said, err)
		}
		said += string(got.GetOutput().GetData())
	}
	if resumed() != 1 {
		t.Error("it was not woken once")
	}
	n.yawns.Store(1)
	caught, err := attach("caught")
	for err == nil {
		_, err = caught.Recv()
	}
	if !errs.Has(err, errs.SandboxPaused) || resumed() != 0 {
		t.Errorf("one that had begun: %v", err)
	}
}
