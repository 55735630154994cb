package network

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/dormouse-run/dormouse/pkg/sandbox"
)

// This file has one sandbox's policy: its chain, and the sets that are of it alone.

// domainSet holds what a rule's names open. Its name says by which policy, so that what one opened is not taken for
// another's.
func (f *firewall) domainSet(m member, rule int) *nftables.Set {
	name := fmt.Sprintf("d%s-%08x-%d", hexOf(m.addr), mark(m.uid, m.egress), rule)
	// Those whose time is over count until the kernel clears them away.
	return &nftables.Set{Table: f.table, Name: name, KeyType: nftables.TypeIPAddr, HasTimeout: true, Size: 4 * maxOpened}
}

// portCarriers are the protocols that have ports.
var portCarriers = []nftables.SetElement{{Key: []byte{unix.IPPROTO_TCP}}, {Key: []byte{unix.IPPROTO_UDP}}}

// sharedSet is a set of addresses or ports of a policy. Rules that say the same have it together: the kernel takes longer over a set than
// over a rule, and the ports of a policy's rules are the same ones most of the time.
type sharedSet struct {
	set      *nftables.Set
	elements []nftables.SetElement
}

// sharedSets are those of a policy, by what they hold: the same ones, by the same names, whenever they are asked for.
func (f *firewall) sharedSets(m member) (byKey map[string]*nftables.Set, all []sharedSet) {
	byKey = make(map[string]*nftables.Set)
	add := func(kind nftables.SetDatatype, elements []nftables.SetElement) {
		key := setKey(kind, elements)
		if byKey[key] != nil {
			return
		}
		name := fmt.Sprintf("p%s-%08x-%d", hexOf(m.addr), mark(m.uid, m.egress), len(all))
		set := &nftables.Set{Table: f.table, Name: name, KeyType: kind, Interval: true}
		byKey[key] = set
		all = append(all, sharedSet{set, elements})
	}
	if m.egress == nil {
		return byKey, nil
	}
	for _, r := range slices.Concat(m.egress.Deny, m.egress.Allow) {
		if all := prefixes(r); len(r.CIDRs) > 0 && len(all) != 1 {
			add(nftables.TypeIPAddr, addressIntervals(all))
		}
		if len(r.Ports) > 1 {
			add(nftables.TypeInetService, portIntervals(r.Ports))
		}
	}
	return byKey, all
}

func setKey(kind nftables.SetDatatype, elements []nftables.SetElement) string {
	key := []byte(kind.Name)
	for _, e := range elements {
		key = append(key, e.Key...)
		if e.IntervalEnd {
			key = append(key, '-') // all keys are of one length
		} else {
			key = append(key, '+')
		}
	}
	return string(key)
}

// addPolicy fills the sandbox's chain.
func (f *firewall) addPolicy(m member) {
	e := m.egress
	if e == nil {
		e = &sandbox.Egress{}
	}
	shared, all := f.sharedSets(m)
	for _, s := range all {
		_ = f.conn.AddSet(s.set, s.elements) // fails for sets that are made wrongly only
	}
	chain := chainOf(m.addr)
	pass := rule(&expr.Immediate{Register: reg1, Data: binaryutil.NativeEndian.PutUint32(mark(m.uid, m.egress))},
		&expr.Ct{Key: expr.CtKeyMARK, SourceRegister: true, Register: reg1}, verdict(expr.VerdictAccept))
	refuse := []expr.Any{&expr.Verdict{Kind: expr.VerdictGoto, Chain: "refuse"}}
	for _, r := range e.Deny {
		// A name is refused by the resolver; a rule with names alone says nothing of addresses.
		if len(r.CIDRs) > 0 || len(r.Domains) == 0 {
			f.addRule(chain, r, ranges(r, shared), shared, refuse)
		}
	}
	for i, r := range e.Allow {
		if len(r.CIDRs) > 0 || len(r.Domains) == 0 {
			f.addRule(chain, r, ranges(r, shared), shared, pass)
		}
		if len(r.Domains) > 0 {
			set := f.domainSet(m, i)
			_ = f.conn.AddSet(set, m.opened.elements(i, time.Now())) // fails for sets that are made wrongly only
			f.addRule(chain, r, rule(loadDestination(), in(set)), shared, pass)
		}
	}
	if e.Default == sandbox.EgressDeny {
		f.add(chain, refuse)
	} else {
		f.add(chain, pass)
	}
}

func (f *firewall) delPolicy(m member) {
	f.conn.FlushChain(f.chain(chainOf(m.addr)))
	for i, r := range allowed(m.egress) {
		if len(r.Domains) > 0 {
			f.conn.DelSet(f.domainSet(m, i))
		}
	}
	_, all := f.sharedSets(m)
	for _, s := range all {
		f.conn.DelSet(s.set)
	}
}

func allowed(e *sandbox.Egress) []sandbox.EgressRule {
	if e == nil {
		return nil
	}
	return e.Allow
}

func prefixes(r sandbox.EgressRule) (all []netip.Prefix) {
	for _, c := range r.CIDRs {
		if p, err := sandbox.ParseCIDR(c); err == nil { // validated at the door
			all = append(all, p)
		}
	}
	return all
}

// ranges matches a rule's addresses; nothing when it has any.
func ranges(r sandbox.EgressRule, shared map[string]*nftables.Set) []expr.Any {
	all := prefixes(r)
	switch {
	case len(r.CIDRs) == 0:
		return nil
	case len(all) == 1: // a set is three messages to the kernel
		return rule(loadDestination(), &expr.Bitwise{SourceRegister: reg1, DestRegister: reg1, Len: 4, Mask: ipMask(all[0]), Xor: make([]byte, 4)},
			equals(bytesOf(all[0].Addr())))
	}
	return rule(loadDestination(), in(shared[setKey(nftables.TypeIPAddr, addressIntervals(all))]))
}

func ports(all []sandbox.PortRange, shared map[string]*nftables.Set) []expr.Any {
	switch {
	case len(all) == 0:
		return nil
	case len(all) > 1:
		return rule(loadPort(), in(shared[setKey(nftables.TypeInetService, portIntervals(all))]))
	case all[0].First == all[0].Last:
		return rule(loadPort(), equals(binaryutil.BigEndian.PutUint16(all[0].First)))
	}
	return rule(loadPort(), &expr.Range{Op: expr.CmpOpEq, Register: reg1, FromData: binaryutil.BigEndian.PutUint16(all[0].First), ToData: binaryutil.BigEndian.PutUint16(all[0].Last)})
}

func (f *firewall) addRule(chain string, r sandbox.EgressRule, addresses []expr.Any, shared map[string]*nftables.Set, then []expr.Any) {
	parts := []any{addresses}
	switch {
	case r.Protocol == sandbox.TCP:
		parts = append(parts, protocol(unix.IPPROTO_TCP))
	case r.Protocol == sandbox.UDP:
		parts = append(parts, protocol(unix.IPPROTO_UDP))
	case r.Protocol == sandbox.ICMP:
		parts = append(parts, protocol(unix.IPPROTO_ICMP))
	case len(r.Ports) > 0:
		parts = append(parts, &expr.Meta{Key: expr.MetaKeyL4PROTO, Register: reg1}, in(f.carriers))
	}
	f.add(chain, append(parts, ports(r.Ports, shared), then)...)
}
