package robustness

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/catalog/redis"
	"github.com/dormouse-run/dormouse/pkg/client"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/wait"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// Faults after which something is lost that no journal has, so that the catalog goes on at an operator's word only, which this test
// gives through the API. What was lost is then known: by the change log of before, by how far each journal reached, and by the report.
// It may be lost, and nothing else.

// loss is what a word took back, by the operations that made it.
type loss struct {
	at  time.Duration
	why string
	// lost are what may be as it was at some time before, unnamed what was put back without its name.
	// regained are what an earlier word had given up and the report names as put back: the server came back without that word, and a node had returned since.
	lost, unnamed, regained map[string]bool
}

// behind is how many operations the server's copy is older at most: what is reported at once is bounded.
const behind = 40

// dumpAway has the server come back with a dump of some operations ago, while a node is away. The journal of the one that stays has, from after the dump,
// a creation and a deletion that were acknowledged.
func (f *faults) dumpAway(ctx context.Context, p planned) error {
	within, cancel := context.WithTimeout(ctx, f.patience)
	defer cancel()
	stays := 1 - p.Node
	deleted, err := f.on(within, stays, "deleted")
	if err != nil {
		return err
	}
	dump := filepath.Join(f.world.dir, "dump-"+p.Hold.String())
	if err := f.world.redis.dump(within, dump); err != nil {
		return err
	}
	if err := f.delete(within, Detach, deleted); err != nil {
		return err
	}
	if _, err := f.on(within, stays, "kept"); err != nil {
		return err
	}
	f.more(within, behind)
	if err := f.journaled(within, stays); err != nil {
		return err
	}
	return f.lose(ctx, p, func() error { return f.world.redis.load(dump) })
}

// cutAway has the server come back without the end of its log, while a node is away.
func (f *faults) cutAway(ctx context.Context, p planned) error {
	return f.lose(ctx, p, func() error { return f.world.redis.truncate(p.Bytes + 20<<10) })
}

// copyUnknown has the server come back with a copy of some operations ago, and both coordinators begin anew: nobody knows how far the catalog was.
func (f *faults) copyUnknown(ctx context.Context, p planned) error {
	kept, err := os.MkdirTemp(f.world.dir, "copy")
	if err != nil {
		return err
	}
	if err := f.world.redis.copy(kept); err != nil {
		return err
	}
	st, err := f.state(ctx)
	if err != nil {
		return err
	}
	f.more(ctx, behind)
	// Without a journal that reaches further nobody could notice.
	if err := until(ctx, "the journals know more than the copy", func() error { return f.beyond(ctx, st.seq) }); err != nil {
		return err
	}
	p.Node = -1
	return f.lose(ctx, p, func() error { return f.world.redis.rewind(kept) })
}

// more waits for so many operations, which clients do until the faults are over.
func (f *faults) more(ctx context.Context, count int64) {
	from := f.traffic.count.Load()
	for f.traffic.count.Load() < from+count && ctx.Err() == nil && !f.traffic.hopeless() {
		_ = wait.For(ctx, 10*time.Millisecond)
	}
}

func (f *faults) beyond(ctx context.Context, seq uint64) error {
	st, err := f.world.operator[0].CatalogStatus(ctx)
	if err != nil {
		return err
	}
	for _, j := range st.GetJournals() {
		if j.GetPoint().GetSeq() <= seq+1 {
			return fmt.Errorf("the journal of node %s is at %v, the copy at %d", j.GetNode(), j.GetPoint(), seq)
		}
	}
	return nil
}

