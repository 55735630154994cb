package api

import (
	"context"
	"slices"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/dormouse-run/dormouse/pkg/dataplane"
	"github.com/dormouse-run/dormouse/pkg/errs"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// Issuer signs tickets.
type Issuer interface {
	Issue(tenant, sandboxUID, node string, verbs []dataplane.Verb, life time.Duration) (string, error)
}

// Tickets is what is needed to give tickets.
type Tickets struct {
	Issuer Issuer
	Life   time.Duration
	// CA gives the CAs of the nodes' certificates, PEM.
	CA func() ([]byte, error)
}

type ticketService struct {
	dormousev1.UnimplementedTicketServiceServer
	*Server
}

var verbs = map[dormousev1.TicketVerb]dataplane.Verb{
	dormousev1.TicketVerb_TICKET_VERB_PROCESS: dataplane.Process,
	dormousev1.TicketVerb_TICKET_VERB_FILE:    dataplane.File,
	dormousev1.TicketVerb_TICKET_VERB_PORT:    dataplane.Port,
}

func verbsOf(in []dormousev1.TicketVerb) ([]dataplane.Verb, error) {
	if len(in) == 0 {
		return dataplane.Verbs(), nil
	}
	var out []dataplane.Verb
	for _, v := range in {
		verb, ok := verbs[v]
		if !ok || slices.Contains(out, verb) {
			return nil, errs.New(errs.InvalidField, "verbs: process, file and port, each once").With("field", "verbs")
		}
		out = append(out, verb)
	}
	return out, nil
}

// IssueTicket implements the service. It needs no leader: all that it says is in the records and the key's file.
func (s ticketService) IssueTicket(ctx context.Context, req *dormousev1.IssueTicketRequest) (*dormousev1.IssueTicketResponse, error) {
	v, err := verbsOf(req.GetVerbs())
	if err != nil {
		return nil, err
	}
	place, err := s.locate(ctx, req.GetSandboxUid())
	if err != nil {
		return nil, err
	}
	t := s.cfg.Tickets
	if t == nil {
		return nil, errs.New(errs.NotSupported, "this coordinator has no key for tickets (tickets.keys_file); it passes calls on itself").With("feature", "tickets")
	}
	resp := &dormousev1.IssueTicketResponse{Node: place.Node, Address: place.Direct, Life: durationpb.New(t.Life)}
	if place.Direct != "" {
		ca, err := t.CA()
		if err != nil {
			return nil, errs.Wrap(err, errs.InternalError, "the CAs cannot be read")
		}
		resp.CaPem = string(ca)
	}
	resp.Ticket, err = t.Issuer.Issue(place.Tenant, place.SandboxUID, place.Node, v, t.Life)
	return resp, err
}
