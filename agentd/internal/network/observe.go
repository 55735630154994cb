package network

import (
	"net/netip"
	"slices"
	"strings"

	"github.com/dormouse-run/dormouse/pkg/errs"
)

// Usage is what a sandbox's network has seen.
type Usage struct {
	Address       string `json:"address"`
	SentBytes     uint64 `json:"sent_bytes"`
	ReceivedBytes uint64 `json:"received_bytes"`
	Refused       uint64 `json:"refused"`
	RefusedNames  uint64 `json:"refused_names"`
	Device        string `json:"device"`
	DevicePresent bool   `json:"device_present"`
}

// Usage reads the counters of one sandbox; nothing where it has no lease.
func (o *Outbound) Usage(uid string) (Usage, error) {
	o.mu.Lock()
	h := o.leases[uid]
	o.mu.Unlock()
	if h == nil {
		return Usage{}, nil
	}
	u := Usage{Address: h.addr.String(), Device: o.links.name(h.addr), RefusedNames: h.refused.Load()}
	refused, err := o.wall.refusals()
	if err != nil {
		return Usage{}, err
	}
	u.Refused = refused[h.addr]
	s, err := o.links.statistics(h.addr)
	if s != nil {
		u.DevicePresent, u.SentBytes, u.ReceivedBytes = true, s.RxBytes, s.TxBytes // what the sandbox sends, this side receives
	}
	return u, err
}

// Usages reads the counters of all sandboxes, by uid. Bytes are those of the device, refused packets those of the
// table, both since the sandbox got its network; names are counted since agentd was started.
func (o *Outbound) Usages() (map[string]Usage, error) {
	o.mu.Lock()
	out := make(map[string]Usage, len(o.leases))
	all := make(map[string]netip.Addr, len(o.leases))
	for uid, h := range o.leases {
		all[uid] = h.addr
		out[uid] = Usage{Address: h.addr.String(), Device: o.links.name(h.addr), RefusedNames: h.refused.Load()}
	}
	o.mu.Unlock()
	devices, err := o.links.list()
	if err != nil {
		return nil, err
	}
	refused, err := o.wall.refusals()
	if err != nil {
		return nil, err
	}
	for uid, addr := range all {
		u := out[uid]
		u.Refused = refused[addr]
		if s, ok := devices[addr]; ok {
			u.DevicePresent = true
			if s != nil {
				u.SentBytes, u.ReceivedBytes = s.RxBytes, s.TxBytes // what the sandbox sends, this side receives
			}
		}
		out[uid] = u
	}
	return out, nil
}

// Leftover is something of this agentd's that no lease explains.
type Leftover struct {
	Address string
	What    string
}

// Inventory is what there is: the holders of leases by uid, and what no lease explains.
type Inventory struct {
	Holders   map[string][]string
	Leftovers []Leftover
}

// Observe looks at devices and table. What is just being made or taken back is no leftover.
func (o *Outbound) Observe() (Inventory, error) {
	inv := Inventory{Holders: make(map[string][]string)}
	before := o.addrs.inUse()
	devices, err := o.links.list()
	if err != nil {
		return inv, err
	}
	rules, err := o.wall.list()
	if err != nil {
		return inv, err
	}
	after := o.addrs.inUse()
	o.mu.Lock()
	for uid, h := range o.leases {
		if h.recorded {
			inv.Holders[uid] = []string{h.addr.String()}
		}
	}
	o.mu.Unlock()
	what := make(map[netip.Addr][]string)
	for addr := range devices {
		what[addr] = append(what[addr], "the device "+o.links.name(addr))
	}
	for addr := range rules {
		what[addr] = append(what[addr], "rules in the table "+o.wall.table.Name)
	}
	for addr, things := range what {
		if !before[addr] && !after[addr] {
			inv.Leftovers = append(inv.Leftovers, Leftover{addr.String(), strings.Join(things, " and ")})
		}
	}
	slices.SortFunc(inv.Leftovers, func(a, b Leftover) int { return strings.Compare(a.Address, b.Address) })
	return inv, nil
}

// Purge removes the leftovers of an address. It is refused for one that is in use.
func (o *Outbound) Purge(address string) error {
	addr, err := netip.ParseAddr(address)
	if err != nil || !addr.Is4() {
		return errs.New(errs.InvalidField, "%q is no address of a sandbox", address).With("field", "name")
	}
	if !o.addrs.claim(addr) {
		return errs.New(errs.WrongPhase, "the address %s is in use", address)
	}
	defer o.addrs.free(addr)
	if err := o.links.remove(addr); err != nil {
		return err
	}
	// Rules that the table was not to have go by making it anew.
	if err := o.wall.renew(); err != nil {
		return err
	}
	return o.links.forget(addr)
}
