package robustness

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/dormouse-run/dormouse/pkg/wait"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// planned is one fault of a schedule.
type planned struct {
	Kind string
	// After so many operations it strikes.
	After int64
	// Leader says which coordinator: the one that leads then, or the other.
	Leader bool
	// Node is the node, where it is about one.
	Node int
	// Hold is how long it lasts, where that is not said by what it is.
	Hold time.Duration
	// Bytes are cut off, or replies torn.
	Bytes int64
}

// strike is how a fault is done: it returns once it is healed.
type strike func(f *faults, ctx context.Context, p planned) error

type fault struct {
	kind string
	do   strike
}

var strikes = []fault{
	{"server killed", (*faults).killServer},
	{"server stopped", (*faults).stopServer},
	{"server came back with a copy", (*faults).oldCopy},
	{"server came back with its log cut off", (*faults).cutLog},
	{"server came back with a copy, under load", (*faults).oldCopyLoaded},
	{"server came back with an old dump, a node away", (*faults).dumpAway},
	{"server came back with its log cut off, a node away", (*faults).cutAway},
	{"server came back with a copy, coordinators new", (*faults).copyUnknown},
	{"disk of the server full", (*faults).fullDisk},
	{"connections cut", (*faults).cutLinks},
	{"link down", (*faults).linkDown},
	{"replies delayed", (*faults).delayReplies},
	{"replies torn", (*faults).tearReplies},
	{"replies lost", (*faults).loseReplies},
	{"coordinator killed", (*faults).killCoordinator},
	{"coordinator stopped", (*faults).stopCoordinator},
	{"session of a node replaced", (*faults).replaceSession},
}

// aimed are faults of one commit or object, which a run has by name alone.
var aimed = []fault{
	{"reply to a commit lost", (*faults).loseReply},
	{"commit of a leader late", (*faults).delayCommit},
	{"first attempts of commits lost", (*faults).loseCommits},
	{"name of a deleted volume given again", (*faults).renameVolume},
}

// losing are the faults after which something is lost, and what a run has in their place unless it is to lose something.
var losing = map[string]string{
	"server came back with an old dump, a node away":     "server came back with a copy",
	"server came back with its log cut off, a node away": "server came back with its log cut off",
	"server came back with a copy, coordinators new":     "server came back with a copy, under load",
}

// schedule chooses the faults of a seed. Seeds that follow each other have all kinds, whatever chance does; or there is one only.
func schedule(seed uint64, count int, ops int64, only string, losses bool) []planned {
	rng := rand.New(rand.NewPCG(seed, 1))
	deck := make([]int, 0, len(strikes))
	for i := range count {
		deck = append(deck, (int(seed%uint64(len(strikes)))*count+i)%len(strikes))
	}
	rng.Shuffle(len(deck), func(i, j int) { deck[i], deck[j] = deck[j], deck[i] })
	var all []planned
	for i, n := range deck {
		kind := strikes[n].kind
		if !losses {
			kind = cmp.Or(losing[kind], kind)
		}
		all = append(all, planned{
			Kind: cmp.Or(only, kind), After: ops * int64(2*i+1) / int64(2*count), Leader: rng.IntN(4) > 0, Node: rng.IntN(nodes),
			Hold: 100*time.Millisecond + time.Duration(rng.Int64N(int64(1500*time.Millisecond))), Bytes: 1 + rng.Int64N(20<<10),
		})
	}
	return all
}

// struck is a fault that was.
type struck struct {
	planned
	Begin, Healed time.Duration
	// Recovered is when the first mutation after the fault succeeded.
	Recovered time.Duration
	// Outage is the longest time without a mutation that succeeded, from its beginning until then.
	Outage time.Duration
}

// faults strike a world.
type faults struct {
	world   *world
	traffic *traffic
	windows []window
	losses  []loss
	struck  []struck
	lost    int // names given by faults
	asked   int // operations of faults
	// patience is how long a fault waits for what it needs.
	patience time.Duration
}

