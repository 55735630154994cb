package backup_test

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/dormouse-run/dormouse/coordinator/internal/backup"
	"github.com/dormouse-run/dormouse/pkg/catalog"
	file "github.com/dormouse-run/dormouse/pkg/catalog/backup"
	"github.com/dormouse-run/dormouse/pkg/catalog/catalogtest"
	"github.com/dormouse-run/dormouse/pkg/catalog/memory"
	"github.com/dormouse-run/dormouse/pkg/catalog/redis"
	"github.com/dormouse-run/dormouse/pkg/catalog/redis/redistest"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/fence"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// model makes random commits and remembers what the catalog has after each.
type model struct {
	*catalogtest.Fixture
	rand   *rand.Rand
	live   map[string]uint64 // revision
	states map[uint64]string // digest after each commit
	last   *file.Sum
	made   int
}

func newModel(t *testing.T, s catalog.Store) *model {
	return &model{Fixture: catalogtest.NewFixture(t, s), rand: rand.New(rand.NewPCG(1, 2)), live: map[string]uint64{}, states: map[uint64]string{}}
}

func (m *model) body(uid string, revision uint64) catalog.Record {
	r := catalog.Record{Key: catalogtest.Volume(uid), Revision: revision, Name: uid, Node: "n1", Phase: "Ready", Body: fmt.Appendf(nil, "%s %d", uid, revision)}
	return r
}

// change commits one random change, and notes the digest of all there is after it.
func (m *model) change() {
	m.T.Helper()
	var c catalog.Commit
	uids := make([]string, 0, len(m.live))
	for uid := range m.live {
		uids = append(uids, uid)
	}
	switch pick := m.rand.IntN(4); {
	case pick == 0 && len(uids) > 50:
		uid := uids[m.rand.IntN(len(uids))]
		c.Deletes = []catalog.Delete{{Key: catalogtest.Volume(uid), ExpectRevision: m.live[uid]}}
		delete(m.live, uid)
	case pick == 1 && len(uids) > 50:
		uid := uids[m.rand.IntN(len(uids))]
		c.Puts = []catalog.Put{{Record: m.body(uid, m.live[uid]+1), ExpectRevision: m.live[uid]}}
		m.live[uid]++
	default:
		// Anywhere in the order of the listing.
		uid := fmt.Sprintf("%04d-%d", m.rand.IntN(10000), m.made)
		m.made++
		c.Puts = []catalog.Put{{Record: m.body(uid, 1)}}
		m.live[uid] = 1
	}
	r := m.One(c)
	if r.Err != nil {
		m.T.Fatal(r.Err)
	}
	m.states[r.Seq] = m.digest()
}

func (m *model) digest() string {
	m.last = new(file.Sum)
	for uid, revision := range m.live {
		m.last.Add(m.body(uid, revision))
	}
	return m.last.String()
}

// take copies the catalog while change is called before every entry that is written.
func take(t *testing.T, s catalog.Store, change func()) *file.File {
	t.Helper()
	var b bytes.Buffer
	w := file.NewWriter(&b)
	h, err := backup.Header(t.Context(), s)
	if err != nil {
		t.Fatal(err)
	}
	if err := w.Header(h); err != nil {
		t.Fatal(err)
	}
	end, err := backup.Copy(t.Context(), s, func(e *dormousev1.CatalogBackupEntry) error {
		change()
		return w.Entry(e)
	})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.End(end); err != nil {
		t.Fatal(err)
	}
	f, err := file.Open(bytes.NewReader(b.Bytes()))
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func onEach(t *testing.T, test func(t *testing.T, open func() catalog.Store)) {
	t.Run("memory", func(t *testing.T) {
		test(t, func() catalog.Store { return memory.New(memory.Options{}) })
	})
	redistest.Each(t, func(t *testing.T, p redistest.Program) {
		server, n := p.Start(t), 0
		test(t, func() catalog.Store {
			n++
			s, err := redis.Open(t.Context(), redis.Options{Address: server.Socket, Catalog: fmt.Sprint("test-", n)})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = s.Close() })
			return s
		})
	})
}

// A backup is what the catalog was at the commit that it names, whatever was committed while it was taken.
func TestBackupIsOfOnePoint(t *testing.T) {
	onEach(t, func(t *testing.T, open func() catalog.Store) {
		m := newModel(t, open())
		for range 600 { // several pages
			m.change()
		}
		left := 500
		f := take(t, m.Store, func() {
			if left--; left >= 0 {
				m.change()
			}
		})
		point := f.End.GetPoint()
		if want := m.states[point.GetSeq()]; f.Sum != want {
			t.Errorf("of commit %d: %d records of digest %s, want %s", point.GetSeq(), f.Records, f.Sum, want)
		}
		if rel, err := m.Compare(t.Context(), catalog.Point{Incarnation: point.GetIncarnation(), Seq: point.GetSeq(), Digest: point.GetDigest()}); err != nil || rel != catalog.Part {
			t.Errorf("its point is %s (%v)", rel, err)
		}
		if point.GetSeq() < 1100 {
			t.Errorf("nothing was committed meanwhile: %v", point)
		}
		restored(t, f, open())
	})
}

