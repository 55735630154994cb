package network

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
)

const ownEnv = "DORMOUSE_NETWORK_TEST_OWN"

// inOwnNamespace runs the tests in a network namespace of their own: it is the node's, and nothing of the machine's is
// touched.
func inOwnNamespace() int {
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Env = append(os.Environ(), ownEnv+"=1")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNET, Pdeathsig: unix.SIGKILL}
	runtime.LockOSThread() // the thread whose end would end the child
	defer runtime.UnlockOSThread()
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return cmd.ProcessState.ExitCode()
}

// nodeIP is the node's on its uplink, outsideIP who is at the other end, metadataIP and blockedIP are there as well.
const (
	nodeIP     = "192.0.2.1"
	outsideIP  = "192.0.2.2"
	metadataIP = "169.254.169.254"
	blockedIP  = "198.51.100.9"
	otherIP    = "203.0.113.7"
)

var testRange = netip.MustParsePrefix("10.77.0.0/24")

// place is a network namespace that a test acts in.
type place struct {
	t  *testing.T
	ns netns.NsHandle
}

func placeAt(t *testing.T, path string) place {
	t.Helper()
	ns, err := netns.GetFromPath(path)
	must(t, err)
	t.Cleanup(func() { _ = ns.Close() })
	return place{t, ns}
}

// do runs f in the place, on a thread that ends with it.
func (p place) do(f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		if err := netns.Set(p.ns); err != nil {
			done <- err
			return
		}
		done <- f()
	}()
	return <-done
}

// serve answers each connection with who it is and who asked, and echoes lines.
func (p place) serve(addr, name string) {
	p.t.Helper()
	var l net.Listener
	must(p.t, p.do(func() (err error) { l, err = net.Listen("tcp4", addr); return err }))
	var all sync.WaitGroup
	var mu sync.Mutex
	var conns []net.Conn
	all.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			mu.Lock()
			conns = append(conns, c)
			mu.Unlock()
			all.Go(func() {
				defer c.Close()
				fmt.Fprintf(c, "%s %s\n", name, c.RemoteAddr())
				_, _ = io.Copy(c, c) // until the caller ends it
			})
		}
	})
	p.t.Cleanup(func() {
		_ = l.Close()
		mu.Lock()
		for _, c := range conns {
			_ = c.Close() // its other end may be gone without a word
		}
		mu.Unlock()
		all.Wait()
	})
}

// reach connects from the place, and gives the first line of the answer.
func (p place) reach(addr string) (net.Conn, string, error) {
	var c net.Conn
	err := p.do(func() (err error) { c, err = net.DialTimeout("tcp4", addr, time.Minute); return err })
	if err != nil {
		return nil, "", err
	}
	must(p.t, c.SetDeadline(time.Now().Add(time.Minute)))
	line, err := bufio.NewReader(io.LimitReader(c, 64)).ReadString('\n')
	if err != nil {
		_ = c.Close()
		return nil, "", err
	}
	return c, strings.TrimSpace(line), nil
}

func (p place) reaches(addr, name string) {
	p.t.Helper()
	c, line, err := p.reach(addr)
	if err != nil {
		p.t.Errorf("%s: %v", addr, err)
		return
	}
	_ = c.Close()
	if got, _, _ := strings.Cut(line, " "); got != name {
		p.t.Errorf("%s is %q, want %s", addr, line, name)
	}
}

// refused connects and must hear at once that it may not.
func (p place) refused(addrs ...string) {
	p.t.Helper()
	for _, addr := range addrs {
		c, line, err := p.reach(addr)
		if err == nil {
			_ = c.Close()
			p.t.Errorf("%s was reached: %q", addr, line)
		} else if !errors.Is(err, unix.ECONNREFUSED) {
			p.t.Errorf("%s: %v, want refused", addr, err)
		}
	}
}

