package robustness

import (
	"fmt"
	"slices"
	"sort"
	"strings"
)

// The states of an object in the model.
const (
	none    = iota // not there yet
	being          // accepted: Creating, Pending, Starting, Preparing
	ready          // Ready, Running
	leaving        // Deleting, or a snapshot that Failed and is being removed
	gone
	failed   // a sandbox that never ran; it may still hold its volume, and has no name
	released // one that holds nothing any more
	fading   // one of these two, Deleting

	stateMask = 7
	openBit   = 8  // its creation is of unknown outcome, and may be accepted at any time
	doomedBit = 16 // so is a deletion of it
	// lostBit: an operator's word has taken it back to what it was at some time before, and what was begun then goes on by itself. Among others
	// nothing is told of it any more: what it can be is checked where it is alone.
	lostBit    = 32
	unnamedBit = 64 // it was put back without its name, if another has that
	stateCount = fading + 1
)

// thing is an object of a cell, in the model.
type thing struct {
	kind   objectKind
	name   string
	target int  // index of the volume of a sandbox, of the sandbox of a snapshot; -1 if there is none
	loose  bool // the outcome of its creation is unknown: it goes on, or fails, by itself
	// overtaken: its creation failed for a deletion; its node may have told that it runs before the creation's own step did.
	overtaken bool
}

// eventKind is an atomic step of an operation. An operation that takes several has them all in its interval, and the
// model holds them to their order.
type eventKind int

const (
	accept       eventKind = iota // the creation was accepted
	finish                        // and ended well
	fail                          // or not
	forget                        // and what was left of it is let go
	mayAccept                     // it is unknown whether: it may be from now on
	remove                        // the deletion was accepted
	removed                       // and ended
	mayRemove                     // it is unknown whether
	lose                          // the catalog lost it, as was reported: it is what it was at some time before
	regain                        // a word had given it up, and the next one found it again, as was reported: it is what it was at any time
	unname                        // it was put back without its name, as was reported
	seePhase                      // a read found the object, in a phase
	seeNothing                    // a read did not find it
	seeRefs                       // a read found exactly these referrers of a volume
	sayTaken                      // refused: the name is taken
	sayAttached                   // refused: the volume is attached
	sayNeeded                     // refused: these refer to the volume
	sayPhase                      // refused: the object is in another phase
	sayNotFound                   // refused: there is no such object, nor one of its name
	sayStale                      // refused: there is none, and its name is another's
	sayGoneAtAll                  // refused: there is none, whoever has its name
)

// event is one step.
type event struct {
	kind   eventKind
	thing  int
	other  int // who has the name or the volume; -1 where it is not known
	phase  string
	refs   []int // sorted
	record *Record
}

// cell is a part of the objects that no other refers to. Its state is a byte for each thing; what is not known is a set of states.
type cell struct {
	things []thing
	// alone: there is one thing, and what it depends on is not looked at.
	alone bool
}

func at(state string, i int) byte { return state[i] & stateMask }

func with(state string, i int, b byte) string {
	next := []byte(state)
	next[i] = next[i]&^stateMask | b
	return string(next)
}

func flagged(state string, i int, bit byte) string {
	next := []byte(state)
	next[i] |= bit
	return string(next)
}

// named tells whether the thing has its name, which no other may have then.
func named(b byte) bool { return b == being || b == ready || b == leaving }

func (c *cell) taken(state string, kind objectKind, name string) bool {
	for i, t := range c.things {
		if t.kind == kind && t.name == name && name != "" && named(at(state, i)) && state[i]&(lostBit|unnamedBit) == 0 {
			return true
		}
	}
	return false
}

// owns tells whether the thing may have its name. What was lost may have it longer: a sandbox that ran and that its node does not have any more.
func owns(s byte) bool { return named(s&stateMask) || s&lostBit != 0 }

// vague tells whether nothing is known of the thing.
func (c *cell) vague(state string, i int) bool { return !c.alone && state[i]&lostBit != 0 }

// mayTaken tells whether somebody may have the name.
func (c *cell) mayTaken(state string, kind objectKind, name string) bool {
	for i, t := range c.things {
		if t.kind == kind && t.name == name && name != "" && owns(state[i]) {
			return true
		}
	}
	return false
}

// holds tells whether a sandbox holds the volume: yes, no, or maybe.
func (c *cell) holds(state string, box, volume int) (yes, maybe bool) {
	if t := c.things[box]; t.kind != sandboxKind || t.target != volume {
		return false, false
	}
	if c.vague(state, box) {
		return false, true
	}
	switch at(state, box) {
	case being, ready, leaving:
		return true, true
	case failed, fading:
		return false, true
	}
	return false, false
}

// ofVolume tells whether it is a snapshot that refers to the volume as long as it is there.
func (c *cell) ofVolume(snapshot, volume int) bool {
	t := c.things[snapshot]
	return t.kind == snapshotKind && t.target >= 0 && c.things[t.target].target == volume
}

