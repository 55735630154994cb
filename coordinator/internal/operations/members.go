package operations

import (
	"errors"
	"strings"
	"time"

	"github.com/dormouse-run/dormouse/coordinator/internal/placement"
	"github.com/dormouse-run/dormouse/coordinator/internal/records"
	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
)

// The index of pools' members is made from the records at the start of the term and follows each commit, as the ledger does. It says where
// to look; what is decided is decided by records. Engine.mu guards it.

// member is what is known of one.
type member struct {
	uid, tenant, pool, template, node string
	phase                             sandbox.Phase
	ready                             bool // a claim may have it
	request                           placement.Resources
	taken                             bool // by a claim that is on its way
	yields                            bool // a start needs its room
}

// members is the index.
type members struct {
	all    map[string]*member            // by uid
	byPool map[string]map[string]*member // by pool
}

func newMembers() members {
	return members{all: make(map[string]*member), byPool: make(map[string]map[string]*member)}
}

// track brings the index up to a sandbox's record, and tells whether it changed. It wants the lock.
func (m *members) track(sb *records.Sandbox) bool {
	old := m.all[sb.UID]
	if sb.Pool == "" {
		return m.drop(sb.UID)
	}
	now := &member{uid: sb.UID, tenant: sb.Tenant, pool: sb.Pool, template: sb.PoolTemplate, node: sb.Status.Node, phase: sb.Status.Phase,
		ready: sb.PoolReady && sb.Status.Phase == sandbox.Paused, request: request(sb)}
	if old != nil {
		now.taken, now.yields = old.taken, old.yields
	}
	m.all[sb.UID] = now
	if m.byPool[sb.Pool] == nil {
		m.byPool[sb.Pool] = make(map[string]*member)
	}
	m.byPool[sb.Pool][sb.UID] = now
	return old == nil || old.phase != now.phase || old.ready != now.ready
}

func (m *members) drop(uid string) bool {
	old := m.all[uid]
	if old == nil {
		return false
	}
	delete(m.all, uid)
	delete(m.byPool[old.pool], uid)
	if len(m.byPool[old.pool]) == 0 {
		delete(m.byPool, old.pool)
	}
	return true
}

// claimable tells whether a claim may look at it.
func (m *member) claimable() bool { return m.ready && !m.taken && !m.yields }

// takeMember keeps the oldest claimable member of the pool, or of any pool of the tenant with that template, from other claims, and gives its
// uid; "" if there is none.
func (e *Engine) takeMember(tenant string, pool *records.Pool, template string) string {
	online := make(map[string]bool)
	for _, n := range e.cfg.Nodes.Nodes() {
		online[n.Name] = n.Online
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	var best *member
	look := func(of map[string]*member) {
		for _, m := range of {
			if m.claimable() && m.tenant == tenant && m.template == template && online[m.node] && (best == nil || strings.Compare(m.uid, best.uid) < 0) {
				best = m
			}
		}
	}
	if pool != nil {
		look(e.members.byPool[pool.UID])
	} else {
		look(e.members.all)
	}
	if best == nil {
		return ""
	}
	best.taken = true
	return best.uid
}

// release lets other claims have a member that takeMember gave.
func (e *Engine) release(uid string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if m := e.members.all[uid]; m != nil && m.taken {
		m.taken = false
		e.wakeKeeper()
	}
}

// numbers are how full a pool is, or all pools of the template.
type numbers struct{ ready, filling, size int }

func (e *Engine) numbers(pool *records.Pool, tpl *records.Template) (n numbers) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, p := range e.pools {
		if p.record != nil && p.record.Tenant == tpl.Tenant && p.record.Spec.TemplateUID == tpl.UID && (pool == nil || pool.UID == p.record.UID) {
			n.size += p.record.Spec.Size
		}
	}
	for _, m := range e.members.all {
		switch {
		case m.tenant != tpl.Tenant || m.template != tpl.UID || pool != nil && m.pool != pool.UID:
		case m.claimable():
			n.ready++
		case m.phase != sandbox.Deleting && !m.ready && !m.phase.Terminal():
			n.filling++
		}
	}
	return n
}

