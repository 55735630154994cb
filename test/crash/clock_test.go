package crash

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/dormouse-run/dormouse/pkg/client"
	"github.com/dormouse-run/dormouse/pkg/uid"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
	"github.com/dormouse-run/dormouse/test/clock"
)

const redis = "redis"

// clocks are the parts whose wall clock a test can move.
var clocks = []string{agentd, coordinator, redis}

// step moves the wall clocks of the parts to the machine's time and the offset.
func (w *world) step(offset time.Duration, parts ...string) {
	w.Helper()
	for _, part := range parts {
		file := redisClock()
		if part != redis {
			file = w.faultFile(part) + ".clock"
		}
		w.ok(clock.Set(file, offset))
	}
}

// stepping moves clocks for the test; they are back when it ends.
func (w *world) stepping(offset time.Duration, parts ...string) {
	w.Helper()
	w.Cleanup(func() { w.step(0, clocks...) })
	w.step(offset, parts...)
}

// standing is what a step of the clock must not change.
type standing struct {
	agentd, coordinator, redis int // processes
	session, epoch             uint64
}

func (w *world) standing() standing {
	w.Helper()
	over, err := w.Overview(w.ctx, 1)
	w.ok(err)
	return standing{w.PID(agentd), w.PID(coordinator), w.PID(redis), over.GetSessionEpoch(), over.GetCoordinatorEpoch()}
}

// beats waits until the coordinator has heard the node so often that it would have noticed a silence.
func (w *world) beats(n int) {
	w.Helper()
	last := ""
	w.await("the node's heartbeats come", func() error {
		node, err := w.Client.GetNode(w.ctx, w.nodeName())
		if err != nil {
			return err
		}
		if at := node.GetLastHeartbeat().AsTime().String(); at != last {
			last = at
			n--
		}
		if n > 0 {
			return fmt.Errorf("%d more are to come", n)
		}
		return nil
	})
}

func (w *world) nodeName() string {
	w.Helper()
	nodes, err := client.Collect(w.Client.ListNodes(w.ctx))
	w.ok(err)
	if len(nodes) != 1 {
		w.Fatalf("there are %d nodes", len(nodes))
	}
	return nodes[0].GetName()
}

// The clock of the whole machine, or of one part, is set by an hour, either way, in the middle of an operation: the
// operation ends as if nothing was, its id gives the truth before and after, no session, lease or process ends, and
// every sandbox is the process that it was. Then the clock is set right again.
func TestF10ClockMoved(t *testing.T) {
	w := enter(t)
	var all []setting
	for _, offset := range []time.Duration{time.Hour, -time.Hour} {
		all = append(all, setting{"machine", clocks, offset})
		for _, part := range clocks {
			all = append(all, setting{part, []string{part}, offset})
		}
	}
	for _, c := range chosen(t, all, 3) {
		t.Run(c.String(), func(t *testing.T) {
			s := w.sub(t)
			s.moved(c.offset, c.parts)
			w.asked = s.asked
		})
	}
}

// setting is whose clock is set, and by how much.
type setting struct {
	who    string
	parts  []string
	offset time.Duration
}

func (c setting) String() string { return fmt.Sprintf("clock/%s by %s", c.who, c.offset) }

func (w *world) moved(offset time.Duration, parts []string) {
	w.Helper()
	was := w.standing()
	old := bare(w) // its id is from before the step
	w.ok(old.run(w.ctx))
	for _, m := range []struct {
		do    scenario
		point string
	}{{create, "start.guest.before"}, {capture, "checkpoint.save.after"}, {restore, "restore.runtime.after"}, {remove, "delete.runtime.before"}} {
		o := m.do(w)
		w.hold(agentd, m.point)
		done := make(chan error, 1)
		go func() { done <- o.run(w.ctx) }()
		w.heldAt(agentd, m.point, done)
		w.stepping(offset, parts...)
		w.beats(2)
		w.release(agentd)
		if err := <-done; err != nil {
			w.Fatalf("the operation that was held at %s says %v", m.point, err)
		}
		w.ok(o.run(w.ctx))
		w.ok(old.run(w.ctx))
		w.step(0, clocks...)
		w.ok(o.run(w.ctx))
		o.check()
		o.clean()
	}
	w.beats(6) // a silence would be noticed by now
	w.lives()
	if is := w.standing(); is != was {
		w.Errorf("before the steps it was %+v, now it is %+v", was, is)
	}
	old.check()
	old.clean()
	w.settled()
}

