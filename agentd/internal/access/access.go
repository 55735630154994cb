// Package access guards the data plane of a node: whoever calls may use one sandbox, and nothing else.
//
// There are two doors. A coordinator comes with its certificate and says whose sandbox it means; a client
// comes without any and shows a ticket (package ticket). Behind both the same holds for each call, before its handler
// sees anything of it: the sandbox that the request names is on this node, and belongs to that tenant.
// Behind the second door it is also the ticket's, and the ticket is for the method's service. Both look at
// the beginning of a call only; a stream that runs goes on.
//
// Another tenant's sandbox is answered exactly as one that is not there.
package access

import (
	"context"
	"strconv"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	"github.com/dormouse-run/dormouse/pkg/admission"
	"github.com/dormouse-run/dormouse/pkg/dataplane"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/ticket"
)

// Sandboxes knows whose the sandboxes of this node are.
type Sandboxes interface {
	// Owner gives the tenant of a sandbox; OBJECT_NOT_FOUND.
	Owner(sandboxUID string) (tenant string, err error)
	// Awake is SANDBOX_PAUSED for one that stands still or is only on the disk.
	Awake(sandboxUID string) error
}

// maxCalls bounds the calls with tickets that one sandbox has open.
const maxCalls = 512

// grant is what a caller may use. An empty sandbox is any of the tenant's.
type grant struct {
	tenant, sandbox string
	direct          bool
}

// Door lets calls of the data plane in. Calls of other services are none of its business: only
// Coordinators passes them.
type Door struct {
	sandboxes Sandboxes
	enter     func(ctx context.Context, verb dataplane.Verb) (grant, error)
	strict    bool                 // nothing but the data plane
	tenants   *admission.Admission // nil: a coordinator has counted already

	mu   sync.Mutex
	open map[string]int // by sandbox
}

// Coordinators is the door of the node API: TLS has let coordinators in only.
func Coordinators(s Sandboxes) *Door {
	return &Door{sandboxes: s, enter: func(ctx context.Context, _ dataplane.Verb) (grant, error) {
		said := metadata.ValueFromIncomingContext(ctx, dataplane.TenantKey)
		if len(said) != 1 || said[0] == "" {
			return grant{}, errs.New(errs.CredentialsMissing, "a coordinator says whose sandbox it means (%s)", dataplane.TenantKey)
		}
		return grant{tenant: said[0]}, nil
	}}
}

// Clients is the door of the listener for clients with tickets. Each tenant is held to the limits.
func Clients(s Sandboxes, v *ticket.Verifier, limits admission.Limits) *Door {
	return &Door{sandboxes: s, strict: true, tenants: admission.New(limits, nil), open: make(map[string]int), enter: func(ctx context.Context, verb dataplane.Verb) (grant, error) {
		values := metadata.ValueFromIncomingContext(ctx, "authorization")
		if len(values) == 0 {
			return grant{}, errs.New(errs.CredentialsMissing, "show a ticket (authorization: Ticket dt1...)")
		}
		text, ok := strings.CutPrefix(values[0], ticket.Scheme)
		if len(values) != 1 || !ok {
			return grant{}, errs.New(errs.CredentialsInvalid, "a node takes tickets only; send one authorization header")
		}
		c, err := v.Verify(text, time.Now())
		if err != nil {
			return grant{}, err
		}
		if !c.May(verb) {
			return grant{}, errs.New(errs.NotAllowed, "the ticket is not for the verb %s", verb)
		}
		return grant{tenant: c.Tenant, sandbox: c.SandboxUID, direct: true}, nil
	}}
}

// look decides on a call that names a sandbox, and counts it until done is called.
//
// A client's call to a sandbox that is paused is not let in: a coordinator is who wakes, where the sandbox's spec
// says so, and the client's library goes there with what was refused here before it began.
func (d *Door) look(g grant, sandboxUID string, stream bool) (done func(), err error) {
	if g.sandbox != "" && g.sandbox != sandboxUID {
		return nil, errs.New(errs.NotAllowed, "the ticket is for another sandbox")
	}
	tenant, err := d.sandboxes.Owner(sandboxUID)
	if errs.Has(err, errs.ObjectNotFound) || err == nil && tenant != g.tenant {
		return nil, errs.New(errs.ObjectNotFound, "there is no sandbox %s", sandboxUID).With("kind", "sandbox").With("uid", sandboxUID)
	}
	if err != nil || !g.direct {
		return func() {}, err
	}
	if err := d.sandboxes.Awake(sandboxUID); err != nil {
		return nil, err
	}
	leave, err := d.tenants.Enter(tenant, stream)
	if err != nil {
		return nil, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.open[sandboxUID] >= maxCalls {
		leave()
		return nil, errs.New(errs.TooMany, "the sandbox has %d calls open at its node; go on when some have ended", maxCalls).
			With("resource", "calls").With("limit", strconv.Itoa(maxCalls))
	}
	d.open[sandboxUID]++
	return func() {
		leave()
		d.mu.Lock()
		defer d.mu.Unlock()
		if d.open[sandboxUID]--; d.open[sandboxUID] == 0 {
			delete(d.open, sandboxUID)
		}
	}, nil
}

// verb tells whether a method is guarded.
func (d *Door) verb(method string) (v dataplane.Verb, guarded bool, err error) {
	v, guarded = dataplane.VerbOf(method)
	if !guarded && d.strict {
		err = errs.New(errs.NotAllowed, "a node serves nothing but the data plane here")
	}
	return v, guarded, err
}

// Unary guards unary calls.
func (d *Door) Unary() grpc.UnaryServerInterceptor {
	return func(ctx context.Context, req any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
		verb, guarded, err := d.verb(info.FullMethod)
		if err != nil {
			return nil, err
		}
		if !guarded {
			return next(ctx, req)
		}
		g, err := d.enter(ctx, verb)
		if err != nil {
			return nil, err
		}
		done, err := d.look(g, dataplane.SandboxUID(req), false)
		if err != nil {
			return nil, err
		}
		defer done()
		return next(ctx, req)
	}
}

// Stream guards streams: their first message is looked at. Once a client's is let in the headers are sent and say so, so that it
// learns without waiting for the first answer that the door is passed.
func (d *Door) Stream() grpc.StreamServerInterceptor {
	return func(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, next grpc.StreamHandler) error {
		verb, guarded, err := d.verb(info.FullMethod)
		if err != nil {
			return err
		}
		if !guarded {
			return next(srv, ss)
		}
		g, err := d.enter(ss.Context(), verb)
		if err != nil {
			return err
		}
		w := &guardedStream{ServerStream: ss, door: d, grant: g}
		defer func() {
			if w.done != nil {
				w.done()
			}
		}()
		return next(srv, w)
	}
}

// guardedStream looks at the first message. Later ones may be received by another goroutine.
type guardedStream struct {
	grpc.ServerStream
	door   *Door
	grant  grant
	looked bool
	done   func()
}

func (w *guardedStream) RecvMsg(m any) error {
	if err := w.ServerStream.RecvMsg(m); err != nil || w.looked {
		return err
	}
	done, err := w.door.look(w.grant, dataplane.SandboxUID(m), true)
	if err != nil {
		return err
	}
	w.looked, w.done = true, done
	if !w.grant.direct {
		return nil
	}
	return w.ServerStream.SendHeader(metadata.Pairs(dataplane.AdmittedKey, "1"))
}
