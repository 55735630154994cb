package session

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	nodev1 "github.com/dormouse-run/dormouse/proto/dormouse/node/v1"
)

// wire is a stream whose other end says nothing and keeps what it hears.
type wire struct {
	nodev1.SessionService_SessionClient
	ctx  context.Context
	sent chan *nodev1.SessionRequest
}

func (w *wire) Send(msg *nodev1.SessionRequest) error {
	w.sent <- msg
	return nil
}

func (w *wire) Recv() (*nodev1.SessionResponse, error) {
	<-w.ctx.Done()
	return nil, w.ctx.Err()
}

// News waits until the call that it is the outcome of has been answered, and all that comes meanwhile is told at once.
func TestNewsSettlesBeforeItIsTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancelCause(t.Context())
		s := &site{changed: make(chan struct{}, 1)}
		w := &wire{ctx: ctx, sent: make(chan *nodev1.SessionRequest, 100)}
		l := &live{c: New(Options{Node: s, Store: s}), stream: w, interval: time.Hour, sent: make(map[string]uint64), flights: make(map[uint64]flight),
			journal: make(chan *nodev1.Journal, 1), kept: make(chan uint64, 1)}
		done := make(chan error, 1)
		go func() { done <- l.run(ctx, cancel) }()
		synctest.Wait() // what was due at the beginning has been looked for
		s.observe()
		time.Sleep(defaultSettle / 2)
		s.observe()
		synctest.Wait()
		if n := len(w.sent); n != 0 {
			t.Fatalf("%d messages before the time", n)
		}
		time.Sleep(defaultSettle)
		synctest.Wait()
		if n := len(w.sent); n != 1 {
			t.Fatalf("%d messages, want one", n)
		}
		if got := (<-w.sent).GetReport().GetSandbox().GetObservation(); got != 2 {
			t.Fatalf("told of observation %d, want the latest, 2", got)
		}
		cancel(errors.New("the end of the test"))
		if err := <-done; err == nil {
			t.Fatal("the session ended without a reason")
		}
	})
}
