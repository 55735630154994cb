package network

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/dormouse-run/dormouse/pkg/errs"
)

// inside is the name of a sandbox's device, in the sandbox.
const inside = "eth0"

// hostMAC is the hardware address of every device on agentd's side: each is on a link of its own.
var hostMAC = net.HardwareAddr{0x02, 0x64, 0x6d, 0x00, 0x00, 0x01}

func insideMAC(addr netip.Addr) net.HardwareAddr {
	b := addr.As4()
	return net.HardwareAddr{0x02, 0x64, b[0], b[1], b[2], b[3]}
}

// links are the devices on agentd's side, in agentd's own namespace.
type links struct {
	prefix  string // of the names of this agentd's devices
	gateway netip.Addr
	nl      *netlink.Handle
	ns      *os.File // agentd's own namespace
}

// devicePrefix is the same for every life of one agentd, and another for any other.
func devicePrefix(instance string) string {
	sum := sha256.Sum256([]byte(instance))
	return "dm" + hex.EncodeToString(sum[:])[:5]
}

func openLinks(instance string, gateway netip.Addr) (*links, error) {
	ns, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		return nil, err
	}
	nl, err := netlink.NewHandle(unix.NETLINK_ROUTE, unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, errors.Join(err, ns.Close())
	}
	return &links{prefix: devicePrefix(instance), gateway: gateway, nl: nl, ns: ns}, nil
}

func (l *links) close() error {
	l.nl.Close()
	return l.ns.Close()
}

// name is the device of an address: 15 characters, which is all that a device's name may have.
func (l *links) name(addr netip.Addr) string {
	b := addr.As4()
	return l.prefix + hex.EncodeToString(b[:])
}

// gatewayName is the device that has the gateway's address.
func (l *links) gatewayName() string { return l.prefix + "gw" }

// addressOf reads a device's name; false for devices of others and the gateway's.
func (l *links) addressOf(name string) (netip.Addr, bool) {
	rest, ours := strings.CutPrefix(name, l.prefix)
	b, err := hex.DecodeString(rest)
	if !ours || err != nil || len(b) != 4 {
		return netip.Addr{}, false
	}
	return netip.AddrFrom4([4]byte(b)), true
}

// ensureGateway makes the device with the gateway's address, and lets the namespace forward. The device is a
// bridge without ports, which every kernel that has container networks can make.
func (l *links) ensureGateway() error {
	if err := setSysctl("ipv4/ip_forward", "1"); err != nil {
		return err
	}
	err := l.nl.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: l.gatewayName()}})
	if err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("make the gateway's device: %w", err)
	}
	link, err := l.nl.LinkByName(l.gatewayName())
	if err != nil {
		return fmt.Errorf("find the gateway's device: %w", err)
	}
	closeIPv6(l.gatewayName())
	have, err := l.nl.AddrList(link, netlink.FAMILY_V4)
	if err != nil {
		return fmt.Errorf("look at the gateway's device: %w", err)
	}
	for _, a := range have {
		// Of another range, from before the configuration changed.
		if !a.IP.Equal(l.gateway.AsSlice()) {
			if err := l.nl.AddrDel(link, &a); err != nil {
				return fmt.Errorf("take the old address off the gateway's device: %w", err)
			}
		}
	}
	if err := l.nl.AddrReplace(link, &netlink.Addr{IPNet: host(l.gateway)}); err != nil {
		return fmt.Errorf("give the gateway's device its address: %w", err)
	}
	if err := l.nl.LinkSetUp(link); err != nil {
		return fmt.Errorf("start the gateway's device: %w", err)
	}
	return nil
}

func (l *links) removeGateway() error { return l.removeNamed(l.gatewayName()) }

// make gives a namespace that has the address, and its device on this side. Nothing is left after an error.
func (l *links) make(addr netip.Addr) (fd int, err error) {
	name := l.name(addr)
	fd, err = newNamespace(func(h *netlink.Handle) error { return l.furnish(h, name, addr) })
	if err != nil {
		return -1, errors.Join(err, l.remove(addr))
	}
	return fd, nil
}

// furnish is called in the new namespace. Made here and with its other end handed over, the pair is seen outside
// only once it has its name.
func (l *links) furnish(h *netlink.Handle, name string, addr netip.Addr) error {
	closeIPv6("all")
	closeIPv6("default")
	err := h.LinkAdd(&netlink.Veth{
		LinkAttrs: netlink.LinkAttrs{Name: inside, HardwareAddr: insideMAC(addr)},
		PeerName:  name, PeerHardwareAddr: hostMAC, PeerNamespace: netlink.NsFd(int(l.ns.Fd())),
	})
	if err != nil {
		return fmt.Errorf("make the pair %s: %w", name, err)
	}
	link, err := h.LinkByName(inside)
	if err != nil {
		return fmt.Errorf("find %s: %w", inside, err)
	}
	if err := h.AddrAdd(link, &netlink.Addr{IPNet: host(addr)}); err != nil {
		return fmt.Errorf("give %s its address: %w", inside, err)
	}
	if err := h.LinkSetUp(link); err != nil {
		return fmt.Errorf("start %s: %w", inside, err)
	}
	index := link.Attrs().Index
	if err := h.RouteAdd(&netlink.Route{LinkIndex: index, Dst: host(l.gateway), Scope: netlink.SCOPE_LINK}); err != nil {
		return fmt.Errorf("route to the gateway: %w", err)
	}
	if err := h.RouteAdd(&netlink.Route{LinkIndex: index, Gw: l.gateway.AsSlice()}); err != nil {
		return fmt.Errorf("route over the gateway: %w", err)
	}
	if err := neighbour(h, index, l.gateway, hostMAC); err != nil {
		return err
	}
	if err := l.outside(name, addr); err != nil {
		return err
	}
	return errors.Join(settled(h, inside), settled(l.nl, name))
}

