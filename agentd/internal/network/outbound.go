package network

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"reflect"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/fault"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
)

// OutboundOptions say what a node's outbound network is made of.
type OutboundOptions struct {
	// Instance is of this agentd alone and the same for each of its lives: its devices and its table are named
	// after it.
	Instance string
	// CIDR is the range of the sandboxes' addresses, from /16 to /28. Its first address is the gateway's.
	CIDR netip.Prefix
	// Blocked are ranges that no sandbox reaches, besides those that are always blocked.
	Blocked []netip.Prefix
	// Resolvers are asked for the names that sandboxes ask for, each "address:port", in their order.
	Resolvers []string
	// Size is how many namespaces are kept ready.
	Size int
	// Log is slog.Default() when nil.
	Log *slog.Logger
}

// Held is a sandbox that has a lease when agentd starts: from its record.
type Held struct {
	UID     string
	Address string
	// Kept: it runs and its policy is to be in force. Otherwise it is being removed, and reaches nothing any more.
	Kept   bool
	Egress *sandbox.Egress
}

// Outbound is the node's network for ModeOutbound. Calls for one uid come one at a time; otherwise it is safe for
// concurrent use.
type Outbound struct {
	opts   OutboundOptions
	log    *slog.Logger
	addrs  *addresses
	links  *links
	wall   *firewall
	names  *resolver
	idle   chan prepared
	cancel context.CancelFunc
	done   chan struct{}

	mu     sync.Mutex
	leases map[string]*hold // by uid
	askers map[netip.Addr]*asker
}

// prepared is a namespace with its address. The descriptor is all that holds it.
type prepared struct {
	addr netip.Addr
	fd   int
}

// hold is what a uid has. fd is -1 once the namespace was entered or given up.
type hold struct {
	prepared
	// refused counts the names that the policy refused.
	refused atomic.Uint64
	// recorded: the address is in the uid's record; before that it is nobody else's, and no lease yet.
	recorded bool
}

// CheckCIDR tells whether a range can be the sandboxes'.
func CheckCIDR(p netip.Prefix) error {
	if !p.IsValid() || !p.Addr().Is4() || p.Bits() < minBits || p.Bits() > maxBits || p.Masked() != p {
		return fmt.Errorf("an IPv4 range of /%d to /%d that begins with its first address, such as 10.89.0.0/16", minBits, maxBits)
	}
	return nil
}

