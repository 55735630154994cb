package access_test

import (
	"context"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"

	"github.com/dormouse-run/dormouse/agentd/internal/access"
	"github.com/dormouse-run/dormouse/pkg/admission"
	"github.com/dormouse-run/dormouse/pkg/dataplane"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/ticket"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// sandboxes knows some, by their tenant; "asleep" is paused.
type sandboxes map[string]string

func (s sandboxes) Owner(uid string) (string, error) {
	tenant, ok := s[uid]
	if !ok {
		return "", errs.New(errs.ObjectNotFound, "no such sandbox")
	}
	return tenant, nil
}

func (s sandboxes) Awake(uid string) error {
	if uid == "asleep" {
		return errs.New(errs.SandboxPaused, "it is paused").With("uid", uid)
	}
	return nil
}

var there = sandboxes{"one": "acme", "two": "acme", "asleep": "acme", "theirs": "rival"}

const (
	list   = dormousev1.ProcessService_ListProcesses_FullMethodName
	attach = dormousev1.ProcessService_AttachProcess_FullMethodName
	read   = dormousev1.FileService_ReadFile_FullMethodName
	create = dormousev1.SandboxService_CreateSandbox_FullMethodName
)

// rig has a door for clients and what signs tickets for it.
type rig struct {
	*testing.T
	door *access.Door
	keys *ticket.Keys
}

func newRig(t *testing.T, limits admission.Limits) *rig {
	keys, err := ticket.OpenKeys(filepath.Join(t.TempDir(), "keys.yaml"), nil)
	if err != nil {
		t.Fatal(err)
	}
	v := &ticket.Verifier{Node: "n1"}
	v.SetKeys(keys.Public())
	return &rig{t, access.Clients(there, v, limits), keys}
}

// shows is the context of a caller with a ticket.
func (r *rig) shows(tenant, sandbox, node string, life time.Duration, verbs ...dataplane.Verb) context.Context {
	text, err := r.keys.Issue(tenant, sandbox, node, verbs, life)
	if err != nil {
		r.Fatal(err)
	}
	return with("authorization", ticket.Scheme+text)
}

func with(pairs ...string) context.Context {
	return metadata.NewIncomingContext(context.Background(), metadata.Pairs(pairs...))
}

// unary makes a unary call, which does what inside says.
func unary(ctx context.Context, d *access.Door, method, sandbox string, inside func() error) error {
	req := &dormousev1.ListProcessesRequest{SandboxUid: sandbox}
	_, err := d.Unary()(ctx, req, &grpc.UnaryServerInfo{FullMethod: method}, func(context.Context, any) (any, error) { return nil, inside() })
	return err
}

// opening is a stream whose client says one thing.
type opening struct {
	grpc.ServerStream
	ctx     context.Context //nolint:containedctx // the interface of gRPC asks for it
	first   proto.Message
	letIn   bool
	further int
}

func (s *opening) Context() context.Context { return s.ctx }

func (s *opening) RecvMsg(m any) error {
	s.further++
	proto.Merge(m.(proto.Message), s.first)
	return nil
}

func (s *opening) SendHeader(md metadata.MD) error {
	s.letIn = len(md.Get(dataplane.AdmittedKey)) == 1
	return nil
}

// stream opens a stream, whose handler reads its first message and then does what inside says.
func stream(ctx context.Context, d *access.Door, method, sandbox string, inside func(s grpc.ServerStream) error) (letIn bool, err error) {
	s := &opening{ctx: ctx, first: &dormousev1.AttachProcessRequest{Event: &dormousev1.AttachProcessRequest_Open{Open: &dormousev1.AttachOpen{SandboxUid: sandbox}}}}
	err = d.Stream()(nil, s, &grpc.StreamServerInfo{FullMethod: method}, func(_ any, ss grpc.ServerStream) error {
		if err := ss.RecvMsg(&dormousev1.AttachProcessRequest{}); err != nil {
			return err
		}
		return inside(ss)
	})
	return s.letIn, err
}

func nothing() error                      { return nil }
func nothingMore(grpc.ServerStream) error { return nil }

func (r *rig) want(what string, err error, reason errs.Reason) {
	r.Helper()
	if got := errs.ReasonOf(err); (err == nil) != (reason == "") || err != nil && got != reason {
		r.Errorf("%s: %v; want %q", what, err, reason)
	}
}

// TestClients: what a ticket opens, and what it does not, for calls and for streams alike.
func TestClients(t *testing.T) {
	r := newRig(t, admission.Limits{})
	p := dataplane.Process
	good := r.shows("acme", "one", "n1", time.Hour, p)
	for name, c := range map[string]struct {
		ctx             context.Context //nolint:containedctx // of the case
		method, sandbox string
		reason          errs.Reason
	}{
		"good":                {good, attach, "one", ""},
		"no ticket":           {context.Background(), attach, "one", errs.CredentialsMissing},
		"an API key":          {with("authorization", "Bearer dm_1"), attach, "one", errs.CredentialsInvalid},
		"two tickets":         {with("authorization", "Ticket a", "authorization", "Ticket b"), attach, "one", errs.CredentialsInvalid},
		"no ticket of ours":   {with("authorization", "Ticket dt1.a.b"), attach, "one", errs.TicketInvalid},
		"expired":             {r.shows("acme", "one", "n1", -time.Second, p), attach, "one", errs.TicketInvalid},
		"for another node":    {r.shows("acme", "one", "n2", time.Hour, p), attach, "one", errs.TicketInvalid},
		"for another sandbox": {good, attach, "two", errs.NotAllowed},
		"for no sandbox":      {good, attach, "", errs.NotAllowed},
		"another verb":        {good, read, "one", errs.NotAllowed},
		"not the data plane":  {good, create, "one", errs.NotAllowed},
		"gone":                {r.shows("acme", "gone", "n1", time.Hour, p), attach, "gone", errs.ObjectNotFound},
		"another tenant's":    {r.shows("acme", "theirs", "n1", time.Hour, p), attach, "theirs", errs.ObjectNotFound},
		"paused":              {r.shows("acme", "asleep", "n1", time.Hour, p), attach, "asleep", errs.SandboxPaused},
	} {
		letIn, err := stream(c.ctx, r.door, c.method, c.sandbox, nothingMore)
		r.want(name+", a stream", err, c.reason)
		if letIn != (c.reason == "") {
			t.Errorf("%s: let in: %v", name, letIn)
		}
		r.want(name+", a call", unary(c.ctx, r.door, c.method, c.sandbox, nothing), c.reason)
	}
	// Another tenant's and none are the same to who asks.
	_, theirs := stream(r.shows("acme", "theirs", "n1", time.Hour, p), r.door, attach, "theirs", nothingMore)
	_, none := stream(r.shows("acme", "no-one", "n1", time.Hour, p), r.door, attach, "no-one", nothingMore)
	if a, b := errs.From(theirs), errs.From(none); a.Message != "there is no sandbox theirs" || b.Message != "there is no sandbox no-one" || len(a.Details) != len(b.Details) {
		t.Errorf("%v, %v", theirs, none)
	}
	// What was let in goes on, whatever comes after it.
	_, err := stream(r.shows("acme", "one", "n1", time.Hour, p), r.door, attach, "one", func(s grpc.ServerStream) error {
		again := &dormousev1.AttachProcessRequest{}
		return s.RecvMsg(again)
	})
	r.want("a later message", err, "")
}

// TestClientsLimits: each tenant is held to its number of calls, streams and calls a second, and each sandbox to its own; the error has
// the number, and what has ended counts no more.
func TestClientsLimits(t *testing.T) {
	limited := func(err error, resource string, limit int) {
		t.Helper()
		if e := errs.From(err); err == nil || e.Reason != errs.TooMany || e.Details["resource"] != resource || e.Details["limit"] != strconv.Itoa(limit) {
			t.Errorf("%v; want that there are too many %s, %d", err, resource, limit)
		}
	}
	r := newRig(t, admission.Limits{Calls: 1, Streams: 2})
	p := dataplane.Process
	one, two := r.shows("acme", "one", "n1", time.Hour, p), r.shows("acme", "two", "n1", time.Hour, p)
	theirs := r.shows("rival", "theirs", "n1", time.Hour, p)
	for range 2 {
		_, err := stream(one, r.door, attach, "one", func(grpc.ServerStream) error {
			_, err := stream(two, r.door, attach, "two", func(grpc.ServerStream) error {
				_, err := stream(one, r.door, attach, "one", nothingMore)
				limited(err, "streams", 2)
				_, err = stream(theirs, r.door, attach, "theirs", nothingMore)
				r.want("another tenant's", err, "")
				return unary(two, r.door, list, "two", func() error {
					limited(unary(one, r.door, list, "one", nothing), "calls", 1)
					return nil
				})
			})
			return err
		})
		r.want("within the limits", err, "")
	}

	r = newRig(t, admission.Limits{Rate: 1, Burst: 3})
	one = r.shows("acme", "one", "n1", time.Hour, p)
	began := 0
	var err error
	for ; err == nil && began < 1000; began++ { // more come in by the second, however slow this is
		err = unary(one, r.door, list, "one", nothing)
	}
	limited(err, "calls_per_second", 1)

	r = newRig(t, admission.Limits{})
	one, two = r.shows("acme", "one", "n1", time.Hour, p), r.shows("acme", "two", "n1", time.Hour, p)
	var deeper func(left int) error
	deeper = func(left int) error {
		if left == 0 {
			limited(unary(one, r.door, list, "one", nothing), "calls", 512)
			return unary(two, r.door, list, "two", nothing)
		}
		return unary(one, r.door, list, "one", func() error { return deeper(left - 1) })
	}
	r.want("as many as one sandbox may have", deeper(512), "")
	r.want("afterwards", unary(one, r.door, list, "one", nothing), "")
}

// TestCoordinators: a coordinator says whose sandbox it means; services that are not the data plane are its own matter.
func TestCoordinators(t *testing.T) {
	r := &rig{T: t, door: access.Coordinators(there)}
	says := func(tenant ...string) context.Context {
		var pairs []string
		for _, s := range tenant {
			pairs = append(pairs, dataplane.TenantKey, s)
		}
		return with(pairs...)
	}
	for name, c := range map[string]struct {
		ctx             context.Context //nolint:containedctx // of the case
		method, sandbox string
		reason          errs.Reason
	}{
		"good":              {says("acme"), attach, "one", ""},
		"any verb":          {says("acme"), read, "two", ""},
		"paused":            {says("acme"), attach, "asleep", ""}, // it has looked itself, and may be the one who wakes
		"another tenant's":  {says("acme"), attach, "theirs", errs.ObjectNotFound},
		"gone":              {says("acme"), attach, "gone", errs.ObjectNotFound},
		"nobody's":          {says(), attach, "one", errs.CredentialsMissing},
		"two tenants'":      {says("acme", "rival"), attach, "one", errs.CredentialsMissing},
		"an empty tenant's": {says(""), attach, "one", errs.CredentialsMissing},
		"not guarded":       {says(), create, "one", ""},
	} {
		_, err := stream(c.ctx, r.door, c.method, c.sandbox, nothingMore)
		r.want(name+", a stream", err, c.reason)
		r.want(name+", a call", unary(c.ctx, r.door, c.method, c.sandbox, nothing), c.reason)
	}
}
