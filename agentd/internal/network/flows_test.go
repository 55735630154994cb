package network

import (
	"net/netip"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dormouse-run/dormouse/pkg/sandbox"
)

// uses tells whether the kernel knows of a connection from one address to another.
func uses(t *testing.T, o *Outbound, from, to string) bool {
	t.Helper()
	o.wall.mu.Lock()
	m := o.wall.members[netip.MustParseAddr(from)]
	o.wall.mu.Unlock()
	used, err := o.links.inUse(m.addr, mark(m.uid, m.egress))
	must(t, err)
	return used[netip.MustParseAddr(to)]
}

// A policy that forbids a connection ends it on both sides; those that it permits go on.
func TestSetEgressEndsWhatItForbids(t *testing.T) {
	outside(t)
	o := openOutbound(t, 1)
	a, addr := enter(t, o, "a", nil)
	stays, _, err := a.reach(outsideIP + ":80")
	must(t, err)
	defer stays.Close()
	ends, _, err := a.reach(otherIP + ":80")
	must(t, err)
	defer ends.Close()
	must(t, echo(stays))
	must(t, echo(ends))
	only := allowing(sandbox.EgressRule{CIDRs: []string{outsideIP}, Protocol: sandbox.TCP, Ports: []sandbox.PortRange{{First: 80, Last: 80}}})
	must(t, o.SetEgress("a", only))
	must(t, o.SetEgress("a", only.Clone())) // again changes nothing
	must(t, echo(stays))
	if uses(t, o, addr, otherIP) {
		t.Error("the kernel still answers for a connection that is forbidden")
	}
	if err := echo(ends); err == nil {
		t.Error("a connection went on that the policy forbids")
	}
	a.refused(otherIP + ":80")
	leave(t, o, "a")
	clean(t, o)
}

// A policy that still has a name leaves what the name stood for open, for connections that there are however long ago it
// was answered; one that has it no more does not.
func TestSetEgressAndNames(t *testing.T) {
	world := outside(t)
	var asked atomic.Int64
	world.names(map[string][]string{"good.example.": {outsideIP}, "other.example.": {otherIP}}, &asked)
	o := openWithNames(t)
	a, addr := enter(t, o, "a", allowing(sandbox.EgressRule{Domains: []string{"good.example", "other.example"}}))
	a.resolves("good.example", outsideIP)
	a.resolves("other.example", otherIP)
	c, _, err := a.reach(outsideIP + ":80")
	must(t, err)
	defer c.Close()
	must(t, echo(c))
	// Both answers are of long ago.
	o.wall.mu.Lock()
	m := o.wall.members[netip.MustParseAddr(addr)]
	for to, e := range m.opened[0] {
		e.until = time.Now().Add(-time.Second)
		m.opened[0][to] = e
	}
	o.wall.mu.Unlock()
	must(t, o.SetEgress("a", allowing(sandbox.EgressRule{CIDRs: []string{"198.51.100.0/24"}}, sandbox.EgressRule{Domains: []string{"*.example"}})))
	must(t, echo(c))
	a.refused(otherIP + ":80")
	a.resolves("other.example", otherIP)
	a.reaches(otherIP+":80", otherIP)
	must(t, o.SetEgress("a", allowing(sandbox.EgressRule{Domains: []string{"other.example"}})))
	a.reaches(otherIP+":80", otherIP) // answered before, and good still
	if err := echo(c); err == nil || uses(t, o, addr, outsideIP) {
		t.Errorf("a connection goes on whose name is not allowed any more: %v", err)
	}
	// What an earlier agentd opened has no names: rules that have all of the domains take it over.
	must(t, o.Close())
	held := Held{UID: "a", Address: addr, Kept: true, Egress: allowing(sandbox.EgressRule{Domains: []string{"other.example"}})}
	o = openWithNames(t, held)
	must(t, o.SetEgress("a", allowing(sandbox.EgressRule{Domains: []string{"other.example", "good.example"}})))
	a.reaches(otherIP+":80", otherIP)
	must(t, o.SetEgress("a", allowing(sandbox.EgressRule{Domains: []string{"good.example"}})))
	a.refused(otherIP + ":80")
	leave(t, o, "a")
	clean(t, o)
}

// An agentd that ended between a policy's record and the last connection that it forbids has left the rest to the next.
func TestARestartEndsWhatThePolicyForbids(t *testing.T) {
	outside(t)
	o := openOutbound(t, 0)
	a, addr := enter(t, o, "a", nil)
	stays, _, err := a.reach(outsideIP + ":80")
	must(t, err)
	defer stays.Close()
	ends, _, err := a.reach(otherIP + ":80")
	must(t, err)
	defer ends.Close()
	must(t, o.Close())
	o = openOutbound(t, 0, Held{UID: "a", Address: addr, Kept: true, Egress: allowing(sandbox.EgressRule{CIDRs: []string{outsideIP}})})
	must(t, echo(stays))
	if err := echo(ends); err == nil || uses(t, o, addr, otherIP) {
		t.Errorf("a connection went on that the policy forbids: %v", err)
	}
	leave(t, o, "a")
	clean(t, o)
}

