// Package repair compares the catalog with the copies of it that nodes keep, and puts back what it lost.
//
// # What is lost
//
// An entry of a node's journal is the word of a catalog that had it at a point of its history. If the catalog's
// history has the point, what the catalog says now is newer, and the entry says nothing. If it does not, what the entry says
// was acknowledged and lost. Among several entries of one record the highest revision counts. What concerned no node is in the memory of
// the coordinator that led (journal.Unplaced), and is taken from there in the same way.
//
// # States of a catalog
//
//	in service -> suspended (a point was shown that it does not have) -> repaired -> in service, as a new incarnation
//
// # Invariants
//
//   - A survey changes nothing.
//   - A repair only adds what was lost, takes forward what is older, and deletes what was deleted: a record that the
//     catalog has at the same or a higher revision is never touched, and what it has a tombstone of is not put back.
//   - All of it is checked by the store like any commit: references, attachments, names. What does not fit is
//     reported, object by object, and left.
//   - Repeating a repair, or one that another began, is harmless: what is put back is no longer lost.
//   - A node that is away may know more. A repair says so and wants to be told to go on without it.
//
// # Crash points
//
// Between any two commits of a repair the catalog is suspended still, and the next repair goes on. The catalog is
// taken into service by one atomic step, the last.
package repair

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"

	"github.com/dormouse-run/dormouse/coordinator/internal/journal"
	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/fence"
	nodev1 "github.com/dormouse-run/dormouse/proto/dormouse/node/v1"
)

// Difference is how the catalog differs from what a node has.
type Difference string

// The differences.
const (
	Lost       Difference = "lost"       // a journal has it, the catalog lost it
	Older      Difference = "older"      // the catalog has an older revision
	Undeleted  Difference = "undeleted"  // a journal says that it was deleted
	Unrecorded Difference = "unrecorded" // a node has an artefact that no record names
	Missing    Difference = "missing"    // a record says that a node has an artefact which is not there
	Unknown    Difference = "unknown"    // the node cannot be asked
)

// Finding is one difference.
type Finding struct {
	Difference Difference
	Key        catalog.Key
	Name, Node string
	// Catalog and Journal are the revisions; 0 is none.
	Catalog, Journal uint64
	Repaired         bool
	Message          string

	entry journal.Entry
}

// Node is what is known of a node.
type Node struct {
	Name   string
	Online bool
}

// Nodes are asked.
type Nodes interface {
	Journal(ctx context.Context, node, after string) (*nodev1.ReadJournalResponse, error)
	// Inventory gives a page of what the node holds, after the one whose Next is given.
	Inventory(ctx context.Context, node, after string) (*nodev1.GetInventoryResponse, fence.Epoch, error)
}

// Repairer compares and repairs.
type Repairer struct {
	Store catalog.Store
	Nodes Nodes
	Log   *slog.Logger
	// Light surveys are for looking alone: they keep no bodies, so that much that was lost costs little memory. They cannot be
	// repaired from.
	Light bool
	// Unplaced are the entries of what concerned no node, as far as they are known.
	Unplaced []journal.Entry

	// givenUp is what the journals that the last survey read say that a repair went on without.
	givenUp map[catalog.Key]bool
}

// maxKnown bounds how many points a survey remembers the relation of.
const maxKnown = 10_000

// Survey is what the journals have that the catalog lost.
type Survey struct {
	Findings []Finding
	// Away are the nodes whose journals are not known, with the reason.
	Away map[string]string
	// Entries is how many there are in the journals that were read.
	Entries int
}

// Survey reads the journals of the nodes that are online and compares. Other nodes are named as away.
func (r *Repairer) Survey(ctx context.Context, nodes []Node) (*Survey, error) {
	s := &Survey{Away: make(map[string]string)}
	lost := make(map[catalog.Key]journal.Entry)
	known := make(map[catalog.Point]catalog.Relation)
	r.givenUp = make(map[catalog.Key]bool)
	for _, n := range nodes {
		if !n.Online {
			s.away(n.Name, "it is away")
			continue
		}
		if err := r.read(ctx, n.Name, known, lost, s); err != nil {
			if ctx.Err() != nil {
				return nil, err
			}
			s.away(n.Name, err.Error())
		}
	}
	for _, e := range r.Unplaced {
		if err := r.consider(ctx, e, known, lost, s); err != nil {
			return nil, err
		}
	}
	keys := make([]catalog.Key, 0, len(lost))
	for k := range lost {
		keys = append(keys, k)
	}
	slices.SortFunc(keys, func(a, b catalog.Key) int { return strings.Compare(a.String(), b.String()) })
	for chunk := range slices.Chunk(keys, catalog.MaxPage) {
		have, err := r.Store.GetMany(ctx, chunk)
		if err != nil {
			return nil, err
		}
		for _, k := range chunk {
			f, differs := compare(lost[k], have)
			if differs && f.Difference == Lost {
				if differs, err = r.unburied(ctx, k); err != nil {
					return nil, err
				}
			}
			if differs {
				s.Findings = append(s.Findings, f)
			}
		}
	}
	return s, nil
}

