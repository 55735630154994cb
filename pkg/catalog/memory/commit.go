package memory

import (
	"context"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/fence"
)

// Commit implements catalog.Store.
func (s *Store) Commit(ctx context.Context, batch []catalog.Commit) ([]catalog.Result, error) {
	if len(batch) > catalog.MaxBatch {
		return nil, errs.New(errs.LimitExceeded, "a batch of %d commits is over the limit of %d", len(batch), catalog.MaxBatch).With("field", "batch")
	}
	if err := s.enter(ctx); err != nil {
		return nil, err
	}
	defer s.mu.Unlock()
	results := make([]catalog.Result, len(batch))
	for i := range batch {
		if err := batch[i].Validate(); err != nil {
			results[i].Err = errs.From(err)
			continue
		}
		results[i] = s.apply(&batch[i])
	}
	return results, nil
}

// apply follows the order of package redis's script: owner, receipt, attempt, age, checks, puts, deletes.
func (s *Store) apply(c *catalog.Commit) catalog.Result {
	refuse := func(e *errs.Error) catalog.Result { return catalog.Result{Err: e} }
	if e := s.checkOwner(c.Owner); e != nil {
		return refuse(e)
	}
	if c.ID != "" {
		if r, ok := s.receipt(c.Tenant, c.ID); ok {
			if r.Digest != c.Digest {
				return refuse(catalog.Refusal(errs.OperationBodyMismatch))
			}
			return catalog.Result{Seq: r.Seq, Revisions: r.Revisions, Replayed: true, Result: r.Result}
		}
	}
	if end, void := s.voids[c.Attempt]; void && c.Attempt != "" && s.clock().Before(end) {
		return refuse(catalog.Refusal(errs.AttemptVoid))
	}
	if c.ID != "" && !c.Minted.IsZero() && s.clock().Sub(c.Minted) > s.retention.Receipts {
		return refuse(catalog.Refusal(errs.OperationExpired))
	}
	if e := s.history.admits(c.Repair); e != nil {
		return refuse(e)
	}
	if e := s.firstRefusal(c); e != nil {
		return refuse(e)
	}
	return s.write(c)
}

func dec(n uint64) string { return strconv.FormatUint(n, 10) }

func (s *Store) checkOwner(o fence.Owner) *errs.Error {
	if o.Coordinator != s.leader.Epoch || s.leader.Epoch == 0 {
		return catalog.Refusal(errs.Fenced, "epoch", dec(uint64(o.Coordinator)), "current_epoch", dec(uint64(s.leader.Epoch)))
	}
	if session := s.sessions[o.Node]; o.Node != "" && (o.Session != session || session == 0) {
		return catalog.Refusal(errs.Fenced, "epoch", dec(uint64(o.Session)), "current_epoch", dec(uint64(session)), "node", o.Node)
	}
	return nil
}

func stale(k catalog.Key, expect, has uint64) *errs.Error {
	return catalog.Refusal(errs.StaleRevision, "uid", k.UID, "revision", dec(expect), "current_revision", dec(has))
}

func gone(k catalog.Key) *errs.Error {
	return catalog.Refusal(errs.StaleUID, "uid", k.UID, "current_uid", "")
}

func short(k catalog.Key) string { return string(k.Kind) + "/" + k.UID }

func (s *Store) firstRefusal(c *catalog.Commit) *errs.Error {
	for i := range c.Checks {
		if e := s.check(&c.Checks[i]); e != nil {
			return e
		}
	}
	p := pending{store: s, repair: c.Repair, puts: make(map[catalog.Key]*catalog.Record), names: make(map[scope]map[string]string), claims: make(map[catalog.Key]catalog.Holder)}
	for i := range c.Puts {
		p.puts[c.Puts[i].Record.Key] = &c.Puts[i].Record
	}
	for i := range c.Puts {
		if e := p.check(&c.Puts[i]); e != nil {
			return e
		}
	}
	for _, d := range c.Deletes {
		if has := s.records[d.Key].Revision; has != d.ExpectRevision {
			return stale(d.Key, d.ExpectRevision, has)
		}
		if e := s.referenced(d.Key); e != nil {
			return e
		}
	}
	return nil
}