// lose has the server come back older while a node is away, or with coordinators that know nothing if there is none, and gives the word.
func (f *faults) lose(ctx context.Context, p planned, change func() error) error {
	f.traffic.gate.Lock()
	defer f.traffic.gate.Unlock()
	ctx, cancel := context.WithTimeout(ctx, f.patience)
	defer cancel()
	began := f.traffic.now()
	leader, err := f.coordinator(ctx, true)
	if err == nil && p.Node >= 0 {
		err = f.world.stopAgent(p.Node)
	}
	if err != nil {
		return err
	}
	if err := f.isolate(ctx, leader); err != nil {
		return err
	}
	was, err := f.read(ctx)
	if err != nil {
		return err
	}
	if err := f.comeBack(ctx, p, change); err != nil {
		return err
	}
	older, err := f.state(ctx)
	if err != nil {
		return err
	}
	f.world.link[leader].set(func(l *link) { l.refuse = false }) // the other one stays away, as in rewind
	if p.Node < 0 {
		if err := f.world.coord[leader].start(); err != nil {
			return err
		}
	}
	if was = slices.DeleteFunc(was, func(c catalog.Change) bool { return c.Seq <= older.seq }); len(was) > 0 {
		l, err := f.operate(ctx, p, leader, was)
		if err != nil {
			return err
		}
		f.losses = append(f.losses, l)
	}
	f.links(func(l *link) { l.refuse = false })
	if err := f.rejoin(ctx, p, leader); err != nil {
		return err
	}
	f.windows = append(f.windows, window{began, f.traffic.now()})
	return nil
}

// isolate closes the links, that of the standby first: the leader has then seen all that the standby has. Else the standby would, once it is back, know
// of more than the operator's word was about, and suspend the catalog again.
func (f *faults) isolate(ctx context.Context, leader int) error {
	other := f.world.link[1-leader]
	other.set(func(l *link) { l.refuse = true })
	other.cut()
	if err := until(ctx, "the leader has seen what the other has", func() error {
		_, err := f.world.operator[leader].CatalogStatus(ctx)
		return err
	}); err != nil {
		return err
	}
	f.world.link[leader].set(func(l *link) { l.refuse = true })
	f.world.link[leader].cut()
	return nil
}

// comeBack has the server come back changed, and ends the coordinators if they are to be new.
func (f *faults) comeBack(ctx context.Context, p planned, change func() error) error {
	if err := f.world.redis.kill(); err != nil {
		return err
	}
	if p.Node < 0 {
		for _, c := range f.world.coord {
			if err := c.kill(); err != nil {
				return err
			}
		}
	}
	return errors.Join(change(), f.world.redis.up(ctx))
}

// rejoin starts what was away, after which the catalog has to be in service.
func (f *faults) rejoin(ctx context.Context, p planned, leader int) (err error) {
	if p.Node < 0 {
		err = f.world.coord[1-leader].start()
	} else if f.world.agent(p.Node) == nil {
		err = f.world.startAgent(ctx, p.Node)
	}
	return errors.Join(err, f.world.ready(ctx))
}

// read gives the change log of the server.
func (f *faults) read(ctx context.Context) (all []catalog.Change, err error) {
	store, err := redis.Open(ctx, redis.Options{Address: f.world.redis.socket})
	if err != nil {
		return nil, err
	}
	defer store.Close()
	for after := uint64(0); ; {
		changes, err := store.Changes(ctx, after, catalog.MaxPage, 0)
		if errs.Has(err, errs.ResumeTooOld) {
			var oldest uint64
			if _, err := fmt.Sscan(errs.From(err).Details["oldest"], &oldest); err != nil || oldest <= after+1 {
				return nil, fmt.Errorf("the change log after %d: %w", after, err)
			}
			after = oldest - 1
			continue
		}
		if err != nil || len(changes) == 0 {
			return all, err
		}
		all, after = append(all, changes...), changes[len(changes)-1].Seq
	}
}

