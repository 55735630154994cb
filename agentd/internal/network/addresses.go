package network

import (
	"encoding/binary"
	"net/netip"
	"sync"

	"github.com/dormouse-run/dormouse/pkg/errs"
)

// addresses hands out the addresses of a range, the longest free one first: who still sends to an address
// that changed hands is to have given up.
type addresses struct {
	prefix  netip.Prefix
	gateway netip.Addr

	mu   sync.Mutex
	next netip.Addr
	used map[netip.Addr]bool
}

// minBits and maxBits bound the range: at least 13 sandboxes, at most 65533.
const (
	minBits = 16
	maxBits = 28
)

func newAddresses(prefix netip.Prefix) *addresses {
	gateway := prefix.Addr().Next()
	return &addresses{prefix: prefix, gateway: gateway, next: gateway.Next(), used: make(map[netip.Addr]bool)}
}

// take gives a free address. RESOURCE_EXHAUSTED when there is none.
func (a *addresses) take() (netip.Addr, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	last := lastOf(a.prefix)
	for range 1 << (32 - a.prefix.Bits()) {
		addr := a.next
		a.next = addr.Next()
		if addr.Compare(last) >= 0 {
			a.next = a.gateway.Next()
			continue
		}
		if !a.used[addr] {
			a.used[addr] = true
			return addr, nil
		}
	}
	return netip.Addr{}, errs.New(errs.TooMany, "all addresses of the range %s are in use; give the node a larger one (network.cidr)", a.prefix).
		With("resource", "network addresses").With("limit", a.prefix.String())
}

// claim takes a certain address; false when it is in use.
func (a *addresses) claim(addr netip.Addr) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.used[addr] {
		return false
	}
	a.used[addr] = true
	return true
}

func (a *addresses) free(addr netip.Addr) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.used, addr)
}

func (a *addresses) inUse() map[netip.Addr]bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	all := make(map[netip.Addr]bool, len(a.used))
	for addr := range a.used {
		all[addr] = true
	}
	return all
}

// lastOf is the last address of a range.
func lastOf(p netip.Prefix) netip.Addr {
	b := p.Masked().Addr().As4()
	n := binary.BigEndian.Uint32(b[:]) | uint32(1<<(32-p.Bits())-1)
	binary.BigEndian.PutUint32(b[:], n)
	return netip.AddrFrom4(b)
}