func (s *Store) referenced(k catalog.Key) *errs.Error {
	holders := s.holdersOf(k)
	if len(holders) == 0 {
		return nil
	}
	var names []string
	for _, h := range holders[:min(len(holders), catalog.MaxHolders)] {
		names = append(names, short(h))
	}
	return catalog.Refusal(errs.StillReferenced, "uid", k.UID, "references", strings.Join(names, ","), "count", strconv.Itoa(len(holders)))
}

func (s *Store) check(k *catalog.Check) *errs.Error {
	r, living := s.records[k.Key]
	switch k.Cond {
	case catalog.CondRevision:
		if r.Revision != k.Revision {
			return stale(k.Key, k.Revision, r.Revision)
		}
	case catalog.CondPhase:
		if !living {
			return gone(k.Key)
		}
		if !slices.Contains(k.Phases, r.Phase) {
			return catalog.Refusal(errs.WrongPhase, "uid", k.Key.UID, "phase", r.Phase)
		}
	case catalog.CondIdentity:
		if !living {
			return gone(k.Key)
		}
		if r.Identity != k.Identity {
			return catalog.Refusal(errs.IdentityMismatch, "uid", k.Key.UID, "want", k.Identity, "has", r.Identity)
		}
	case catalog.CondNamed:
		if uid := s.names[scope{k.Key.Tenant, k.Key.Kind}][k.Name]; uid != k.Key.UID {
			return catalog.Refusal(errs.StaleUID, "uid", k.Key.UID, "current_uid", uid)
		}
	case catalog.CondUnreferenced:
		return s.referenced(k.Key)
	}
	return nil
}

// pending is what the puts of one commit claim from each other.
type pending struct {
	store  *Store
	repair bool
	puts   map[catalog.Key]*catalog.Record
	names  map[scope]map[string]string
	claims map[catalog.Key]catalog.Holder
}

func (p *pending) check(put *catalog.Put) *errs.Error {
	r := &put.Record
	old := p.store.records[r.Key]
	if old.Revision != put.ExpectRevision {
		return stale(r.Key, put.ExpectRevision, old.Revision)
	}
	if old.Identity != "" && old.Identity != r.Identity {
		return catalog.Refusal(errs.IdentityMismatch, "uid", r.UID, "want", r.Identity, "has", old.Identity)
	}
	if r.Name != "" && r.Name != old.Name {
		sc := scope{r.Tenant, r.Kind}
		owner, taken := p.names[sc][r.Name]
		if !taken {
			owner, taken = p.store.names[sc][r.Name]
		}
		if taken {
			return catalog.Refusal(errs.NameTaken, "name", r.Name, "uid", owner)
		}
		if p.names[sc] == nil {
			p.names[sc] = make(map[string]string)
		}
		p.names[sc][r.Name] = r.UID
	}
	held := modes(old.Refs)
	for _, ref := range r.Refs {
		if held[ref.Target] == ref.Mode {
			continue
		}
		if e := p.checkRef(r, ref, held[ref.Target] == ""); e != nil {
			return e
		}
	}
	return nil
}

func modes(refs []catalog.Ref) map[catalog.Key]catalog.RefMode {
	m := make(map[catalog.Key]catalog.RefMode, len(refs))
	for _, r := range refs {
		m[r.Target] = r.Mode
	}
	return m
}

func (p *pending) checkRef(r *catalog.Record, ref catalog.Ref, added bool) *errs.Error {
	if added {
		target, ok := p.puts[ref.Target]
		if !ok {
			living, exists := p.store.records[ref.Target]
			if !exists {
				return gone(ref.Target)
			}
			target = &living
		}
		if target.Sealed && !p.repair {
			return catalog.Refusal(errs.WrongPhase, "uid", ref.Target.UID, "phase", target.Phase)
		}
	}
	if !ref.Mode.Attaches() {
		return nil
	}
	conflict := func(mode catalog.RefMode) bool {
		return mode.Attaches() && (ref.Mode == catalog.Exclusive || mode == catalog.Exclusive)
	}
	taken := func(holder catalog.Key) *errs.Error {
		return catalog.Refusal(errs.AlreadyAttached, "volume", ref.Target.UID, "holder", short(holder))
	}
	for _, h := range p.store.holdersOf(ref.Target) {
		if h != r.Key && conflict(p.store.holders[ref.Target][h]) {
			return taken(h)
		}
	}
	if claim, ok := p.claims[ref.Target]; ok && conflict(claim.Mode) {
		return taken(claim.Key)
	}
	p.claims[ref.Target] = catalog.Holder{Key: r.Key, Mode: ref.Mode}
	return nil
}

