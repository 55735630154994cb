package network

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/google/nftables"

	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
)

// maxOpened bounds the addresses that one rule's names open at a time.
const maxOpened = 512

// maxNames bounds the names that are remembered of an open address.
const maxNames = 8

// opening says until when an address is open, and which names stood for it: those that were asked for last. What an earlier agentd
// opened has none.
type opening struct {
	until time.Time
	names []string
}

// opened are the addresses that each rule with names opens.
type opened map[int]map[netip.Addr]opening

// open lets a sandbox reach addresses for a time, by its rules with names. It is an error if its policy is another by
// now, or too much is open.
func (f *firewall) open(addr netip.Addr, egress *sandbox.Egress, name string, rules []int, targets []netip.Addr, ttl time.Duration) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	m, ok := f.members[addr]
	if !ok || m.egress != egress {
		return errs.New(errs.WrongPhase, "the policy has changed meanwhile")
	}
	now := time.Now()
	var do []func()
	for _, rule := range rules {
		set := f.domainSet(m, rule)
		for _, t := range targets {
			was, known := m.opened[rule][t]
			if known && was.until.Sub(now) >= ttl-lateness {
				m.opened.add(rule, t, was.until, name)
				continue // long enough
			}
			if !known && len(m.opened[rule]) >= maxOpened {
				if m.opened.expire(rule, now); len(m.opened[rule]) >= maxOpened {
					return errs.New(errs.LimitExceeded, "the names of one rule open %d addresses at a time", maxOpened).With("limit", fmt.Sprint(maxOpened))
				}
			}
			m.opened.add(rule, t, now.Add(ttl), name)
			key := []nftables.SetElement{{Key: bytesOf(t), Timeout: ttl}}
			do = append(do, func() {
				if known {
					// Added twice, an element keeps its old time: so it is made sure that it is there, and then made anew.
					_ = f.conn.SetAddElements(set, key)
					_ = f.conn.SetDeleteElements(set, key)
				}
				_ = f.conn.SetAddElements(set, key)
			})
		}
	}
	if f.stale {
		return f.rebuild()
	}
	for _, add := range do {
		add()
	}
	return f.flush("open addresses")
}

func (o opened) add(rule int, addr netip.Addr, until time.Time, names ...string) {
	if o[rule] == nil {
		o[rule] = make(map[netip.Addr]opening)
	}
	has := o[rule][addr].names
	for _, name := range names {
		if name != "" && !slices.Contains(has, name) {
			has = append(slices.Clone(has), name)
		}
	}
	o[rule][addr] = opening{until, has[max(0, len(has)-maxNames):]}
}

func (o opened) expire(rule int, now time.Time) {
	for addr, e := range o[rule] {
		if e.until.Before(now) {
			delete(o[rule], addr)
		}
	}
}

// elements are those that are still open.
func (o opened) elements(rule int, now time.Time) []nftables.SetElement {
	var out []nftables.SetElement
	for addr, e := range o[rule] {
		if left := e.until.Sub(now); left > time.Second {
			out = append(out, nftables.SetElement{Key: bytesOf(addr), Timeout: left})
		}
	}
	return out
}

// inherit takes over from the policy before what this one opens as well: by the names, or where they are not known, by
// rules that have all of the domains of the one that opened it. What connections use stays open for maxOpen, however long ago it was
// answered.
func (o opened) inherit(now time.Time, egress *sandbox.Egress, was member, inUse map[netip.Addr]bool) {
	for rule, addresses := range was.opened {
		for addr, e := range addresses {
			if inUse[addr] {
				e.until = now.Add(maxOpen)
			} else if !e.until.After(now) {
				continue
			}
			for _, to := range heirs(egress, allowed(was.egress)[rule], e.names) {
				if len(o[to]) < maxOpened {
					o.add(to, addr, e.until, e.names...)
				}
			}
		}
	}
}

// heirs are the rules of a policy that open what a rule of another one opened.
func heirs(egress *sandbox.Egress, rule sandbox.EgressRule, names []string) []int {
	if egress == nil {
		return nil // nothing is closed
	}
	var out []int
	for _, name := range names {
		if answered, rules := egress.Allows(name); answered {
			out = append(out, rules...)
		}
	}
	if len(names) == 0 && !slices.ContainsFunc(egress.Deny, func(r sandbox.EgressRule) bool { return len(r.Domains) > 0 }) {
		for i, r := range egress.Allow {
			if !slices.ContainsFunc(rule.Domains, func(d string) bool { return !slices.Contains(r.Domains, d) }) {
				out = append(out, i)
			}
		}
	}
	return out
}

// recall reads what an earlier agentd opened by the same policy. A table that is not there had nothing open.
func (f *firewall) recall(m member) {
	for i, r := range allowed(m.egress) {
		if len(r.Domains) == 0 {
			continue
		}
		elements, err := f.conn.GetSetElements(f.domainSet(m, i))
		if err != nil {
			continue
		}
		for _, e := range elements {
			if addr, ok := netip.AddrFromSlice(e.Key); ok && len(m.opened[i]) < maxOpened {
				m.opened.add(i, addr, time.Now().Add(e.Expires))
			}
		}
	}
}
