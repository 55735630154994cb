package network

import (
	"errors"
	"net/netip"
	"strconv"
	"sync"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
)

// alwaysBlocked are the ranges that no policy opens: this network, loopback, link-local with the metadata
// services, multicast, reserved and broadcast.
var alwaysBlocked = []netip.Prefix{
	netip.MustParsePrefix("0.0.0.0/8"), netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("169.254.0.0/16"),
	netip.MustParsePrefix("224.0.0.0/4"), netip.MustParsePrefix("240.0.0.0/4"),
}

// member is one sandbox in the table.
type member struct {
	uid    string
	device string
	addr   netip.Addr
	egress *sandbox.Egress
	opened opened
}

func newMember(uid, device string, addr netip.Addr, egress *sandbox.Egress) member {
	return member{uid, device, addr, egress, make(opened)}
}

// firewall is the table of one agentd. What it should hold is in members and devices; a transaction that failed
// leaves the table as it was, and the next one makes it anew.
//
//	input      from a sandbox to the node: its resolver, answers, and nothing else
//	forward    from a sandbox to elsewhere: outgoing; from elsewhere to a sandbox: answers only
//	outgoing   not blocked, then the sandbox's own chain
//	s<address> one sandbox's policy; what no map entry leads to one is refused
//	carriers   the protocols that have ports
//	refuse     counts by sandbox; refuses so that the caller hears of it
type firewall struct {
	devices string // the beginning of the devices' names
	cidr    netip.Prefix
	gateway netip.Addr
	blocked []netip.Prefix

	mu      sync.Mutex
	conn    *nftables.Conn
	table   *nftables.Table
	members map[netip.Addr]member
	known   map[netip.Addr]string // addresses by their devices, with and without a policy
	counted map[netip.Addr]uint64 // what was refused before the table was made
	stale   bool

	sources, marks, denied, policies, never, carriers *nftables.Set
}

// replyBuffer holds the answers to the largest transaction: one for each of some ten thousand messages.
const replyBuffer = 32 << 20

func openFirewall(prefix string, cidr netip.Prefix, gateway netip.Addr, blocked []netip.Prefix) (*firewall, error) {
	conn, err := nftables.New(nftables.WithSockOptions(func(c *netlink.Conn) error {
		if err := c.SetReadBuffer(replyBuffer); err != nil {
			return err
		}
		return c.SetWriteBuffer(replyBuffer)
	}))
	if err != nil {
		return nil, errs.Wrap(err, errs.InternalError, "speak to nftables: %v", err)
	}
	f := &firewall{devices: prefix, cidr: cidr, gateway: gateway, blocked: append(append([]netip.Prefix{cidr}, alwaysBlocked...), blocked...),
		conn: conn, table: &nftables.Table{Family: nftables.TableFamilyINet, Name: "dormouse-" + prefix[2:]},
		members: make(map[netip.Addr]member), known: make(map[netip.Addr]string), counted: make(map[netip.Addr]uint64)}
	address := nftables.TypeIPAddr
	f.sources = &nftables.Set{Table: f.table, Name: "sources", KeyType: nftables.MustConcatSetType(nftables.TypeIFName, address), Concatenation: true}
	f.marks = &nftables.Set{Table: f.table, Name: "marks", KeyType: nftables.MustConcatSetType(address, nftables.TypeMark), Concatenation: true}
	f.denied = &nftables.Set{Table: f.table, Name: "denied", KeyType: address, Counter: true}
	f.policies = &nftables.Set{Table: f.table, Name: "policies", KeyType: address, IsMap: true, DataType: nftables.TypeVerdict}
	f.carriers = &nftables.Set{Table: f.table, Name: "carriers", KeyType: nftables.TypeInetProto}
	f.never = &nftables.Set{Table: f.table, Name: "blocked", KeyType: address, Interval: true}
	return f, nil
}

func (f *firewall) chain(name string) *nftables.Chain {
	return &nftables.Chain{Table: f.table, Name: name}
}