// A sandbox that has no network at the moment has no rules either, until it gets one.
func TestSetEgressWithoutANetwork(t *testing.T) {
	outside(t)
	o := openOutbound(t, 0)
	_, addr := enter(t, o, "a", nil)
	must(t, o.Remove("a"))
	must(t, o.SetEgress("a", allowing()))
	if there, err := o.wall.list(); err != nil || there[netip.MustParseAddr(addr)] {
		t.Errorf("there are rules: %v, %v", there, err)
	}
	a, _ := enter(t, o, "a", allowing())
	a.refused(outsideIP + ":80")
	leave(t, o, "a")
	clean(t, o)
}

// What the table says of a packet, permits says of its connection.
func TestPermits(t *testing.T) {
	tcp := func(to string, port uint16) flow {
		return flow{to: netip.MustParseAddr(to), protocol: unix.IPPROTO_TCP, port: port}
	}
	ports := []sandbox.PortRange{{First: 80, Last: 90}}
	ping := flow{to: netip.MustParseAddr("192.0.2.1"), protocol: unix.IPPROTO_ICMP}
	now := time.Now()
	for i, c := range []struct {
		egress *sandbox.Egress
		flow   flow
		want   bool
	}{
		{nil, tcp("192.0.2.1", 1), true},
		{&sandbox.Egress{}, tcp("192.0.2.1", 1), true},
		{allowing(), tcp("192.0.2.1", 1), false},
		{allowing(sandbox.EgressRule{Ports: ports}), tcp("192.0.2.1", 90), true},
		{allowing(sandbox.EgressRule{Ports: ports}), tcp("192.0.2.1", 91), false},
		{allowing(sandbox.EgressRule{Ports: ports}), ping, false},
		{allowing(sandbox.EgressRule{Protocol: sandbox.ICMP}), ping, true},
		{allowing(sandbox.EgressRule{Protocol: sandbox.UDP}), tcp("192.0.2.1", 53), false},
		{allowing(sandbox.EgressRule{CIDRs: []string{"192.0.2.0/25"}}), tcp("192.0.2.127", 1), true},
		{allowing(sandbox.EgressRule{CIDRs: []string{"192.0.2.0/25"}}), tcp("192.0.2.128", 1), false},
		{allowing(sandbox.EgressRule{Domains: []string{"a.example"}}), tcp("192.0.2.9", 1), true},
		{allowing(sandbox.EgressRule{Domains: []string{"a.example"}}), tcp("192.0.2.8", 1), false},
		{allowing(sandbox.EgressRule{Domains: []string{"a.example"}, Ports: ports}), tcp("192.0.2.9", 1), false},
		{&sandbox.Egress{Deny: []sandbox.EgressRule{{Domains: []string{"a.example"}}}}, tcp("192.0.2.9", 1), true},
		{&sandbox.Egress{Deny: []sandbox.EgressRule{{Ports: ports}}}, tcp("192.0.2.9", 85), false},
		{&sandbox.Egress{Default: sandbox.EgressDeny, Allow: []sandbox.EgressRule{{CIDRs: []string{"0.0.0.0/0"}}}, Deny: []sandbox.EgressRule{{CIDRs: []string{"192.0.2.9"}}}}, tcp("192.0.2.9", 1), false},
	} {
		m := newMember("a", "d", netip.MustParseAddr("10.0.0.2"), c.egress)
		m.opened.add(0, netip.MustParseAddr("192.0.2.9"), now.Add(time.Minute))
		m.opened.add(0, netip.MustParseAddr("192.0.2.8"), now.Add(-time.Minute))
		if got := m.permits(c.flow, now); got != c.want {
			t.Errorf("case %d: %t", i, got)
		}
	}
}

// What was refused is counted on when the table is made anew, by this agentd or the next.
func TestCountersGoOn(t *testing.T) {
	outside(t)
	o := openOutbound(t, 0)
	a, addr := enter(t, o, "a", allowing())
	refused := func(o *Outbound) uint64 {
		t.Helper()
		u, err := o.Usage("a")
		must(t, err)
		if !u.DevicePresent || u.Address != addr || u.SentBytes == 0 {
			t.Errorf("it is %+v", u)
		}
		return u.Refused
	}
	a.refused(outsideIP + ":80")
	first := refused(o)
	must(t, o.wall.renew())
	if n := refused(o); first == 0 || n != first {
		t.Errorf("%d, and %d after the table was made anew", first, n)
	}
	a.refused(outsideIP + ":80")
	second := refused(o)
	must(t, o.Close())
	o = openOutbound(t, 0, Held{UID: "a", Address: addr, Kept: true, Egress: allowing()})
	if n := refused(o); second <= first || n != second {
		t.Errorf("%d, then %d, and %d after a restart", first, second, n)
	}
	if u, err := o.Usage("nobody"); err != nil || u.Address != "" {
		t.Errorf("%+v, %v", u, err)
	}
	leave(t, o, "a")
	clean(t, o)
	if _, ok := o.wall.counted[netip.MustParseAddr(addr)]; ok {
		t.Errorf("left are the counters %v", o.wall.counted)
	}
}