func (s *Store) write(c *catalog.Commit) catalog.Result {
	s.seq++
	now := s.clock()
	change := catalog.Change{Seq: s.seq}
	revisions := make(map[catalog.Key]uint64, len(c.Puts))
	for i := range c.Puts {
		r := clone(c.Puts[i].Record)
		old, existed := s.records[r.Key]
		r.Revision, r.Seq, r.Created, r.Updated = old.Revision+1, s.seq, now, now
		if forced := c.Puts[i].Revision; forced != 0 {
			r.Revision = forced
		}
		if existed {
			r.Created = old.Created
		}
		s.unlink(&old)
		s.link(&r)
		s.records[r.Key] = r
		revisions[r.Key] = r.Revision
		change.Items = append(change.Items, catalog.ChangedRecord{Key: r.Key, Revision: r.Revision, Phase: r.Phase, Node: r.Node})
	}
	for _, d := range c.Deletes {
		old := s.records[d.Key]
		s.unlink(&old)
		delete(s.records, d.Key)
		if d.Tombstone {
			s.tombs[d.Key] = catalog.Tombstone{
				Key: d.Key, Revision: old.Revision, Seq: s.seq, Body: slices.Clone(d.Body), At: now, Expires: now.Add(s.retention.Tombstones),
			}
		}
		change.Items = append(change.Items, catalog.ChangedRecord{Key: d.Key, Revision: d.ExpectRevision, Node: old.Node, Deleted: true})
	}
	if c.ID != "" {
		life := s.retention.Receipts
		if c.Transient {
			life = min(life, catalog.TransientLife)
		}
		if !c.Minted.IsZero() {
			life += min(max(c.Minted.Sub(now), 0), catalog.MaxAhead)
		}
		s.receipts[receiptKey{c.Tenant, c.ID}] = heldReceipt{expires: now.Add(life), Receipt: catalog.Receipt{
			Tenant: c.Tenant, ID: c.ID, Digest: c.Digest, Seq: s.seq, Revisions: maps.Clone(revisions), Result: slices.Clone(c.Result), At: now,
		}}
	}
	s.history.grow(c.Attempt, now, &change)
	s.log = append(s.log, change)
	if extra := len(s.log) - int(s.retention.Changes); extra > 0 {
		s.log = slices.Delete(s.log, 0, extra)
	}
	close(s.grown)
	s.grown = make(chan struct{})
	return catalog.Result{Seq: s.seq, Revisions: revisions, Result: slices.Clone(c.Result)}
}

// unlink takes a record out of the indexes, link puts it in.
func (s *Store) unlink(r *catalog.Record) {
	if r.Name != "" {
		delete(s.names[scope{r.Tenant, r.Kind}], r.Name)
	}
	for _, ref := range r.Refs {
		if delete(s.holders[ref.Target], r.Key); len(s.holders[ref.Target]) == 0 {
			delete(s.holders, ref.Target)
		}
	}
}

func (s *Store) link(r *catalog.Record) {
	if r.Name != "" {
		sc := scope{r.Tenant, r.Kind}
		if s.names[sc] == nil {
			s.names[sc] = make(map[string]string)
		}
		s.names[sc][r.Name] = r.UID
	}
	for _, ref := range r.Refs {
		if s.holders[ref.Target] == nil {
			s.holders[ref.Target] = make(map[catalog.Key]catalog.RefMode)
		}
		s.holders[ref.Target][r.Key] = ref.Mode
	}
}

