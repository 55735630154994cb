package sandbox

import (
	"slices"
	"strings"
	"testing"
)

func TestEgressValidate(t *testing.T) {
	one := func(r EgressRule) *Egress { return &Egress{Allow: []EgressRule{r}} }
	many := func(n int) []string { return slices.Repeat([]string{"10.0.0.1"}, n) }
	for name, c := range map[string]struct {
		e             *Egress
		reason, field string
	}{
		"none":            {nil, "", ""},
		"empty":           {&Egress{}, "", ""},
		"all of it":       {&Egress{Default: EgressDeny, Allow: []EgressRule{{CIDRs: []string{"10.1.0.0/16", "192.0.2.1"}, Domains: []string{"example.com", "*.Example.org."}, Ports: []PortRange{{80, 80}, {1, 65535}}, Protocol: TCP}}, Deny: []EgressRule{{Protocol: ICMP}}}, "", ""},
		"action":          {&Egress{Default: "maybe"}, "INVALID_FIELD", "e.default_action"},
		"empty rule":      {one(EgressRule{}), "INVALID_FIELD", "e.allow[0]"},
		"deny is checked": {&Egress{Deny: []EgressRule{{}}}, "INVALID_FIELD", "e.deny[0]"},
		"IPv6":            {one(EgressRule{CIDRs: []string{"2001:db8::/32"}}), "INVALID_FIELD", "e.allow[0].cidrs[0]"},
		"no range":        {one(EgressRule{CIDRs: []string{"10.0.0.0/33"}}), "INVALID_FIELD", "e.allow[0].cidrs[0]"},
		"domain":          {one(EgressRule{Domains: []string{"a..b"}}), "INVALID_FIELD", "e.allow[0].domains[0]"},
		"star inside":     {one(EgressRule{Domains: []string{"a.*.b"}}), "INVALID_FIELD", "e.allow[0].domains[0]"},
		"long domain":     {one(EgressRule{Domains: []string{strings.Repeat("a.", MaxDomain/2) + "abc"}}), "INVALID_FIELD", "e.allow[0].domains[0]"},
		"port 0":          {one(EgressRule{Ports: []PortRange{{0, 1}}}), "INVALID_FIELD", "e.allow[0].ports[0]"},
		"ports backwards": {one(EgressRule{Ports: []PortRange{{2, 1}}}), "INVALID_FIELD", "e.allow[0].ports[0]"},
		"protocol":        {one(EgressRule{Protocol: "sctp"}), "INVALID_FIELD", "e.allow[0].protocol"},
		"ports of icmp":   {one(EgressRule{Protocol: ICMP, Ports: []PortRange{{1, 1}}}), "INVALID_FIELD", "e.allow[0].ports"},
		"many rules":      {&Egress{Allow: make([]EgressRule, MaxEgressRules+1)}, "LIMIT_EXCEEDED", "e.allow"},
		"many CIDRs":      {one(EgressRule{CIDRs: many(MaxEgressTargets + 1)}), "LIMIT_EXCEEDED", "e.allow[0].cidrs"},
		"many domains":    {one(EgressRule{Domains: many(MaxEgressTargets + 1)}), "LIMIT_EXCEEDED", "e.allow[0].domains"},
		"many ports":      {one(EgressRule{Ports: make([]PortRange, MaxEgressPorts+1)}), "LIMIT_EXCEEDED", "e.allow[0].ports"},
	} {
		if p := c.e.Validate("e"); (c.reason == "") != (p == nil) || p != nil && (p.Reason != c.reason || p.Field != c.field) {
			t.Errorf("%s: got %+v", name, p)
		}
	}
}

func TestEgressNames(t *testing.T) {
	e := &Egress{Default: EgressDeny, Allow: []EgressRule{{Domains: []string{"example.com"}}, {Domains: []string{"*.example.com", "other.org."}}}, Deny: []EgressRule{{Domains: []string{"bad.example.com"}}}}
	for name, want := range map[string][]int{
		"example.com.": {0}, "EXAMPLE.com": {0}, "a.b.example.com": {1}, "other.org": {1}, "a.other.org": nil,
		"bad.example.com": nil, "xexample.com": nil, "com": nil, "": nil,
	} {
		answer, rules := e.Allows(name)
		if answer != (want != nil) || !slices.Equal(rules, want) {
			t.Errorf("%s: %t %v", name, answer, rules)
		}
	}
	e.Default = EgressAllow
	if answer, rules := e.Allows("elsewhere.net"); !answer || rules != nil {
		t.Error("what the default allows is not answered")
	}
	if answer, _ := e.Allows("bad.example.com"); answer {
		t.Error("a denied name is answered")
	}
}

func TestEgressClone(t *testing.T) {
	e := &Egress{Allow: []EgressRule{{CIDRs: []string{"10.0.0.1"}, Domains: []string{"a"}, Ports: []PortRange{{1, 2}}}}}
	c := e.Clone()
	c.Allow[0].CIDRs[0], c.Allow[0].Domains[0], c.Allow[0].Ports[0].First = "x", "x", 9
	if e.Allow[0].CIDRs[0] != "10.0.0.1" || e.Allow[0].Domains[0] != "a" || e.Allow[0].Ports[0].First != 1 {
		t.Error("the copy shares something")
	}
}
