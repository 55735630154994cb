package network

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/miekg/dns"

	"github.com/dormouse-run/dormouse/pkg/sandbox"
)

// Bounds of the resolver. A name's addresses are open for at least minOpen and at most maxOpen: an application may use
// an answer a little later than its time allows, and an answer that is good for years is asked for again.
const (
	minOpen      = time.Minute
	maxOpen      = time.Hour
	lateness     = 30 * time.Second
	askTime      = 5 * time.Second // for all upstreams
	tryTime      = 2 * time.Second // for one
	atOnce       = 256             // questions of all sandboxes
	atOnceEach   = 32              // questions of one
	answerSize   = 1232            // of a datagram, where the sandbox takes more than 512
	maxAddresses = 32              // of one answer
)

// resolver answers the sandboxes' questions at the gateway: names that the policy allows by asking the node's own
// resolvers, others with REFUSED. What it answers for a rule with names is opened before it is answered. Addresses that
// are always blocked are taken out of answers, so that a name of somebody else's cannot stand for the node.
type resolver struct {
	servers []string
	log     *slog.Logger
	// asker is who has an address; nil for nobody.
	asker func(netip.Addr) *asker
	// open lets the addresses through for a time, if the policy is still this one.
	open func(addr netip.Addr, egress *sandbox.Egress, name string, rules []int, targets []netip.Addr, ttl time.Duration) error
	// blocked tells whether no policy opens an address.
	blocked func(netip.Addr) bool

	udp, tcp *dns.Server
	slots    chan struct{}
	running  sync.WaitGroup
	ctx      context.Context //nolint:containedctx // of the questions that are being answered
	cancel   context.CancelFunc
}

// asker is a sandbox that asks.
type asker struct {
	addr   netip.Addr
	egress *sandbox.Egress
	slots  chan struct{}
	// refused counts what was not answered because of the policy.
	refused func()
}

// types are the kinds of records that are passed on. Others are answered with nothing: some have addresses in them.
var types = []uint16{dns.TypeA, dns.TypeCNAME, dns.TypeMX, dns.TypeTXT, dns.TypeSRV, dns.TypeNS, dns.TypeSOA, dns.TypePTR, dns.TypeCAA}

// listen serves at the gateway until close.
func (r *resolver) listen(gateway netip.Addr) error {
	address := netip.AddrPortFrom(gateway, 53).String()
	r.slots = make(chan struct{}, atOnce)
	r.ctx, r.cancel = context.WithCancel(context.Background())
	packets, err := net.ListenPacket("udp4", address)
	if err != nil {
		return fmt.Errorf("the resolver: %w", err)
	}
	streams, err := net.Listen("tcp4", address)
	if err != nil {
		return errors.Join(fmt.Errorf("the resolver: %w", err), packets.Close())
	}
	r.udp = &dns.Server{PacketConn: packets, Handler: r, ReadTimeout: askTime, WriteTimeout: askTime}
	r.tcp = &dns.Server{Listener: streams, Handler: r, ReadTimeout: askTime, WriteTimeout: askTime, MaxTCPQueries: 64}
	for _, s := range []*dns.Server{r.udp, r.tcp} {
		started := make(chan struct{})
		s.NotifyStartedFunc = sync.OnceFunc(func() { close(started) })
		failed := make(chan error, 1)
		r.running.Go(func() {
			err := s.ActivateAndServe()
			failed <- err
			if err != nil && r.ctx.Err() == nil {
				r.log.Error("the resolver ended", "error", err)
			}
		})
		select {
		case <-started:
		case err := <-failed:
			r.close()
			return fmt.Errorf("the resolver: %w", err)
		}
	}
	return nil
}

// close ends it; questions that are being answered are given up.
func (r *resolver) close() {
	r.cancel()
	for _, s := range []*dns.Server{r.udp, r.tcp} {
		_ = s.Shutdown() // fails for a server that does not serve
	}
	r.running.Wait()
}

// ServeDNS implements dns.Handler.
func (r *resolver) ServeDNS(w dns.ResponseWriter, q *dns.Msg) {
	from, err := netip.ParseAddrPort(w.RemoteAddr().String())
	if err != nil {
		return
	}
	a := r.asker(from.Addr().Unmap())
	if a == nil {
		return // nobody of ours
	}
	for _, slots := range []chan struct{}{r.slots, a.slots} {
		select {
		case slots <- struct{}{}:
			defer func() { <-slots }()
		default:
			_ = w.WriteMsg(failure(q, dns.RcodeServerFailure))
			return
		}
	}
	reply := r.answer(a, q)
	size := dns.MinMsgSize
	if opt := q.IsEdns0(); opt != nil {
		size = min(max(int(opt.UDPSize()), dns.MinMsgSize), answerSize)
		reply.SetEdns0(answerSize, false)
	}
	if w.RemoteAddr().Network() == "udp" {
		reply.Truncate(size)
	}
	_ = w.WriteMsg(reply) // who has gone away needs none
}