// operate is what an operator does about a catalog that is suspended: looks, asks for a repair, and accepts what is said to be lost.
func (f *faults) operate(ctx context.Context, p planned, leader int, was []catalog.Change) (loss, error) {
	operator := f.world.operator[leader]
	var found []*dormousev1.CatalogFinding
	l := loss{why: p.Kind, lost: make(map[string]bool), unnamed: make(map[string]bool), regained: make(map[string]bool)}
	if err := until(ctx, "writes are refused since the catalog came back older", func() error { return f.refused(ctx, f.world.user[leader]) }); err != nil {
		return l, err
	}
	if err := until(ctx, "the differences are told", func() (err error) {
		if err = f.present(ctx, operator, p.Node); err == nil {
			found, err = client.Collect(operator.VerifyCatalog(ctx))
		}
		return err
	}); err != nil {
		return l, err
	}
	seen := keysOf(found)
	without := f.away(p.Node)
	if len(without) > 0 && !slices.ContainsFunc(found, func(d *dormousev1.CatalogFinding) bool {
		return d.GetDifference() == dormousev1.CatalogDifference_CATALOG_DIFFERENCE_UNKNOWN && d.GetNode() == without[0]
	}) {
		f.traffic.blame("verify does not say that node %s is away: %v", without[0], found)
	}
	// Neither nothing nor the half of it is enough.
	for _, accept := range []bool{false, true}[:1+len(without)] {
		if resp, err := operator.RepairCatalog(ctx, accept); err == nil {
			f.traffic.blame("a repair that may lose something went on without being told to (%v): %v", accept, resp)
		}
	}
	reach := make(map[string]uint64)
	var resp *dormousev1.RepairCatalogResponse
	err := until(ctx, "the operator's word is heard", func() (err error) {
		if err := f.reach(ctx, operator, reach); err != nil {
			return err
		}
		resp, err = operator.RepairCatalog(ctx, true, without...)
		return err
	})
	if err != nil {
		return l, err
	}
	if told := resp.GetFindings(); int(resp.GetTotal()) > len(told) && !told[len(told)-1].GetRepaired() {
		return l, fmt.Errorf("%d differences are more than are told of", resp.GetTotal()) // which begins with what is not put right
	}
	for _, d := range resp.GetFindings() {
		if !seen[keyOf(d)] && d.GetUid() != "" {
			f.traffic.blame("the repair found what verify did not: %v", d)
		}
	}
	l.at = f.traffic.now()
	return l, f.account(ctx, &l, was, reach, resp.GetFindings())
}

// refused tells whether a write is refused for the reason, while reads go on.
func (f *faults) refused(ctx context.Context, user *client.Client) error {
	call, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	_, err := user.CreateVolume(call, &dormousev1.CreateVolumeRequest{})
	if !errs.Has(err, errs.CatalogRewound) {
		return fmt.Errorf("a write is answered: %w", err)
	}
	_, err = client.Collect(user.ListVolumes(call, &dormousev1.ListVolumesRequest{}))
	return err
}

func (f *faults) away(node int) []string {
	if node < 0 {
		return nil
	}
	return []string{nodeName(node)}
}

// present tells whether the nodes that are there are online.
func (f *faults) present(ctx context.Context, operator *client.Client, away int) error {
	st, err := operator.CatalogStatus(ctx)
	if err != nil {
		return err
	}
	if st.GetSuspended() == nil {
		return errors.New("it is not suspended")
	}
	online := 0
	for _, j := range st.GetJournals() {
		if j.GetOnline() {
			online++
		}
	}
	if online+len(f.away(away)) < nodes {
		return fmt.Errorf("%d nodes are online", online)
	}
	return nil
}

// reach enters how far the journals reach.
func (f *faults) reach(ctx context.Context, operator *client.Client, into map[string]uint64) error {
	st, err := operator.CatalogStatus(ctx)
	if err != nil {
		return err
	}
	for _, j := range st.GetJournals() {
		if j.GetOnline() {
			into[j.GetNode()] = j.GetPoint().GetSeq()
		}
	}
	return nil
}

func keyOf(d *dormousev1.CatalogFinding) catalog.Key {
	return catalog.Key{Tenant: d.GetTenant(), Kind: catalog.Kind(d.GetKind()), UID: d.GetUid()}
}

func keysOf(found []*dormousev1.CatalogFinding) map[catalog.Key]bool {
	all := make(map[catalog.Key]bool)
	for _, d := range found {
		all[keyOf(d)] = true
	}
	return all
}

// fate is what a lost part of the history did to a record.
type fate struct {
	last catalog.ChangedRecord
	kept catalog.ChangedRecord // the last of it that a journal is known to have; no revision if there is none
}

// fatesOf gives what became of each record that the traffic is about.
func fatesOf(was []catalog.Change, reach map[string]uint64) map[catalog.Key]fate {
	fates := make(map[catalog.Key]fate)
	for _, c := range was {
		for _, item := range c.Items {
			switch item.Key.Kind {
			case catalog.KindVolume, catalog.KindSandbox, catalog.KindSnapshot, catalog.KindOperation:
			default:
				continue
			}
			x := fates[item.Key]
			if x.last = item; c.Seq <= reach[item.Node] {
				x.kept = item
			}
			fates[item.Key] = x
		}
	}
	return fates
}