// run strikes as planned, one fault at a time, each once the system has recovered from the one before.
func (f *faults) run(ctx context.Context, plan []planned) error {
	for _, p := range plan {
		err := until(ctx, "there were "+strconv.FormatInt(p.After, 10)+" operations", func() error {
			if f.traffic.hopeless() {
				return nil
			}
			if n := f.traffic.count.Load(); n < p.After {
				return fmt.Errorf("%d", n)
			}
			return nil
		})
		if err != nil {
			return err
		}
		if f.traffic.hopeless() {
			return nil
		}
		s := struck{planned: p, Begin: f.traffic.now()}
		for _, k := range slices.Concat(strikes, aimed) {
			if k.kind == p.Kind {
				err = k.do(f, ctx, p)
			}
		}
		if err != nil {
			return fmt.Errorf("%s: %w", p.Kind, err)
		}
		s.Healed = f.traffic.now()
		if err := f.recovered(ctx, &s); err != nil {
			return fmt.Errorf("%s: %w", p.Kind, err)
		}
		f.struck = append(f.struck, s)
	}
	return nil
}

// recovered waits for a mutation that succeeds.
func (f *faults) recovered(ctx context.Context, s *struck) error {
	t := f.traffic
	ctx, cancel := context.WithTimeout(ctx, f.patience)
	defer cancel()
	return until(ctx, "a mutation succeeds after it", func() error {
		if t.hopeless() {
			return nil
		}
		t.mu.Lock()
		defer t.mu.Unlock()
		if t.latest <= s.Healed {
			return errors.New("none yet")
		}
		s.Recovered = t.latest
		for _, g := range t.gaps {
			if g.to >= s.Begin && g.from <= s.Recovered {
				s.Outage = max(s.Outage, g.to-max(g.from, s.Begin))
			}
		}
		return nil
	})
}

func (f *faults) killServer(ctx context.Context, p planned) error {
	if err := f.world.redis.kill(); err != nil {
		return err
	}
	_ = wait.For(ctx, p.Hold)
	return f.world.redis.up(ctx)
}

func (f *faults) stopServer(ctx context.Context, p planned) error {
	if err := f.world.redis.signal(syscall.SIGSTOP); err != nil {
		return err
	}
	_ = wait.For(ctx, 2*p.Hold)
	return f.world.redis.signal(syscall.SIGCONT)
}

// fullDisk leaves no room until the server has died of it, or nothing was written for a while.
func (f *faults) fullDisk(ctx context.Context, p planned) error {
	free, err := f.world.redis.fill()
	if err != nil {
		return err
	}
	bound := time.NewTimer(5 * time.Second)
	defer bound.Stop()
	ended := false
	select {
	case <-f.world.redis.ended():
		ended = true
	case <-bound.C:
	case <-ctx.Done():
	}
	_ = wait.For(ctx, p.Hold)
	if err := free(); err != nil || !ended {
		return err
	}
	if err := f.world.redis.kill(); err != nil { // which takes note of its end
		return err
	}
	return f.world.redis.up(ctx)
}

func (f *faults) links(change func(*link)) {
	for _, l := range f.world.link {
		l.set(change)
	}
}

func (f *faults) cutLinks(ctx context.Context, p planned) error {
	for range 4 {
		for _, l := range f.world.link {
			l.cut()
		}
		_ = wait.For(ctx, p.Hold/4)
	}
	return nil
}

func (f *faults) linkDown(ctx context.Context, p planned) error {
	l, err := f.oneLink(ctx, p)
	if err != nil {
		return err
	}
	l.set(func(l *link) { l.refuse = true })
	l.cut()
	_ = wait.For(ctx, 2*p.Hold)
	l.set(func(l *link) { l.refuse = false })
	return nil
}

func (f *faults) oneLink(ctx context.Context, p planned) (*link, error) {
	i, err := f.coordinator(ctx, p.Leader)
	return f.world.link[i], err
}

