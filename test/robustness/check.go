package robustness

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/anishathalye/porcupine"

	"github.com/dormouse-run/dormouse/pkg/errs"
)

// window is a time in which the catalog may be an older one: from the kill of a server that comes back with older data until
// the catalog is in service again. Reads of then promise nothing, nor does a refusal that is founded on one.
type window struct{ from, to time.Duration }

func (w window) has(r *Record) bool { return r.Call <= w.to && r.Return >= w.from }

// checker makes a history of each cell and has it checked.
type checker struct {
	records []*Record
	objects map[string]*object
	byUID   map[string]string
	windows []window
	losses  []loss
	limit   time.Duration
}

// partition is the history of one cell.
type partition struct {
	cell
	events []porcupine.Operation
	index  map[string]int // thing by operation
	// alone are the histories of each thing by itself, with what lists saw of it. A list is no read of one moment, so that its
	// objects are read one by one; all in one history would only make the checker try their orders.
	alone []*partition
}

// uncheckable is in what is said of a history that takes too long.
const uncheckable = "could not be checked within"

// check gives what is wrong. A history that could not be checked within the limit is wrong. Each object by itself is checked first, since
// that is soon done.
func (c *checker) check(cells int) (wrong []string, steps int) {
	for n := range cells {
		p := c.partition(n)
		parts := append(slices.Clone(p.alone), p.split()...)
		for i, part := range parts {
			steps += len(part.events)
			what := fmt.Sprintf("cell %d", n)
			if i < len(p.alone) {
				what += ", an object by itself,"
			}
			if verdict := part.check(c.limit); verdict != "" {
				wrong = append(wrong, what+verdict)
				break
			}
		}
	}
	return wrong, steps
}

// check gives "" for a history that is linearizable.
func (p *partition) check(limit time.Duration) string {
	model := porcupine.Model{
		Init:  func() any { return p.initial() },
		Step:  func(state, input, _ any) (bool, any) { return p.advance(state.(string), input.(event)) },
		Equal: func(a, b any) bool { return a == b },
	}
	result, info := porcupine.CheckOperationsVerbose(model, p.events, limit)
	switch result {
	case porcupine.Ok:
		return ""
	case porcupine.Unknown:
		return fmt.Sprintf(" "+uncheckable+" %s:\n%s", limit, p.explain(info))
	}
	return " is not linearizable:\n" + p.explain(info)
}