// hook is a chain of the kernel's. Ours come before others' of the same kind: what they would accept is
// refused here first, and what is accepted here they may still refuse.
func (f *firewall) hook(name string, kind nftables.ChainType, hook *nftables.ChainHook, priority nftables.ChainPriority) {
	accept := nftables.ChainPolicyAccept
	f.conn.AddChain(&nftables.Chain{Table: f.table, Name: name, Type: kind, Hooknum: hook, Priority: nftables.ChainPriorityRef(priority), Policy: &accept})
}

func (f *firewall) add(chain string, parts ...any) {
	f.conn.AddRule(&nftables.Rule{Table: f.table, Chain: f.chain(chain), Exprs: rule(parts...)})
}

// rebuild makes the table anew from what it should hold, in one transaction: there is no moment without it.
func (f *firewall) rebuild() error {
	if counts, err := f.counters(); err == nil { // else there is no table yet
		f.counted = counts
	}
	f.conn.AddTable(f.table)
	f.conn.DelTable(f.table)
	f.conn.AddTable(f.table)
	for _, s := range []*nftables.Set{f.sources, f.marks, f.denied, f.policies} {
		if err := f.conn.AddSet(s, nil); err != nil {
			return errs.Wrap(err, errs.InternalError, "make the firewall's sets: %v", err)
		}
	}
	if err := errors.Join(f.conn.AddSet(f.never, addressIntervals(f.blocked)), f.conn.AddSet(f.carriers, portCarriers)); err != nil {
		return errs.Wrap(err, errs.InternalError, "make the firewall's sets: %v", err)
	}
	f.hook("input", nftables.ChainTypeFilter, nftables.ChainHookInput, *nftables.ChainPriorityFilter-10)
	f.hook("forward", nftables.ChainTypeFilter, nftables.ChainHookForward, *nftables.ChainPriorityFilter-10)
	f.hook("postrouting", nftables.ChainTypeNAT, nftables.ChainHookPostrouting, *nftables.ChainPriorityNATSource)
	for _, name := range []string{"refuse", "genuine", "node", "outgoing", "incoming"} {
		f.conn.AddChain(f.chain(name))
	}
	f.baseRules()
	for addr, device := range f.known {
		f.addSource(addr, device)
	}
	for _, m := range f.members {
		f.addMember(m)
	}
	if err := f.flush("make the table"); err != nil {
		return err
	}
	f.stale = false
	return nil
}

func (f *firewall) baseRules() {
	f.add("input", from(f.devices), jump("node"))
	f.add("forward", from(f.devices), jump("outgoing"))
	f.add("forward", to(f.devices), jump("incoming"))

	// Counted by sandbox, refused so that who asked need not wait for it.
	f.add("refuse", loadSource(reg1), in(f.denied))
	f.add("refuse", protocol(unix.IPPROTO_TCP), &expr.Reject{Type: unix.NFT_REJECT_TCP_RST})
	f.add("refuse", &expr.Reject{Type: unix.NFT_REJECT_ICMPX_UNREACH, Code: unix.NFT_REJECT_ICMPX_ADMIN_PROHIBITED})

	// IPv4 from the sandbox's own address, as it is of a connection.
	f.add("genuine", notIPv4(), verdict(expr.VerdictDrop))
	f.add("genuine", &expr.Meta{Key: expr.MetaKeyIIFNAME, Register: reg1}, loadSource(reg2), in(f.sources), verdict(expr.VerdictReturn))
	f.add("genuine", verdict(expr.VerdictDrop))

	f.add("node", jump("genuine"))
	f.add("node", state(known), answering(), verdict(expr.VerdictAccept))
	for _, p := range []uint8{unix.IPPROTO_UDP, unix.IPPROTO_TCP} {
		f.add("node", loadDestination(), equals(bytesOf(f.gateway)), protocol(p), loadPort(), equals([]byte{0, 53}), verdict(expr.VerdictAccept))
	}
	f.add("node", jump("refuse"))

	f.add("outgoing", jump("genuine"))
	f.add("outgoing", state(expr.CtStateBitINVALID), verdict(expr.VerdictDrop)) // NAT would let it out as it is
	f.add("outgoing", loadDestination(), in(f.never), jump("refuse"))
	f.add("outgoing", state(known), loadSource(reg1), &expr.Ct{Key: expr.CtKeyMARK, Register: reg1b}, in(f.marks), verdict(expr.VerdictAccept))
	f.add("outgoing", loadSource(reg1), &expr.Lookup{SourceRegister: reg1, DestRegister: 0, IsDestRegSet: true, SetName: f.policies.Name, SetID: f.policies.ID})
	f.add("outgoing", jump("refuse"))

	f.add("incoming", state(known), answering(), verdict(expr.VerdictAccept))
	f.add("incoming", verdict(expr.VerdictDrop))

	mask := ipMask(f.cidr)
	f.add("postrouting", &expr.Meta{Key: expr.MetaKeyNFPROTO, Register: reg1}, equals([]byte{unix.NFPROTO_IPV4}), loadSource(reg1),
		&expr.Bitwise{SourceRegister: reg1, DestRegister: reg1, Len: 4, Mask: mask, Xor: make([]byte, 4)}, equals(bytesOf(f.cidr.Masked().Addr())),
		&expr.Meta{Key: expr.MetaKeyOIFNAME, Register: reg1}, &expr.Cmp{Op: expr.CmpOpNeq, Register: reg1, Data: []byte(f.devices)}, &expr.Masq{})
}

