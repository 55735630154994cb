// Package placement decides which node takes a sandbox or a volume. It is pure: what it knows is in
// its arguments; it has no clock and does no I/O.
//
// What is decided here is by what nodes said last; the node has the last word, and what it refuses for want of memory is placed again without
// it (Refused).
//
// A node fits when it is online, healthy and not cordoned, when it has the labels, the architecture, the network,
// the artefact and the volumes that are needed, and when what was asked, added to what was
// placed there, stays within what is allocatable. Of the nodes that fit, the one that is left with
// the largest free share of its scarcest resource wins, so that load spreads; ties go to the
// node with fewer sandboxes, then by name, so that the same input gives the same answer.
package placement

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/dormouse-run/dormouse/pkg/errs"
)

// Resources that are counted. Sandboxes counts heads; an allocatable of zero sandboxes is no bound.
type Resources struct {
	CPUMillis   int64
	MemoryBytes int64
	DiskBytes   int64
	Sandboxes   int64
}

// Add gives the sum.
func (r Resources) Add(o Resources) Resources {
	return Resources{r.CPUMillis + o.CPUMillis, r.MemoryBytes + o.MemoryBytes, r.DiskBytes + o.DiskBytes, r.Sandboxes + o.Sandboxes}
}

// Sub gives the difference.
func (r Resources) Sub(o Resources) Resources {
	return Resources{r.CPUMillis - o.CPUMillis, r.MemoryBytes - o.MemoryBytes, r.DiskBytes - o.DiskBytes, r.Sandboxes - o.Sandboxes}
}

// Node is what is known of a node at the moment of the decision.
type Node struct {
	Name     string
	Online   bool
	Cordoned bool
	Problems map[string]string // by type; empty when healthy
	// Short: its memory gets short. It takes what somebody waits for, and nothing that is kept for later.
	Short        bool
	Labels       map[string]string
	Architecture string
	// NoOutbound: it says that it has no outbound networks.
	NoOutbound  bool
	Allocatable Resources
	Placed      Resources
}

// Max gives the larger of each.
func (r Resources) Max(o Resources) Resources {
	return Resources{max(r.CPUMillis, o.CPUMillis), max(r.MemoryBytes, o.MemoryBytes), max(r.DiskBytes, o.DiskBytes), max(r.Sandboxes, o.Sandboxes)}
}

// Request is what is to be placed.
type Request struct {
	// Resources are counted against what is left of a node.
	Resources Resources
	// Limits are how far it may grow: not counted, but no node takes what could outgrow it alone.
	Limits       Resources
	Selector     map[string]string
	Architecture string // "" is any
	Outbound     bool   // it needs an outbound network
	// Artefact is where the snapshot is; nil when none is needed.
	Artefact []string
	// Volumes has the node of each volume, by uid.
	Volumes map[string]string
	// Node is the only one allowed, or "".
	Node string
	// Refused says of nodes that were asked already why they did not take it.
	Refused map[string]string
	// Returns: it lives on Node already, and only its resources were given back: a cordon or other labels do not keep it away.
	Returns bool
}

// NoFit says, for each node, why it does not fit.
type NoFit struct {
	Why map[string]string
	// Transient tells that some node would fit if only it were online and healthy.
	Transient bool
}

func (n *NoFit) Error() string { return n.Envelope().Message }

// Envelope is NO_NODE_FITS with the nodes' reasons.
func (n *NoFit) Envelope() *errs.Error {
	if len(n.Why) == 0 {
		return errs.New(errs.NoNodeFits, "no node is registered; start agentd on one")
	}
	names := slices.Sorted(maps.Keys(n.Why))
	parts := make([]string, 0, len(names))
	for _, name := range names[:min(len(names), 8)] {
		parts = append(parts, name+": "+n.Why[name])
	}
	if len(names) > 8 {
		parts = append(parts, fmt.Sprintf("and %d more", len(names)-8))
	}
	e := errs.New(errs.NoNodeFits, "no node fits (%s)", strings.Join(parts, "; "))
	for _, name := range names[:min(len(names), 32)] {
		e = e.With("node."+name, n.Why[name])
	}
	return e
}