// explain tells how far the checker came: the operations after the longest beginning that can be put in order.
func (p *partition) explain(info porcupine.LinearizationInfo) string {
	var longest []int
	for _, all := range info.PartialLinearizations() {
		for _, one := range all {
			if len(one) > len(longest) {
				longest = one
			}
		}
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%d of %d steps can be put in order; of the others the earliest are\n", len(longest), len(p.events))
	rest := make([]porcupine.Operation, 0, len(p.events))
	for i, e := range p.events {
		if !slices.Contains(longest, i) {
			rest = append(rest, e)
		}
	}
	slices.SortFunc(rest, func(a, b porcupine.Operation) int { return int(a.Return - b.Return) })
	for _, e := range rest[:min(len(rest), 6)] {
		in := e.Input.(event)
		fmt.Fprintf(&b, "  step %d on thing %d (%s): %s\n", in.kind, in.thing, in.phase, in.record)
	}
	b.WriteString(p.concerning(rest[:min(len(rest), 3)]))
	set := p.initial()
	for _, i := range longest {
		if ok, next := p.advance(set, p.events[i].Input.(event)); ok {
			set = next
		}
	}
	states := strings.Split(set, between)
	fmt.Fprintf(&b, "  %d states are possible there, such as\n", len(states))
	for op, i := range p.index {
		if s := states[0][i]; s&stateMask != none && s&stateMask != gone {
			fmt.Fprintf(&b, "    thing %d, %s %q of operation %s: state %d flags %x\n", i, p.things[i].kind, p.things[i].name, op, s&stateMask, s&^stateMask)
		}
	}
	return b.String()
}

// concerning lists the records of everything that the steps are about, as far as they change it, in the order of their calls.
func (p *partition) concerning(steps []porcupine.Operation) string {
	about := make(map[int]bool)
	for _, s := range steps {
		in := s.Input.(event)
		about[in.thing], about[in.other] = true, true
		for _, n := range in.refs {
			about[n] = true
		}
	}
	var b strings.Builder
	b.WriteString("  what was done to the things of the first of them:\n")
	said := make(map[*Record]bool)
	for _, e := range slices.SortedFunc(slices.Values(p.events), func(a, b porcupine.Operation) int { return int(a.Call - b.Call) }) {
		in := e.Input.(event)
		if about[in.thing] && in.kind <= unname && !said[in.record] {
			said[in.record] = true
			fmt.Fprintf(&b, "    thing %d: %s\n", in.thing, in.record)
		}
	}
	return b.String()
}

func (c *checker) partition(n int) *partition {
	p := &partition{index: make(map[string]int)}
	var mine []*Record
	for _, r := range c.records {
		if r.Cell != n && r.Cell >= 0 {
			continue
		}
		mine = append(mine, r)
		if o := c.objects[r.Op]; o != nil && o.cell == n {
			if kind, creates := created(r.Kind); creates {
				p.index[r.Op] = len(p.things)
				p.things = append(p.things, thing{kind: kind, name: r.Name, target: -1, loose: r.Outcome == Unknown,
					overtaken: r.Outcome == Failed && r.Reason == string(errs.WrongPhase)})
			}
		}
	}
	for op, i := range p.index {
		if target, ok := p.index[c.objects[op].target]; ok {
			p.things[i].target = target
		}
	}
	for _, t := range p.things {
		one := t
		one.target = -1
		p.alone = append(p.alone, &partition{cell: cell{things: []thing{one}, alone: true}})
	}
	for _, r := range mine {
		c.enter(p, r)
	}
	for _, l := range c.losses {
		r := &Record{Worker: -1, Cell: n, Kind: word, Op: l.why, Call: l.at, Return: l.at, Outcome: OK}
		for kind, ops := range map[eventKind]map[string]bool{lose: l.lost, regain: l.regained, unname: l.unnamed} {
			for op := range ops {
				if i, ok := p.index[op]; ok {
					p.add(r, event{kind: kind, thing: i})
				}
			}
		}
	}
	return p
}

// add puts an event into the history, and into that of the thing by itself where it is about that alone.
func (p *partition) add(r *Record, e event) {
	if e.kind <= seeNothing {
		p.addAlone(r, e)
	}
	p.append(r, e)
}

func (p *partition) addAlone(r *Record, e event) {
	one := p.alone[e.thing]
	e.thing = 0
	one.append(r, e)
}

func (p *partition) append(r *Record, e event) {
	e.record = r
	worker := r.Worker
	if worker < 0 {
		worker = workers + 1
	}
	call, back := r.Call.Nanoseconds(), r.Return.Nanoseconds()
	if e.kind == mayAccept || e.kind == mayRemove {
		back = call // the sooner something becomes possible, the more is
	}
	p.events = append(p.events, porcupine.Operation{ClientId: worker, Input: e, Call: call, Return: back})
}

// enter makes the events of a record.
func (c *checker) enter(p *partition, r *Record) {
	inWindow := slices.ContainsFunc(c.windows, func(w window) bool { return w.has(r) })
	if _, creates := created(r.Kind); creates {
		c.enterCreation(p, r, p.index[r.Op], inWindow)
		return
	}
	switch r.Kind {
	case DeleteVolume, Detach, DeleteSnapshot:
		c.enterDeletion(p, r, p.index[r.Target], inWindow)
	case GetVolume, GetSandbox, GetSnapshot:
		if r.Outcome == OK && !inWindow {
			c.enterGet(p, r, p.index[r.Target])
		}
	case ListVolumes, ListSandboxes, ListSnapshots:
		if r.Outcome == OK && !inWindow {
			c.enterList(p, r)
		}
	}
}

func (c *checker) enterCreation(p *partition, r *Record, i int, inWindow bool) {
	switch r.Outcome {
	case OK:
		p.add(r, event{kind: accept, thing: i})
		p.add(r, event{kind: finish, thing: i})
	case Failed:
		p.add(r, event{kind: accept, thing: i})
		p.add(r, event{kind: fail, thing: i})
		p.add(r, event{kind: forget, thing: i})
	case Unknown:
		p.add(r, event{kind: mayAccept, thing: i})
	case Refused:
		if !inWindow {
			c.enterRefusal(p, r, i)
		}
	}
}

func (c *checker) enterDeletion(p *partition, r *Record, i int, inWindow bool) {
	switch r.Outcome {
	case OK:
		p.add(r, event{kind: remove, thing: i})
		p.add(r, event{kind: removed, thing: i})
	case Unknown, Failed:
		p.add(r, event{kind: mayRemove, thing: i})
	case Refused:
		if !inWindow {
			c.enterRefusal(p, r, i)
		}
	}
}

// resolve gives the thing of a uid, or -1.
func (c *checker) resolve(p *partition, uid string) int {
	if i, ok := p.index[c.byUID[uid]]; ok {
		return i
	}
	return -1
}

// enterRefusal makes the event of a refusal. The thing is what was to be created or deleted; some refusals are of its target.
func (c *checker) enterRefusal(p *partition, r *Record, i int) {
	about := i
	if _, creates := created(r.Kind); creates && r.Reason != string(errs.NameTaken) {
		about = p.things[i].target
	}
	switch errs.Reason(r.Reason) {
	case errs.NameTaken:
		p.add(r, event{kind: sayTaken, thing: i, other: c.resolve(p, r.Details["uid"])})
	case errs.AlreadyAttached:
		holder := r.Details["holder"]
		p.add(r, event{kind: sayAttached, thing: about, other: c.resolve(p, holder[strings.LastIndexByte(holder, '/')+1:])})
	case errs.StillReferenced:
		var refs []int
		for name := range strings.SplitSeq(r.Details["references"], ",") {
			if n := c.resolve(p, name[strings.LastIndexByte(name, '/')+1:]); n >= 0 {
				refs = append(refs, n)
			}
		}
		p.add(r, event{kind: sayNeeded, thing: about, refs: refs})
	case errs.WrongPhase:
		p.add(r, event{kind: sayPhase, thing: about, phase: strings.ToUpper(r.Details["phase"])})
	case errs.StaleUID:
		if r.Details["current_uid"] == "" { // it went between the look and the commit
			p.add(r, event{kind: sayGoneAtAll, thing: about})
			return
		}
		p.add(r, event{kind: sayStale, thing: about, other: c.resolve(p, r.Details["current_uid"])})
	case errs.ObjectNotFound:
		kind := sayNotFound
		// Tombstones are not rebuilt, so that who had a name is not known after a rewind.
		if slices.ContainsFunc(c.windows, func(w window) bool { return w.from <= r.Return }) {
			kind = sayGoneAtAll
		}
		p.add(r, event{kind: kind, thing: about})
	}
}

func (c *checker) enterGet(p *partition, r *Record, i int) {
	if r.Absent {
		p.add(r, event{kind: seeNothing, thing: i})
		return
	}
	seen := r.Seen[0]
	p.add(r, event{kind: seePhase, thing: i, phase: seen.Phase})
	if r.Kind != GetVolume {
		return
	}
	var refs []int
	for _, uid := range append(slices.Clone(seen.Sandboxes), seen.Snapshots...) {
		n := c.resolve(p, uid)
		if n < 0 {
			return // of one whose creation is unknown and that nobody has seen
		}
		refs = append(refs, n)
	}
	slices.Sort(refs)
	p.add(r, event{kind: seeRefs, thing: i, refs: refs})
}

// enterList makes a read of each object of it. A list is no read of one moment: each object is read by itself.
func (c *checker) enterList(p *partition, r *Record) {
	seen := make(map[string]Seen)
	for _, s := range r.Seen {
		seen[s.Op] = s
	}
	kind := map[Kind]objectKind{ListVolumes: volumeKind, ListSandboxes: sandboxKind, ListSnapshots: snapshotKind}[r.Kind]
	for op, i := range p.index {
		t := p.things[i]
		if t.kind != kind || r.Name != "" && t.name != r.Name {
			continue
		}
		if s, ok := seen[op]; ok {
			p.addAlone(r, event{kind: seePhase, thing: i, phase: s.Phase})
		} else if c.mayLive(op, r) {
			p.addAlone(r, event{kind: seeNothing, thing: i})
		}
	}
}

// mayLive tells whether it says anything that a read did not find the object: it does not where it was never there, or is
// gone for certain.
func (c *checker) mayLive(op string, read *Record) bool {
	for _, r := range c.records {
		if r.Op == op && (r.Call > read.Return || r.Outcome == Refused || r.Outcome == NotStarted) {
			return false
		}
		if r.Target == op && r.Outcome == OK && (r.Kind == DeleteVolume || r.Kind == Detach || r.Kind == DeleteSnapshot) && r.Return < read.Call {
			return false
		}
	}
	return true
}
