package robustness

import (
	"slices"
	"testing"
	"time"

	"github.com/dormouse-run/dormouse/pkg/errs"
)

// told is a history that somebody could be told: the records are one after another, unless a call is moved.
type told struct{ *history }

func (h told) tell(r Record) *Record {
	outcome, uid, seen, absent := r.Outcome, r.UID, r.Seen, r.Absent
	h.begin(&r)
	h.end(&r, func() { r.Outcome, r.UID, r.Seen, r.Absent = outcome, uid, seen, absent })
	n := time.Duration(r.Number)
	r.Call, r.Return = 2*n, 2*n+1
	return h.records[r.Number]
}

func (h told) verdict() []string {
	records, objects, byUID, wrong := h.snapshot()
	c := &checker{records: records, objects: objects, byUID: byUID, limit: time.Minute}
	more, _ := c.check(1)
	return append(wrong, more...)
}

// begun is a volume, a sandbox that holds it, and a snapshot.
func begun() told {
	h := told{newHistory()}
	h.tell(Record{Kind: CreateVolume, Op: "v", Name: "a", UID: "V", Outcome: OK})
	h.tell(Record{Kind: Attach, Op: "s", Name: "a", Target: "v", UID: "S", Outcome: OK})
	h.tell(Record{Kind: Publish, Op: "p", Target: "s", UID: "P", Outcome: OK})
	return h
}

func refusal(kind Kind, op, target string, reason errs.Reason, details map[string]string) Record {
	return Record{Kind: kind, Op: op, Name: "a", Target: target, Outcome: Refused, Reason: string(reason), Details: details}
}

// TestTheModel: what may be told, and what may not.
func TestTheModel(t *testing.T) {
	for name, c := range map[string]struct {
		good bool
		tell func(h told)
	}{
		"a life": {true, func(h told) {
			h.tell(refusal(CreateVolume, "v2", "", errs.NameTaken, map[string]string{"uid": "V"}))
			h.tell(refusal(Attach, "s2", "v", errs.AlreadyAttached, map[string]string{"holder": "sandbox/S"}))
			h.tell(Record{Kind: Detach, Op: "d", Target: "s", Outcome: OK})
			h.tell(refusal(DeleteVolume, "dv", "v", errs.StillReferenced, map[string]string{"references": "P"}))
			h.tell(Record{Kind: GetVolume, Op: "g", Target: "v", Outcome: OK, Seen: []Seen{{Op: "v", UID: "V", Phase: "READY", Snapshots: []string{"P"}}}})
			h.tell(Record{Kind: DeleteSnapshot, Op: "dp", Target: "p", Outcome: OK})
			h.tell(Record{Kind: DeleteVolume, Op: "dv2", Target: "v", Outcome: OK})
			h.tell(refusal(DeleteVolume, "dv3", "v", errs.ObjectNotFound, nil))
			h.tell(Record{Kind: CreateVolume, Op: "v3", Name: "a", UID: "V3", Outcome: OK})
			h.tell(refusal(Attach, "s3", "v", errs.StaleUID, map[string]string{"current_uid": "V3"}))
		}},
		"the name is free": {false, func(h told) {
			h.tell(Record{Kind: CreateVolume, Op: "v2", Name: "b", UID: "V2", Outcome: OK})
			h.tell(Record{Kind: DeleteVolume, Op: "dv", Target: "v2", Outcome: OK})
			h.tell(Record{Kind: CreateVolume, Op: "v3", Name: "b", Outcome: Refused, Reason: string(errs.NameTaken), Details: map[string]string{"uid": "V2"}})
		}},
		"two volumes of a name": {false, func(h told) { h.tell(Record{Kind: CreateVolume, Op: "v2", Name: "a", UID: "V2", Outcome: OK}) }},
		"attached twice":        {false, func(h told) { h.tell(Record{Kind: Attach, Op: "s2", Name: "b", Target: "v", UID: "S2", Outcome: OK}) }},
		"deleted under a snapshot": {false, func(h told) {
			h.tell(Record{Kind: Detach, Op: "d", Target: "s", Outcome: OK})
			h.tell(Record{Kind: DeleteVolume, Op: "dv", Target: "v", Outcome: OK})
		}},
		"the reference is lost": {false, func(h told) {
			h.tell(Record{Kind: GetVolume, Op: "g", Target: "v", Outcome: OK, Seen: []Seen{{Op: "v", UID: "V", Phase: "READY", Sandboxes: []string{"S"}}}})
		}},
		"the deleted comes back": {false, func(h told) {
			h.tell(Record{Kind: DeleteSnapshot, Op: "dp", Target: "p", Outcome: OK})
			h.tell(Record{Kind: ListSnapshots, Op: "l", Cell: -1, Outcome: OK, Seen: []Seen{{Op: "p", UID: "P", Phase: "READY"}}})
		}},
		"what was acknowledged is lost": {false, func(h told) { h.tell(Record{Kind: GetSandbox, Op: "g", Target: "s", Outcome: OK, Absent: true}) }},
		"a list leaves it out":          {false, func(h told) { h.tell(Record{Kind: ListSnapshots, Op: "l", Cell: -1, Outcome: OK}) }},
		"the heir is not named": {false, func(h told) {
			h.tell(Record{Kind: DeleteSnapshot, Op: "dp", Target: "p", Outcome: OK})
			h.tell(Record{Kind: Detach, Op: "d", Target: "s", Outcome: OK})
			h.tell(Record{Kind: DeleteVolume, Op: "dv", Target: "v", Outcome: OK})
			h.tell(Record{Kind: CreateVolume, Op: "v3", Name: "a", UID: "V3", Outcome: OK})
			h.tell(refusal(DeleteVolume, "dv2", "v", errs.ObjectNotFound, nil))
		}},
		"said to be not started": {false, func(h told) {
			h.tell(Record{Kind: CreateVolume, Op: "v2", Name: "b", Outcome: NotStarted})
			h.tell(Record{Kind: ListVolumes, Op: "l", Name: "b", Outcome: OK, Seen: []Seen{{Op: "v2", UID: "V2", Phase: "READY"}}})
		}},
		"unknown, and there": {true, func(h told) {
			h.tell(Record{Kind: CreateVolume, Op: "v2", Name: "b", Outcome: Unknown})
			h.tell(Record{Kind: ListVolumes, Op: "l", Name: "b", Outcome: OK})
			h.tell(Record{Kind: ListVolumes, Op: "l2", Name: "b", Outcome: OK, Seen: []Seen{{Op: "v2", UID: "V2", Phase: "CREATING"}}})
		}},
		"unknown, and never there": {true, func(h told) {
			h.tell(Record{Kind: Detach, Op: "d", Target: "s", Outcome: Unknown})
			h.tell(Record{Kind: GetSandbox, Op: "g", Target: "s", Outcome: OK, Seen: []Seen{{Op: "s", UID: "S", Phase: "RUNNING"}}})
		}},
		"unknown, there and back": {false, func(h told) {
			h.tell(Record{Kind: Detach, Op: "d", Target: "s", Outcome: Unknown})
			h.tell(Record{Kind: GetSandbox, Op: "g", Target: "s", Outcome: OK, Absent: true})
			h.tell(Record{Kind: GetSandbox, Op: "g2", Target: "s", Outcome: OK, Seen: []Seen{{Op: "s", UID: "S", Phase: "RUNNING"}}})
		}},
		"applied twice": {false, func(h told) {
			h.tell(Record{Kind: ListVolumes, Op: "l", Name: "a", Outcome: OK, Seen: []Seen{{Op: "v", UID: "V", Phase: "READY"}, {Op: "v", UID: "V2", Phase: "READY"}}})
		}},
	} {
		h := begun()
		c.tell(h)
		if wrong := h.verdict(); (len(wrong) == 0) != c.good {
			t.Errorf("%s: %v", name, wrong)
		}
	}
}

