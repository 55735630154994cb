package model

import (
	"fmt"
	"hash/maphash"
	"slices"
	"strings"
)

// Found is what a search came to.
type Found struct {
	States int
	Depth  int
	// Err is the invariant that does not hold, and Trace the shortest way there. Nil: all states hold all of them.
	Err   error
	Trace []Action
}

func (f Found) String() string {
	if f.Err == nil {
		return fmt.Sprintf("%d states, %d steps deep: all invariants hold", f.States, f.Depth)
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%v\nafter %d states, by this way:\n", f.Err, f.States)
	for i, a := range f.Trace {
		fmt.Fprintf(&b, "%3d %s\n", i+1, a)
	}
	return b.String()
}

// from is how a state was first reached.
type from struct {
	parent  int
	action  Action
	swapped bool // the coordinators changed names in it
}

// Search visits every state that the rules allow from the beginning, nearest first. States are told apart by 64 bits of a hash.
func (r Rules) Search(begin State) (found Found) {
	seed := maphash.MakeSeed()
	known := map[uint64]struct{}{maphash.Comparable(seed, begin): {}}
	reached := []from{{parent: -1}}
	type visit struct {
		state State
		id    int
	}
	level := []visit{{begin, 0}}
	for len(level) > 0 && found.Err == nil {
		var next []visit
		for i := range level {
			v := &level[i]
			r.next(&v.state, func(a Action, t *State, err error) {
				if found.Err != nil {
					return
				}
				if err != nil {
					found.Err, found.Trace = err, trace(reached, from{parent: v.id, action: a})
					return
				}
				to := *t
				swapped := to.canonical()
				h := maphash.Comparable(seed, to)
				if _, ok := known[h]; ok {
					return
				}
				known[h] = struct{}{}
				reached = append(reached, from{v.id, a, swapped})
				next = append(next, visit{to, len(reached) - 1})
			})
		}
		if level = next; len(level) > 0 {
			found.Depth++
		}
	}
	found.States = len(known)
	return found
}

// trace is the way to a step, with the names that coordinators had in the beginning.
func trace(reached []from, last from) []Action {
	way := []from{last}
	for last.parent > 0 {
		last = reached[last.parent]
		way = append(way, last)
	}
	slices.Reverse(way)
	actions := make([]Action, len(way))
	swapped := false
	for i, w := range way {
		if swapped && w.action.Coordinator != 0 {
			w.action.Coordinator = coordinators + 1 - w.action.Coordinator
		}
		actions[i] = w.action
		swapped = swapped != w.swapped
	}
	return actions
}