// needs tells whether a snapshot refers to the volume.
func (c *cell) needs(state string, snapshot, volume int) bool {
	if !c.ofVolume(snapshot, volume) {
		return false
	}
	b := at(state, snapshot)
	return b == being || b == ready || b == leaving
}

func (c *cell) held(state string, volume int) (yes bool) {
	for i := range c.things {
		if y, _ := c.holds(state, i, volume); y {
			return true
		}
	}
	return false
}

func (c *cell) needed(state string, volume int) bool {
	for i := range c.things {
		if c.needs(state, i, volume) {
			return true
		}
	}
	return false
}

// accepts gives the state after a creation was accepted, if it may be.
func (c *cell) accepts(state string, i int) (string, bool) {
	t := c.things[i]
	if at(state, i) != none || c.taken(state, t.kind, t.name) {
		return "", false
	}
	switch {
	case c.alone:
	case t.kind == sandboxKind:
		if at(state, t.target) != ready || c.held(state, t.target) {
			return "", false
		}
	case t.kind == snapshotKind:
		if at(state, t.target) != ready {
			return "", false
		}
	}
	return with(state, i, being), true
}

// removes gives the state after a deletion was accepted, if it may be.
func (c *cell) removes(state string, i int) (string, bool) {
	b := at(state, i)
	switch c.things[i].kind {
	case volumeKind:
		if b != ready && b != leaving || c.held(state, i) || c.needed(state, i) {
			return "", false
		}
	case sandboxKind:
		switch b {
		case failed, released, fading:
			return with(state, i, fading), true
		case being, ready, leaving:
		default:
			return "", false
		}
	case snapshotKind:
		if b != ready && b != leaving {
			return "", false
		}
	}
	return with(state, i, leaving), true
}

// fails gives the state after a creation that was accepted has failed. What is being deleted meanwhile is the deletion's.
func (c *cell) fails(state string, i int) (string, bool) {
	switch b := at(state, i); {
	case b == being && c.things[i].kind == sandboxKind:
		return with(state, i, failed), true
	case b == being:
		return with(state, i, leaving), true
	case b == leaving || b == gone || b == fading:
		return state, true
	}
	return "", false
}

func (c *cell) forgets(state string, i int) (string, bool) {
	switch b := at(state, i); {
	case b == failed:
		return with(state, i, released), true
	case b == leaving && c.things[i].kind != sandboxKind:
		return with(state, i, gone), true
	}
	return state, true
}

// spontaneous gives the states that follow by what is of unknown outcome.
func (c *cell) spontaneous(state string) []string {
	var next []string
	add := func(s string, ok bool) {
		if ok && s != state {
			next = append(next, s)
		}
	}
	for i, t := range c.things {
		b := at(state, i)
		if c.vague(state, i) {
			continue
		}
		if state[i]&openBit != 0 && b == none {
			add(c.accepts(state, i))
		}
		if t.overtaken && b == being {
			add(with(state, i, ready), true)
		}
		if state[i]&lostBit != 0 {
			c.strays(state, i, add)
		}
		if t.loose {
			if b == being {
				add(with(state, i, ready), true)
				add(c.fails(state, i))
			}
			if b == failed || b == leaving {
				add(c.forgets(state, i))
			}
		}
		if state[i]&doomedBit != 0 {
			add(c.removes(state, i))
			if b == leaving || b == fading {
				add(with(state, i, gone), true)
			}
		}
	}
	return next
}

// before are the states that a thing in one may have had, and that one.
var before = [stateCount][]byte{
	none:     {none},
	being:    {none, being},
	ready:    {none, being, ready},
	leaving:  {none, being, ready, leaving},
	gone:     {none, being, ready, leaving, gone, failed, released, fading},
	failed:   {none, being, failed},
	released: {none, being, failed, released},
	fading:   {none, being, failed, released, fading},
}

// strays gives the states that follow for what was lost: what was begun goes on, and a sandbox that its node does not have any more has failed.
func (c *cell) strays(state string, i int, add func(string, bool)) {
	switch b := at(state, i); b {
	case being:
		add(with(state, i, ready), true)
		add(c.fails(state, i))
	case ready:
		add(with(state, i, failed), c.things[i].kind == sandboxKind)
	case failed:
		add(with(state, i, released), true)
	case leaving, fading:
		add(with(state, i, gone), true)
	}
}

