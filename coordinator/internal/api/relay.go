package api

import (
	"context"
	"errors"
	"io"
	"sync"
	"sync/atomic"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"github.com/dormouse-run/dormouse/coordinator/internal/nodeclient"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/wire"
)

// frame is a message of which only the bytes matter.
type frame = wire.Frame

// relay passes a stream on: the first message and what comes after it up to the node, what the node says down.
//
// Until the node has said something, what went up is kept, so that a stream that the node refused before it began can be passed on once
// more. Of what the client sends meanwhile that is at most a window (nodeclient.StreamWindow): a node that took more has begun.
type relay struct {
	down          grpc.ServerStream
	first         proto.Message
	clientStreams bool
	cancel        context.CancelFunc // of what is passed on, when the client can no longer be read
	// begun: the node has said something or taken more than is kept. Nothing is sent again.
	begun atomic.Bool

	up      grpc.ClientStream // of the round; set under mu
	passing bool

	mu   sync.Mutex // of sending up
	kept []*frame
	size int
	over bool // the client sends no more
}

// run passes the stream on to one end of it. What it gives is what the node ended it with.
func (r *relay) run(up grpc.ClientStream) error {
	if err := r.resend(up); err != nil {
		return err
	}
	if r.clientStreams && !r.passing {
		// It ends with the stream from below, which gRPC ends when the handler has returned: nobody can wait for
		// it before.
		r.passing = true
		go func() {
			if r.passUp() != nil {
				r.cancel()
			}
		}()
	}
	for {
		msg := new(frame)
		err := up.RecvMsg(msg)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		r.begun.Store(true)
		if err := r.down.SendMsg(msg); err != nil {
			return err
		}
	}
}

// resend sends up the first message, and what followed it in an earlier round.
func (r *relay) resend(up grpc.ClientStream) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.up = up
	if err := sent(up, r.first); err != nil {
		return err
	}
	for _, msg := range r.kept {
		if up.SendMsg(msg.Again()) != nil {
			return nil // what is received has the reason
		}
	}
	if r.over || !r.clientStreams {
		return up.CloseSend()
	}
	return nil
}

// passUp passes messages and their end on. An error means that the stream is of no use any more.
func (r *relay) passUp() error {
	for {
		msg := new(frame)
		err := r.down.RecvMsg(msg)
		if err != nil && !errors.Is(err, io.EOF) {
			return err
		}
		if done, err := r.pass(msg, err != nil); done || err != nil {
			return err
		}
	}
}

// pass passes one message on, or the end. Done: there is nothing more to pass on.
func (r *relay) pass(msg *frame, end bool) (done bool, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if end {
		r.over = true
		return true, r.up.CloseSend()
	}
	keeps := r.keep(msg)
	if r.up.SendMsg(msg) != nil && !keeps {
		return true, nil // the other direction has the reason
	}
	return false, nil
}

// keep keeps the message, if it may have to be sent again. It wants the lock.
func (r *relay) keep(msg *frame) bool {
	if r.size += msg.Len(); r.size > nodeclient.StreamWindow {
		r.begun.Store(true)
	}
	if r.begun.Load() {
		r.release()
		return false
	}
	r.kept = append(r.kept, msg.Again())
	return true
}

// release wants the lock.
func (r *relay) release() {
	for _, msg := range r.kept {
		msg.Free()
	}
	r.kept = nil
}

// end lets go what was kept. Nothing is kept after it.
func (r *relay) end() {
	r.begun.Store(true)
	r.cancel() // which ends a sending that goes on
	r.mu.Lock()
	defer r.mu.Unlock()
	r.release()
}

// sent sends the first message. If it was not taken, the reason is what is received.
func sent(up grpc.ClientStream, first proto.Message) error {
	err := up.SendMsg(first)
	if errors.Is(err, io.EOF) {
		if got := up.RecvMsg(new(frame)); got != nil && !errors.Is(got, io.EOF) {
			return got
		}
		return errs.New(errs.ReplyLost, "the node ended the stream before it began")
	}
	return err
}
