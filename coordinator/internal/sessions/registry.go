// Package sessions keeps what the coordinator knows of nodes: each agentd dials in and holds one
// stream open, over which it says that it lives and what its sandboxes do.
//
// # States of a node
//
// A node is known from its first session on (its record stays), and online while it has a session
// whose last heartbeat is recent enough. A node that is not online is away: what it holds is
// unknown, never absent. Nothing of it is touched until it is back.
//
// # Invariants
//
//   - A session has an epoch from the store, higher than any before. Opening one fences the one before, in the
//     store and here: its stream ends, and so do the calls made under it.
//   - What a node reports is committed under its session's epoch, so that a report of a fenced
//     session changes nothing. A report is acknowledged only after its commit.
//   - The node's name is that of its certificate.
//   - A node that has seen more of the catalog than the catalog has is heard before it is let in (Config.Witness).
//   - Records are compared with the node's inventory only in one order: the records are read first, then the node
//     is asked. What is recorded as running and is then not there is lost. What is there but not
//     recorded is removed only if its tombstone proves that it was deleted.
//
// # Crash points
//
// The coordinator keeps no state here but node records. After a crash nodes dial the next leader,
// send what was not acknowledged, and are compared anew.
package sessions

import (
	"context"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dormouse-run/dormouse/coordinator/internal/journal"
	"github.com/dormouse-run/dormouse/coordinator/internal/nodeclient"
	"github.com/dormouse-run/dormouse/coordinator/internal/operations"
	"github.com/dormouse-run/dormouse/coordinator/internal/placement"
	"github.com/dormouse-run/dormouse/coordinator/internal/records"
	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/fence"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
	"github.com/dormouse-run/dormouse/pkg/ticket"
	nodev1 "github.com/dormouse-run/dormouse/proto/dormouse/node/v1"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// Work is what a term of leadership does with what nodes tell: the operations engine.
type Work interface {
	Observe(ctx context.Context, node string, o operations.Observation) error
	Lost(ctx context.Context, node string, session fence.Epoch, tenant, uid string, revision uint64) error
	Placements(ctx context.Context, node string) ([]*records.Sandbox, error)
	Moment(ctx context.Context) (seq uint64, err error)
	Judge(ctx context.Context, moment uint64, keys []catalog.Key) (map[catalog.Key]operations.Verdict, error)
	Confirms(ctx context.Context, key catalog.Key, deletedBy catalog.Point) (bool, error)
	DropOrphan(ctx context.Context, node string, key catalog.Key, why string) (fence.Epoch, error)
	Placed(node string) placement.Resources
	Used(node string, uses []operations.Use)
}

// Store opens sessions and reads records.
type Store interface {
	catalog.Reader
	OpenSession(ctx context.Context, coordinator fence.Epoch, node string, above fence.Epoch) (fence.Epoch, error)
}

// Inventory asks a node for a page of what it holds, after the one whose Next is given.
type Inventory func(ctx context.Context, node, after string) (*nodev1.GetInventoryResponse, fence.Epoch, error)

// Feeds bring the journals of nodes up to date.
type Feeds interface {
	Feed(node string, send func(*nodev1.Journal) error) *journal.Feed
}

// Config of a Registry.
type Config struct {
	Store     Store
	Queue     operations.Publisher
	Inventory Inventory
	// Trace (may be nil) asks a node for what its journal keeps of a record, by key: nil is nothing.
	Trace func(ctx context.Context, node, key string) (*nodev1.JournalEntry, error)
	Log   *slog.Logger
	// OrphansEvery is how long after one look at what a node holds the next one comes. What only the node's own journal
	// says is deleted is removed when two looks found it, at least OrphanGrace apart.
	OrphansEvery, OrphanGrace time.Duration
	// Heartbeat is the interval asked of nodes; after Missed of them a node is away.
	Heartbeat time.Duration
	Missed    int
	// OnHigherEpoch is told when a node has seen a coordinator epoch above ours.
	OnHigherEpoch func(fence.Epoch)
	// Witness (may be nil) is asked whether the catalog has the points that a node has seen of it. Its error refuses the session.
	Witness func(ctx context.Context, node string, seen ...catalog.Point) error
	// TicketKeys (may be nil) gives the keys that tickets are signed with.
	TicketKeys func() []ticket.PublicKey
	// PeerNode gives the node's name in the peer's certificate.
	PeerNode func(context.Context) (string, error)
}

// Registry serves SessionService and knows the nodes.
type Registry struct {
	nodev1.UnimplementedSessionServiceServer
	cfg Config

	removed atomic.Int64 // orphans, in this term

	mu      sync.Mutex
	term    *term
	nodes   map[string]*node
	changed chan struct{} // closed and replaced when a node comes back
}

// term is one leadership. Its context ends with it.
type term struct {
	epoch  fence.Epoch
	work   Work
	feeds  Feeds
	ctx    context.Context
	cancel context.CancelCauseFunc
	wg     sync.WaitGroup // its sessions
}

type node struct {
	record      records.Node
	session     *session // nil when away
	lastBeat    time.Time
	problems    map[string]string
	notices     map[string]string
	memory      *dormousev1.NodeMemory
	allocatable records.Resources
	images      []*dormousev1.Image
	journal     catalog.Point // what it has all that concerns it up to
	held        int           // orphans that the last look left alone
	unread      bool          // the last look failed
}

// New makes a registry that refuses sessions (NO_LEADER) until Lead and Accept.
func New(cfg Config) *Registry {
	if cfg.Heartbeat <= 0 {
		cfg.Heartbeat = 2 * time.Second
	}
	if cfg.Missed <= 0 {
		cfg.Missed = 4
	}
	if cfg.OrphansEvery <= 0 {
		cfg.OrphansEvery = 10 * time.Minute
	}
	if cfg.OrphanGrace <= 0 {
		cfg.OrphanGrace = 10 * time.Minute
	}
	if cfg.Trace == nil {
		cfg.Trace = func(context.Context, string, string) (*nodev1.JournalEntry, error) { return nil, nil }
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.TicketKeys == nil {
		cfg.TicketKeys = func() []ticket.PublicKey { return nil }
	}
	if cfg.Witness == nil {
		cfg.Witness = func(context.Context, string, ...catalog.Point) error { return nil }
	}
	if cfg.OnHigherEpoch == nil {
		cfg.OnHigherEpoch = func(fence.Epoch) {}
	}
	return &Registry{cfg: cfg, nodes: make(map[string]*node), changed: make(chan struct{})}
}

// Lead begins a term: the nodes are read from their records, all of them away.
func (r *Registry) Lead(ctx context.Context) error {
	nodes := make(map[string]*node)
	q := catalog.Query{Kind: catalog.KindNode, Tenant: catalog.SystemTenant, PageSize: catalog.MaxPage}
	for {
		page, err := r.cfg.Store.List(ctx, q)
		if err != nil {
			return err
		}
		for _, rec := range page.Records {
			n, err := records.NodeOf(rec)
			if err != nil {
				return err
			}
			nodes[n.Name] = &node{record: *n, allocatable: n.Allocatable, lastBeat: n.SessionTime}
		}
		if q.After = page.Next; page.Next == "" {
			break
		}
	}
	r.mu.Lock()
	r.nodes = nodes
	r.mu.Unlock()
	return nil
}

// Accept lets nodes in, until ctx ends or Resign. Without feeds (nil) their journals stay as they are.
func (r *Registry) Accept(ctx context.Context, epoch fence.Epoch, work Work, feeds Feeds) {
	t := &term{epoch: epoch, work: work, feeds: feeds}
	r.removed.Store(0)
	t.ctx, t.cancel = context.WithCancelCause(ctx)
	r.mu.Lock()
	r.term = t
	r.mu.Unlock()
}

// Resign ends all sessions with the reason and waits for them. Nodes dial again.
func (r *Registry) Resign(reason error) {
	r.mu.Lock()
	t := r.term
	r.term = nil
	r.mu.Unlock()
	if t != nil {
		t.cancel(reason)
		t.wg.Wait()
	}
}

// sessionOf wants the lock.
func (r *Registry) sessionOf(name string) *session {
	if n := r.nodes[name]; n != nil {
		return n.session
	}
	return nil
}

// Directory gives the sessions in force to the client of nodes.
type Directory struct{ *Registry }

// Session implements nodeclient.Directory.
func (d Directory) Session(name string) (nodeclient.Session, bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	s := d.sessionOf(name)
	if s == nil {
		return nodeclient.Session{}, false
	}
	return nodeclient.Session{Node: name, Address: s.address, Epoch: s.epoch, Coordinator: s.term.epoch, Context: s.ctx}, true
}

// Nodes implements operations.Nodes.
func (r *Registry) Nodes() []placement.Node {
	r.mu.Lock()
	defer r.mu.Unlock()
	all := make([]placement.Node, 0, len(r.nodes))
	for _, n := range r.nodes {
		a := n.allocatable
		all = append(all, placement.Node{Name: n.record.Name, Online: n.session != nil, Cordoned: n.record.Cordoned,
			Problems: n.problems, Short: n.memory.GetPressure() >= dormousev1.MemoryPressure_MEMORY_PRESSURE_SOME, Labels: n.record.Labels, Architecture: n.record.Architecture,
			NoOutbound:  len(n.record.Networks) > 0 && !slices.Contains(n.record.Networks, sandbox.NetworkOutbound),
			Allocatable: placement.Resources{CPUMillis: a.CPUMillis, MemoryBytes: a.MemoryBytes, DiskBytes: a.DiskBytes, Sandboxes: a.Sandboxes}})
	}
	return all
}

// Changed implements operations.Nodes.
func (r *Registry) Changed() <-chan struct{} {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.changed
}

// news wants the lock.
func (r *Registry) news() {
	close(r.changed)
	r.changed = make(chan struct{})
}

// Cordon implements operations.Nodes.
func (r *Registry) Cordon(name string, cordoned bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if n := r.nodes[name]; n != nil {
		n.record.Cordoned = cordoned
		r.news()
	}
}

// View is a node as operators see it.
type View struct {
	records.Node
	Online   bool
	Problems map[string]string
	// Notices keep nothing away from the node.
	Notices map[string]string
	// Memory is the node's as it said last; nil where it did not, or is away.
	Memory    *dormousev1.NodeMemory
	LastBeat  time.Time
	Requested placement.Resources
	// Journal is what the node's copy of the catalog reaches to, as far as it was said in this term.
	Journal catalog.Point
}

// Views lists the nodes by name.
func (r *Registry) Views() []View {
	r.mu.Lock()
	all := make([]View, 0, len(r.nodes))
	t := r.term
	for _, n := range r.nodes {
		v := View{Node: n.record, Online: n.session != nil, Problems: n.problems, LastBeat: n.lastBeat, Journal: n.journal}
		v.Allocatable = n.allocatable
		if v.Online {
			v.Notices, v.Memory = n.notices, n.memory
		}
		all = append(all, v)
	}
	r.mu.Unlock()
	if t != nil {
		for i := range all {
			all[i].Requested = t.work.Placed(all[i].Name)
		}
	}
	slices.SortFunc(all, func(a, b View) int { return strings.Compare(a.Name, b.Name) })
	return all
}

// Images lists what the online nodes hold, by digest, with the nodes that have each.
func (r *Registry) Images() []*dormousev1.Image {
	r.mu.Lock()
	defer r.mu.Unlock()
	byDigest := make(map[string]*dormousev1.Image)
	for _, name := range slices.Sorted(maps.Keys(r.nodes)) {
		for _, img := range r.nodes[name].images {
			if img == nil {
				continue
			}
			key := img.GetDigest() + " " + img.GetReference()
			have := byDigest[key]
			if have == nil {
				have = &dormousev1.Image{Reference: img.GetReference(), Digest: img.GetDigest(), ErofsDigest: img.GetErofsDigest(), SizeBytes: img.GetSizeBytes(),
					Layers: img.GetLayers(), Architecture: img.GetArchitecture(), PullTime: img.GetPullTime()}
				byDigest[key] = have
			}
			have.Nodes = append(have.Nodes, name)
		}
	}
	all := make([]*dormousev1.Image, 0, len(byDigest))
	for _, key := range slices.Sorted(maps.Keys(byDigest)) {
		all = append(all, byDigest[key])
	}
	return all
}

// LearnImage adds an image that a node has now, ahead of its next heartbeat.
func (r *Registry) LearnImage(name string, img *dormousev1.Image) {
	r.ForgetImage(name, img.GetDigest())
	r.mu.Lock()
	defer r.mu.Unlock()
	if n := r.nodes[name]; n != nil && n.session != nil {
		n.images = append(n.images, img)
	}
}

// ForgetImage takes out an image that a node no longer has.
func (r *Registry) ForgetImage(name, digest string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if n := r.nodes[name]; n != nil {
		n.images = slices.DeleteFunc(slices.Clone(n.images), func(i *dormousev1.Image) bool { return i.GetDigest() == digest })
	}
}

// lead gives the term in force and counts the caller as one of its sessions.
func (r *Registry) lead() (*term, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.term == nil || r.term.ctx.Err() != nil {
		return nil, errs.New(errs.NoLeader, "this coordinator is not the leader; dial another, or again")
	}
	r.term.wg.Add(1)
	return r.term, nil
}
