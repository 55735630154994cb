package guest

import (
	"bytes"
	"context"
	"strings"

	"github.com/dormouse-run/dormouse/agentd/internal/guestwire"
	"github.com/dormouse-run/dormouse/pkg/errs"
)

// result is a reply, or why there is none.
type result struct {
	typ     guestwire.Type
	payload []byte
	err     error
}

// decode reads the reply into m.
func (r result) decode(m guestwire.Message) error {
	switch {
	case r.err != nil:
		return r.err
	case r.typ == guestwire.TypeError:
		return guestError(r.payload)
	case r.typ == guestwire.TypeRejected:
		return rejected(r.payload)
	}
	if err := guestwire.Unmarshal(r.payload, m); err != nil {
		return errs.Wrap(err, errs.InternalError, "guest init sent an answer that cannot be read")
	}
	return nil
}

// call receives replies of one type, or an error. It holds a bounded number of them.
type call struct {
	want guestwire.Type
	ch   chan result
}

func newCall(want guestwire.Type) *call { return &call{want: want, ch: make(chan result, 1)} }

func (r *call) deliver(t guestwire.Type, payload []byte) {
	if t == r.want || t == guestwire.TypeError || t == guestwire.TypeRejected && r.want == guestwire.TypeWelcome {
		r.put(result{typ: t, payload: bytes.Clone(payload)})
	}
}

func (r *call) broken(err error) { r.put(result{err: err}) }

// put drops what nobody asked for.
func (r *call) put(res result) {
	select {
	case r.ch <- res:
	default:
	}
}

// roundTrip sends a request and waits for its reply. When ctx ends first, the outcome is unknown
// if the request was sent, and not_started if not.
func (c *Conn) roundTrip(ctx context.Context, req, reply guestwire.Message) error {
	r := newCall(reply.Type())
	stream, err := c.register(r)
	if err != nil {
		return err
	}
	if err := c.send(ctx, stream, req); err != nil {
		c.unregister(stream)
		return err
	}
	select {
	case res := <-r.ch:
		c.unregister(stream)
		return res.decode(reply)
	case <-ctx.Done():
		c.abandon(stream)
		return errs.From(ctx.Err())
	}
}

// controlTrip is roundTrip past the gate.
func (c *Conn) controlTrip(ctx context.Context, req, reply guestwire.Message, after func()) error {
	r := newCall(reply.Type())
	stream, err := c.register(r)
	if err != nil {
		return err
	}
	defer c.unregister(stream)
	if err := c.sendControl(ctx, stream, req, after); err != nil {
		return err
	}
	select {
	case res := <-r.ch:
		return res.decode(reply)
	case <-ctx.Done():
		return c.silent(ctx)
	}
}

func notSent(ctx context.Context) error {
	return errs.From(ctx.Err()).WithOutcome(errs.NotStarted, errs.AfterBackoff)
}

// guestReasons are those that guest init may give; any other is its mistake.
var guestReasons = map[errs.Reason]bool{
	errs.CommandNotFound: true, errs.CommandNotRunnable: true, errs.UserNotFound: true, errs.InvalidField: true,
	errs.LimitExceeded: true, errs.TooMany: true, errs.ProcessNotFound: true, errs.OperationBodyMismatch: true,
	errs.WrongPhase: true, errs.NotSupported: true, errs.SandboxFailed: true, errs.InputTaken: true,
}

func guestError(payload []byte) error {
	var m guestwire.Error
	if err := guestwire.Unmarshal(payload, &m); err != nil || !guestReasons[errs.Reason(m.Reason)] {
		return errs.New(errs.InternalError, "guest init failed: %s", clean(m.Message))
	}
	e := errs.New(errs.Reason(m.Reason), "%s", clean(m.Message))
	if key := m.DetailKey; key != "" && len(key) <= 32 && strings.Trim(key, "abcdefghijklmnopqrstuvwxyz_") == "" {
		e = e.With(key, clean(m.DetailValue))
	}
	return e
}

func rejected(payload []byte) error {
	var m guestwire.Rejected
	if err := guestwire.Unmarshal(payload, &m); err != nil {
		return errs.New(errs.InternalError, "guest init refused the hello in a way that cannot be read")
	}
	switch reason := errs.Reason(m.Reason); reason {
	case errs.Fenced:
		return errs.New(reason, "the guest channel has a later generation than this node's").With("current_epoch", utoa(m.CurrentGeneration))
	case errs.StaleUID:
		return errs.New(reason, "the guest channel belongs to another sandbox; one that was restored needs a generation above its snapshot's").With("current_epoch", utoa(m.CurrentGeneration))
	}
	return errs.New(errs.NotSupported, "guest init and this node have no protocol version in common; use the runtime bundle that made the sandbox").With("feature", "guest protocol")
}

// clean makes a guest's text fit for an error or a log: short, and without control characters.
func clean(s string) string {
	if len(s) > maxText {
		s = s[:maxText]
	}
	return strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f || r == '\ufffd' || (r >= 0x80 && r < 0xa0) {
			return '?'
		}
		return r
	}, strings.ToValidUTF8(s, "?"))
}
