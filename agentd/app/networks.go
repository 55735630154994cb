package app

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"

	"github.com/dormouse-run/dormouse/agentd/internal/debug"
	"github.com/dormouse-run/dormouse/agentd/internal/network"
	"github.com/dormouse-run/dormouse/agentd/internal/nodestate"
	"github.com/dormouse-run/dormouse/agentd/internal/runner"
	"github.com/dormouse-run/dormouse/pkg/config"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
	"github.com/dormouse-run/dormouse/pkg/wire"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// networks are the node's modes as the runner and reconcile see them. outbound is nil where the node has none.
type networks struct {
	pool     *network.Pool
	outbound *network.Outbound
}

// openNetworks opens both pools. The leases of outbound are in the sandboxes' records.
func (a *App) openNetworks() (networks, error) {
	n := networks{pool: network.NewPool(network.Options{Size: a.cfg.Limits.Networks, Log: a.log})}
	a.onClose(n.pool.Close)
	if a.cfg.Network.CIDR == "" {
		return n, nil
	}
	cidr, blocked, err := a.cfg.Network.parse()
	if err != nil {
		return n, err
	}
	all, err := a.state.Sandboxes()
	if err != nil {
		return n, err
	}
	var held []network.Held
	for _, rec := range all {
		if rec.Address != "" {
			// A hibernated one has no network until it wakes.
			kept := rec.Intent == nodestate.IntentKeep && rec.Phase != sandbox.Hibernated
			held = append(held, network.Held{UID: rec.UID, Address: rec.Address, Kept: kept, Egress: rec.Spec.Egress})
		}
	}
	// Of this node's records: no two agentds have the same.
	instance := a.cfg.Node + " " + a.cfg.StateDir
	n.outbound, err = network.OpenOutbound(network.OutboundOptions{Instance: instance, CIDR: cidr, Blocked: blocked, Resolvers: a.cfg.Network.servers(), Size: a.cfg.Network.Ready, Log: a.log}, held)
	if err != nil {
		return n, err
	}
	a.onClose(n.outbound.Close)
	return n, nil
}

func (n networks) has(mode string) (*network.Outbound, error) {
	if n.outbound == nil {
		return nil, network.NotHere(network.Mode(mode))
	}
	return n.outbound, nil
}

func (n networks) Reserve(ctx context.Context, uid, mode string) (string, error) {
	if mode != string(network.ModeOutbound) {
		return "", nil
	}
	o, err := n.has(mode)
	if err != nil {
		return "", err
	}
	return o.Reserve(ctx, uid)
}

func (n networks) Acquire(ctx context.Context, uid, mode string, egress *sandbox.Egress) (runner.Lease, error) {
	if mode != string(network.ModeOutbound) {
		lease, err := n.pool.Acquire(ctx, uid, network.Mode(mode))
		if err != nil {
			return nil, err
		}
		return lease, nil
	}
	o, err := n.has(mode)
	if err != nil {
		return nil, err
	}
	lease, err := o.Acquire(ctx, uid, egress)
	if err != nil {
		return nil, err
	}
	return lease, nil
}

func (n networks) SetEgress(uid string, egress *sandbox.Egress) error {
	o, err := n.has(string(network.ModeOutbound))
	if err != nil {
		return err
	}
	return o.SetEgress(uid, egress)
}

func (n networks) Remove(uid string) error {
	if n.outbound == nil {
		return nil
	}
	return n.outbound.Remove(uid)
}

func (n networks) Free(uid string) {
	if n.outbound != nil {
		n.outbound.Free(uid)
	}
}

// Observe and Purge are for reconcile.

func (n networks) Observe() (network.Inventory, error) {
	if n.outbound == nil {
		return network.Inventory{}, nil
	}
	return n.outbound.Observe()
}

func (n networks) Purge(address string) error {
	o, err := n.has(string(network.ModeOutbound))
	if err != nil {
		return err
	}
	return o.Purge(address)
}