// compare wants a record to be as a journal had it, or newer.
func (f *faults) compare(ctx context.Context, store *redis.Store, k catalog.Key, x fate) error {
	now, err := store.Get(ctx, k)
	if err != nil && !errs.Has(err, errs.ObjectNotFound) {
		return err
	}
	switch there := err == nil; {
	case there && x.kept.Deleted:
		f.traffic.blame("%s was deleted at revision %d, which the journal of node %s has, and is back at %d (%s)", k, x.kept.Revision, x.kept.Node, now.Revision, now.Phase)
	case there && now.Revision < x.kept.Revision && !x.last.Deleted: // else a journal that was sent what there was when it was read has nothing of it
		f.traffic.blame("%s is at revision %d; the journal of node %s has %d, and nobody said that it was lost", k, now.Revision, x.kept.Node, x.kept.Revision)
	case !there && !x.kept.Deleted && !x.last.Deleted && x.kept.Phase != "Deleting" && x.kept.Phase != "Failed":
		f.traffic.blame("%s is not there; the journal of node %s has it (%s), and nobody said that it was lost", k, x.kept.Node, x.kept.Phase)
	}
	return nil
}

// account compares what the catalog has now with what it had, and enters what may be lost: what concerned a node that is away, or none, what a
// journal does not reach to, and what the report says was not put back. The rest has to be there.
func (f *faults) account(ctx context.Context, l *loss, was []catalog.Change, reach map[string]uint64, found []*dormousev1.CatalogFinding) error {
	fates := fatesOf(was, reach)
	excused := make(map[catalog.Key]bool)
	for _, d := range found {
		if strings.Contains(d.GetMessage(), "without its name") {
			l.add(f.traffic, l.unnamed, keyOf(d))
		}
		if d.GetRepaired() {
			l.regain(f.traffic, keyOf(d))
		}
		if !d.GetRepaired() && d.GetUid() != "" {
			excused[keyOf(d)] = true
		}
	}
	store, err := redis.Open(ctx, redis.Options{Address: f.world.redis.socket})
	if err != nil {
		return err
	}
	defer store.Close()
	for _, k := range slices.SortedFunc(maps.Keys(fates), func(a, b catalog.Key) int { return strings.Compare(a.String(), b.String()) }) {
		x := fates[k]
		if excused[k] {
			l.add(f.traffic, l.lost, k)
			continue
		}
		if x.kept.Revision < x.last.Revision || x.kept.Revision == 0 {
			l.add(f.traffic, l.lost, k)
		}
		if x.kept.Revision == 0 {
			continue
		}
		if err := f.compare(ctx, store, k, x); err != nil {
			return err
		}
	}
	l.shun(f.traffic)
	f.traffic.era.Add(1)
	return nil
}

// add enters what the record is of: an object, or what an operation made or deleted.
func (l *loss) add(t *traffic, to map[string]bool, k catalog.Key) {
	t.history.mu.Lock()
	defer t.history.mu.Unlock()
	op := t.operationOf(k)
	if o := t.objects[op]; o != nil {
		to[op] = true
		o.lost = o.lost || l.lost[op]
	}
}

// regain enters what an earlier word had given up.
func (l *loss) regain(t *traffic, k catalog.Key) {
	t.history.mu.Lock()
	defer t.history.mu.Unlock()
	if op := t.operationOf(k); t.objects[op] != nil && t.objects[op].lost {
		l.regained[op] = true
	}
}

// operationOf gives the operation that made the object which the record is of. It wants the lock.
func (t *traffic) operationOf(k catalog.Key) string {
	op := t.byUID[k.UID]
	if k.Kind == catalog.KindOperation {
		op = k.UID
		for _, r := range t.records {
			if _, creates := created(r.Kind); r.Op == op && !creates {
				op = r.Target
			}
		}
	}
	return op
}

// shun enters what nobody has seen, since whether it is among what was lost cannot be told; and has no more asked of what was lost, nor of
// what that was made on.
func (l *loss) shun(t *traffic) {
	t.history.mu.Lock()
	defer t.history.mu.Unlock()
	for op, o := range t.objects {
		if o.uid == "" {
			l.lost[op], o.lost = true, true
		}
		for lost := o.lost; lost && o != nil; o = t.objects[o.target] {
			o.shunned = true
		}
	}
}