// While the clock is off, everything can be started again: what was recorded under another time is taken as it is,
// and who leads is known at once.
func TestF10RestartedUnderAnotherClock(t *testing.T) {
	w := enter(t)
	const long, short = "ttl: 20s", "ttl: 800ms"
	w.ok(configure(w.ctx, w.Cluster, long, short))
	w.KeepLeases = true // a clock that was set decides how long they are
	defer func() {
		w.KeepLeases = false
		w.ok(configure(w.ctx, w.Cluster, short, long))
	}()
	for _, offset := range []time.Duration{time.Hour, -time.Hour} {
		t.Run(offset.String(), func(t *testing.T) {
			s := w.sub(t)
			o := bare(s)
			s.ok(o.run(s.ctx))
			s.stepping(offset, clocks...)
			for _, daemon := range []string{agentd, coordinator} {
				s.ok(s.kill(daemon))
				s.restart(daemon)
			}
			s.ok(s.KillRedis(s.ctx))
			s.ok(s.StartRedis(s.ctx))
			s.online()
			s.lives()
			s.ok(s.insist(o.run)) // the receipt is there
			o.check()
			o.clean()
			s.under(create, func() {})
			s.under(capture, func() {})
			s.step(0, clocks...)
			s.lives()
			s.settled()
			w.asked = s.asked
		})
	}
}

// A request that waits for a node that is away waits as long as it would have.
func TestF10ClockMovedWhileANodeIsAwaited(t *testing.T) {
	w := enter(t)
	w.ok(w.KillAgentd(w.ctx, 1))
	w.await("the node is away", func() error {
		nodes, err := client.Collect(w.Client.ListNodes(w.ctx))
		if err == nil && nodes[0].GetOnline() {
			err = errors.New("it is online")
		}
		return err
	})
	var made *client.Sandbox
	done := make(chan error, 1)
	go func() {
		var err error
		made, err = w.api.CreateSandbox(w.ctx, &dormousev1.CreateSandboxRequest{Name: "awaits", Spec: w.spec()})
		done <- err
	}()
	w.await("it waits", func() error {
		s, err := w.api.FindSandbox(w.ctx, "awaits")
		if err == nil && len(s.Last.GetStatus().GetConditions()) == 0 {
			err = errors.New("it is not said to wait")
		}
		return err
	})
	w.stepping(time.Hour, coordinator)
	w.restart(agentd)
	w.ok(<-done)
	w.answers(made)
	w.step(0, coordinator)
	w.drop(made)
	w.settled()
}

// B10, its second half: a snapshot is restored after the clock was set, on a node that was started since or was not.
func TestB10RestoreAfterTheClockJumped(t *testing.T) {
	w := enter(t)
	for _, offset := range []time.Duration{time.Hour, -time.Hour} {
		w.stepping(offset, clocks...)
		w.under(restore, func() {})
		w.ok(w.kill(agentd))
		w.restart(agentd)
		w.under(restore, func() {})
	}
	w.step(0, clocks...)
	w.under(restore, func() {})
}

// What is made after a step gets a uid of the clock's time, and one that nothing had before.
func TestF10UidsAfterAStep(t *testing.T) {
	w := enter(t)
	made := map[string]bool{}
	for _, offset := range []time.Duration{0, time.Hour, 0, -time.Hour, 0} {
		w.stepping(offset, coordinator)
		s := w.newSandbox()
		at, err := uid.Time(s.UID)
		w.ok(err)
		if off := time.Until(at) - offset; off.Abs() > 30*time.Minute || made[s.UID] {
			w.Errorf("with the clock moved by %s a sandbox got the uid %s, of %s (made before: %v)", offset, s.UID, at, made[s.UID])
		}
		made[s.UID] = true
		events, err := client.Collect(w.api.ListEvents(w.ctx, &dormousev1.ListEventsRequest{ObjectUid: s.UID}))
		if err != nil || len(events) < 2 {
			w.Errorf("with the clock moved by %s there are the events %v (%v)", offset, events, err)
		}
		w.drop(s)
	}
}
