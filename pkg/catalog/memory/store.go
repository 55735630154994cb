// Package memory is a catalog in the process's own memory, for unit tests of what is built on a
// catalog. It keeps the same promises as package redis, except that it is gone with the process.
package memory

import (
	"context"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"

	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/fence"
)

// Options of a store; the zero value is useful.
type Options struct {
	Retention catalog.Retention
	// Now is the store's clock; time.Now if nil.
	Now func() time.Time
}

type scope struct {
	tenant string
	kind   catalog.Kind
}

type receiptKey struct{ tenant, id string }

type heldReceipt struct {
	catalog.Receipt
	expires time.Time
}

// Store is a catalog.Store. Its lock is held for map operations only.
type Store struct {
	retention   catalog.Retention
	now         func() time.Time
	incarnation string

	mu       sync.Mutex
	closed   bool
	records  map[catalog.Key]catalog.Record
	names    map[scope]map[string]string
	holders  map[catalog.Key]map[catalog.Key]catalog.RefMode
	receipts map[receiptKey]heldReceipt
	voids    map[string]time.Time
	tombs    map[catalog.Key]catalog.Tombstone
	log      []catalog.Change
	seq      uint64
	history  history
	leader   catalog.Lease
	leaseEnd time.Time
	sessions map[string]fence.Epoch
	grown    chan struct{} // closed and replaced at each applied commit and at Close
}

var _ catalog.Store = (*Store)(nil)

// New makes an empty catalog.
func New(o Options) *Store {
	if o.Now == nil {
		o.Now = time.Now
	}
	return &Store{
		retention: o.Retention.WithDefaults(), now: o.Now, incarnation: uuid.NewString(),
		records: make(map[catalog.Key]catalog.Record), names: make(map[scope]map[string]string),
		holders:  make(map[catalog.Key]map[catalog.Key]catalog.RefMode),
		receipts: make(map[receiptKey]heldReceipt), voids: make(map[string]time.Time),
		tombs: make(map[catalog.Key]catalog.Tombstone), sessions: make(map[string]fence.Epoch), history: newHistory(),
		grown: make(chan struct{}),
	}
}

// enter locks the store, or says why the call cannot start.
func (s *Store) enter(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return errs.From(err).WithOutcome(errs.NotStarted, errs.SameOperation)
	}
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return errs.New(errs.ShuttingDown, "the catalog is closed; ask another coordinator")
	}
	return nil
}

// clock is the store's time, in the precision that every store has.
func (s *Store) clock() time.Time { return s.now().UTC().Truncate(time.Millisecond) }

func clone(r catalog.Record) catalog.Record {
	r.Refs, r.Body = slices.Clone(r.Refs), slices.Clone(r.Body)
	return r
}

// Get implements catalog.Reader.
func (s *Store) Get(ctx context.Context, key catalog.Key) (catalog.Record, error) {
	many, err := s.GetMany(ctx, []catalog.Key{key})
	if err != nil {
		return catalog.Record{}, err
	}
	r, ok := many[key]
	if !ok {
		return catalog.Record{}, catalog.NotFound(key.Kind, key.UID)
	}
	return r, nil
}

// GetByName implements catalog.Reader.
func (s *Store) GetByName(ctx context.Context, tenant string, kind catalog.Kind, name string) (catalog.Record, error) {
	if err := catalog.ValidateScope(tenant, kind); err != nil {
		return catalog.Record{}, err
	}
	if err := s.enter(ctx); err != nil {
		return catalog.Record{}, err
	}
	defer s.mu.Unlock()
	uid, ok := s.names[scope{tenant, kind}][name]
	if !ok {
		return catalog.Record{}, catalog.NotFound(kind, name)
	}
	return clone(s.records[catalog.Key{Tenant: tenant, Kind: kind, UID: uid}]), nil
}

// GetMany implements catalog.Reader.
func (s *Store) GetMany(ctx context.Context, keys []catalog.Key) (map[catalog.Key]catalog.Record, error) {
	if err := catalog.ValidateKeys(keys); err != nil {
		return nil, err
	}
	if err := s.enter(ctx); err != nil {
		return nil, err
	}
	defer s.mu.Unlock()
	found := make(map[catalog.Key]catalog.Record, len(keys))
	for _, k := range keys {
		if r, ok := s.records[k]; ok {
			found[k] = clone(r)
		}
	}
	return found, nil
}

// Living implements catalog.Reader.
func (s *Store) Living(ctx context.Context, keys []catalog.Key) (map[catalog.Key]bool, error) {
	if err := catalog.ValidateKeys(keys); err != nil {
		return nil, err
	}
	if err := s.enter(ctx); err != nil {
		return nil, err
	}
	defer s.mu.Unlock()
	living := make(map[catalog.Key]bool, len(keys))
	for _, k := range keys {
		if _, ok := s.records[k]; ok {
			living[k] = true
		}
	}
	return living, nil
}

// List implements catalog.Reader.
func (s *Store) List(ctx context.Context, q catalog.Query) (catalog.Page, error) {
	size, err := q.Validate()
	if err != nil {
		return catalog.Page{}, err
	}
	if err := s.enter(ctx); err != nil {
		return catalog.Page{}, err
	}
	defer s.mu.Unlock()
	member := func(k catalog.Key) string { return k.UID + "/" + k.Tenant }
	var keys []catalog.Key
	for k, r := range s.records {
		if q.Matches(&r) && member(k) > q.After {
			keys = append(keys, k)
		}
	}
	slices.SortFunc(keys, func(a, b catalog.Key) int { return strings.Compare(member(a), member(b)) })
	var page catalog.Page
	bytes := 0
	for i, k := range keys {
		r := clone(s.records[k])
		page.Records = append(page.Records, r)
		if bytes += len(r.Body); (len(page.Records) == size || bytes >= catalog.MaxPageBytes/2) && i < len(keys)-1 {
			page.Next = member(k)
			break
		}
	}
	return page, nil
}