func failure(q *dns.Msg, code int) *dns.Msg {
	reply := new(dns.Msg)
	reply.SetRcode(q, code)
	reply.RecursionAvailable = true
	return reply
}

func (r *resolver) answer(a *asker, q *dns.Msg) *dns.Msg {
	switch {
	case q.Opcode != dns.OpcodeQuery:
		return failure(q, dns.RcodeNotImplemented)
	case len(q.Question) != 1 || q.Question[0].Qclass != dns.ClassINET:
		return failure(q, dns.RcodeRefused)
	}
	question := q.Question[0]
	allowed, rules := a.egress.Allows(question.Name)
	if !allowed {
		a.refused()
		return failure(q, dns.RcodeRefused)
	}
	if !slices.Contains(types, question.Qtype) {
		return failure(q, dns.RcodeSuccess) // nothing of that kind, IPv6 addresses among it
	}
	ctx, cancel := context.WithTimeout(r.ctx, askTime)
	defer cancel()
	got, err := r.ask(ctx, question)
	if err != nil {
		r.log.Debug("no resolver of the node answers", "error", err)
		return failure(q, dns.RcodeServerFailure)
	}
	reply := failure(q, got.Rcode)
	targets, ttl := r.take(a, reply, got)
	ttl = min(max(ttl, minOpen), maxOpen) + lateness
	if len(rules) > 0 && len(targets) > 0 {
		if err := r.open(a.addr, a.egress, strings.ToLower(question.Name), rules, targets, ttl); err != nil {
			r.log.Warn("open what a name stands for", "address", a.addr.String(), "error", err)
			return failure(q, dns.RcodeServerFailure)
		}
	}
	return reply
}

// take puts what may be known of an answer into the reply, and gives its addresses and how long they are good.
func (r *resolver) take(a *asker, reply, got *dns.Msg) (targets []netip.Addr, ttl time.Duration) {
	ttl = maxOpen
	for _, rr := range got.Answer {
		head := rr.Header()
		if head.Class != dns.ClassINET || !slices.Contains(types, head.Rrtype) {
			continue
		}
		head.Ttl = min(head.Ttl, uint32(maxOpen/time.Second))
		if record, ok := rr.(*dns.A); ok {
			addr, ok := netip.AddrFromSlice(record.A.To4())
			if !ok || len(targets) == maxAddresses {
				continue
			}
			if r.blocked(addr) {
				a.refused()
				continue
			}
			targets = append(targets, addr)
		}
		ttl = min(ttl, time.Duration(head.Ttl)*time.Second)
		reply.Answer = append(reply.Answer, rr)
	}
	for _, rr := range got.Ns {
		// How long it is good that there is nothing.
		if rr.Header().Rrtype == dns.TypeSOA {
			reply.Ns = append(reply.Ns, rr)
		}
	}
	return targets, ttl
}

// ask asks the node's resolvers, one after the other.
func (r *resolver) ask(ctx context.Context, question dns.Question) (*dns.Msg, error) {
	if len(r.servers) == 0 {
		return nil, errors.New("the node has none: set network.resolvers in the configuration of agentd")
	}
	var all []error
	for _, server := range r.servers {
		got, err := exchange(ctx, server, question)
		if err == nil {
			return got, nil
		}
		all = append(all, fmt.Errorf("%s: %w", server, err))
	}
	return nil, errors.Join(all...)
}

func exchange(ctx context.Context, server string, question dns.Question) (*dns.Msg, error) {
	ctx, cancel := context.WithTimeout(ctx, tryTime)
	defer cancel()
	var got *dns.Msg
	for _, proto := range []string{"udp", "tcp"} {
		// A question of its own, with a number and a port that the sandbox knows nothing of.
		m := new(dns.Msg)
		m.SetQuestion(question.Name, question.Qtype)
		m.SetEdns0(answerSize, false)
		var err error
		if got, _, err = (&dns.Client{Net: proto}).ExchangeContext(ctx, m, server); err != nil {
			return nil, err
		}
		if len(got.Question) != 1 || !strings.EqualFold(got.Question[0].Name, question.Name) || got.Question[0].Qtype != question.Qtype {
			return nil, errors.New("it answers another question")
		}
		if !got.Truncated {
			break
		}
	}
	switch got.Rcode {
	case dns.RcodeSuccess, dns.RcodeNameError:
		return got, nil
	}
	return nil, fmt.Errorf("it answers %s", dns.RcodeToString[got.Rcode])
}

// NodeResolvers are those of the node's own resolv.conf.
func NodeResolvers(file string) []string {
	conf, err := dns.ClientConfigFromFile(file)
	if err != nil {
		return nil
	}
	var out []string
	for _, s := range conf.Servers {
		out = append(out, net.JoinHostPort(s, conf.Port))
	}
	return out
}
