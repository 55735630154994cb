package integration

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/types/known/fieldmaskpb"

	"github.com/dormouse-run/dormouse/pkg/client"
	"github.com/dormouse-run/dormouse/pkg/errs"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
	"github.com/dormouse-run/dormouse/test/fabric"
)

// ticker is a server in the hub that sends to its first caller for as long as there is one; over is closed then.
func (w *world) ticker() (port string, over chan struct{}) {
	w.Helper()
	var l net.Listener
	w.ok(fabric.Do(fabric.HubPath(w.ID), func() (err error) {
		l, err = net.Listen("tcp4", fabric.HubAddr+":0")
		return err
	}))
	over = make(chan struct{})
	ended := make(chan struct{})
	go func() {
		defer close(over)
		c, err := l.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		every := time.NewTicker(5 * time.Millisecond)
		defer every.Stop()
		for {
			if _, err := c.Write([]byte("tick\n")); err != nil {
				return
			}
			select {
			case <-every.C:
			case <-ended:
				return
			}
		}
	}()
	w.Cleanup(func() {
		close(ended)
		_ = l.Close()
		<-over
	})
	_, port, _ = net.SplitHostPort(l.Addr().String())
	return port, over
}

// door is a server in the hub. knocked tells how often it was called until now, what waits to be accepted included.
func (w *world) door() (port string, knocked func() int64) {
	w.Helper()
	var l net.Listener
	w.ok(fabric.Do(fabric.HubPath(w.ID), func() (err error) {
		l, err = net.Listen("tcp4", fabric.HubAddr+":0")
		return err
	}))
	var knocks atomic.Int64
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			knocks.Add(1)
			_ = c.Close()
		}
	}()
	w.Cleanup(func() {
		_ = l.Close()
		<-done
	})
	_, port, _ = net.SplitHostPort(l.Addr().String())
	mine := int64(0)
	return port, func() int64 {
		w.Helper()
		c, err := fabric.Dialer(fabric.HubPath(w.ID))(w.ctx, "tcp4", l.Addr().String())
		w.ok(err)
		defer c.Close()
		_, err = io.ReadAll(c) // until it is its turn
		w.ok(err)
		mine++
		return knocks.Load() - mine
	}
}

// egress sets a policy and checks that it is said to be in force.
func (w *world) egress(ctx context.Context, s *client.Sandbox, policy *dormousev1.EgressPolicy) error {
	err := s.Update(ctx, &dormousev1.UpdateSandboxRequest{Egress: policy, UpdateMask: &fieldmaskpb.FieldMask{Paths: []string{"egress"}}})
	if has, saw := s.Last.GetMeta().GetGeneration(), s.Last.GetStatus().GetObservedGeneration(); err == nil && saw < has {
		err = fmt.Errorf("generation %d, observed %d", has, saw)
	}
	return err
}

func only(rules ...*dormousev1.EgressRule) *dormousev1.EgressPolicy {
	return &dormousev1.EgressPolicy{DefaultAction: dormousev1.EgressAction_EGRESS_ACTION_DENY, Allow: rules}
}

// What a sandbox may reach changes while it runs, for the connections that there are too, while it is paused, and while it is hibernated; a
// copy has the policy of its source.
func TestEgressUpdate(t *testing.T) {
	w := enter(t)
	site := fabric.HubAddr + ":" + w.website()
	port, over := w.ticker()
	s := w.create(w.outbound(1, nil, "sh", "-c", "nc "+fabric.HubAddr+" "+port+" >/tmp/heard; touch /tmp/ended; sleep 1000000"))
	heard := func() error {
		if w.sh(s, "cat /tmp/heard 2>/dev/null | wc -c") == "0" {
			return fmt.Errorf("nothing came")
		}
		return nil
	}
	w.await("the stream begins", heard)

	// One that is allowed goes on: it sends on, and more comes.
	w.ok(w.egress(w.ctx, s, only(&dormousev1.EgressRule{Cidrs: []string{fabric.HubAddr}, Protocol: dormousev1.EgressProtocol_EGRESS_PROTOCOL_TCP})))
	before := w.sh(s, "wc -c </tmp/heard")
	w.await("the stream goes on", func() error {
		if now := w.sh(s, "wc -c </tmp/heard"); now == before {
			return fmt.Errorf("it is at %s", now)
		}
		return nil
	})
	w.fetches(s, site, "you are "+fabric.NodeAddr(1))
	// One that is forbidden ends, on both sides.
	w.ok(w.egress(w.ctx, s, only()))
	select {
	case <-over:
	case <-w.ctx.Done():
		t.Fatal("the server still has its caller")
	}
	w.await("the stream ends", func() error {
		if w.sh(s, "ls /tmp") == "heard" {
			return fmt.Errorf("it goes on")
		}
		return nil
	})
	w.unreachable(s, site)

	w.ok(s.Pause(w.ctx, ""))
	seen, err := s.Network(w.ctx)
	w.ok(err)
	if seen.GetRefusedPackets() == 0 || seen.GetSentBytes() == 0 || seen.GetReceivedBytes() == 0 || seen.GetMode() != dormousev1.NetworkMode_NETWORK_MODE_OUTBOUND || seen.GetAddress() == "" {
		t.Errorf("its network has seen %v", seen)
	}
	a := w.rest(w.key, "PATCH", "/v1/sandboxes/"+s.UID, `{"egress":{"defaultAction":"EGRESS_ACTION_DENY","allow":[{"cidrs":["`+fabric.HubAddr+`"]}]},"updateMask":"egress"}`)
	if a.status != 200 {
		t.Fatalf("%d %s", a.status, a.body)
	}
	w.ok(s.Resume(w.ctx, ""))
	w.fetches(s, site, "you are "+fabric.NodeAddr(1))

	w.ok(s.Hibernate(w.ctx, ""))
	w.ok(w.egress(w.ctx, s, only()))
	w.ok(s.Resume(w.ctx, ""))
	w.unreachable(s, site)
	copies, _, err := w.api.Fork(w.ctx, &dormousev1.ForkSandboxRequest{SandboxUid: s.UID})
	w.ok(err)
	w.unreachable(copies[0], site)
	w.ok(w.egress(w.ctx, copies[0], nil))
	w.fetches(copies[0], site, "you are "+fabric.NodeAddr(1))
	w.unreachable(s, site)

	w.refused(w.egress(w.ctx, s, only(&dormousev1.EgressRule{Cidrs: []string{"::/0"}})), errs.InvalidField)
	inside := w.create(w.spec())
	w.refused(w.egress(w.ctx, inside, only()), errs.InvalidField)
	if a = w.rest(w.key, "GET", "/v1/sandboxes/"+inside.UID+"/network", ""); a.status != 200 || !strings.Contains(string(a.body), "NETWORK_MODE_NONE") {
		t.Errorf("%d %s", a.status, a.body)
	}
	w.ok(copies[0].Hibernate(w.ctx, ""))
	if seen, err = copies[0].Network(w.ctx); err != nil || seen.GetSentBytes() != 0 {
		t.Errorf("a hibernated sandbox's network has seen %v, %v", seen, err)
	}
	w.ok(copies[0].Refresh(w.ctx))
	w.is(copies[0], dormousev1.SandboxPhase_SANDBOX_PHASE_HIBERNATED)
}

