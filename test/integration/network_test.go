package integration

import (
	"bufio"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"
	"github.com/vishvananda/netlink"

	"github.com/dormouse-run/dormouse/pkg/client"
	"github.com/dormouse-run/dormouse/pkg/errs"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
	"github.com/dormouse-run/dormouse/test/cluster"
	"github.com/dormouse-run/dormouse/test/fabric"
)

// website is a server in the hub, which is the rest of the world to a sandbox. It answers with who asked.
func (w *world) website() (port string) {
	w.Helper()
	var l net.Listener
	w.ok(fabric.Do(fabric.HubPath(w.ID), func() (err error) {
		l, err = net.Listen("tcp4", fabric.HubAddr+":0")
		return err
	}))
	server := &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(out http.ResponseWriter, r *http.Request) {
		host, _, _ := net.SplitHostPort(r.RemoteAddr)
		fmt.Fprintln(out, "you are", host)
	})}
	done := make(chan error, 1)
	go func() { done <- server.Serve(l) }()
	w.Cleanup(func() {
		_ = server.Close()
		if err := <-done; !errors.Is(err, http.ErrServerClosed) {
			w.Error(err)
		}
	})
	_, port, _ = net.SplitHostPort(l.Addr().String())
	return port
}

// outbound is a spec with a network, on a certain node.
func (w *world) outbound(node int, egress *dormousev1.EgressPolicy, command ...string) *dormousev1.SandboxSpec {
	w.Helper()
	spec := w.spec(command...)
	spec.Network, spec.Egress = dormousev1.NetworkMode_NETWORK_MODE_OUTBOUND, egress
	spec.NodeSelector = map[string]string{"zone": fmt.Sprintf("z%d", node)}
	return spec
}

// fetch asks a server for a page from inside.
func (w *world) fetch(s *client.Sandbox, address string) (string, error) {
	host, port, _ := net.SplitHostPort(address)
	out, err := cluster.Exec(w.ctx, s, "sh", "-c", `printf 'GET / HTTP/1.0\r\n\r\n' | nc -w 20 `+host+" "+port)
	_, body, _ := strings.Cut(string(out), "\r\n\r\n")
	return strings.TrimSpace(body), err
}

func (w *world) fetches(s *client.Sandbox, address, want string) {
	w.Helper()
	if got, err := w.fetch(s, address); err != nil || got != want {
		w.Errorf("%s answers %q, %v; want %q", address, got, err, want)
	}
}

// unreachable tries and must be refused, not left waiting.
func (w *world) unreachable(s *client.Sandbox, addresses ...string) {
	w.Helper()
	for _, a := range addresses {
		got, err := w.fetch(s, a)
		if err == nil || !strings.Contains(err.Error(), "refused") && !strings.Contains(err.Error(), "unreachable") {
			w.Errorf("%s answers %q, %v; want it refused", a, got, err)
		}
	}
}

// addressOf is the address that a sandbox sees itself have.
func (w *world) addressOf(s *client.Sandbox) string {
	w.Helper()
	return w.sh(s, `ip -4 -o addr show eth0 | sed 's/.* inet \([0-9.]*\).*/\1/'`)
}

// echoServer answers lines on port 7 inside.
const echoServer = "while true; do nc -l -p 7 -e cat; done"

// listening is a sandbox in which the node reaches port 7.
func (w *world) reaches(s *client.Sandbox, address string) {
	w.Helper()
	w.await("a listener in "+s.UID, func() error { return w.echo(w.ctx, s, address) })
}

// echo connects from the node's side and sends a line through.
func (w *world) echo(ctx context.Context, s *client.Sandbox, address string) error {
	c, err := fabric.Dialer(w.NodeNetns(w.nodeOf(s)))(ctx, "tcp4", net.JoinHostPort(address, "7"))
	if err != nil {
		return err
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(10 * time.Second)); err != nil {
		return err
	}
	if _, err := io.WriteString(c, "hello\n"); err != nil {
		return err
	}
	line, err := bufio.NewReader(c).ReadString('\n')
	if err == nil && line != "hello\n" {
		err = fmt.Errorf("heard %q", line)
	}
	return err
}

