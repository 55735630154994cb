package guest

import (
	"context"
	"time"

	"github.com/dormouse-run/dormouse/agentd/internal/guestwire"
	"github.com/dormouse-run/dormouse/pkg/errs"
)

// Identity is what Configure tells a sandbox about itself. What is empty or nil stays as it is.
type Identity struct {
	// Hostname is set and written to /etc/hostname.
	Hostname string
	// Hosts becomes /etc/hosts, if WriteHosts or not empty. localhost and the host name are added.
	Hosts      []Host
	WriteHosts bool
	// DNS becomes /etc/resolv.conf.
	DNS *DNS
	// SecretEnv, if not nil, replaces the "NAME=value" entries that only the main command gets.
	// They stay in guest init's memory; do not log them.
	SecretEnv []string
	// Hook says when the image's hook is started.
	Hook Hook
}

// Hook is a time for the image's restore hook.
type Hook uint32

// HookAfterRestore starts it if the uid is another than at the last Configure. HookLater does not: the sandbox is to stand still
// until it is claimed. HookNow starts it once for the channel's generation, also if the uid is as it was.
const (
	HookAfterRestore = Hook(guestwire.HookAfterRestore)
	HookLater        = Hook(guestwire.HookLater)
	HookNow          = Hook(guestwire.HookNow)
)

// Host is a line of /etc/hosts.
type Host struct {
	Address string
	Names   []string
}

// DNS is the content of /etc/resolv.conf.
type DNS struct {
	Nameservers, Searches, Options []string
}

// Configured says what came of it.
type Configured struct {
	// HostnameSet is false when guest init lacks CAP_SYS_ADMIN; the file is written all the same.
	HostnameSet bool
	// IdentityChanged says that the uid is another than at the last Configure.
	IdentityChanged bool
	// HookProcess is the id of the image's restore hook, if it was started.
	HookProcess string
}

// Configure gives the sandbox its identity, and writes its uid, host name and generation to
// /run/dormouse/identity.json. After a restore the image's /etc/dormouse/on-restore is started, unless
// Hook says otherwise. It is idempotent.
func (c *Conn) Configure(ctx context.Context, id Identity) (Configured, error) {
	m := &guestwire.Configure{
		Hostname: id.Hostname, WriteHosts: id.WriteHosts,
		SecretEnvironment: id.SecretEnv, ReplaceSecretEnvironment: id.SecretEnv != nil, Hook: uint32(id.Hook),
	}
	for _, h := range id.Hosts {
		m.Hosts = append(m.Hosts, guestwire.HostEntry{Address: h.Address, Names: h.Names})
	}
	if d := id.DNS; d != nil {
		m.Resolver = &guestwire.Resolver{Nameservers: d.Nameservers, Searches: d.Searches, Options: d.Options}
	}
	var reply guestwire.Configured
	if err := c.roundTrip(ctx, m, &reply); err != nil {
		return Configured{}, err
	}
	return Configured{HostnameSet: reply.HostnameSet, IdentityChanged: reply.IdentityChanged, HookProcess: clean(reply.HookProcessID)}, nil
}

// Ping asks for a sign of life.
func (c *Conn) Ping(ctx context.Context) error {
	var reply guestwire.Pong
	const nonce = 1
	if err := c.roundTrip(ctx, &guestwire.Ping{Nonce: nonce}, &reply); err != nil {
		return err
	}
	if reply.Nonce != nonce {
		return errs.New(errs.InternalError, "guest init answered another ping")
	}
	return nil
}

// Quiesce stops the channel for a checkpoint. When it returns nil, guest init has consumed
// everything that was sent and writes nothing until Resume; requests made meanwhile wait for
// Resume or for the end of their ctx, waits and streams stay open. On an error the channel goes on.
func (c *Conn) Quiesce(ctx context.Context) error {
	c.mu.Lock()
	c.mustResume = false
	c.mu.Unlock()
	c.setGate(true)
	err := c.controlTrip(ctx, &guestwire.Quiesce{}, &guestwire.Quiesced{}, nil)
	if err != nil {
		// The guest may obey later; whatever is sent next tells it to go on.
		c.mu.Lock()
		c.mustResume = true
		c.mu.Unlock()
		c.setGate(false)
	}
	return err
}

// Drain waits until nothing lies in either FIFO. It is for the time between pausing a quiesced
// sandbox and saving it: what lay there would be saved with it, and taken from here.
func (c *Conn) Drain(ctx context.Context) error {
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for {
		in, err := buffered(c.in)
		if err != nil {
			return errs.Wrap(err, errs.InternalError, "the guest channel's FIFO cannot be looked at")
		}
		out, err := buffered(c.out)
		if err != nil {
			return errs.Wrap(err, errs.InternalError, "the guest channel's FIFO cannot be looked at")
		}
		if in == 0 && out == 0 {
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return c.silent(ctx)
		case <-c.done:
			return c.failure()
		}
	}
}

// Resume ends Quiesce. It may be repeated, and called without one.
func (c *Conn) Resume(ctx context.Context) error {
	return c.controlTrip(ctx, &guestwire.Resume{}, &guestwire.Resumed{}, func() { c.setGate(false) })
}