// outside makes the rest of the world: a namespace behind the node's uplink, with servers on port 80 of each address.
func outside(t *testing.T) place {
	t.Helper()
	own, err := os.Open("/proc/thread-self/ns/net")
	must(t, err)
	defer own.Close()
	fd, err := newNamespace(func(h *netlink.Handle) error {
		err := h.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "world"}, PeerName: "uplink", PeerNamespace: netlink.NsFd(int(own.Fd()))})
		if err != nil {
			return err
		}
		link, err := h.LinkByName("world")
		if err != nil {
			return err
		}
		for _, ip := range []string{outsideIP + "/24", metadataIP + "/32", blockedIP + "/32", otherIP + "/32"} {
			addr, err := netlink.ParseAddr(ip)
			if err != nil {
				return err
			}
			if err := h.AddrAdd(link, addr); err != nil {
				return err
			}
		}
		return h.LinkSetUp(link)
	})
	must(t, err)
	t.Cleanup(func() { _ = unix.Close(fd) })
	for _, name := range []string{"lo", "uplink"} {
		link, err := netlink.LinkByName(name)
		must(t, err)
		must(t, netlink.LinkSetUp(link))
		if name == "uplink" {
			addr, err := netlink.ParseAddr(nodeIP + "/24")
			must(t, err)
			must(t, netlink.AddrAdd(link, addr))
			must(t, netlink.RouteAdd(&netlink.Route{Gw: net.ParseIP(outsideIP), LinkIndex: link.Attrs().Index}))
			t.Cleanup(func() { must(t, netlink.LinkDel(link)) })
		}
	}
	world := placeAt(t, fmt.Sprintf("/proc/self/fd/%d", fd))
	for _, ip := range []string{outsideIP, metadataIP, blockedIP, otherIP} {
		world.serve(ip+":80", ip)
	}
	world.serve(outsideIP+":81", "port81")
	return world
}

func openOutbound(t *testing.T, size int, held ...Held) *Outbound {
	t.Helper()
	o, err := OpenOutbound(OutboundOptions{Instance: t.Name(), CIDR: testRange, Blocked: []netip.Prefix{netip.MustParsePrefix("198.51.100.0/24")}, Size: size}, held)
	must(t, err)
	return o
}

// enter is a sandbox: the place that it acts in, and its address.
func enter(t *testing.T, o *Outbound, uid string, e *sandbox.Egress) (place, string) {
	t.Helper()
	addr, err := o.Reserve(t.Context(), uid)
	must(t, err)
	l, err := o.Acquire(t.Context(), uid, e)
	must(t, err)
	p := placeAt(t, l.Path())
	must(t, l.Release())
	return p, addr
}

// leave takes all of a uid back.
func leave(t *testing.T, o *Outbound, uids ...string) {
	t.Helper()
	for _, uid := range uids {
		must(t, o.Remove(uid))
		must(t, o.Remove(uid)) // again
		o.Free(uid)
	}
}

// clean closes and looks whether anything is left.
func clean(t *testing.T, o *Outbound) {
	t.Helper()
	must(t, o.Close())
	all, err := netlink.LinkList()
	must(t, err)
	for _, l := range all {
		if strings.HasPrefix(l.Attrs().Name, "dm") {
			t.Errorf("the device %s is left", l.Attrs().Name)
		}
	}
	tables, err := o.wall.conn.ListTables()
	must(t, err)
	if len(tables) != 0 {
		t.Errorf("the table %s is left", tables[0].Name)
	}
}

func TestOutboundReachesOnlyWhatItMay(t *testing.T) {
	world := outside(t)
	node := placeAt(t, "/proc/thread-self/ns/net")
	node.serve(nodeIP+":80", "node")
	o := openOutbound(t, 2)
	node.serve(o.Gateway().String()+":80", "gateway")
	a, addrA := enter(t, o, "a", nil)
	b, addrB := enter(t, o, "b", nil)
	b.serve(addrB+":80", "b")

	c, line, err := a.reach(outsideIP + ":80")
	must(t, err)
	must(t, c.Close())
	if !strings.HasPrefix(line, outsideIP+" "+nodeIP+":") {
		t.Errorf("outside saw %q, want the node's address", line)
	}
	a.reaches(otherIP+":80", otherIP)
	a.refused(nodeIP+":80", o.Gateway().String()+":80", addrB+":80", metadataIP+":80", blockedIP+":80")
	node.reaches(addrB+":80", "b")
	// Who is outside does not reach in, even if it knows the way.
	must(t, world.do(func() error {
		link, err := netlink.LinkByName("world")
		if err != nil {
			return err
		}
		_, dst, _ := net.ParseCIDR(testRange.String())
		return netlink.RouteAdd(&netlink.Route{Dst: dst, Gw: net.ParseIP(nodeIP), LinkIndex: link.Attrs().Index})
	}))
	if c, _, err := dialShort(world, addrB+":80"); err == nil {
		_ = c.Close()
		t.Error("a sandbox was reached from outside")
	}
	usages, err := o.Usages()
	must(t, err)
	if u := usages["a"]; u.Address != addrA || u.Refused == 0 || u.SentBytes == 0 || u.ReceivedBytes == 0 || !u.DevicePresent {
		t.Errorf("counted %+v", u)
	}
	leave(t, o, "a", "b")
	clean(t, o)
}