// step gives the state after the event, if it may happen in this one.
func (c *cell) step(state string, e event) (string, bool) {
	i := e.thing
	b := at(state, i)
	if c.vague(state, i) {
		return state, true
	}
	switch e.kind {
	case accept:
		return c.accepts(state, i)
	case finish:
		return with(state, i, ready), b == being
	case fail:
		return c.fails(state, i)
	case forget:
		return c.forgets(state, i)
	case mayAccept:
		return flagged(state, i, openBit), true
	case remove:
		return c.removes(state, i)
	case removed:
		return with(state, i, gone), b == leaving || b == fading || b == gone
	case mayRemove:
		return flagged(state, i, doomedBit), true
	case unname:
		return flagged(state, i, unnamedBit), true
	case seePhase:
		return state, slices.Contains(phases[c.things[i].kind][b], e.phase)
	case seeNothing:
		return state, b == none || b == gone
	case seeRefs:
		return state, c.refers(state, i, e.refs)
	}
	return state, c.refuses(state, e)
}

// phases are those that a read gives of an object in a state.
var phases = [...][stateCount][]string{
	volumeKind:   {being: {"CREATING"}, ready: {"READY"}, leaving: {"DELETING"}},
	sandboxKind:  {being: {"PENDING", "STARTING"}, ready: {"RUNNING"}, leaving: {"DELETING"}, fading: {"DELETING"}, failed: {"FAILED"}, released: {"FAILED"}},
	snapshotKind: {being: {"PREPARING"}, ready: {"READY"}, leaving: {"DELETING", "FAILED"}},
}

// refers tells whether exactly these refer to the volume.
func (c *cell) refers(state string, volume int, refs []int) bool {
	for i := range c.things {
		_, seen := slices.BinarySearch(refs, i)
		yes, maybe := c.holds(state, i, volume)
		if c.needs(state, i, volume) {
			yes, maybe = true, true
		}
		maybe = maybe || c.vague(state, i) && c.ofVolume(i, volume)
		if seen && !maybe || !seen && yes {
			return false
		}
	}
	return true
}

// attached tells whether the sandbox, or any if it is not known, may hold the volume.
func (c *cell) attached(state string, volume, box int) bool {
	for i := range c.things {
		if _, maybe := c.holds(state, i, volume); maybe && (box < 0 || box == i) {
			return true
		}
	}
	return false
}

// referred tells whether the named ones may refer to the volume, and any does. Who holds it refers to it, too.
func (c *cell) referred(state string, volume int, refs []int) bool {
	for _, i := range refs {
		if _, maybe := c.holds(state, i, volume); !maybe && !c.needs(state, i, volume) && !c.vague(state, i) {
			return false
		}
	}
	return len(refs) > 0 || c.needed(state, volume) || c.attached(state, volume, -1)
}

// refuses tells whether a refusal is justified in the state.
func (c *cell) refuses(state string, e event) bool {
	i := e.thing
	t, b := c.things[i], at(state, i)
	switch e.kind {
	case sayTaken:
		if e.other >= 0 {
			return e.other != i && owns(state[e.other])
		}
		return c.mayTaken(state, t.kind, t.name)
	case sayAttached:
		return c.attached(state, i, e.other)
	case sayNeeded:
		return c.referred(state, i, e.refs)
	case sayPhase:
		return slices.Contains(phases[t.kind][b], e.phase)
	case sayNotFound:
		return (b == none || b == gone) && !c.taken(state, t.kind, t.name)
	case sayStale:
		return (b == gone || b == none && state[i]&lostBit != 0) && (e.other < 0 && c.mayTaken(state, t.kind, t.name) || e.other >= 0 && owns(state[e.other]))
	case sayGoneAtAll:
		return b == none || b == gone
	}
	panic(fmt.Sprintf("no such event: %d", e.kind))
}

// A set of states is a string: its members sorted and joined. No state has the separator in it.
const between = "\xff"

func (c *cell) initial() string { return strings.Repeat("\x00", len(c.things)) }

// advance steps a set of states: each may first change by what is of unknown outcome.
func (c *cell) advance(set string, e event) (bool, string) {
	next := map[string]bool{}
	for s := range c.closure(set) {
		if (e.kind == lose || e.kind == regain) && !c.alone {
			next[flagged(with(s, e.thing, none), e.thing, lostBit)] = true
			continue
		}
		if e.kind == lose {
			for _, b := range before[at(s, e.thing)] {
				next[flagged(with(s, e.thing, b), e.thing, lostBit)] = true
			}
			continue
		}
		if e.kind == regain {
			for b := range byte(stateCount) {
				next[flagged(with(s, e.thing, b), e.thing, lostBit)] = true
			}
			continue
		}
		if after, ok := c.step(s, e); ok {
			next[after] = true
		}
	}
	return len(next) > 0, joined(next)
}

func (c *cell) closure(set string) map[string]bool {
	all := map[string]bool{}
	todo := strings.Split(set, between)
	for len(todo) > 0 {
		s := todo[len(todo)-1]
		todo = todo[:len(todo)-1]
		if all[s] {
			continue
		}
		all[s] = true
		todo = append(todo, c.spontaneous(s)...)
	}
	return all
}

func joined(set map[string]bool) string {
	members := make([]string, 0, len(set))
	for s := range set {
		members = append(members, s)
	}
	sort.Strings(members)
	return strings.Join(members, between)
}