// A snapshot that was taken before a policy was narrowed gives what it was taken with; agentd is killed in the middle of updates, and the
// last one holds.
func TestEgressUpdateAndADyingAgentd(t *testing.T) {
	w := enter(t)
	site := fabric.HubAddr + ":" + w.website()
	s := w.create(w.outbound(1, nil))
	snap := w.checkpoint(s)
	hub := only(&dormousev1.EgressRule{Cidrs: []string{fabric.HubAddr}})
	var updates errgroup.Group
	updates.Go(func() error {
		for i := range 6 {
			if err := w.egress(w.ctx, s, []*dormousev1.EgressPolicy{hub, only()}[i%2]); err != nil {
				return err
			}
		}
		return nil
	})
	for range 2 {
		w.restartAgentd(1)
	}
	w.ok(updates.Wait())
	w.unreachable(s, site)
	w.ok(w.egress(w.ctx, s, hub))
	w.fetches(s, site, "you are "+fabric.NodeAddr(1))
	restored, err := snap.Restore(w.ctx, &dormousev1.RestoreSandboxRequest{})
	w.ok(err)
	if restored.Last.GetSpec().GetEgress() != nil {
		t.Errorf("restored with %v", restored.Last.GetSpec().GetEgress())
	}
	w.fetches(restored, site, "you are "+fabric.NodeAddr(1))
}

// A program tries without end to get out while its sandbox is hibernated, wakes, is copied and restored under a policy that does not let it:
// not one connection gets through, not even the first.
func TestThePolicyIsThereBeforeTheGuestGoesOn(t *testing.T) {
	w := enter(t)
	port, knocked := w.door()
	s := w.create(w.outbound(1, nil, "sh", "-c", `i=0; while true; do nc -w 20 `+fabric.HubAddr+" "+port+` </dev/null >/dev/null 2>&1; i=$((i+1)); echo $i >/tmp/n; mv /tmp/n /tmp/tries; done`))
	tries := func(s *client.Sandbox) (n int) {
		w.await("it tries", func() error {
			_, err := fmt.Sscan(w.sh(s, "cat /tmp/tries 2>/dev/null || echo 0"), &n)
			if err == nil && n == 0 {
				err = errors.New("not once")
			}
			return err
		})
		return n
	}
	goesOn := func(s *client.Sandbox) {
		t.Helper()
		before := tries(s)
		w.await("it goes on trying", func() error {
			if now := tries(s); now < before+3 {
				return fmt.Errorf("%d times, then %d", before, now)
			}
			return nil
		})
	}
	goesOn(s)
	if knocked() == 0 {
		t.Fatal("it was allowed, and did not get out")
	}
	w.ok(s.Hibernate(w.ctx, ""))
	w.ok(w.egress(w.ctx, s, only()))
	before := knocked()
	w.ok(s.Resume(w.ctx, ""))
	goesOn(s)
	snap := w.checkpoint(s)
	copies, _, err := w.api.Fork(w.ctx, &dormousev1.ForkSandboxRequest{SandboxUid: s.UID, Count: 2})
	w.ok(err)
	restored, err := snap.Restore(w.ctx, &dormousev1.RestoreSandboxRequest{})
	w.ok(err)
	seen := map[string]bool{}
	for _, c := range append(copies, restored, s) {
		goesOn(c)
		if at := fmt.Sprint(w.nodeOf(c), w.addressOf(c)); seen[at] {
			t.Errorf("two have the address %s", at)
		} else {
			seen[at] = true
		}
	}
	if now := knocked(); now != before {
		t.Errorf("%d connections got through", now-before)
	}
}
