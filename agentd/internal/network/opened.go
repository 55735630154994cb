package network

import (
	"fmt"
	"net/netip"
	"time"

	"github.com/google/nftables"

	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
)

// maxOpened bounds the addresses that one rule's names open at a time.
const maxOpened = 512

// opened are the addresses that each rule with names opens, and until when.
type opened map[int]map[netip.Addr]time.Time

// open lets a sandbox reach addresses for a time, by its rules with names. It is an error if its policy is another by
// now, or too much is open.
func (f *firewall) open(addr netip.Addr, egress *sandbox.Egress, rules []int, targets []netip.Addr, ttl time.Duration) error {
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
			until, known := m.opened[rule][t]
			if known && until.Sub(now) >= ttl-lateness {
				continue // long enough
			}
			if !known && len(m.opened[rule]) >= maxOpened {
				if m.opened.expire(rule, now); len(m.opened[rule]) >= maxOpened {
					return errs.New(errs.LimitExceeded, "the names of one rule open %d addresses at a time", maxOpened).With("limit", fmt.Sprint(maxOpened))
				}
			}
			m.opened.add(rule, t, now.Add(ttl))
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

func (o opened) add(rule int, addr netip.Addr, until time.Time) {
	if o[rule] == nil {
		o[rule] = make(map[netip.Addr]time.Time)
	}
	o[rule][addr] = until
}

func (o opened) expire(rule int, now time.Time) {
	for addr, until := range o[rule] {
		if until.Before(now) {
			delete(o[rule], addr)
		}
	}
}

// elements are those that are still open.
func (o opened) elements(rule int, now time.Time) []nftables.SetElement {
	var out []nftables.SetElement
	for addr, until := range o[rule] {
		if left := until.Sub(now); left > time.Second {
			out = append(out, nftables.SetElement{Key: bytesOf(addr), Timeout: left})
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
