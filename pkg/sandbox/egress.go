package sandbox

import (
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strings"
)

// EgressAction is what becomes of a connection.
type EgressAction string

// The actions.
const (
	EgressAllow EgressAction = "allow"
	EgressDeny  EgressAction = "deny"
)

// Protocol is a transport protocol; empty is any.
type Protocol string

// The protocols.
const (
	TCP  Protocol = "tcp"
	UDP  Protocol = "udp"
	ICMP Protocol = "icmp"
)

// PortRange is first to last, both in it.
type PortRange struct {
	First uint16 `json:"first"`
	Last  uint16 `json:"last"`
}

// EgressRule matches what goes to one of the CIDRs or one of the domains, at one of the ports, by the protocol. No
// ports: any. Neither CIDRs nor domains: any address.
type EgressRule struct {
	CIDRs []string `json:"cidrs,omitempty"`
	// Domains are names, or "*." and a name for everything below it. The node's resolver answers them, and what it
	// answered is open for as long as the answer is good.
	Domains  []string    `json:"domains,omitempty"`
	Ports    []PortRange `json:"ports,omitempty"`
	Protocol Protocol    `json:"protocol,omitempty"`
}

// Egress is what a sandbox may reach. A deny rule goes before an allow rule, and either before the default.
// What the node always blocks is not opened by any of them.
type Egress struct {
	// Default is EgressAllow when empty.
	Default EgressAction `json:"default,omitempty"`
	Allow   []EgressRule `json:"allow,omitempty"`
	Deny    []EgressRule `json:"deny,omitempty"`
}

// Bounds of a policy.
const (
	MaxEgressRules   = 32 // of each list
	MaxEgressTargets = 64 // CIDRs and domains of a rule, each
	MaxEgressPorts   = 16 // ranges of a rule
	MaxDomain        = 253
)

// Clone is a deep copy; nil stays nil.
func (e *Egress) Clone() *Egress {
	if e == nil {
		return nil
	}
	out := &Egress{Default: e.Default}
	for _, r := range e.Allow {
		out.Allow = append(out.Allow, r.clone())
	}
	for _, r := range e.Deny {
		out.Deny = append(out.Deny, r.clone())
	}
	return out
}

func (r EgressRule) clone() EgressRule {
	r.CIDRs, r.Domains, r.Ports = slices.Clone(r.CIDRs), slices.Clone(r.Domains), slices.Clone(r.Ports)
	return r
}

// Allows tells what the policy says of a name: whether the resolver answers it, and which of the allow rules the
// addresses of the answer are for.
func (e *Egress) Allows(name string) (answer bool, rules []int) {
	if e == nil {
		return true, nil
	}
	for _, r := range e.Deny {
		if r.hasDomain(name) {
			return false, nil
		}
	}
	for i, r := range e.Allow {
		if r.hasDomain(name) {
			rules = append(rules, i)
		}
	}
	return len(rules) > 0 || e.Default != EgressDeny, rules
}

func (r EgressRule) hasDomain(name string) bool {
	name = strings.ToLower(strings.TrimSuffix(name, "."))
	return slices.ContainsFunc(r.Domains, func(d string) bool {
		d = strings.ToLower(strings.TrimSuffix(d, "."))
		if below, ok := strings.CutPrefix(d, "*."); ok {
			return strings.HasSuffix(name, "."+below)
		}
		return name == d
	})
}

var domainForm = regexp.MustCompile(`^(\*\.)?([A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?\.)*[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?\.?$`)

// Validate checks a policy; nil is one.
func (e *Egress) Validate(field string) *Problem {
	if e == nil {
		return nil
	}
	if e.Default != "" && e.Default != EgressAllow && e.Default != EgressDeny {
		return invalid(field+".default_action", "allow or deny")
	}
	for _, l := range []struct {
		name  string
		rules []EgressRule
	}{{"allow", e.Allow}, {"deny", e.Deny}} {
		if len(l.rules) > MaxEgressRules {
			return tooLarge(field+"."+l.name, "rules", MaxEgressRules, len(l.rules))
		}
		for i, r := range l.rules {
			if p := r.validate(fmt.Sprintf("%s.%s[%d]", field, l.name, i)); p != nil {
				return p
			}
		}
	}
	return nil
}

func (r EgressRule) validate(field string) *Problem {
	switch {
	case len(r.CIDRs) > MaxEgressTargets:
		return tooLarge(field+".cidrs", "CIDRs", MaxEgressTargets, len(r.CIDRs))
	case len(r.Domains) > MaxEgressTargets:
		return tooLarge(field+".domains", "domains", MaxEgressTargets, len(r.Domains))
	case len(r.Ports) > MaxEgressPorts:
		return tooLarge(field+".ports", "ranges", MaxEgressPorts, len(r.Ports))
	case len(r.CIDRs)+len(r.Domains)+len(r.Ports) == 0 && r.Protocol == "":
		return invalid(field, "the rule is empty; name CIDRs, domains, ports or a protocol, or use default_action")
	case r.Protocol != "" && r.Protocol != TCP && r.Protocol != UDP && r.Protocol != ICMP:
		return invalid(field+".protocol", "tcp, udp or icmp")
	case r.Protocol == ICMP && len(r.Ports) > 0:
		return invalid(field+".ports", "icmp has no ports")
	}
	for i, c := range r.CIDRs {
		if _, err := ParseCIDR(c); err != nil {
			return invalid(fmt.Sprintf("%s.cidrs[%d]", field, i), "%q is no IPv4 address or range such as 203.0.113.0/24 (IPv6 is closed)", c)
		}
	}
	for i, d := range r.Domains {
		if len(d) > MaxDomain || !domainForm.MatchString(d) {
			return invalid(fmt.Sprintf("%s.domains[%d]", field, i), "a name such as example.com, or *.example.com for what is below it, at most %d characters", MaxDomain)
		}
	}
	for i, p := range r.Ports {
		if p.First == 0 || p.Last < p.First {
			return invalid(fmt.Sprintf("%s.ports[%d]", field, i), "first to last, from 1 to 65535")
		}
	}
	return nil
}

// ParseCIDR reads an IPv4 range, or an address, which is the range of itself. Bits behind the prefix are cleared.
func ParseCIDR(s string) (netip.Prefix, error) {
	if !strings.Contains(s, "/") {
		s += "/32"
	}
	p, err := netip.ParsePrefix(s)
	if err == nil && !p.Addr().Is4() {
		err = fmt.Errorf("%s is not IPv4", s)
	}
	return p.Masked(), err
}