// Decide picks the node, or explains with *NoFit, or, where no node could hold the request even
// when empty, with ABOVE_EVERY_NODE.
func Decide(nodes []Node, r Request) (string, error) {
	if err := Possible(nodes, r.Resources.Max(r.Limits)); err != nil {
		return "", err
	}
	why := &NoFit{Why: make(map[string]string, len(nodes))}
	var fits []Node
	for _, n := range nodes {
		if reason := lasting(n, r); reason != "" {
			why.Why[n.Name] = reason
		} else if reason := passing(n); reason != "" {
			why.Why[n.Name], why.Transient = reason, true
		} else {
			fits = append(fits, n)
		}
	}
	if len(fits) == 0 {
		return "", why
	}
	best := slices.MinFunc(fits, func(a, b Node) int {
		return cmp.Or(
			cmp.Compare(free(b, r.Resources), free(a, r.Resources)),
			cmp.Compare(a.Placed.Sandboxes, b.Placed.Sandboxes),
			strings.Compare(a.Name, b.Name))
	})
	return best.Name, nil
}

// Possible is ABOVE_EVERY_NODE when there are nodes and none of them, empty, could hold it.
func Possible(nodes []Node, r Resources) error {
	if len(nodes) == 0 {
		return nil
	}
	var worst *errs.Error
	for _, res := range compare(r) {
		largest := int64(0)
		for _, n := range nodes {
			largest = max(largest, res.of(n.Allocatable))
		}
		if res.asked > largest {
			worst = errs.New(errs.AboveEveryNode, "%s: %d is asked, the largest node has %d; ask for less", res.name, res.asked, largest).
				With("resource", res.name).With("asked", strconv.FormatInt(res.asked, 10)).With("largest", strconv.FormatInt(largest, 10))
			break
		}
	}
	if worst == nil {
		return nil
	}
	return worst
}

// lasting is why the node cannot take it although it may be online, or "".
func lasting(n Node, r Request) string {
	if r.Node != "" && n.Name != r.Node {
		return "another node was asked for"
	}
	if r.Artefact != nil && !slices.Contains(r.Artefact, n.Name) {
		return "it does not hold the snapshot"
	}
	for _, uid := range slices.Sorted(maps.Keys(r.Volumes)) {
		if at := r.Volumes[uid]; at != n.Name {
			return fmt.Sprintf("volume %s is on %s", uid, at)
		}
	}
	if why, ok := r.Refused[n.Name]; ok {
		return "it refused: " + why
	}
	if n.Cordoned && !r.Returns {
		return "it is cordoned"
	}
	for _, k := range slices.Sorted(maps.Keys(r.Selector)) {
		if v, ok := n.Labels[k]; !r.Returns && (!ok || v != r.Selector[k]) {
			return fmt.Sprintf("it has no label %s=%s", k, r.Selector[k])
		}
	}
	if r.Architecture != "" && n.Architecture != r.Architecture {
		return "its architecture is " + n.Architecture
	}
	if r.Outbound && n.NoOutbound {
		return "it has no outbound network"
	}
	return full(n, r)
}

// full is what the node has too little of, or "".
func full(n Node, r Request) string {
	for _, res := range compare(r.Limits) {
		if total := res.of(n.Allocatable); res.asked > total {
			return fmt.Sprintf("%s: the limit is %d, the node has %d", res.name, res.asked, total)
		}
	}
	left := n.Allocatable.Sub(n.Placed)
	for _, res := range compare(r.Resources) {
		if res.asked > max(res.of(left), 0) {
			return fmt.Sprintf("%s: %d asked, %d left", res.name, res.asked, max(res.of(left), 0))
		}
	}
	if bound := n.Allocatable.Sandboxes; bound > 0 && left.Sandboxes < r.Resources.Sandboxes {
		return fmt.Sprintf("it has all of its %d sandboxes", bound)
	}
	return ""
}

// passing is why the node cannot take it now, or "".
func passing(n Node) string {
	if !n.Online {
		return "it is offline"
	}
	for _, p := range slices.Sorted(maps.Keys(n.Problems)) {
		return "it has " + p
	}
	return ""
}

type counted struct {
	name  string
	asked int64
	of    func(Resources) int64
}

func compare(r Resources) []counted {
	return []counted{
		{"cpu_millis", r.CPUMillis, func(r Resources) int64 { return r.CPUMillis }},
		{"memory_bytes", r.MemoryBytes, func(r Resources) int64 { return r.MemoryBytes }},
		{"disk_bytes", r.DiskBytes, func(r Resources) int64 { return r.DiskBytes }},
	}
}

// free is the share of the scarcest resource that is left once the request is placed, in
// thousandths.
func free(n Node, r Resources) int64 {
	share := int64(1000)
	left := n.Allocatable.Sub(n.Placed).Sub(r)
	for _, res := range compare(r) {
		if total := res.of(n.Allocatable); total > 0 {
			share = min(share, int64(float64(res.of(left))/float64(total)*1000))
		}
	}
	return share
}