func ipMask(p netip.Prefix) []byte {
	return binaryutil.BigEndian.PutUint32(^uint32(0) << (32 - p.Bits()))
}

// ---- one sandbox ----------------------------------------------------------------

func (f *firewall) addSource(addr netip.Addr, device string) {
	_ = f.conn.SetAddElements(f.sources, []nftables.SetElement{{Key: deviceKey(device, addr)}}) // fails for anonymous sets only
	counter := nftables.SetElement{Key: bytesOf(addr)}
	if n := f.counted[addr]; n > 0 {
		counter.Comment = strconv.FormatUint(n, 10) // the kernel's own counter begins at 0
	}
	_ = f.conn.SetAddElements(f.denied, []nftables.SetElement{counter})
}

func (f *firewall) delSource(addr netip.Addr, device string) {
	_ = f.conn.SetDeleteElements(f.sources, []nftables.SetElement{{Key: deviceKey(device, addr)}})
	_ = f.conn.SetDeleteElements(f.denied, []nftables.SetElement{{Key: bytesOf(addr)}})
}

func chainOf(addr netip.Addr) string { return "s" + hexOf(addr) }

func (f *firewall) entries(m member) (marks, policies []nftables.SetElement) {
	return []nftables.SetElement{{Key: markKey(m.addr, mark(m.uid, m.egress))}},
		[]nftables.SetElement{{Key: bytesOf(m.addr), VerdictData: &expr.Verdict{Kind: expr.VerdictGoto, Chain: chainOf(m.addr)}}}
}

func (f *firewall) addMember(m member) {
	f.conn.AddChain(f.chain(chainOf(m.addr)))
	f.addPolicy(m)
	marks, policies := f.entries(m)
	_ = f.conn.SetAddElements(f.marks, marks)
	_ = f.conn.SetAddElements(f.policies, policies)
}

func (f *firewall) delMember(m member) {
	marks, policies := f.entries(m)
	_ = f.conn.SetDeleteElements(f.policies, policies)
	_ = f.conn.SetDeleteElements(f.marks, marks)
	f.delPolicy(m)
	f.conn.DelChain(f.chain(chainOf(m.addr)))
}

// ---- transactions ---------------------------------------------------------------

func (f *firewall) flush(what string) error {
	if err := f.conn.Flush(); err != nil {
		f.stale = true
		return errs.Wrap(err, errs.InternalError, "nftables: %s: %v", what, err)
	}
	return nil
}

// change is one transaction: what is to hold from now on, and how the table gets there. After a failure the table is
// as it was, and is made anew by the next change.
func (f *firewall) change(what string, hold, do func()) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.stale {
		hold()
		return f.rebuild()
	}
	do()
	hold()
	return f.flush(what)
}

// reset makes the table for these alone.
func (f *firewall) reset(members []member) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, m := range members {
		f.recall(m)
		f.known[m.addr], f.members[m.addr] = m.device, m
	}
	return f.rebuild()
}