func (f *faults) delayReplies(ctx context.Context, p planned) error {
	f.links(func(l *link) { l.delay = p.Hold / 10 })
	_ = wait.For(ctx, 2*p.Hold)
	f.links(func(l *link) { l.delay = 0 })
	return nil
}

func (f *faults) tearReplies(ctx context.Context, p planned) error {
	for range 6 {
		f.links(func(l *link) { l.tearing = 2 })
		_ = wait.For(ctx, p.Hold/6)
	}
	f.links(func(l *link) { l.tearing = 0 })
	return nil
}

// loseReplies has the server do what it is asked, and nobody told; then the way to it is closed for a while.
func (f *faults) loseReplies(ctx context.Context, p planned) error {
	for range 2 {
		f.links(func(l *link) { l.mute = true })
		_ = wait.For(ctx, 50*time.Millisecond)
		f.links(func(l *link) { l.mute, l.refuse = false, true })
		for _, l := range f.world.link {
			l.cut()
		}
		_ = wait.For(ctx, time.Second+p.Hold) // longer than clients try again by themselves
		f.links(func(l *link) { l.refuse = false })
		if err := f.recovered(ctx, &struck{Healed: f.traffic.now()}); err != nil {
			return err
		}
	}
	return nil
}

// coordinator gives the one that leads, or the other.
func (f *faults) coordinator(ctx context.Context, leader bool) (int, error) {
	who, err := f.world.redis.client.HGet(ctx, keyPrefix+"leader", "h").Result()
	if err != nil {
		return 0, fmt.Errorf("who leads: %w", err)
	}
	i := 0
	if strings.HasPrefix(who, "c1/") == leader {
		i = 1
	}
	return i, nil
}

func (f *faults) killCoordinator(ctx context.Context, p planned) error {
	i, err := f.coordinator(ctx, p.Leader)
	if err != nil {
		return err
	}
	if err := f.world.coord[i].kill(); err != nil {
		return err
	}
	_ = wait.For(ctx, p.Hold)
	return f.world.coord[i].start()
}

// stopCoordinator has one stand still for longer than its lease. What clients ask it for meanwhile it finds when it goes on.
func (f *faults) stopCoordinator(ctx context.Context, p planned) error {
	i, err := f.coordinator(ctx, p.Leader)
	if err != nil {
		return err
	}
	if err := f.world.coord[i].signal(syscall.SIGSTOP); err != nil {
		return err
	}
	_ = wait.For(ctx, 2*lease+p.Hold)
	return f.world.coord[i].signal(syscall.SIGCONT)
}

func (f *faults) replaceSession(ctx context.Context, p planned) error {
	if err := f.world.stopAgent(p.Node); err != nil {
		return err
	}
	_ = wait.For(ctx, p.Hold/4)
	return f.world.startAgent(ctx, p.Node)
}

// oldCopy has the server come back with what it had some operations ago.
func (f *faults) oldCopy(ctx context.Context, p planned) error { return f.anOldCopy(ctx, false) }

// oldCopyLoaded is the same, while clients go on and ask again for what they are refused.
func (f *faults) oldCopyLoaded(ctx context.Context, p planned) error { return f.anOldCopy(ctx, true) }

func (f *faults) anOldCopy(ctx context.Context, loaded bool) error {
	kept, err := os.MkdirTemp(f.world.dir, "copy")
	if err != nil {
		return err
	}
	if err := f.world.redis.copy(kept); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, f.patience)
	defer cancel()
	// What is acknowledged since the copy was made has to be there afterwards: this is, whatever clients do.
	if _, err := f.volume(ctx, "kept"); err != nil {
		return err
	}
	f.more(ctx, 60)
	return f.rewind(ctx, loaded, func() error { return f.world.redis.rewind(kept) })
}

// cutLog has the server come back without the end of its log.
func (f *faults) cutLog(ctx context.Context, p planned) error {
	return f.rewind(ctx, false, func() error { return f.world.redis.truncate(p.Bytes) })
}

