// Package activity knows when each sandbox of the node was last used: when a call into it (a process, file or port call, or a
// stream that is attached) began, went on or ended, or when it took more than a trickle of CPU. It decides nothing: the coordinator
// is told, and what becomes of an idle sandbox is an operation of its.
//
// # Invariants
//
//   - Looking at records, and commands of the coordinator, are no use.
//   - Times are kept in a file, so that a restart of agentd makes no sandbox younger; what a crash loses is at most the last Interval. A
//     sandbox of which nothing is known counts as used now.
//   - A sandbox that was just started, restored or resumed was used then.
//   - A sandbox that runs is unused only if its CPU was measured from one moment to another: one that was never measured, whose CPU cannot be read, or
//     whose counter began anew is not taken for unused. What it does is asked for at that moment, and not remembered from the last round.
package activity

import (
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"sync"
	"time"

	"github.com/dormouse-run/dormouse/pkg/durable"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
)

// Interval is how often sandboxes are looked at, CPUShare the share of a core (in thousandths) above which one is in use.
const (
	Interval = 2 * time.Second
	CPUShare = 20
)

// Box is a sandbox as recorded.
type Box struct {
	UID   string
	Phase sandbox.Phase
}

// Options of a Tracker. All but Now and Log are needed.
type Options struct {
	// Path of the file with the times.
	Path string
	// Boxes lists the sandboxes, Box gives one of them (OBJECT_NOT_FOUND), CPU what one has used of it.
	Boxes func() ([]Box, error)
	Box   func(uid string) (Box, error)
	CPU   func(ctx context.Context, uid string) (time.Duration, error)
	Now   func() time.Time
	Log   *slog.Logger
}

// Tracker keeps the times. Its methods may be called concurrently.
type Tracker struct {
	opts Options

	mu    sync.Mutex
	boxes map[string]*box
	saved map[string]time.Time // of an earlier agentd, until the sandbox is seen
	dirty bool
}

type box struct {
	last    time.Time
	users   int
	phase   sandbox.Phase
	cpu     time.Duration
	sampled time.Time // when cpu was read
	news    bool      // last is not told yet
}

// Use is when a sandbox was last used, as time gone since.
type Use struct {
	UID       string
	UnusedFor time.Duration
}

// Open reads what an earlier agentd kept. A file that cannot be read counts as none.
func Open(opts Options) *Tracker {
	if opts.Now == nil {
		opts.Now = time.Now
	}
	if opts.Log == nil {
		opts.Log = slog.New(slog.DiscardHandler)
	}
	t := &Tracker{opts: opts, boxes: make(map[string]*box), saved: make(map[string]time.Time)}
	data, err := os.ReadFile(opts.Path)
	if err == nil {
		err = json.Unmarshal(data, &t.saved)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		opts.Log.Warn("when sandboxes were last used is not known; they count as used now", "error", err)
	}
	return t
}

// Run looks at the sandboxes until the context ends, and keeps the times.
func (t *Tracker) Run(ctx context.Context) {
	every := time.NewTicker(Interval)
	defer every.Stop()
	for {
		t.Look(ctx)
		select {
		case <-every.C:
		case <-ctx.Done():
			t.keep()
			return
		}
	}
}

// Look is one round.
func (t *Tracker) Look(ctx context.Context) {
	all, err := t.opts.Boxes()
	if err != nil {
		t.opts.Log.WarnContext(ctx, "look at what sandboxes are used", "error", err)
		return
	}
	there := make(map[string]bool, len(all))
	for _, b := range all {
		there[b.UID] = true
		t.look(ctx, b)
	}
	t.mu.Lock()
	for uid, b := range t.boxes {
		if !there[uid] && b.users == 0 {
			delete(t.boxes, uid)
			t.dirty = true
		}
	}
	t.mu.Unlock()
	t.keep()
}

