// Package fence has the one type for every check of ownership: an epoch that only grows.
// A coordinator's leadership, a node's session and a guest channel's generation are epochs.
//
// The rule is the same everywhere: who holds a lower epoch than the one in force has lost
// ownership and is refused (errs.Fenced); an equal one is the owner; a higher one is news, and
// must be made durable before anything is done in its name.
package fence

import "fmt"

// Epoch counts owners. Zero means "none yet" and owns nothing.
type Epoch uint64

// Verdict is what a check finds.
type Verdict int

// Stale: refuse. Current: go on. Newer: persist it first, then go on.
const (
	Stale Verdict = iota
	Current
	Newer
)

func (v Verdict) String() string {
	switch v {
	case Stale:
		return "stale"
	case Current:
		return "current"
	case Newer:
		return "newer"
	}
	return fmt.Sprintf("Verdict(%d)", int(v))
}

// Check compares the epoch that a request carries with the one in force.
// A request with epoch zero is always stale.
func Check(inForce, carried Epoch) Verdict {
	switch {
	case carried == 0 || carried < inForce:
		return Stale
	case carried == inForce:
		return Current
	}
	return Newer
}

// Owner names who does a mutation: the coordinator's epoch, and the node and its session's epoch
// where the mutation reports what a node did. Node is empty where no node is concerned.
type Owner struct {
	Coordinator Epoch
	Node        string
	Session     Epoch
}
