package network

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/dormouse-run/dormouse/pkg/sandbox"
)

// upstream is a name server outside, that the node asks.
const upstreamAddr = outsideIP + ":5353"

// names serves the zone: addresses by name; what is not there does not exist.
func (p place) names(zone map[string][]string, asked *atomic.Int64) {
	p.t.Helper()
	var packets net.PacketConn
	var streams net.Listener
	must(p.t, p.do(func() (err error) {
		if packets, err = net.ListenPacket("udp4", upstreamAddr); err == nil {
			streams, err = net.Listen("tcp4", upstreamAddr)
		}
		return err
	}))
	handler := dns.HandlerFunc(func(w dns.ResponseWriter, q *dns.Msg) {
		asked.Add(1)
		reply := new(dns.Msg)
		reply.SetReply(q)
		name := strings.ToLower(q.Question[0].Name)
		addrs, ok := zone[name]
		if !ok {
			reply.Rcode = dns.RcodeNameError
		}
		for _, a := range addrs {
			rr, err := dns.NewRR(fmt.Sprintf("%s 5 IN A %s", q.Question[0].Name, a))
			if err == nil && q.Question[0].Qtype == dns.TypeA {
				reply.Answer = append(reply.Answer, rr)
			}
		}
		if w.RemoteAddr().Network() == "udp" {
			reply.Truncate(dns.MinMsgSize)
		}
		_ = w.WriteMsg(reply)
	})
	for _, s := range []*dns.Server{{PacketConn: packets, Handler: handler}, {Listener: streams, Handler: handler}} {
		started, done := make(chan struct{}), make(chan struct{})
		s.NotifyStartedFunc = func() { close(started) }
		go func() { defer close(done); _ = s.ActivateAndServe() }()
		<-started
		p.t.Cleanup(func() { _ = s.Shutdown(); <-done })
	}
}

// lookup asks the resolver from the place.
func (p place) lookup(proto, name string, kind uint16) *dns.Msg {
	p.t.Helper()
	m := new(dns.Msg)
	m.SetQuestion(dns.Fqdn(name), kind)
	server := netip.AddrPortFrom(newAddresses(testRange).gateway, 53).String()
	var conn net.Conn
	must(p.t, p.do(func() (err error) { conn, err = net.DialTimeout(proto, server, time.Minute); return err }))
	defer conn.Close()
	got, _, err := (&dns.Client{Net: strings.TrimSuffix(proto, "4"), Timeout: time.Minute}).ExchangeWithConnContext(context.Background(), m, &dns.Conn{Conn: conn})
	must(p.t, err)
	return got
}

func (p place) resolves(name string, want ...string) {
	p.t.Helper()
	got := p.lookup("udp4", name, dns.TypeA)
	var addrs []string
	for _, rr := range got.Answer {
		if a, ok := rr.(*dns.A); ok {
			addrs = append(addrs, a.A.String())
		}
	}
	if got.Rcode != dns.RcodeSuccess || fmt.Sprint(addrs) != fmt.Sprint(want) {
		p.t.Errorf("%s is %v, %s; want %v", name, addrs, dns.RcodeToString[got.Rcode], want)
	}
}

func (p place) answers(name string, kind uint16, code int) {
	p.t.Helper()
	if got := p.lookup("udp4", name, kind); got.Rcode != code || len(got.Answer) != 0 {
		p.t.Errorf("%s: %s with %v, want %s with nothing", name, dns.RcodeToString[got.Rcode], got.Answer, dns.RcodeToString[code])
	}
}

func openWithNames(t *testing.T, held ...Held) *Outbound {
	t.Helper()
	o, err := OpenOutbound(OutboundOptions{Instance: t.Name(), CIDR: testRange, Blocked: []netip.Prefix{netip.MustParsePrefix("198.51.100.0/24")},
		Resolvers: []string{nodeIP + ":9", upstreamAddr}}, held) // the first does not answer
	must(t, err)
	return o
}

