package guest

import (
	"context"
	"slices"
	"time"

	"github.com/dormouse-run/dormouse/agentd/internal/guestwire"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/fence"
)

// hello speaks until there is an answer. If the guest took the hello and said nothing, it may wait
// for the rest of a frame that an agentd began and did not live to end: a frame's length of zeros
// ends its waiting.
func (c *Conn) hello(ctx context.Context) error {
	r := newCall(guestwire.TypeWelcome)
	stream, err := c.register(r)
	if err != nil {
		return err
	}
	defer c.unregister(stream)
	hello, _ := guestwire.AppendMessage(nil, c.ch, stream, &guestwire.Hello{
		MinVersion: guestwire.Version, MaxVersion: guestwire.Version, SandboxUID: c.uid,
	})
	frame := hello
	for wait := helloFirst; ; wait = min(2*wait, helloMost) {
		select {
		case c.ctl <- control{frame: frame}:
		case <-ctx.Done():
			return c.silent(ctx)
		case <-c.done:
			return c.failure()
		}
		for unread := true; unread; {
			timer := time.NewTimer(wait)
			select {
			case res := <-r.ch:
				timer.Stop()
				return c.welcome(res)
			case <-ctx.Done():
				timer.Stop()
				return c.silent(ctx)
			case <-timer.C:
			}
			n, err := buffered(c.in)
			if err != nil {
				return c.silent(ctx)
			}
			unread = n > 0
		}
		frame = slices.Concat(make([]byte, guestwire.MaxFrame), hello)
	}
}

func (c *Conn) welcome(res result) error {
	var w guestwire.Welcome
	if err := res.decode(&w); err != nil {
		return err
	}
	if w.Version != guestwire.Version {
		return errs.New(errs.NotSupported, "guest init chose a protocol version that this node does not speak").With("feature", "guest protocol")
	}
	c.info = Info{
		Version: w.Version, Build: clean(w.Build), PreviousUID: clean(w.PreviousSandboxUID),
		PreviousGeneration: fence.Epoch(w.PreviousGeneration), Processes: int(w.Processes),
	}
	for _, s := range w.Capabilities[:min(len(w.Capabilities), 64)] {
		c.info.Capabilities = append(c.info.Capabilities, clean(s))
	}
	return nil
}

func (c *Conn) silent(ctx context.Context) error {
	return errs.Wrap(ctx.Err(), errs.GuestSilent, "guest init did not answer in time; the sandbox may be starting, paused or out of memory").With("uid", c.uid)
}