// restored puts the file into an empty catalog, in two attempts.
func restored(t *testing.T, f *file.File, s catalog.Store) {
	t.Helper()
	ctx := t.Context()
	fix := catalogtest.NewFixture(t, s)
	fix.Must(catalog.Put{Record: catalog.Record{Key: catalog.Key{Tenant: catalog.SystemTenant, Kind: catalog.KindNode, UID: "came-by-itself"}}})
	r := &backup.Restorer{Store: s, Epoch: fix.Owner.Coordinator}
	p := f.End.GetPoint()
	begin := catalog.Restore{ID: f.ID, By: "t", Point: catalog.Point{Incarnation: p.GetIncarnation(), Seq: p.GetSeq(), Digest: p.GetDigest()}}
	for attempt := range 2 {
		if err := s.BeginRestore(ctx, r.Epoch, begin); err != nil {
			t.Fatal(err)
		}
		if err := r.Clear(ctx); err != nil {
			t.Fatal(err)
		}
		n := 0
		for rec, err := range f.Entries() {
			if err != nil {
				t.Fatal(err)
			}
			if n++; attempt == 0 && n > 100 {
				break
			}
			one, err := file.RecordOf(rec)
			if err != nil {
				t.Fatal(err)
			}
			if waiting, err := r.Put(ctx, []catalog.Record{one}); err != nil || len(waiting) > 0 {
				t.Fatal(waiting, err)
			}
		}
		err := r.Compare(ctx, f.Records, f.Sum)
		if attempt == 0 && !errs.Has(err, errs.RestoreUnfinished) {
			t.Fatalf("after a hundred of %d records: %v", f.Records, err)
		}
		if attempt == 1 && err != nil {
			t.Fatal(err)
		}
	}
	if err := s.EndRestore(ctx, r.Epoch, f.ID); err != nil {
		t.Fatal(err)
	}
	if _, err := backup.Header(ctx, s); !errs.Has(err, errs.CatalogRewound) {
		t.Errorf("a backup of a suspended catalog: %v", err)
	}
	if err := s.Resume(ctx, r.Epoch); err != nil {
		t.Fatal(err)
	}
	if again := take(t, s, func() {}); again.Sum != f.Sum || again.Records != f.Records {
		t.Errorf("a backup of what was restored has %d records of digest %s, want %d of %s", again.Records, again.Sum, f.Records, f.Sum)
	}
}

// A repair, or a restore, in the middle of a backup ends it.
func TestBackupEndsWithTheHistory(t *testing.T) {
	m := newModel(t, memory.New(memory.Options{}))
	for range 300 {
		m.change()
	}
	n := 0
	_, err := backup.Copy(t.Context(), m.Store, func(*dormousev1.CatalogBackupEntry) error {
		if n++; n == 10 {
			why := catalog.Suspension{By: "n1", Witness: catalog.Point{Incarnation: "x", Seq: 5000, Digest: "d"}}
			if err := m.Suspend(t.Context(), m.Owner.Coordinator, why); err != nil {
				return err
			}
			return m.Resume(t.Context(), m.Owner.Coordinator)
		}
		return nil
	})
	if !errs.Has(err, errs.ResumeTooOld) {
		t.Errorf("got %v", err)
	}
}

func TestRestoreChecksRecords(t *testing.T) {
	s := memory.New(memory.Options{})
	lease, _, err := s.Lead(t.Context(), catalog.Claim{Holder: "t", TTL: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	ctx := context.Background()
	r := &backup.Restorer{Store: s, Epoch: lease.Epoch}
	snap := catalog.Record{Key: catalogtest.Snapshot("s"), Revision: 3, Refs: []catalog.Ref{catalogtest.To(catalogtest.Volume("v"), catalog.Reference)}}
	vol := catalog.Record{Key: catalogtest.Volume("v"), Revision: 4, Name: "data", Sealed: true}
	if _, err := r.Put(ctx, []catalog.Record{vol}); errs.Has(err, errs.CatalogRewound) || err == nil {
		t.Errorf("into a catalog in service: %v", err)
	}
	if err := s.BeginRestore(ctx, lease.Epoch, catalog.Restore{ID: "b", By: "t", Point: catalog.Point{Incarnation: "i", Seq: 9}}); err != nil {
		t.Fatal(err)
	}
	if _, err := (&backup.Restorer{Store: s, Epoch: fence.Epoch(99)}).Put(ctx, []catalog.Record{vol}); !errs.Has(err, errs.Fenced) {
		t.Errorf("of another term: %v", err)
	}
	if waiting, err := r.Put(ctx, []catalog.Record{snap, vol}); err != nil || len(waiting) != 1 || waiting[0] != 0 {
		t.Errorf("what refers to what comes later waits: %v, %v", waiting, err)
	}
	if waiting, err := r.Put(ctx, []catalog.Record{snap, vol}); err != nil || len(waiting) != 0 {
		t.Errorf("again: %v, %v", waiting, err)
	}
	other := vol
	other.Name = "another"
	if _, err := r.Put(ctx, []catalog.Record{other}); !errs.Has(err, errs.StateDamaged) {
		t.Errorf("the same record, different: %v", err)
	}
	twin := catalog.Record{Key: catalogtest.Volume("w"), Revision: 1, Name: "data"}
	if _, err := r.Put(ctx, []catalog.Record{twin}); !errs.Has(err, errs.StateDamaged) {
		t.Errorf("a name twice: %v", err)
	}
}