// yield makes room for a request that fits nowhere, out of what pools keep ready: it tells whether the keeper gives enough of it up, so that
// asking again makes sense.
func (e *Engine) yield(r placement.Request) bool {
	nodes := e.cfg.Nodes.Nodes()
	e.mu.Lock()
	defer e.mu.Unlock()
	if len(e.members.all) == 0 {
		return false
	}
	for i := range nodes {
		nodes[i].Placed = e.sum(nodes[i].Name)
		for _, m := range e.members.all {
			if m.node == nodes[i].Name && (m.ready && !m.taken || m.phase == sandbox.Deleting) {
				nodes[i].Placed = nodes[i].Placed.Sub(m.request)
			}
		}
	}
	name, err := placement.Decide(nodes, r)
	if err != nil {
		return false
	}
	e.give(nodes, name, r)
	return true
}

// give marks as many ready members on the node as the request needs; those that are leaving already count. It wants the lock.
func (e *Engine) give(nodes []placement.Node, name string, r placement.Request) {
	r.Node = name
	var on []*member
	for i := range nodes {
		if nodes[i].Name != name {
			continue
		}
		nodes[i].Placed = e.sum(name)
		for _, m := range e.members.all {
			switch {
			case m.node != name:
			case m.yields || m.phase == sandbox.Deleting:
				nodes[i].Placed = nodes[i].Placed.Sub(m.request)
			case m.claimable():
				on = append(on, m)
			}
		}
		for _, m := range on {
			var nofit *placement.NoFit
			if _, err := placement.Decide(nodes, r); !errors.As(err, &nofit) {
				break
			}
			m.yields = true
			nodes[i].Placed = nodes[i].Placed.Sub(m.request)
		}
	}
	e.wakeKeeper()
}

// spare is what of each resource of a node pools leave free: a tenth.
const spare = 10

// decideSpare is decide for a member: it takes only what a node can spare.
func (e *Engine) decideSpare(uid string, r placement.Request) (string, error) {
	nodes := e.cfg.Nodes.Nodes()
	e.mu.Lock()
	defer e.mu.Unlock()
	for i := range nodes {
		a := &nodes[i].Allocatable
		nodes[i].Placed = e.sum(nodes[i].Name)
		if nodes[i].Short {
			nodes[i].Problems = map[string]string{"little memory left": ""}
		}
		a.CPUMillis -= a.CPUMillis / spare
		a.MemoryBytes -= a.MemoryBytes / spare
		a.DiskBytes -= a.DiskBytes / spare
		if a.Sandboxes > 0 {
			a.Sandboxes = max(a.Sandboxes-a.Sandboxes/spare, 1)
		}
	}
	node, err := placement.Decide(nodes, r)
	if err == nil {
		e.reserve(node, uid, reservation{Resources: r.Resources})
	}
	return node, err
}

// countClaim counts for the pool's status.
func (e *Engine) countClaim(pool string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if p := e.pools[pool]; p != nil {
		p.claimed++
	}
	e.wakeKeeper()
}

// poolChanged has the keeper read the pool's record again.
func (e *Engine) poolChanged(tenant, uid string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	p := e.pools[uid]
	if p == nil {
		p = &poolState{key: records.PoolKey(tenant, uid)}
		e.pools[uid] = p
	}
	p.stale = true
	e.wakeKeeper()
}

// wakeKeeper never blocks.
func (e *Engine) wakeKeeper() {
	select {
	case e.keeper <- struct{}{}:
	default:
	}
}

// poolState is what the keeper has of a pool. Engine.mu guards it; the record is replaced, never changed.
type poolState struct {
	key     catalog.Key
	record  *records.Pool // as it was read or written last
	stale   bool          // it is to be read again
	claimed int64         // not in the record yet
	memory  int64         // that a member requests
	told    time.Time     // when its status was written last
}