func (s *Survey) away(node, why string) {
	s.Away[node] = why
	s.Findings = append(s.Findings, Finding{Difference: Unknown, Node: node, Message: "its journal is not known: " + why})
}

// read takes from one node's journal what was lost.
func (r *Repairer) read(ctx context.Context, node string, known map[catalog.Point]catalog.Relation, lost map[catalog.Key]journal.Entry, s *Survey) error {
	for after := ""; ; {
		page, err := r.Nodes.Journal(ctx, node, after)
		if err != nil {
			return err
		}
		for _, p := range page.GetEntries() {
			e, err := journal.EntryOf(node, p)
			if err == nil && p.GetGivenUp() {
				r.givenUp[e.Record.Key] = true
			}
			if err == nil {
				err = r.consider(ctx, e, known, lost, s)
			}
			if err != nil {
				return err
			}
		}
		if after = page.GetNext(); after == "" {
			return nil
		}
	}
}

// consider takes the entry if what it says was lost.
func (r *Repairer) consider(ctx context.Context, e journal.Entry, known map[catalog.Point]catalog.Relation, lost map[catalog.Key]journal.Entry, s *Survey) (err error) {
	s.Entries++
	relation, ok := known[e.Point]
	if !ok {
		if relation, err = r.Store.Compare(ctx, e.Point); err != nil {
			return err
		}
		if len(known) >= maxKnown {
			clear(known)
		}
		known[e.Point] = relation
	}
	if !relation.Missing() {
		return nil
	}
	if r.Light {
		e.Record.Body, e.Record.Refs = nil, nil
	}
	if old, ok := lost[e.Record.Key]; !ok || newer(e, old) {
		lost[e.Record.Key] = e
	}
	return nil
}

func newer(a, b journal.Entry) bool {
	if a.Record.Revision != b.Record.Revision {
		return a.Record.Revision > b.Record.Revision
	}
	return a.Deleted && !b.Deleted
}

// unburied tells whether the catalog does not know that the record was deleted. What it knows to be deleted stays so, whatever a journal has: uids are
// never used again.
func (r *Repairer) unburied(ctx context.Context, k catalog.Key) (bool, error) {
	_, err := r.Store.Tombstone(ctx, k)
	if errs.Has(err, errs.ObjectNotFound) {
		return true, nil
	}
	return false, err
}

// compare tells whether the catalog is behind the entry.
func compare(e journal.Entry, have map[catalog.Key]catalog.Record) (Finding, bool) {
	has, there := have[e.Record.Key]
	f := Finding{Key: e.Record.Key, Name: e.Record.Name, Node: e.Record.Node, Catalog: has.Revision, Journal: e.Record.Revision, entry: e}
	switch {
	case e.Deleted && there && has.Revision <= e.Record.Revision:
		f.Difference, f.Name, f.Node = Undeleted, has.Name, has.Node
	case e.Deleted:
		return f, false
	case !there:
		f.Difference = Lost
	case has.Revision < e.Record.Revision:
		f.Difference = Older
	default:
		return f, false
	}
	f.Message = fmt.Sprintf("seen at commit %d of %s", e.Point.Seq, e.Point.Incarnation)
	if e.Bare {
		f.Message = fmt.Sprintf("it was written by commit %d and concerned no node: there is no copy of it", e.Record.Seq)
	}
	return f, true
}

// order is that of repair: what is referred to before what refers to it.
func order(a, b Finding) int {
	return cmp.Or(cmp.Compare(slices.Index(journal.Kinds, a.Key.Kind), slices.Index(journal.Kinds, b.Key.Kind)), strings.Compare(a.Key.String(), b.Key.String()))
}
