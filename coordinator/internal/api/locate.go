package api

import (
	"context"
	"sync"

	"github.com/dormouse-run/dormouse/coordinator/internal/auth"
	"github.com/dormouse-run/dormouse/coordinator/internal/nodeclient"
	"github.com/dormouse-run/dormouse/coordinator/internal/records"
	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
)

// locate finds where the caller's sandbox can be used. All access to what is inside sandboxes goes through
// here, whatever its protocol.
//
// It reads two records, the sandbox's and that of the node that the first one names. Both are read anew for each call, so that what is
// deleted, paused, moved or another tenant's is so at once. Only which node it was the last time is remembered, to ask for both in one
// round trip; when the sandbox's record names another node, that one is asked for after it.
func (s *Server) locate(ctx context.Context, u string) (nodeclient.Place, error) {
	id, err := auth.From(ctx)
	if err != nil {
		return nodeclient.Place{}, err
	}
	if err := checkUID("sandbox_uid", u); err != nil {
		return nodeclient.Place{}, err
	}
	key := records.SandboxKey(id.Tenant, u)
	keys := []catalog.Key{key}
	if last := s.lastNodes.of(key); last != "" {
		keys = append(keys, records.NodeKey(last))
	}
	read, err := s.cfg.Store.GetMany(ctx, keys)
	if err != nil {
		return nodeclient.Place{}, err
	}
	rec, ok := read[key]
	if !ok {
		return nodeclient.Place{}, notFound(catalog.KindSandbox, u)
	}
	found, err := records.SandboxOf(rec)
	if err != nil {
		return nodeclient.Place{}, err
	}
	if found.Hidden() {
		return nodeclient.Place{}, notFound(catalog.KindSandbox, u)
	}
	sb, err := s.awake(ctx, found)
	if err != nil {
		return nodeclient.Place{}, err
	}
	switch sb.Status.Phase {
	case sandbox.Running, sandbox.Stopped, sandbox.Starting:
		if sb.Status.Node != "" {
			if sb != found { // it was woken: what was read before is old
				read = nil
			}
			s.lastNodes.note(key, sb.Status.Node)
			return s.placeAt(ctx, sb, read)
		}
	}
	return nodeclient.Place{}, errs.New(errs.WrongPhase, "sandbox %s is %s; it must be Running", u, sb.Status.Phase).
		With("uid", u).With("phase", string(sb.Status.Phase))
}

// placeOf adds where the sandbox's node is.
func (s *Server) placeOf(ctx context.Context, sb *records.Sandbox) (nodeclient.Place, error) {
	return s.placeAt(ctx, sb, nil)
}

// placeAt is placeOf, with what was just read.
func (s *Server) placeAt(ctx context.Context, sb *records.Sandbox, read map[catalog.Key]catalog.Record) (nodeclient.Place, error) {
	id, err := auth.From(ctx)
	if err != nil {
		return nodeclient.Place{}, err
	}
	key := records.NodeKey(sb.Status.Node)
	rec, ok := read[key]
	if !ok {
		if rec, err = s.cfg.Store.Get(ctx, key); err != nil {
			return nodeclient.Place{}, err
		}
	}
	n, err := records.NodeOf(rec)
	if err != nil {
		return nodeclient.Place{}, err
	}
	return nodeclient.Place{Tenant: id.Tenant, SandboxUID: sb.UID, Node: n.Name, Address: n.Address, Direct: n.DirectAddress}, nil
}

// lastNodes remembers on which node sandboxes were, as a guess and nothing more. The zero value is empty.
type lastNodes struct {
	mu   sync.Mutex
	node map[catalog.Key]string
}

// maxLastNodes bounds how many sandboxes are remembered.
const maxLastNodes = 16 << 10

func (l *lastNodes) of(sandbox catalog.Key) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.node[sandbox]
}

func (l *lastNodes) note(sandbox catalog.Key, node string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.node[sandbox] == node {
		return
	}
	if l.node == nil || len(l.node) >= maxLastNodes {
		l.node = make(map[catalog.Key]string)
	}
	l.node[sandbox] = node
}