// usage is what a sandbox's network has seen.
func (n networks) usage(rec nodestate.Sandbox) (*dormousev1.SandboxNetwork, error) {
	out := &dormousev1.SandboxNetwork{Mode: wire.NetworkModesToProto([]sandbox.NetworkMode{cmp.Or(rec.Spec.Network, sandbox.NetworkNone)})[0], Address: rec.Address}
	if n.outbound == nil {
		return out, nil
	}
	u, err := n.outbound.Usage(rec.UID)
	out.SentBytes, out.ReceivedBytes, out.RefusedPackets, out.RefusedNames = u.SentBytes, u.ReceivedBytes, u.Refused, u.RefusedNames
	return out, err
}

// networkObjects is what agentctl shows of the network, by sandbox.
func (a *App) networkObjects(context.Context) ([]debug.Object, error) {
	if a.networks.outbound == nil {
		return nil, nil
	}
	usages, err := a.networks.outbound.Usages()
	if err != nil {
		return nil, err
	}
	all, err := a.state.Sandboxes()
	if err != nil {
		return nil, err
	}
	var out []debug.Object
	for _, rec := range all {
		u, ok := usages[rec.UID]
		if !ok {
			continue
		}
		state := "ready"
		if !u.DevicePresent {
			state = "gone"
		}
		out = append(out, debug.Object{UID: rec.UID, Tenant: rec.Tenant, State: state,
			Columns: map[string]string{"address": u.Address, "device": u.Device, "sent": config.FormatBytes(int64(u.SentBytes)),
				"received": config.FormatBytes(int64(u.ReceivedBytes)), "refused": fmt.Sprint(u.Refused), "refused_names": fmt.Sprint(u.RefusedNames)},
			Detail: func(context.Context) (any, error) {
				return map[string]any{"usage": u, "egress": rec.Spec.Egress}, nil
			}})
	}
	return out, nil
}

// servers are the resolvers with their ports.
func (c NetworkConfig) servers() []string {
	if len(c.Resolvers) == 0 {
		return network.NodeResolvers("/etc/resolv.conf")
	}
	var out []string
	for _, r := range c.Resolvers {
		if addr, err := netip.ParseAddr(r); err == nil {
			r = netip.AddrPortFrom(addr, 53).String()
		}
		out = append(out, r)
	}
	return out
}

// modes are those that sandboxes may have here.
func (c NetworkConfig) modes() []dormousev1.NetworkMode {
	modes := []sandbox.NetworkMode{sandbox.NetworkNone}
	if c.CIDR != "" {
		modes = append(modes, sandbox.NetworkOutbound)
	}
	return wire.NetworkModesToProto(modes)
}

func (c NetworkConfig) check() error {
	if c.Ready < 0 || c.Ready > maxReady {
		return fmt.Errorf("network.ready: 0 to %d", maxReady)
	}
	for _, s := range c.servers() {
		if _, err := netip.ParseAddrPort(s); err != nil && len(c.Resolvers) > 0 {
			return fmt.Errorf("network.resolvers: %q is neither an address nor address:port", s)
		}
	}
	if c.CIDR == "" {
		return nil
	}
	_, _, err := c.parse()
	return err
}

func (c NetworkConfig) parse() (cidr netip.Prefix, blocked []netip.Prefix, err error) {
	if cidr, err = netip.ParsePrefix(c.CIDR); err == nil {
		err = network.CheckCIDR(cidr)
	}
	if err != nil {
		return cidr, nil, fmt.Errorf("network.cidr: %q: %w", c.CIDR, err)
	}
	for _, b := range c.Blocked {
		p, err := sandbox.ParseCIDR(b)
		if err != nil {
			return cidr, nil, fmt.Errorf("network.blocked: %q: %w", b, err)
		}
		blocked = append(blocked, p)
	}
	return cidr, blocked, nil
}