// OpenOutbound makes the gateway and the table, removes devices that nobody has, and starts to fill the pool. What
// the held sandboxes may reach does not change for a moment, if their policies did not.
func OpenOutbound(opts OutboundOptions, held []Held) (*Outbound, error) {
	if err := CheckCIDR(opts.CIDR); err != nil {
		return nil, errs.New(errs.InvalidField, "network.cidr: %v", err).With("field", "network.cidr")
	}
	if opts.Log == nil {
		opts.Log = slog.Default()
	}
	o := &Outbound{opts: opts, log: opts.Log, addrs: newAddresses(opts.CIDR.Masked()), idle: make(chan prepared, max(opts.Size, 0)), done: make(chan struct{}), leases: make(map[string]*hold), askers: make(map[netip.Addr]*asker)}
	if err := o.open(held); err != nil {
		if o.links != nil {
			err = errors.Join(err, o.links.close())
		}
		return nil, errs.Wrap(err, errs.InternalError, "prepare the outbound network: %v", err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	o.cancel = cancel
	go o.fill(ctx)
	return o, nil
}

func (o *Outbound) open(held []Held) error {
	var err error
	if o.links, err = openLinks(o.opts.Instance, o.addrs.gateway); err != nil {
		return err
	}
	if o.wall, err = openFirewall(o.links.prefix, o.opts.CIDR.Masked(), o.addrs.gateway, o.opts.Blocked); err != nil {
		return err
	}
	var members []member
	for _, h := range held {
		addr, err := netip.ParseAddr(h.Address)
		if err != nil || !addr.Is4() || !o.addrs.claim(addr) {
			return fmt.Errorf("the record of sandbox %s has the address %q, which is none or another's", h.UID, h.Address)
		}
		o.leases[h.UID] = &hold{prepared: prepared{addr, -1}, recorded: true}
		if h.Kept {
			o.introduce(o.leases[h.UID], h.Egress)
			members = append(members, newMember(h.UID, o.links.name(addr), addr, h.Egress))
		}
	}
	// The table first: from here on nothing passes that is not to.
	if err := o.wall.reset(members); err != nil {
		return err
	}
	fault.At("network.table.after")
	// An earlier agentd may have ended between a policy's record and its last connection.
	if err := o.links.cut(o.wall.forbids); err != nil {
		return err
	}
	if err := o.links.ensureGateway(); err != nil {
		return err
	}
	if err := o.sweep(); err != nil {
		return err
	}
	o.names = &resolver{servers: o.opts.Resolvers, log: o.log, asker: o.askerAt, open: o.wall.open, blocked: o.blocks}
	return o.names.listen(o.addrs.gateway)
}

// introduce lets the uid's sandbox ask the resolver, under the policy.
func (o *Outbound) introduce(h *hold, egress *sandbox.Egress) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.askers[h.addr] = &asker{addr: h.addr, egress: egress, slots: make(chan struct{}, atOnceEach), refused: func() { h.refused.Add(1) }}
}

func (o *Outbound) dismiss(addr netip.Addr) {
	o.mu.Lock()
	defer o.mu.Unlock()
	delete(o.askers, addr)
}

func (o *Outbound) askerAt(addr netip.Addr) *asker {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.askers[addr]
}

// blocks tells whether no policy opens an address, the node's own included.
func (o *Outbound) blocks(addr netip.Addr) bool {
	for _, p := range o.wall.blocked {
		if p.Contains(addr) {
			return true
		}
	}
	own, err := o.links.isOwn(addr)
	return own || err != nil
}

// sweep removes devices of addresses that nobody has.
func (o *Outbound) sweep() error {
	devices, err := o.links.list()
	if err != nil {
		return err
	}
	used := o.addrs.inUse()
	for addr := range devices {
		if !used[addr] {
			if err := o.links.remove(addr); err != nil {
				return err
			}
		}
	}
	return nil
}

// Close ends the pool and gives up the namespaces that nobody has. Sandboxes keep theirs, and the table goes on; the
// table and the gateway go with the last sandbox.
func (o *Outbound) Close() error {
	o.cancel()
	<-o.done
	o.names.close()
	var all []error
	for {
		select {
		case p := <-o.idle:
			all = append(all, o.discard(p))
			continue
		default:
		}
		break
	}
	o.mu.Lock()
	left := len(o.leases)
	for _, h := range o.leases {
		if h.fd >= 0 {
			all = append(all, unix.Close(h.fd))
			h.fd = -1
		}
	}
	o.mu.Unlock()
	if left == 0 {
		all = append(all, o.wall.drop(), o.links.removeGateway())
	}
	return errors.Join(append(all, o.links.close())...)
}

// Idle is how many namespaces are ready now.
func (o *Outbound) Idle() int { return len(o.idle) }

// Gateway is the address of the resolver.
func (o *Outbound) Gateway() netip.Addr { return o.addrs.gateway }

// prepare makes a namespace with an address.
func (o *Outbound) prepare() (prepared, error) {
	addr, err := o.addrs.take()
	if err != nil {
		return prepared{}, err
	}
	p, err := o.prepareAt(addr)
	if err != nil {
		o.addrs.free(addr)
	}
	return p, err
}

func (o *Outbound) prepareAt(addr netip.Addr) (prepared, error) {
	if err := o.wall.admit(addr, o.links.name(addr)); err != nil {
		return prepared{}, err
	}
	fd, err := o.links.make(addr)
	if err != nil {
		return prepared{}, errors.Join(err, o.wall.remove(addr))
	}
	fault.At("network.link.after")
	return prepared{addr, fd}, nil
}

// discard gives up a namespace that nobody entered.
func (o *Outbound) discard(p prepared) error {
	err := errors.Join(o.links.remove(p.addr), o.wall.remove(p.addr), unix.Close(p.fd))
	if err == nil {
		o.addrs.free(p.addr)
	}
	return err
}

// aStart is about how long a sandbox takes to start.
const aStart = 100 * time.Millisecond

// refillPause keeps the making of the next namespace from the start of the sandbox that took the last one, while there
// are enough.
func (o *Outbound) refillPause() time.Duration {
	if len(o.idle) == 0 || len(o.idle) < cap(o.idle)/2 {
		return 0
	}
	return aStart
}

// fill keeps the pool full until its context ends.
func (o *Outbound) fill(ctx context.Context) {
	defer close(o.done)
	if cap(o.idle) == 0 {
		return
	}
	retry := time.NewTimer(0)
	defer retry.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-retry.C:
		}
		p, err := o.prepare()
		if err != nil {
			o.log.Error("make a network for the pool", "error", err)
			retry.Reset(time.Second)
			continue
		}
		select {
		case o.idle <- p:
			retry.Reset(o.refillPause())
		case <-ctx.Done():
			if err := o.discard(p); err != nil {
				o.log.Error("give up a network of the pool", "error", err)
			}
			return
		}
	}
}