// rewind has the server come back with older data, once the nodes' journals have all that there is: nothing may be lost then,
// and the catalog has to come back into service by itself. There is no traffic meanwhile but a probe; if loaded, only until the journals
// have everything. The standby stays away until then: it has not led, does not know which nodes there are, and would wait for an operator.
func (f *faults) rewind(ctx context.Context, loaded bool, change func() error) error {
	f.traffic.gate.Lock()
	unlock := sync.OnceFunc(f.traffic.gate.Unlock)
	defer unlock()
	ctx, cancel := context.WithTimeout(ctx, f.patience)
	defer cancel()
	var head *dormousev1.HistoryPoint
	if err := until(ctx, "the journals have everything", func() (err error) { head, err = f.settled(ctx); return err }); err != nil {
		return err
	}
	leading, err := f.oneLink(ctx, planned{Leader: true})
	if err != nil {
		return err
	}
	began := f.traffic.now()
	if loaded {
		unlock()
	}
	if err := f.world.redis.kill(); err != nil {
		return err
	}
	if err := change(); err != nil {
		return err
	}
	if err := f.world.redis.up(ctx); err != nil {
		return err
	}
	older, err := f.state(ctx)
	if err != nil {
		return err
	}
	leading.set(func(l *link) { l.refuse = false })
	if err := until(ctx, "the catalog is in service again", func() error { return f.resumed(ctx, head, older) }); err != nil {
		return err
	}
	w := window{began, f.traffic.now()}
	f.windows = append(f.windows, w)
	f.links(func(l *link) { l.refuse = false })
	if loaded {
		f.traffic.typed(w)
	}
	return nil
}

// settled closes the links, if the journals have all that the server has, and gives the point.
func (f *faults) settled(ctx context.Context) (*dormousev1.HistoryPoint, error) {
	st, err := f.world.operator[0].CatalogStatus(ctx)
	if err != nil {
		return nil, err
	}
	head := st.GetHead()
	for _, j := range st.GetJournals() {
		if !j.GetOnline() || j.GetPoint().GetSeq() != head.GetSeq() || j.GetPoint().GetIncarnation() != head.GetIncarnation() {
			return nil, fmt.Errorf("the journal of node %s is at %v, the catalog at %v", j.GetNode(), j.GetPoint(), head)
		}
	}
	f.links(func(l *link) { l.refuse = true })
	for _, l := range f.world.link {
		l.cut()
	}
	now, err := f.state(ctx)
	if err == nil && now.seq != head.GetSeq() {
		err = fmt.Errorf("the catalog went on to %d", now.seq)
	}
	if err != nil {
		f.links(func(l *link) { l.refuse = false })
		return nil, err
	}
	return head, nil
}

// catalogState is what the server has.
type catalogState struct {
	seq         uint64
	incarnation string
	suspended   bool
}

func (f *faults) state(ctx context.Context) (catalogState, error) {
	p := f.world.redis.client.TxPipeline()
	seq, incarnation, suspended := p.Get(ctx, keyPrefix+"seq"), p.Get(ctx, keyPrefix+"incarnation"), p.Exists(ctx, keyPrefix+"suspended")
	if _, err := p.Exec(ctx); err != nil {
		return catalogState{}, err
	}
	n, err := seq.Uint64()
	return catalogState{n, incarnation.Val(), suspended.Val() > 0}, err
}

// resumed tells whether the catalog goes on: repaired, or as if nothing had happened, which the checker will notice.
func (f *faults) resumed(ctx context.Context, before *dormousev1.HistoryPoint, older catalogState) error {
	call, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	for _, c := range f.world.user {
		if _, err := c.CreateVolume(call, &dormousev1.CreateVolumeRequest{}); err == nil {
			break
		}
	}
	now, err := f.state(ctx)
	switch {
	case err != nil:
		return err
	case now.suspended:
		return errors.New("it is suspended")
	case now.incarnation != before.GetIncarnation():
		return nil
	case older.seq >= before.GetSeq():
		return nil // what was cut off was no commit
	case now.seq > older.seq:
		return nil // it was taken for the one that it was
	}
	return errors.New("nobody has noticed yet")
}