// admit lets a device use its address; nothing passes yet.
func (f *firewall) admit(addr netip.Addr, device string) error {
	if f.knows(addr) {
		return nil
	}
	return f.change("admit "+device, func() { f.known[addr] = device }, func() { f.addSource(addr, device) })
}

func (f *firewall) knows(addr netip.Addr) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	_, ok := f.known[addr]
	return ok
}

// concerns tells whether the table holds, or may hold, anything of the address.
func (f *firewall) concerns(addr netip.Addr) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	_, ok := f.known[addr]
	return ok || f.stale
}

// set puts a sandbox's policy in force, in place of the one it had. What that one opened by a name stays open as far as this one
// opens it as well; used are the addresses that connections use.
func (f *firewall) set(m member, used map[netip.Addr]bool) error {
	inherit := func() {
		if was, ok := f.members[m.addr]; ok {
			m.opened.inherit(time.Now(), m.egress, was, used)
		}
	}
	return f.change("set the policy of "+m.uid, func() { inherit(); f.known[m.addr], f.members[m.addr] = m.device, m }, func() {
		inherit()
		if _, ok := f.known[m.addr]; !ok {
			f.addSource(m.addr, m.device)
		}
		was, ok := f.members[m.addr]
		if !ok {
			f.addMember(m)
			return
		}
		marks, _ := f.entries(was)
		_ = f.conn.SetDeleteElements(f.marks, marks)
		f.delPolicy(was)
		f.addPolicy(m)
		marks, _ = f.entries(m)
		_ = f.conn.SetAddElements(f.marks, marks)
	})
}

// policyOf is the policy that is in force for an address, and whether names opened anything by it; false where none is.
func (f *firewall) policyOf(addr netip.Addr) (egress *sandbox.Egress, named, ok bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	m, ok := f.members[addr]
	return m.egress, len(m.opened) > 0, ok && !f.stale
}

// remove takes all of an address out. Idempotent.
func (f *firewall) remove(addr netip.Addr) error {
	if !f.concerns(addr) {
		return nil
	}
	return f.change("remove "+addr.String(), func() { delete(f.known, addr); delete(f.members, addr); delete(f.counted, addr) }, func() {
		if m, ok := f.members[addr]; ok {
			f.delMember(m)
		}
		f.delSource(addr, f.known[addr])
	})
}

// drop takes the table away.
func (f *firewall) drop() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.conn.AddTable(f.table)
	f.conn.DelTable(f.table)
	return f.flush("remove the table")
}

// refusals counts what was refused, by address.
func (f *firewall) refusals() (map[netip.Addr]uint64, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	counts, err := f.counters()
	if err != nil {
		return nil, errs.Wrap(err, errs.InternalError, "nftables: read the counters: %v", err)
	}
	return counts, nil
}

// counters are the kernel's, and what was counted before. It wants the lock.
func (f *firewall) counters() (map[netip.Addr]uint64, error) {
	elements, err := f.conn.GetSetElements(f.denied)
	if err != nil {
		return nil, err
	}
	counts := make(map[netip.Addr]uint64, len(elements))
	for _, e := range elements {
		if addr, ok := netip.AddrFromSlice(e.Key); ok && e.Counter != nil {
			before, err := strconv.ParseUint(e.Comment, 10, 64)
			if err != nil {
				before = 0
			}
			counts[addr] = before + e.Counter.Packets
		}
	}
	return counts, nil
}

// list gives the addresses that the table holds anything of, as the kernel has it.
func (f *firewall) list() (map[netip.Addr]bool, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	found := make(map[netip.Addr]bool)
	for _, s := range []*nftables.Set{f.denied, f.policies} {
		elements, err := f.conn.GetSetElements(s)
		if err != nil {
			return nil, errs.Wrap(err, errs.InternalError, "nftables: list the table: %v", err)
		}
		for _, e := range elements {
			if addr, ok := netip.AddrFromSlice(e.Key); ok {
				found[addr] = true
			}
		}
	}
	return found, nil
}

// renew makes the table anew: what it should not have is gone then.
func (f *firewall) renew() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.rebuild()
}