func TestOutboundNetwork(t *testing.T) {
	w := enter(t)
	port := w.website()
	site, node := fabric.HubAddr+":"+port, fabric.NodeAddr(1)
	other := w.create(w.outbound(1, nil, "sh", "-c", echoServer))
	otherAddress := w.addressOf(other)
	s := w.create(w.outbound(1, nil))

	w.fetches(s, site, "you are "+node) // NAT
	n, err := w.Client.GetNode(w.ctx, s.Last.GetStatus().GetNode())
	w.ok(err)
	if !slices.Contains(n.GetNetworkModes(), dormousev1.NetworkMode_NETWORK_MODE_OUTBOUND) {
		t.Errorf("the node has the networks %v", n.GetNetworkModes())
	}
	gateway := strings.TrimSuffix(cluster.NetworkCIDR, "0/24") + "1"
	if got := w.sh(s, "cat /etc/resolv.conf"); got != "nameserver "+gateway {
		w.Errorf("resolv.conf is %q", got)
	}
	w.reaches(other, otherAddress)
	// The node, the gateway, another sandbox, metadata.
	w.unreachable(s, node+":7421", gateway+":80", otherAddress+":7", "169.254.169.254:80")
	if got := w.sh(s, "cat /proc/net/if_inet6 | grep -v ' lo$' | wc -l"); got != "0" {
		w.Errorf("there are %s IPv6 addresses", got)
	}

	denied := w.create(w.outbound(1, &dormousev1.EgressPolicy{DefaultAction: dormousev1.EgressAction_EGRESS_ACTION_DENY}))
	w.unreachable(denied, site)
	narrow := w.create(w.outbound(2, &dormousev1.EgressPolicy{DefaultAction: dormousev1.EgressAction_EGRESS_ACTION_DENY, Allow: []*dormousev1.EgressRule{
		{Cidrs: []string{fabric.HubAddr}, Protocol: dormousev1.EgressProtocol_EGRESS_PROTOCOL_TCP}}}))
	w.fetches(narrow, site, "you are "+fabric.NodeAddr(2))
	w.unreachable(narrow, fabric.NodeAddr(1)+":7421")

	// A new agentd goes on with the addresses and policies that there are.
	w.restartAgentd(1)
	w.fetches(s, site, "you are "+node)
	w.unreachable(denied, site)
	w.unreachable(s, otherAddress+":7")
	w.reaches(other, otherAddress)
}

// nameServer answers names in the hub, as the nodes' upstream.
func (w *world) nameServer(zone map[string]string) {
	w.Helper()
	var packets net.PacketConn
	w.ok(fabric.Do(fabric.HubPath(w.ID), func() (err error) {
		packets, err = net.ListenPacket("udp4", cluster.NameServer)
		return err
	}))
	server := &dns.Server{PacketConn: packets, Handler: dns.HandlerFunc(func(out dns.ResponseWriter, q *dns.Msg) {
		reply := new(dns.Msg)
		reply.SetReply(q)
		address, ok := zone[q.Question[0].Name]
		if !ok {
			reply.Rcode = dns.RcodeNameError
		} else if q.Question[0].Qtype == dns.TypeA {
			reply.Answer = []dns.RR{&dns.A{Hdr: dns.RR_Header{Name: q.Question[0].Name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 1}, A: net.ParseIP(address)}}
		}
		_ = out.WriteMsg(reply)
	})}
	started, done := make(chan struct{}), make(chan error, 1)
	server.NotifyStartedFunc = func() { close(started) }
	go func() { done <- server.ActivateAndServe() }()
	<-started
	w.Cleanup(func() {
		_ = server.Shutdown()
		w.ok(<-done)
	})
}

// A program asks for a page by name. The name is answered if the policy has it, and what it stands for is then
// open, and nothing else; a name for the node itself is worth nothing.
func TestOutboundByName(t *testing.T) {
	w := enter(t)
	port := w.website()
	w.nameServer(map[string]string{"site.example.": fabric.HubAddr, "secret.example.": fabric.HubAddr, "node.example.": fabric.NodeAddr(1)})
	spec := w.outbound(1, &dormousev1.EgressPolicy{DefaultAction: dormousev1.EgressAction_EGRESS_ACTION_DENY, Allow: []*dormousev1.EgressRule{
		{Domains: []string{"site.example", "node.example"}, Protocol: dormousev1.EgressProtocol_EGRESS_PROTOCOL_TCP}}})
	spec.Image, spec.Resources = w.subject(), &dormousev1.Resources{MemoryLimitBytes: 256 * mib}
	s := w.create(spec)
	page := func(host string) (string, error) {
		out, err := cluster.Exec(w.ctx, s, "python3", "-c", `import sys,urllib.request as u
print(u.urlopen("http://"+sys.argv[1]+"/", timeout=20).read().decode().strip())`, host+":"+port)
		return strings.TrimSpace(string(out)), err
	}
	if got, err := page(fabric.HubAddr); err == nil || !strings.Contains(err.Error(), "refused") {
		t.Errorf("before its name was asked for: %q, %v", got, err)
	}
	if got, err := page("site.example"); err != nil || got != "you are "+fabric.NodeAddr(1) {
		t.Errorf("by its name: %q, %v", got, err)
	}
	for _, host := range []string{"secret.example", "node.example"} {
		if got, err := page(host); err == nil {
			t.Errorf("%s answers %q", host, got)
		}
	}
	restored, err := w.checkpoint(s).Restore(w.ctx, &dormousev1.RestoreSandboxRequest{})
	w.ok(err)
	s = restored
	if got, err := page("site.example"); err != nil || got != "you are "+fabric.NodeAddr(1) {
		t.Errorf("after a restore: %q, %v", got, err)
	}
}