// Referrers implements catalog.Reader.
func (s *Store) Referrers(ctx context.Context, target catalog.Key, after string, limit int) (catalog.Holders, error) {
	size, err := catalog.PageSize(limit)
	if err == nil {
		err = target.Validate()
	}
	if err != nil {
		return catalog.Holders{}, err
	}
	if err := s.enter(ctx); err != nil {
		return catalog.Holders{}, err
	}
	defer s.mu.Unlock()
	page := catalog.Holders{Count: len(s.holders[target])}
	for _, k := range s.holdersOf(target) {
		if k.String() <= after {
			continue
		}
		if len(page.Holders) == size {
			page.Next = page.Holders[size-1].Key.String()
			break
		}
		page.Holders = append(page.Holders, catalog.Holder{Key: k, Mode: s.holders[target][k]})
	}
	return page, nil
}

func (s *Store) holdersOf(target catalog.Key) []catalog.Key {
	return slices.SortedFunc(maps.Keys(s.holders[target]), func(a, b catalog.Key) int { return strings.Compare(a.String(), b.String()) })
}

// Receipt implements catalog.Reader.
func (s *Store) Receipt(ctx context.Context, tenant, id string) (catalog.Receipt, bool, error) {
	if err := s.enter(ctx); err != nil {
		return catalog.Receipt{}, false, err
	}
	defer s.mu.Unlock()
	r, ok := s.receipt(tenant, id)
	return r, ok, nil
}

func (s *Store) receipt(tenant, id string) (catalog.Receipt, bool) {
	held, ok := s.receipts[receiptKey{tenant, id}]
	if !ok || !s.clock().Before(held.expires) {
		return catalog.Receipt{}, false
	}
	r := held.Receipt
	r.Revisions, r.Result = maps.Clone(r.Revisions), slices.Clone(r.Result)
	return r, true
}

// Settle implements catalog.Store.
func (s *Store) Settle(ctx context.Context, tenant, id, attempt string) (catalog.Receipt, bool, error) {
	if err := catalog.ValidateSettle(tenant, id, attempt); err != nil {
		return catalog.Receipt{}, false, err
	}
	if err := s.enter(ctx); err != nil {
		return catalog.Receipt{}, false, err
	}
	defer s.mu.Unlock()
	r, ok := s.receipt(tenant, id)
	if !ok {
		s.voids[attempt] = s.clock().Add(catalog.VoidLife)
	}
	return r, ok, nil
}

// Tombstone implements catalog.Store.
func (s *Store) Tombstone(ctx context.Context, key catalog.Key) (catalog.Tombstone, error) {
	if err := s.enter(ctx); err != nil {
		return catalog.Tombstone{}, err
	}
	defer s.mu.Unlock()
	t, ok := s.tombs[key]
	if !ok || !s.clock().Before(t.Expires) {
		return catalog.Tombstone{}, catalog.NotFound(key.Kind, key.UID)
	}
	t.Body = slices.Clone(t.Body)
	return t, nil
}

// ListTombstones implements catalog.Store.
func (s *Store) ListTombstones(ctx context.Context, tenant string, kind catalog.Kind, after string, limit int) (catalog.Tombstones, error) {
	size, err := catalog.PageSize(limit)
	if err == nil {
		err = catalog.ValidateScope(tenant, kind)
	}
	if err != nil {
		return catalog.Tombstones{}, err
	}
	if err := s.enter(ctx); err != nil {
		return catalog.Tombstones{}, err
	}
	defer s.mu.Unlock()
	var page catalog.Tombstones
	for k, t := range s.tombs {
		if k.Tenant == tenant && k.Kind == kind && k.UID > after && s.clock().Before(t.Expires) {
			t.Body = slices.Clone(t.Body)
			page.Tombstones = append(page.Tombstones, t)
		}
	}
	slices.SortFunc(page.Tombstones, func(a, b catalog.Tombstone) int { return strings.Compare(a.Key.UID, b.Key.UID) })
	if len(page.Tombstones) > size {
		page.Tombstones = page.Tombstones[:size]
		page.Next = page.Tombstones[size-1].Key.UID
	}
	return page, nil
}

// Compact implements catalog.Store. It forgets expired receipts and voids as well, which a server
// does by itself.
func (s *Store) Compact(ctx context.Context, limit int) (int, error) {
	limit, err := catalog.PageSize(limit)
	if err != nil {
		return 0, err
	}
	if err := s.enter(ctx); err != nil {
		return 0, err
	}
	defer s.mu.Unlock()
	now, n := s.clock(), 0
	for k, t := range s.tombs {
		if n < limit && !now.Before(t.Expires) {
			delete(s.tombs, k)
			n++
		}
	}
	maps.DeleteFunc(s.receipts, func(_ receiptKey, r heldReceipt) bool { return !now.Before(r.expires) })
	maps.DeleteFunc(s.voids, func(_ string, end time.Time) bool { return now.After(end) })
	return n, nil
}

// Status implements catalog.Store.
func (s *Store) Status(ctx context.Context) (catalog.Status, error) {
	if err := s.enter(ctx); err != nil {
		return catalog.Status{}, err
	}
	defer s.mu.Unlock()
	return catalog.Status{
		Server: "memory", Incarnation: s.incarnation, RunID: s.incarnation, Seq: s.seq, Epoch: s.leader.Epoch,
		Durability: "none", Tombstones: len(s.tombs), Suspended: s.history.suspension(), Restored: s.history.restored,
	}, nil
}

// Close implements catalog.Store.
func (s *Store) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.closed {
		s.closed = true
		close(s.grown)
	}
	return nil
}
