package network

import (
	"slices"
	"strings"
	"testing"

	"github.com/dormouse-run/dormouse/pkg/sandbox"
)

// Rules that say the same share their sets; another policy brings its own, and none is left of a policy that is over.
func TestRulesShareSets(t *testing.T) {
	o := openOutbound(t, 0)
	defer clean(t, o)
	addr, err := o.addrs.take()
	must(t, err)
	defer o.addrs.free(addr)
	must(t, o.wall.admit(addr, o.links.name(addr)))
	have := func() (names []string) {
		t.Helper()
		sets, err := o.wall.conn.GetSets(o.wall.table)
		must(t, err)
		for _, s := range sets {
			if strings.HasPrefix(s.Name, "p"+hexOf(addr)) {
				names = append(names, s.Name)
			}
		}
		return names
	}
	ports := []sandbox.PortRange{{First: 80, Last: 80}, {First: 443, Last: 443}}
	other := []sandbox.PortRange{{First: 443, Last: 443}, {First: 80, Last: 80}, {First: 8080, Last: 8090}}
	cidrs := []string{"192.0.2.0/24", "198.51.100.0/24"}
	first := &sandbox.Egress{Default: sandbox.EgressDeny, Deny: []sandbox.EgressRule{{CIDRs: []string{"192.0.2.7/32"}, Ports: ports}}}
	for range 8 {
		first.Allow = append(first.Allow, sandbox.EgressRule{CIDRs: cidrs, Ports: ports}, sandbox.EgressRule{Domains: []string{"example.com"}, Ports: other, Protocol: sandbox.TCP})
	}
	second := &sandbox.Egress{Default: sandbox.EgressDeny, Allow: []sandbox.EgressRule{{CIDRs: cidrs, Ports: ports}, {Ports: ports, Protocol: sandbox.UDP}}}
	var before []string
	for _, c := range []struct {
		egress *sandbox.Egress
		sets   int
	}{{first, 3}, {second, 2}, {first, 3}, {first, 3}, {nil, 0}, {second, 2}} {
		must(t, o.wall.set(newMember("one", o.links.name(addr), addr, c.egress), nil))
		names := have()
		if len(names) != c.sets {
			t.Errorf("%d sets, not %d: %v", len(names), c.sets, names)
		}
		if len(before) > 0 && len(before) != len(names) && slices.ContainsFunc(names, func(n string) bool { return slices.Contains(before, n) }) {
			t.Errorf("a set of %v is still there: %v", before, names)
		}
		before = names
	}
	must(t, o.wall.renew())
	if names := have(); len(names) != 2 {
		t.Errorf("made anew it has %v", names)
	}
	must(t, o.wall.remove(addr))
	if names := have(); len(names) > 0 {
		t.Errorf("%v are left", names)
	}
}
