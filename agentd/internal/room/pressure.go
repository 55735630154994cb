package room

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/dormouse-run/dormouse/pkg/config"
)

// Level says how short memory is.
type Level int

// The levels, from the least.
const (
	None Level = iota
	Some
	High
)

func (l Level) String() string { return [...]string{"none", "some", "high"}[l] }

const (
	// lookEvery is how often pressure is looked at, lowEvery how often Low is called while it lasts.
	lookEvery = time.Second
	lowEvery  = 10 * time.Second
	// Above stalled percent of the time with somebody waiting for memory pressure begins, below calm it ends.
	stalled, calm = 25, 10
	// headroomShare of the limit, or the reserve if that is more, is the headroom above the reserve.
	headroomShare = 20
	// easeShare of the limit more must be available before a level is left than where it began.
	easeShare = 100
)

// Figures are the room's for who reports them.
type Figures struct {
	Level                                          Level
	Available, Used, Requested, Unclaimed, Reserve int64
	Waiting                                        int
}

// Problem says why nothing is started, or is empty.
func (f Figures) Problem() string {
	if f.Level < High {
		return ""
	}
	return fmt.Sprintf("%s of memory is available, %s is to be left", config.FormatBytes(f.Available), config.FormatBytes(f.Reserve))
}

// Figures reads anew, within bounds, and gives them.
func (r *Room) Figures() (Figures, error) {
	r.refresh(false)
	r.mu.Lock()
	defer r.mu.Unlock()
	f := Figures{Level: r.level, Available: r.available(), Used: r.used, Reserve: r.o.Reserve, Waiting: len(r.waiting)}
	f.Requested, f.Unclaimed = r.sums()
	return f, r.broken
}

// Pressure gives the level, and a channel that is closed when it is another.
func (r *Room) Pressure() (Level, <-chan struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.level, r.changed
}

// Run looks at pressure until ctx ends, and calls Low while it lasts.
func (r *Room) Run(ctx context.Context) {
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	var low time.Time
	for {
		r.refreshAsked()
		if r.o.Requested != nil {
			r.o.Requested(r.requested())
		}
		if level, _ := r.Pressure(); level > None && r.o.Low != nil && r.o.Now().Sub(low) >= lowEvery {
			r.o.Low(ctx)
			low = r.o.Now()
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

func (r *Room) requested() int64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	requests, _ := r.sums()
	return requests
}

// refresh reads the machine's figures. Those of a thousand sandboxes take a while: who would be refused waits for them, all others have
// them read by Run, so that a start that fits is not held up.
func (r *Room) refresh(refused bool) {
	r.reading.Lock()
	defer r.reading.Unlock()
	if refused {
		r.sampleAfter(urgent * r.took)
	} else {
		r.asked = true
	}
	r.look()
}

// refreshAsked is Run's.
func (r *Room) refreshAsked() {
	r.reading.Lock()
	defer r.reading.Unlock()
	if r.asked {
		r.sampleAfter(max(relaxed*r.took, freshest))
	}
	r.look()
}

// sampleAfter samples unless that was done within the pause. It wants reading.
func (r *Room) sampleAfter(pause time.Duration) {
	now := r.o.Now()
	if !r.sampled.IsZero() && now.Sub(r.sampled) < pause {
		return
	}
	r.sample()
	r.asked, r.sampled = false, r.o.Now()
	r.took = r.sampled.Sub(now)
}

// sample reads what each sandbox uses. It wants reading.
func (r *Room) sample() {
	r.mu.Lock()
	uids := make([]string, 0, len(r.shares))
	for uid := range r.shares {
		uids = append(uids, uid)
	}
	r.mu.Unlock()
	used, failed := make(map[string]int64, len(uids)), error(nil)
	for _, uid := range uids {
		n, err := r.o.Source.UsedBy(uid)
		if err != nil {
			failed = err
			continue // it counts as before
		}
		used[uid] = n
	}
	if failed != nil {
		r.o.Log.Warn("read the memory of the sandboxes", "error", failed)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for uid, n := range used {
		if s := r.shares[uid]; s != nil {
			s.used = n
		}
	}
}

// look reads the figures of the machine and of all sandboxes together, and settles the level. It wants reading.
func (r *Room) look() {
	m, err := r.o.Source.Machine()
	used, usedErr := r.o.Source.Used()
	err = errors.Join(err, usedErr)
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.broken = err; err != nil {
		r.o.Log.Error("read the machine's memory; nothing is started meanwhile", "error", err)
		return
	}
	r.machine, r.used = m, used
	if next := r.levelNow(); next != r.level {
		r.o.Log.Warn("memory pressure", "was", r.level.String(), "is", next.String(), "available", r.available(), "reserve", r.o.Reserve, "stalled_percent", m.Stalled)
		r.level = next
		close(r.changed)
		r.changed = make(chan struct{})
	}
}

// levelNow wants the lock.
func (r *Room) levelNow() Level {
	available, limit := r.available(), r.limit()
	headroom := max(r.o.Reserve, limit/headroomShare)
	ease := func(at Level) int64 {
		if r.level >= at {
			return limit / easeShare
		}
		return 0
	}
	switch {
	case available < r.o.Reserve+ease(High):
		return High
	case available < r.o.Reserve+headroom+ease(Some), r.machine.Stalled > stalled, r.level >= Some && r.machine.Stalled > calm:
		return Some
	}
	return None
}