// look notes a sandbox as it is, and tells whether it is known what CPU it used since it was looked at before.
func (t *Tracker) look(ctx context.Context, seen Box) (measured bool) {
	t.mu.Lock()
	b := t.boxes[seen.UID]
	if b == nil {
		b = t.add(seen.UID, t.saved[seen.UID])
		delete(t.saved, seen.UID)
	}
	if seen.Phase == sandbox.Running && b.phase != sandbox.Running && b.phase != sandbox.Gone {
		t.used(b)
	}
	b.phase = seen.Phase
	t.mu.Unlock()
	switch seen.Phase {
	case sandbox.Running:
		return t.sample(ctx, seen.UID, b)
	case sandbox.Paused:
		return true // none
	}
	return false
}

// add wants the lock. A zero time is now.
func (t *Tracker) add(uid string, last time.Time) *box {
	now := t.opts.Now()
	if last.IsZero() || last.After(now) {
		last = now
	}
	b := &box{last: last, news: true}
	t.boxes[uid], t.dirty = b, true
	return b
}

// used wants the lock.
func (t *Tracker) used(b *box) {
	b.last, b.news, t.dirty = t.opts.Now(), true, true
}

// sample takes a sandbox that used more than its share of CPU since it was last asked for used. It tells whether there was a last time.
func (t *Tracker) sample(ctx context.Context, uid string, b *box) (measured bool) {
	cpu, err := t.opts.CPU(ctx, uid)
	if err != nil {
		return false // it is just going
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	now := t.opts.Now()
	if !b.sampled.IsZero() {
		spent, took := cpu-b.cpu, now.Sub(b.sampled)
		measured = spent >= 0 // else it was stopped, and goes on with a new counter
		if !measured || spent*1000 > took*CPUShare {
			t.used(b)
		}
	}
	b.cpu, b.sampled = cpu, now
	return measured
}

// Use notes that a call into the sandbox begins; the function that it gives, that it ended.
func (t *Tracker) Use(uid string) (done func()) {
	t.mu.Lock()
	defer t.mu.Unlock()
	b := t.boxes[uid]
	if b == nil {
		b = t.add(uid, time.Time{})
	}
	b.users++
	t.used(b)
	return sync.OnceFunc(func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		b.users--
		t.used(b)
	})
}

// Unused tells whether the sandbox is known not to have been used for so long, also as of now.
func (t *Tracker) Unused(ctx context.Context, uid string, long time.Duration) bool {
	seen, err := t.opts.Box(uid)
	if err != nil && !errs.Has(err, errs.ObjectNotFound) {
		t.opts.Log.WarnContext(ctx, "look at whether a sandbox is used", "sandbox", uid, "error", err)
	}
	if err != nil || !t.look(ctx, seen) {
		return false
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	b := t.boxes[uid]
	return b != nil && b.users == 0 && t.opts.Now().Sub(b.last) >= long
}

// News tells of the sandboxes that were used since it was last asked, or with all of every one.
func (t *Tracker) News(all bool) []Use {
	t.mu.Lock()
	defer t.mu.Unlock()
	now := t.opts.Now()
	var out []Use
	for uid, b := range t.boxes {
		if !all && !b.news && b.users == 0 {
			continue
		}
		b.news = false
		u := Use{UID: uid}
		if b.users == 0 {
			u.UnusedFor = max(now.Sub(b.last), 0)
		}
		out = append(out, u)
	}
	return out
}

// keep writes the times, if they changed.
func (t *Tracker) keep() {
	t.mu.Lock()
	if !t.dirty {
		t.mu.Unlock()
		return
	}
	t.dirty = false
	times := make(map[string]time.Time, len(t.boxes))
	for uid, b := range t.boxes {
		times[uid] = b.last.UTC()
	}
	t.mu.Unlock()
	if err := durable.WriteJSON(t.opts.Path, times); err != nil {
		t.opts.Log.Warn("keep when sandboxes were last used", "error", err)
		t.mu.Lock()
		t.dirty = true
		t.mu.Unlock()
	}
}
