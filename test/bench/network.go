package bench

import (
	"context"
	"time"

	"google.golang.org/protobuf/types/known/fieldmaskpb"

	"github.com/dormouse-run/dormouse/pkg/client"
	"github.com/dormouse-run/dormouse/pkg/wait"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// benchNetwork compares sandboxes with an outbound network with those that have none, each way in turn: the start, the
// deletion, and how long another policy takes.
func benchNetwork(ctx context.Context, b *bench) ([]Row, error) {
	kinds := []func(*dormousev1.SandboxSpec){
		func(*dormousev1.SandboxSpec) {},
		func(s *dormousev1.SandboxSpec) { s.Network = dormousev1.NetworkMode_NETWORK_MODE_OUTBOUND },
		func(s *dormousev1.SandboxSpec) {
			s.Network, s.Egress = dormousev1.NetworkMode_NETWORK_MODE_OUTBOUND, manyRules()
		},
	}
	starts, deletes := make([]Sample, len(kinds)), make([]Sample, len(kinds))
	var updates Sample
	for round := range b.times(40) + 1 {
		for i, kind := range kinds {
			s, started, err := b.startOf(ctx, kind)
			if err != nil {
				return nil, err
			}
			if i == 1 {
				began := time.Now()
				err = s.Update(ctx, &dormousev1.UpdateSandboxRequest{Egress: manyRules(), UpdateMask: &fieldmaskpb.FieldMask{Paths: []string{"egress"}}})
				if err != nil {
					return nil, err
				}
				updates.add(time.Since(began))
			}
			began := time.Now()
			if err := s.Delete(ctx, ""); err != nil {
				return nil, err
			}
			if round > 0 { // the first is warm-up
				starts[i].add(started)
				deletes[i].add(time.Since(began))
			}
		}
	}
	more := func(what string, with, without Sample, atMost float64) Row {
		return Row{What: what, Product: times(with), Bare: times(without), Value: with.Median() - without.Median(), Unit: "ms", AtMost: atMost}
	}
	return []Row{
		more("what an outbound network adds to create to Running; bare: without one", starts[1], starts[0], 15),
		more("the same with a policy of 32 rules", starts[2], starts[0], 15),
		more("what it adds to a deletion", deletes[1], deletes[0], 0),
		{What: "another policy, of 32 rules, in force", Product: times(updates), Value: updates.Median(), Unit: "ms"},
	}, nil
}

// startOf starts a sandbox, after the kernel had its time and the pool of networks too.
func (b *bench) startOf(ctx context.Context, kind func(*dormousev1.SandboxSpec)) (*client.Sandbox, time.Duration, error) {
	if err := wait.For(ctx, breath); err != nil {
		return nil, 0, err
	}
	began := time.Now()
	s, err := b.create(ctx, startMemory, kind)
	return s, time.Since(began), err
}

// manyRules is a policy as large as they get in practice.
func manyRules() *dormousev1.EgressPolicy {
	p := &dormousev1.EgressPolicy{DefaultAction: dormousev1.EgressAction_EGRESS_ACTION_DENY}
	ports := []*dormousev1.PortRange{{First: 80, Last: 80}, {First: 443, Last: 443}}
	for range 16 {
		p.Allow = append(p.Allow,
			&dormousev1.EgressRule{Domains: []string{"example.com", "*.example.com"}, Ports: ports, Protocol: dormousev1.EgressProtocol_EGRESS_PROTOCOL_TCP},
			&dormousev1.EgressRule{Cidrs: []string{"192.0.2.0/24", "198.51.100.0/24"}, Ports: ports})
	}
	return p
}