// dialShort is for what is dropped without a word.
func dialShort(p place, addr string) (c net.Conn, line string, err error) {
	err = p.do(func() (err error) { c, err = net.DialTimeout("tcp4", addr, 300*time.Millisecond); return err })
	return c, "", err
}

func TestOutboundSourceMustBeItsOwn(t *testing.T) {
	outside(t)
	o := openOutbound(t, 0)
	a, _ := enter(t, o, "a", nil)
	_, addrB := enter(t, o, "b", nil)
	for _, ip := range []string{addrB, "192.0.2.77"} {
		err := a.do(func() error {
			link, err := netlink.LinkByName(inside)
			if err != nil {
				return err
			}
			addr, err := netlink.ParseAddr(ip + "/32")
			if err != nil {
				return err
			}
			if err := netlink.AddrAdd(link, addr); err != nil {
				return err
			}
			c, err := (&net.Dialer{Timeout: 300 * time.Millisecond, LocalAddr: &net.TCPAddr{IP: net.ParseIP(ip)}}).Dial("tcp4", outsideIP+":80")
			if err == nil {
				_ = c.Close()
				return fmt.Errorf("%s was reached as %s", outsideIP, ip)
			}
			return nil
		})
		must(t, err)
	}
	leave(t, o, "a", "b")
	clean(t, o)
}

func allowing(rules ...sandbox.EgressRule) *sandbox.Egress {
	return &sandbox.Egress{Default: sandbox.EgressDeny, Allow: rules}
}

func TestOutboundPolicies(t *testing.T) {
	outside(t)
	o := openOutbound(t, 1)
	a, _ := enter(t, o, "a", allowing(sandbox.EgressRule{CIDRs: []string{outsideIP + "/31", "169.254.0.0/16"}, Ports: []sandbox.PortRange{{First: 80, Last: 80}}}))
	a.reaches(outsideIP+":80", outsideIP)
	a.refused(outsideIP+":81", otherIP+":80", metadataIP+":80")

	must(t, o.SetEgress("a", &sandbox.Egress{Deny: []sandbox.EgressRule{{CIDRs: []string{"192.0.2.0/24"}, Protocol: sandbox.TCP, Ports: []sandbox.PortRange{{First: 81, Last: 90}}}}}))
	a.reaches(outsideIP+":80", outsideIP)
	a.reaches(otherIP+":80", otherIP)
	a.refused(outsideIP + ":81")

	// Ports without addresses; deny goes before allow.
	must(t, o.SetEgress("a", &sandbox.Egress{Default: sandbox.EgressDeny,
		Allow: []sandbox.EgressRule{{Ports: []sandbox.PortRange{{First: 1, Last: 100}}}}, Deny: []sandbox.EgressRule{{CIDRs: []string{otherIP}}}}))
	a.reaches(outsideIP+":81", "port81")
	a.refused(otherIP + ":80")

	// Several addresses and ports.
	must(t, o.SetEgress("a", allowing(sandbox.EgressRule{CIDRs: []string{outsideIP, "198.51.100.0/24"}, Ports: []sandbox.PortRange{{First: 70, Last: 79}, {First: 81, Last: 81}}})))
	a.reaches(outsideIP+":81", "port81")
	a.refused(outsideIP+":80", otherIP+":81")
	must(t, o.SetEgress("a", allowing(sandbox.EgressRule{CIDRs: []string{"0.0.0.0/0"}, Ports: []sandbox.PortRange{{First: 81, Last: 81}}})))
	a.reaches(outsideIP+":81", "port81")
	a.refused(outsideIP + ":80")
	must(t, o.SetEgress("a", nil))

	// A connection that a new policy forbids ends, one that it allows goes on.
	c, _, err := a.reach(outsideIP + ":80")
	must(t, err)
	defer c.Close()
	must(t, echo(c))
	must(t, o.SetEgress("a", allowing(sandbox.EgressRule{CIDRs: []string{"0.0.0.0/0"}})))
	must(t, echo(c))
	must(t, o.SetEgress("a", allowing()))
	if err := echo(c); err == nil {
		t.Error("a connection went on that the policy forbids")
	}
	a.refused(outsideIP + ":80")
	leave(t, o, "a")
	clean(t, o)
}

func echo(c net.Conn) error {
	if err := c.SetDeadline(time.Now().Add(20 * time.Second)); err != nil {
		return err
	}
	if _, err := c.Write([]byte("ping\n")); err != nil {
		return err
	}
	buf := make([]byte, 5)
	_, err := io.ReadFull(c, buf)
	return err
}

