package robustness

import (
	"cmp"
	"slices"
)

// A history is linearizable if those of its independent parts are, and checking them apart costs the sum of what they cost, and not the product.

// title is a name, which one thing of a kind has at a time.
type title struct {
	kind objectKind
	name string
}

// names tells whether the step is about its other thing, too.
func (e event) names() bool {
	return e.other >= 0 && (e.kind == sayTaken || e.kind == sayAttached || e.kind == sayStale)
}

// split gives the histories of the things that have nothing to do with each other: neither refers to the other, nor has its name, nor is one named
// where the other was asked for.
func (p *partition) split() []*partition {
	root := make([]int, len(p.things))
	for i := range root {
		root[i] = i
	}
	var find func(i int) int
	find = func(i int) int {
		if root[i] != i {
			root[i] = find(root[i])
		}
		return root[i]
	}
	first := make(map[title]int)
	for i, t := range p.things {
		if t.target >= 0 {
			root[find(i)] = find(t.target)
		}
		if t.name == "" {
			continue
		}
		if other, ok := first[title{t.kind, t.name}]; ok {
			root[find(i)] = find(other)
		} else {
			first[title{t.kind, t.name}] = i
		}
	}
	for _, e := range p.events {
		in := e.Input.(event)
		for _, other := range in.refs {
			root[find(in.thing)] = find(other)
		}
		if in.names() {
			root[find(in.thing)] = find(in.other)
		}
	}
	parts := make(map[int]*partition)
	place := make([]int, len(p.things))
	for i, t := range p.things {
		part := parts[find(i)]
		if part == nil {
			part = &partition{index: make(map[string]int)}
			parts[find(i)] = part
		}
		place[i] = len(part.things)
		part.things = append(part.things, t)
	}
	for op, i := range p.index {
		parts[find(i)].index[op] = place[i]
	}
	for i, t := range p.things {
		if t.target >= 0 {
			parts[find(i)].things[place[i]].target = place[t.target]
		}
	}
	for _, e := range p.events {
		in := e.Input.(event)
		part := parts[find(in.thing)]
		in.refs = slices.Clone(in.refs)
		for i, n := range in.refs {
			in.refs[i] = place[n]
		}
		if in.names() {
			in.other = place[in.other]
		}
		in.thing = place[in.thing]
		e.Input = in
		part.events = append(part.events, e)
	}
	all := make([]*partition, 0, len(parts))
	for _, part := range parts {
		all = append(all, part)
	}
	slices.SortFunc(all, func(a, b *partition) int { return cmp.Compare(len(a.events), len(b.events)) })
	return all
}
