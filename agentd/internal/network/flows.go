package network

import (
	"net/netip"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
)

// A flow is a connection that a sandbox began, as the kernel keeps track of it. What it forwards to the sandbox is the answer to a flow, so
// that one which a new policy forbids is over once the kernel has forgotten it: packets that come in belong to nothing then, and
// those that go out are refused by the policy.
type flow struct {
	from, to netip.Addr
	protocol uint8
	port     uint16
	mark     uint32
}

func flowOf(f *netlink.ConntrackFlow) flow {
	from, _ := netip.AddrFromSlice(f.Forward.SrcIP)
	to, _ := netip.AddrFromSlice(f.Forward.DstIP)
	return flow{from.Unmap(), to.Unmap(), f.Forward.Protocol, f.Forward.DstPort, f.Mark}
}

// matching is a filter of flows.
type matching func(flow) bool

// MatchConntrackFlow implements netlink.CustomConntrackFilter.
func (m matching) MatchConntrackFlow(f *netlink.ConntrackFlow) bool { return m(flowOf(f)) }

// cut makes the kernel forget flows.
func (l *links) cut(what matching) error {
	if _, err := l.nl.ConntrackDeleteFilters(netlink.ConntrackTable, unix.AF_INET, what); err != nil {
		return errs.Wrap(err, errs.InternalError, "end connections that are forbidden: %v", err)
	}
	return nil
}

// inUse are the addresses that a sandbox has connections to which were let through with the mark.
func (l *links) inUse(from netip.Addr, mark uint32) (map[netip.Addr]bool, error) {
	all, err := l.nl.ConntrackTableList(netlink.ConntrackTable, unix.AF_INET)
	if err != nil {
		return nil, errs.Wrap(err, errs.InternalError, "list the connections of %s: %v", from, err)
	}
	used := make(map[netip.Addr]bool)
	for _, c := range all {
		if f := flowOf(c); f.from == from && f.mark == mark {
			used[f.to] = true
		}
	}
	return used, nil
}

// forbids tells whether a flow is one of a sandbox whose policy does not let it through. A flow that has the policy's mark was let
// through by it.
func (f *firewall) forbids(c flow) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	m, ok := f.members[c.from]
	if !ok || c.to == f.gateway || c.mark == mark(m.uid, m.egress) {
		return false
	}
	return slices.ContainsFunc(f.blocked, func(p netip.Prefix) bool { return p.Contains(c.to) }) || !m.permits(c, time.Now())
}

// permits is what the sandbox's chain says of a flow.
func (m member) permits(c flow, now time.Time) bool {
	if m.egress == nil {
		return true
	}
	for _, r := range m.egress.Deny {
		if concerns(r, c) && byAddress(r, c.to) {
			return false
		}
	}
	for i, r := range m.egress.Allow {
		if concerns(r, c) && (byAddress(r, c.to) || m.opened[i][c.to].until.After(now)) {
			return true
		}
	}
	return m.egress.Default != sandbox.EgressDeny
}

// byAddress tells whether a rule names the address, or any.
func byAddress(r sandbox.EgressRule, to netip.Addr) bool {
	if len(r.CIDRs) == 0 {
		return len(r.Domains) == 0
	}
	return slices.ContainsFunc(r.CIDRs, func(s string) bool {
		p, err := sandbox.ParseCIDR(s)
		return err == nil && p.Contains(to)
	})
}

// concerns tells whether a rule is for the flow's protocol and port.
func concerns(r sandbox.EgressRule, c flow) bool {
	protocols := map[sandbox.Protocol]uint8{sandbox.TCP: unix.IPPROTO_TCP, sandbox.UDP: unix.IPPROTO_UDP, sandbox.ICMP: unix.IPPROTO_ICMP}
	if r.Protocol != "" && protocols[r.Protocol] != c.protocol {
		return false
	}
	if len(r.Ports) == 0 {
		return true
	}
	return (c.protocol == unix.IPPROTO_TCP || c.protocol == unix.IPPROTO_UDP) &&
		slices.ContainsFunc(r.Ports, func(p sandbox.PortRange) bool { return p.First <= c.port && c.port <= p.Last })
}