// TestTheModelOfALoss: what an operator's word gave up may be gone or as it was before, once and for all; what comes back then has been resurrected, unless
// the next word was told of it.
func TestTheModelOfALoss(t *testing.T) {
	for name, c := range map[string]struct{ good, regained, back bool }{
		"gone":              {true, false, false},
		"resurrected":       {false, false, true},
		"told to come back": {true, true, true},
	} {
		h := begun()
		h.tell(Record{Kind: ListSnapshots, Op: "l", Cell: -1, Outcome: OK})
		if c.back {
			h.tell(Record{Kind: GetSnapshot, Op: "g", Target: "p", Outcome: OK, Seen: []Seen{{Op: "p", UID: "P", Phase: "READY"}}})
		} else {
			h.tell(Record{Kind: GetSnapshot, Op: "g", Target: "p", Outcome: OK, Absent: true})
		}
		records, objects, byUID, wrong := h.snapshot()
		lost := h.records[3].Call - 1 // between the records
		losses := []loss{{at: lost, lost: map[string]bool{"p": true}}}
		if c.regained {
			losses = append(losses, loss{at: h.records[3].Return + 1, regained: map[string]bool{"p": true}})
		}
		h.records[4].Call, h.records[4].Return = h.records[4].Call+2, h.records[4].Return+2
		more, _ := (&checker{records: records, objects: objects, byUID: byUID, losses: losses, limit: time.Minute}).check(1)
		if wrong = append(wrong, more...); (len(wrong) == 0) != c.good {
			t.Errorf("%s: %v", name, wrong)
		}
	}
}

// TestIndependentPartsAreCheckedApart: what shares no name and refers to nothing of the other; a step is in the part of what it is about.
func TestIndependentPartsAreCheckedApart(t *testing.T) {
	h := begun()
	h.tell(Record{Kind: CreateVolume, Op: "b", Name: "b", UID: "B", Outcome: OK})
	h.tell(Record{Kind: Attach, Op: "t", Name: "b", Target: "b", UID: "T", Outcome: OK})
	h.tell(Record{Kind: Publish, Op: "q", Target: "t", UID: "Q", Outcome: OK})
	h.tell(refusal(DeleteVolume, "db", "b", errs.StillReferenced, map[string]string{"references": "T,Q"}))
	h.tell(Record{Kind: CreateVolume, Op: "c", Name: "c", UID: "C", Outcome: OK})
	h.tell(refusal(CreateVolume, "a2", "", errs.NameTaken, map[string]string{"uid": "V"}))
	records, objects, byUID, _ := h.snapshot()
	p := (&checker{records: records, objects: objects, byUID: byUID}).partition(0)
	var sizes []int
	steps := 0
	for _, part := range p.split() {
		sizes, steps = append(sizes, len(part.things)), steps+len(part.events)
		for op, i := range part.index {
			if part.things[i] != p.things[p.index[op]] && part.things[i].target < 0 {
				t.Errorf("%s is %+v, and was %+v", op, part.things[i], p.things[p.index[op]])
			}
		}
		if verdict := part.check(time.Minute); verdict != "" {
			t.Error(verdict)
		}
	}
	slices.Sort(sizes)
	if !slices.Equal(sizes, []int{1, 3, 4}) || steps != len(p.events) {
		t.Errorf("parts of %v things and %d steps, of %d and %d", sizes, steps, len(p.things), len(p.events))
	}
}