// A request for what cannot be says so.
func TestOutboundBadInput(t *testing.T) {
	w := enter(t)
	for _, egress := range []*dormousev1.EgressPolicy{
		{Allow: []*dormousev1.EgressRule{{Cidrs: []string{"fe80::/10"}}}},
		{Deny: []*dormousev1.EgressRule{{Ports: []*dormousev1.PortRange{{First: 1, Last: 70000}}}}},
		{DefaultAction: 9},
	} {
		_, err := w.api.CreateSandbox(w.ctx, &dormousev1.CreateSandboxRequest{Spec: w.outbound(1, egress)})
		w.refused(err, errs.InvalidField)
	}
	w.holdNothing()
}

// Connections from the node hammer a listener while the sandbox is checkpointed; the source, a restore and
// forks take new ones, each at an address of its own, and under the policy of the source.
func TestB01RestoreWhileAListenerIsHammered(t *testing.T) {
	w := enter(t)
	site := fabric.HubAddr + ":" + w.website()
	s := w.create(w.outbound(1, &dormousev1.EgressPolicy{DefaultAction: dormousev1.EgressAction_EGRESS_ACTION_DENY}, "sh", "-c", echoServer))
	address := w.addressOf(s)
	w.reaches(s, address)
	ctx, cancel := context.WithCancel(w.ctx)
	answered, hammered := make(chan struct{}, 1), make(chan struct{})
	go func() {
		defer close(hammered)
		for ctx.Err() == nil {
			try, end := context.WithTimeout(ctx, time.Second)
			if w.echo(try, s, address) == nil {
				select {
				case answered <- struct{}{}:
				default:
				}
			}
			end()
		}
	}()
	select {
	case <-answered:
	case <-hammered:
		t.Fatal("nothing answers")
	}
	snap := w.checkpoint(s)
	restored, err := snap.Restore(w.ctx, &dormousev1.RestoreSandboxRequest{})
	w.ok(err)
	forks, _, err := w.api.Fork(w.ctx, &dormousev1.ForkSandboxRequest{SandboxUid: s.UID, Count: 2})
	w.ok(err)
	cancel()
	<-hammered
	seen := map[string]bool{address: true}
	w.reaches(s, address)
	for _, c := range append(forks, restored) {
		a := w.addressOf(c)
		if seen[a] && w.nodeOf(c) == w.nodeOf(s) {
			w.Errorf("%s has the address %s of another", c.UID, a)
		}
		seen[a] = true
		w.reaches(c, a)
		w.unreachable(c, site)
	}
}

// plantedAddress is one that no sandbox of a test gets.
const plantedAddress = "10.89.0.250"

// plantDevice makes the device that a sandbox of the planted address would have, named as that of the sandbox is.
func (w *world) plantDevice(node int, address string) (name string) {
	w.Helper()
	hexOf := func(a string) string { return hex.EncodeToString(net.ParseIP(a).To4()) }
	w.ok(fabric.Do(w.NodeNetns(node), func() error {
		links, err := netlink.LinkList()
		if err != nil {
			return err
		}
		for _, l := range links {
			if prefix, ok := strings.CutSuffix(l.Attrs().Name, hexOf(address)); ok {
				name = prefix + hexOf(plantedAddress)
				return netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name}, PeerName: "planted"})
			}
		}
		return fmt.Errorf("no device of %s", address)
	}))
	return name
}

// The doctor finds what nobody has, and removes it.
func TestDoctorFindsNetworkLeftovers(t *testing.T) {
	w := enter(t)
	s := w.create(w.outbound(1, nil))
	name := w.plantDevice(1, w.addressOf(s))
	found, err := w.Doctor(w.ctx, 1)
	w.ok(err)
	if len(found) != 1 || found[0].GetKind() != "orphan-network" || found[0].GetName() != plantedAddress || !strings.Contains(found[0].GetObserved(), name) {
		w.Fatalf("found %v", found)
	}
	fixed, err := w.Fix(w.ctx, 1)
	w.ok(err)
	if len(fixed) != 1 || !fixed[0].GetFixed() {
		w.Fatalf("fixed %v", fixed)
	}
	if found, err = w.Doctor(w.ctx, 1); err != nil || len(found) != 0 {
		w.Fatalf("after it %v, %v", found, err)
	}
	w.fetches(s, fabric.HubAddr+":"+w.website(), "you are "+fabric.NodeAddr(1))
}