// A restart of agentd makes the table anew: connections go on, and who was denied stays denied.
func TestOutboundSurvivesARestart(t *testing.T) {
	outside(t)
	o := openOutbound(t, 2)
	policy := allowing(sandbox.EgressRule{CIDRs: []string{outsideIP}})
	a, addrA := enter(t, o, "a", policy)
	b, addrB := enter(t, o, "b", nil)
	c, _, err := a.reach(outsideIP + ":80")
	must(t, err)
	defer c.Close()
	must(t, echo(c))
	must(t, o.Close())
	must(t, echo(c)) // the table goes on alone

	o = openOutbound(t, 2, Held{UID: "a", Address: addrA, Kept: true, Egress: policy}, Held{UID: "b", Address: addrB})
	must(t, echo(c))
	a.reaches(outsideIP+":80", outsideIP)
	a.refused(otherIP + ":80")
	if c, _, err := dialShort(b, outsideIP+":80"); err == nil {
		_ = c.Close()
		t.Error("a sandbox that is being removed reached out")
	}
	// Addresses that are held are given to nobody else.
	_, addr := enter(t, o, "c", nil)
	if addr == addrA || addr == addrB {
		t.Errorf("%s has two holders", addr)
	}
	leave(t, o, "a", "b", "c")
	clean(t, o)
}

func TestOutboundLeftoversAreFoundAndPurged(t *testing.T) {
	o := openOutbound(t, 2)
	enter(t, o, "a", nil)
	planted, foreign := netip.MustParseAddr("10.77.0.200"), "dm00000c0a80001"
	for _, name := range []string{o.links.name(planted), foreign} {
		must(t, netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name}, PeerName: "p" + name[1:]}))
	}
	o.wall.addSource(planted, o.links.name(planted))
	must(t, o.wall.flush("plant"))
	inv, err := o.Observe()
	must(t, err)
	if len(inv.Leftovers) != 1 || inv.Leftovers[0].Address != planted.String() || !strings.Contains(inv.Leftovers[0].What, "device") || !strings.Contains(inv.Leftovers[0].What, "rules") {
		t.Fatalf("found %+v", inv.Leftovers)
	}
	if len(inv.Holders) != 1 || len(inv.Holders["a"]) != 1 {
		t.Fatalf("holders %+v", inv.Holders)
	}
	if err := o.Purge(inv.Holders["a"][0]); !errs.Has(err, errs.WrongPhase) {
		t.Errorf("purged what is in use: %v", err)
	}
	must(t, o.Purge(planted.String()))
	if inv, err = o.Observe(); err != nil || len(inv.Leftovers) != 0 {
		t.Fatalf("after it %+v, %v", inv.Leftovers, err)
	}
	link, err := netlink.LinkByName(foreign) // another agentd's: not touched
	must(t, err)
	must(t, netlink.LinkDel(link))
	leave(t, o, "a")
	clean(t, o)
}

func TestOutboundAddressesEnd(t *testing.T) {
	o, err := OpenOutbound(OutboundOptions{Instance: t.Name(), CIDR: netip.MustParsePrefix("10.77.1.0/28")}, nil)
	must(t, err)
	seen := map[string]bool{}
	var uids []string
	for i := range 13 {
		uid := fmt.Sprint("u", i)
		addr, err := o.Reserve(t.Context(), uid)
		must(t, err)
		if again, err := o.Reserve(t.Context(), uid); err != nil || again != addr || seen[addr] {
			t.Fatalf("%s, then %s, %v; seen %v", addr, again, err, seen)
		}
		seen[addr] = true
		uids = append(uids, uid)
	}
	if _, err := o.Reserve(t.Context(), "more"); !errs.Has(err, errs.TooMany) {
		t.Errorf("got %v, want TOO_MANY", err)
	}
	leave(t, o, uids...)
	if _, err := o.Reserve(t.Context(), "more"); err != nil {
		t.Error(err)
	}
	leave(t, o, "more")
	clean(t, o)
}

// A thousand sandboxes' policies fit into the one transaction of a restart.
func TestOutboundRebuildsAThousand(t *testing.T) {
	var held []Held
	for i := range 1000 {
		held = append(held, Held{UID: fmt.Sprint(i), Address: netip.AddrFrom4([4]byte{10, 77, byte(i / 250), byte(2 + i%250)}).String(), Kept: true,
			Egress: allowing(sandbox.EgressRule{Domains: []string{"example.com"}})})
	}
	o, err := OpenOutbound(OutboundOptions{Instance: t.Name(), CIDR: netip.MustParsePrefix("10.77.0.0/16")}, held)
	must(t, err)
	began := time.Now()
	must(t, o.wall.renew())
	t.Logf("made anew in %s", time.Since(began))
	for _, h := range held {
		o.Free(h.UID)
	}
	clean(t, o)
}