// Reserve gives the uid an address, in memory only: the caller makes it durable before Acquire. The uid has the same
// one until Free.
func (o *Outbound) Reserve(ctx context.Context, uid string) (string, error) {
	o.mu.Lock()
	h := o.leases[uid]
	o.mu.Unlock()
	if h != nil {
		return h.addr.String(), nil
	}
	if err := ctx.Err(); err != nil {
		return "", err
	}
	var p prepared
	select {
	case p = <-o.idle:
	default:
		var err error
		if p, err = o.prepare(); err != nil {
			return "", err
		}
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.leases[uid] = &hold{prepared: p}
	return p.addr.String(), nil
}

// Acquire puts the policy in force and gives the namespace. Remove takes back what it did, also after an error.
func (o *Outbound) Acquire(ctx context.Context, uid string, egress *sandbox.Egress) (*Lease, error) {
	if _, err := o.Reserve(ctx, uid); err != nil {
		return nil, err
	}
	o.mu.Lock()
	h := o.leases[uid]
	o.mu.Unlock()
	if h.fd < 0 {
		// It had one before, that a runtime entered.
		if err := o.take(h); err != nil {
			return nil, err
		}
		p, err := o.prepareAt(h.addr)
		if err != nil {
			return nil, err
		}
		o.mu.Lock()
		h.prepared = p
		o.mu.Unlock()
	}
	fault.At("network.policy.before")
	if err := o.enforce(uid, h, egress, nil); err != nil {
		return nil, err
	}
	fault.At("network.policy.after")
	o.mu.Lock()
	defer o.mu.Unlock()
	fd := h.fd
	h.fd, h.recorded = -1, true
	return &Lease{uid: uid, mode: ModeOutbound, fd: fd, path: fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), fd), servers: []string{o.addrs.gateway.String()}}, nil
}

func (o *Outbound) enforce(uid string, h *hold, egress *sandbox.Egress, used map[netip.Addr]bool) error {
	if err := o.wall.set(newMember(uid, o.links.name(h.addr), h.addr, egress), used); err != nil {
		return err
	}
	o.introduce(h, egress)
	return nil
}

// SetEgress puts another policy in force, in one step, and then ends the connections that it forbids. The caller made it durable before.
// A sandbox that has no network at the moment gets the policy by Acquire. Idempotent.
func (o *Outbound) SetEgress(uid string, egress *sandbox.Egress) error {
	o.mu.Lock()
	h := o.leases[uid]
	o.mu.Unlock()
	if h == nil {
		return errs.New(errs.ObjectNotFound, "sandbox %s has no network of this node's", uid).With("kind", "network").With("uid", uid)
	}
	was, named, ok := o.wall.policyOf(h.addr)
	switch {
	case !ok && o.askerAt(h.addr) == nil:
		return nil
	case !ok || !reflect.DeepEqual(was, egress):
		var used map[netip.Addr]bool
		if named { // the kernel looks through all that it keeps track of
			var err error
			if used, err = o.links.inUse(h.addr, mark(uid, was)); err != nil {
				return err
			}
		}
		if err := o.enforce(uid, h, egress, used); err != nil {
			return err
		}
		fault.At("network.repolicy.after")
	}
	return o.links.cut(func(f flow) bool { return f.from == h.addr && o.wall.forbids(f) })
}

// Remove takes the policy, the device and the connections of the uid back; its address stays its own. Idempotent.
func (o *Outbound) Remove(uid string) error {
	o.mu.Lock()
	h := o.leases[uid]
	o.mu.Unlock()
	if h == nil {
		return nil
	}
	return o.take(h)
}

func (o *Outbound) take(h *hold) error {
	o.dismiss(h.addr)
	if err := o.wall.remove(h.addr); err != nil {
		return err
	}
	fault.At("network.unpolicy.after")
	if err := o.links.remove(h.addr); err != nil {
		return err
	}
	fault.At("network.unlink.after")
	o.mu.Lock()
	fd := h.fd
	h.fd = -1
	o.mu.Unlock()
	if fd >= 0 {
		_ = unix.Close(fd) // the last holder
	}
	return o.links.forget(h.addr)
}

// Free gives the uid's address back, once no record has it. Idempotent; only after Remove.
func (o *Outbound) Free(uid string) {
	o.mu.Lock()
	h := o.leases[uid]
	delete(o.leases, uid)
	o.mu.Unlock()
	if h != nil {
		o.addrs.free(h.addr)
	}
}