func TestResolverOpensWhatItAnswers(t *testing.T) {
	world := outside(t)
	var asked atomic.Int64
	many := make([]string, 100)
	for i := range many {
		many[i] = fmt.Sprintf("203.0.113.%d", 1+i)
	}
	world.names(map[string][]string{
		"good.example.": {outsideIP}, "more.example.": {otherIP, outsideIP}, "deep.sub.example.": {otherIP}, "other.test.": {otherIP},
		"rebind.example.": {nodeIP, "127.0.0.1", metadataIP, "10.77.0.3", blockedIP, otherIP}, "inside.example.": {nodeIP}, "many.example.": many,
	}, &asked)
	o := openWithNames(t)
	web := []sandbox.PortRange{{First: 80, Last: 80}}
	policy := &sandbox.Egress{Default: sandbox.EgressDeny, Allow: []sandbox.EgressRule{
		{Domains: []string{"good.example", "rebind.example", "inside.example", "many.example"}, Ports: web}, {Domains: []string{"*.sub.example"}},
	}, Deny: []sandbox.EgressRule{{Domains: []string{"bad.sub.example"}}}}
	a, _ := enter(t, o, "a", policy)
	b, _ := enter(t, o, "b", &sandbox.Egress{Default: sandbox.EgressDeny})

	a.refused(outsideIP+":80", otherIP+":80")
	a.resolves("good.example", outsideIP)
	a.resolves("GOOD.example", outsideIP)
	a.reaches(outsideIP+":80", outsideIP)
	a.refused(outsideIP+":81", otherIP+":80")
	b.refused(outsideIP + ":80") // opened for the one who asked
	a.resolves("deep.sub.example", otherIP)
	a.reaches(otherIP+":80", otherIP)

	// What stands for the node, other sandboxes and the like is taken out.
	a.resolves("rebind.example", otherIP)
	a.resolves("inside.example")
	a.refused(nodeIP+":80", metadataIP+":80")

	before := asked.Load()
	a.answers("other.test", dns.TypeA, dns.RcodeRefused)
	a.answers("bad.sub.example", dns.TypeA, dns.RcodeRefused)
	b.answers("good.example", dns.TypeA, dns.RcodeRefused)
	a.answers("good.example", dns.TypeAAAA, dns.RcodeSuccess)
	a.answers("good.example", dns.TypeHTTPS, dns.RcodeSuccess)
	if n := asked.Load(); n != before {
		t.Errorf("outside was asked %d times for what is not to be known", n-before)
	}
	a.answers("absent.sub.example", dns.TypeA, dns.RcodeNameError)

	// A long answer is cut, and had in full over TCP, up to the bound.
	if got := a.lookup("udp4", "many.example", dns.TypeA); !got.Truncated {
		t.Error("a long answer was not cut")
	}
	if got := a.lookup("tcp4", "many.example", dns.TypeA); len(got.Answer) != maxAddresses {
		t.Errorf("%d addresses, want %d", len(got.Answer), maxAddresses)
	}
	usages, err := o.Usages()
	must(t, err)
	if n := usages["a"].RefusedNames; n < 2 {
		t.Errorf("%d names are counted as refused", n)
	}

	// What the default allows needs no opening, and what is denied by name is not answered.
	must(t, o.SetEgress("a", &sandbox.Egress{Deny: []sandbox.EgressRule{{Domains: []string{"*.example"}}}}))
	a.resolves("other.test", otherIP)
	a.answers("good.example", dns.TypeA, dns.RcodeRefused)
	a.reaches(outsideIP+":80", outsideIP)
	leave(t, o, "a", "b")
	clean(t, o)
}

// What was opened stays open over a restart of agentd, and no longer than it was to.
func TestResolverAndARestart(t *testing.T) {
	world := outside(t)
	var asked atomic.Int64
	world.names(map[string][]string{"good.example.": {outsideIP}}, &asked)
	o := openWithNames(t)
	policy := allowing(sandbox.EgressRule{Domains: []string{"good.example"}})
	a, addr := enter(t, o, "a", policy)
	a.resolves("good.example", outsideIP)
	c, _, err := a.reach(outsideIP + ":80")
	must(t, err)
	defer c.Close()
	must(t, o.Close())

	o = openWithNames(t, Held{UID: "a", Address: addr, Kept: true, Egress: policy})
	a.reaches(outsideIP+":80", outsideIP)
	// Its time is over: new connections are refused, the old one goes on. The kernel's clock is not ours to turn, so the
	// element is taken out as the kernel would.
	m := o.wall.members[netip.MustParseAddr(addr)]
	o.wall.mu.Lock()
	o.wall.conn.FlushSet(o.wall.domainSet(m, 0))
	delete(m.opened, 0)
	must(t, o.wall.flush("expire"))
	o.wall.mu.Unlock()
	a.refused(outsideIP + ":80")
	must(t, echo(c))
	a.resolves("good.example", outsideIP)
	a.reaches(outsideIP+":80", outsideIP)
	leave(t, o, "a")
	clean(t, o)
}

// The names of one rule open a bounded number of addresses.
func TestResolverIsBounded(t *testing.T) {
	o := openOutbound(t, 0)
	policy := allowing(sandbox.EgressRule{Domains: []string{"*.example"}})
	_, addr := enter(t, o, "a", policy)
	open := func(n int, p *sandbox.Egress) error {
		var targets []netip.Addr
		for i := range 16 {
			targets = append(targets, netip.AddrFrom4([4]byte{20, 0, byte(n), byte(i)}))
		}
		return o.wall.open(netip.MustParseAddr(addr), p, "some.example.", []int{0}, targets, time.Minute)
	}
	for n := range maxOpened / 16 {
		must(t, open(n, policy))
	}
	must(t, open(0, policy)) // open already
	if err := open(200, policy); err == nil {
		t.Error("more than the bound was opened")
	}
	if err := open(0, policy.Clone()); err == nil {
		t.Error("an answer of an earlier policy was opened")
	}
	leave(t, o, "a")
	clean(t, o)
}

func TestNodeResolvers(t *testing.T) {
	file := filepath.Join(t.TempDir(), "resolv.conf")
	must(t, os.WriteFile(file, []byte("nameserver 192.0.2.53\nnameserver 192.0.2.54\n"), 0o600))
	if got := NodeResolvers(file); fmt.Sprint(got) != "[192.0.2.53:53 192.0.2.54:53]" {
		t.Errorf("got %v", got)
	}
	if got := NodeResolvers(file + "x"); got != nil {
		t.Errorf("got %v", got)
	}
}