// settleTime bounds how long the kernel may take to let a new device send: it does so in its own time, and drops what
// is sent before.
const settleTime = 30 * time.Second

func settled(h *netlink.Handle, name string) error {
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for late := time.Now().Add(settleTime); ; <-tick.C {
		link, err := h.LinkByName(name)
		if err != nil {
			return fmt.Errorf("look at %s: %w", name, err)
		}
		if link.Attrs().OperState == netlink.OperUp {
			return nil
		}
		if time.Now().After(late) {
			return fmt.Errorf("%s is not up after %s", name, settleTime)
		}
	}
}

// outside sets up this side.
func (l *links) outside(name string, addr netip.Addr) error {
	link, err := l.nl.LinkByName(name)
	if err != nil {
		return fmt.Errorf("find %s: %w", name, err)
	}
	closeIPv6(name)
	if err := l.nl.LinkSetUp(link); err != nil {
		return fmt.Errorf("start %s: %w", name, err)
	}
	index := link.Attrs().Index
	if err := neighbour(l.nl, index, addr, insideMAC(addr)); err != nil {
		return err
	}
	err = l.nl.RouteReplace(&netlink.Route{LinkIndex: index, Dst: host(addr), Scope: netlink.SCOPE_LINK, Src: l.gateway.AsSlice()})
	if err != nil {
		return fmt.Errorf("route to %s: %w", addr, err)
	}
	return nil
}

func neighbour(h *netlink.Handle, index int, addr netip.Addr, mac net.HardwareAddr) error {
	err := h.NeighSet(&netlink.Neigh{LinkIndex: index, State: netlink.NUD_PERMANENT, IP: addr.AsSlice(), HardwareAddr: mac})
	if err != nil {
		return fmt.Errorf("name the neighbour %s: %w", addr, err)
	}
	return nil
}

// remove takes the device of an address away, with its route, and with it the sandbox's end. Idempotent.
func (l *links) remove(addr netip.Addr) error { return l.removeNamed(l.name(addr)) }

func (l *links) removeNamed(name string) error {
	link, err := l.nl.LinkByName(name)
	if err == nil {
		err = l.nl.LinkDel(link)
	}
	if err == nil || absent(err) {
		return nil
	}
	return errs.Wrap(err, errs.InternalError, "remove the network device %s: %v", name, err)
}

func absent(err error) bool {
	var missing netlink.LinkNotFoundError
	return errors.As(err, &missing) || errors.Is(err, unix.ENODEV)
}

// list gives the devices of this agentd, by address.
func (l *links) list() (map[netip.Addr]*netlink.LinkStatistics, error) {
	all, err := l.nl.LinkList()
	if err != nil {
		return nil, errs.Wrap(err, errs.InternalError, "list the network devices: %v", err)
	}
	found := make(map[netip.Addr]*netlink.LinkStatistics)
	for _, link := range all {
		if addr, ok := l.addressOf(link.Attrs().Name); ok {
			found[addr] = link.Attrs().Statistics
		}
	}
	return found, nil
}

// statistics are those of the device of an address; nil where there is none.
func (l *links) statistics(addr netip.Addr) (*netlink.LinkStatistics, error) {
	link, err := l.nl.LinkByName(l.name(addr))
	switch {
	case absent(err):
		return nil, nil //nolint:nilnil // none
	case err != nil:
		return nil, errs.Wrap(err, errs.InternalError, "look at the network device of %s: %v", addr, err)
	}
	return link.Attrs().Statistics, nil
}

// isOwn tells whether the node itself has an address.
func (l *links) isOwn(addr netip.Addr) (bool, error) {
	all, err := l.nl.AddrList(nil, netlink.FAMILY_V4)
	if err != nil {
		return false, err
	}
	for _, a := range all {
		if a.IP.Equal(addr.AsSlice()) {
			return true, nil
		}
	}
	return false, nil
}

// forget drops the connections that are known of an address: whoever has it next is not to get their packets.
func (l *links) forget(addr netip.Addr) error {
	ours := &netlink.ConntrackFilter{}
	if err := ours.AddIP(netlink.ConntrackOrigSrcIP, addr.AsSlice()); err != nil {
		return err
	}
	theirs := &netlink.ConntrackFilter{}
	if err := theirs.AddIP(netlink.ConntrackOrigDstIP, addr.AsSlice()); err != nil {
		return err
	}
	_, err := l.nl.ConntrackDeleteFilters(netlink.ConntrackTable, unix.AF_INET, ours, theirs)
	if err != nil {
		return errs.Wrap(err, errs.InternalError, "drop the connections of %s: %v", addr, err)
	}
	return nil
}

func host(addr netip.Addr) *net.IPNet {
	return &net.IPNet{IP: addr.AsSlice(), Mask: net.CIDRMask(32, 32)}
}

// setSysctl sets what is not set yet, in the namespace of the calling thread.
func setSysctl(name, value string) error {
	path := "/proc/sys/net/" + name
	has, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if strings.TrimSpace(string(has)) == value {
		return nil
	}
	return os.WriteFile(path, []byte(value), 0o600)
}

// closeIPv6 switches IPv6 off on a device. Where that is not possible, because the kernel has no IPv6 or /proc/sys is
// read-only, the firewall drops it all the same.
func closeIPv6(device string) { _ = setSysctl("ipv6/conf/"+device+"/disable_ipv6", "1") }