// Changes implements catalog.Store.
func (s *Store) Changes(ctx context.Context, after uint64, limit int, block time.Duration) ([]catalog.Change, error) {
	size, err := catalog.PageSize(limit)
	if err != nil {
		return nil, err
	}
	wait, cancel := context.WithTimeout(ctx, block)
	defer cancel()
	for {
		if err := s.enter(ctx); err != nil {
			return nil, err
		}
		oldest, grown := s.seq-uint64(len(s.log))+1, s.grown
		if after > s.seq || after+1 < oldest {
			seq := s.seq
			s.mu.Unlock()
			return nil, catalog.TooOld(after, oldest, seq)
		}
		rest := s.log[after+1-oldest:]
		rest = slices.Clone(rest[:min(len(rest), size)])
		s.mu.Unlock()
		if len(rest) > 0 || block <= 0 {
			return rest, nil
		}
		select {
		case <-grown:
		case <-wait.Done():
			if err := ctx.Err(); err != nil {
				return nil, errs.From(err).WithOutcome(errs.NotStarted, errs.AfterBackoff)
			}
			return nil, nil
		}
	}
}

// Seq implements catalog.Store.
func (s *Store) Seq(ctx context.Context) (uint64, error) {
	st, err := s.Status(ctx)
	return st.Seq, err
}

// Lead implements catalog.Store.
func (s *Store) Lead(ctx context.Context, c catalog.Claim) (catalog.Lease, bool, error) {
	if err := c.Validate(); err != nil {
		return catalog.Lease{}, false, err
	}
	if err := s.enter(ctx); err != nil {
		return catalog.Lease{}, false, err
	}
	defer s.mu.Unlock()
	now := s.now()
	if s.leader.Holder != c.Holder {
		if left := s.leaseEnd.Sub(now); left > 0 {
			return catalog.Lease{Holder: s.leader.Holder, Epoch: s.leader.Epoch, Left: left}, false, nil
		}
	}
	if s.leader.Holder != c.Holder || s.leader.Epoch <= c.Above {
		s.leader = catalog.Lease{Holder: c.Holder, Epoch: max(s.leader.Epoch, c.Above) + 1}
	}
	s.leaseEnd = now.Add(c.TTL)
	return catalog.Lease{Holder: c.Holder, Epoch: s.leader.Epoch, Left: c.TTL}, true, nil
}

// Leader implements catalog.Store.
func (s *Store) Leader(ctx context.Context) (catalog.Lease, error) {
	if err := s.enter(ctx); err != nil {
		return catalog.Lease{}, err
	}
	defer s.mu.Unlock()
	l := s.leader
	l.Left = max(s.leaseEnd.Sub(s.now()), 0)
	return l, nil
}

// Release implements catalog.Store.
func (s *Store) Release(ctx context.Context, holder string, epoch fence.Epoch) error {
	if err := s.enter(ctx); err != nil {
		return err
	}
	defer s.mu.Unlock()
	if s.leader.Holder != holder || s.leader.Epoch != epoch {
		return catalog.Refusal(errs.Fenced, "epoch", dec(uint64(epoch)), "current_epoch", dec(uint64(s.leader.Epoch)))
	}
	s.leader, s.leaseEnd = catalog.Lease{Epoch: epoch + 1}, time.Time{}
	return nil
}

// OpenSession implements catalog.Store.
func (s *Store) OpenSession(ctx context.Context, coordinator fence.Epoch, node string, above fence.Epoch) (fence.Epoch, error) {
	if err := catalog.ValidateNode(node); err != nil {
		return 0, err
	}
	if err := s.enter(ctx); err != nil {
		return 0, err
	}
	defer s.mu.Unlock()
	if e := s.checkOwner(fence.Owner{Coordinator: coordinator}); e != nil {
		return 0, e
	}
	s.sessions[node] = max(s.sessions[node], above) + 1
	return s.sessions[node], nil
}

// SessionEpoch implements catalog.Store.
func (s *Store) SessionEpoch(ctx context.Context, node string) (fence.Epoch, error) {
	if err := catalog.ValidateNode(node); err != nil {
		return 0, err
	}
	if err := s.enter(ctx); err != nil {
		return 0, err
	}
	defer s.mu.Unlock()
	return s.sessions[node], nil
}
