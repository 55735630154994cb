package journal

import (
	"fmt"

	"github.com/dormouse-run/dormouse/pkg/catalog"
	nodev1 "github.com/dormouse-run/dormouse/proto/dormouse/node/v1"
)

// PointToProto is what a node keeps of a point.
func PointToProto(p catalog.Point) *nodev1.CatalogPoint {
	if p.IsZero() {
		return nil
	}
	return &nodev1.CatalogPoint{Incarnation: p.Incarnation, Seq: p.Seq, Digest: p.Digest}
}

// PointOf reads what a node kept.
func PointOf(p *nodev1.CatalogPoint) catalog.Point {
	return catalog.Point{Incarnation: p.GetIncarnation(), Seq: p.GetSeq(), Digest: p.GetDigest()}
}

// Entry is what a journal has of one record.
type Entry struct {
	Record  catalog.Record
	Deleted bool // at Record.Revision
	// Bare: it is known that there was this revision, but there is no copy of it. Nodes keep no such entries.
	Bare bool
	// Point is a place in the catalog's history at which the entry was so.
	Point catalog.Point
}

func living(r catalog.Record) *nodev1.JournalEntry {
	e := &nodev1.JournalEntry{Tenant: r.Tenant, Kind: string(r.Kind), Uid: r.UID, Revision: r.Revision, Seq: r.Seq,
		Name: r.Name, Phase: r.Phase, Node: r.Node, Identity: r.Identity, Sealed: r.Sealed, Body: r.Body}
	for _, ref := range r.Refs {
		e.References = append(e.References, &nodev1.JournalReference{Tenant: ref.Target.Tenant, Kind: string(ref.Target.Kind), Uid: ref.Target.UID, Mode: string(ref.Mode)})
	}
	return e
}

func deleted(c catalog.ChangedRecord, seq uint64) *nodev1.JournalEntry {
	return &nodev1.JournalEntry{Tenant: c.Key.Tenant, Kind: string(c.Key.Kind), Uid: c.Key.UID, Revision: c.Revision, Seq: seq, Deleted: true}
}

// EntryOf reads an entry that a node gave. A node is trusted with what concerns it and with nothing else.
func EntryOf(node string, p *nodev1.JournalEntry) (Entry, error) {
	e := Entry{Deleted: p.GetDeleted(), Point: PointOf(p.GetPoint())}
	e.Record = catalog.Record{Key: catalog.Key{Tenant: p.GetTenant(), Kind: catalog.Kind(p.GetKind()), UID: p.GetUid()},
		Revision: p.GetRevision(), Seq: p.GetSeq(), Name: p.GetName(), Phase: p.GetPhase(), Node: p.GetNode(),
		Identity: p.GetIdentity(), Sealed: p.GetSealed(), Body: p.GetBody()}
	for _, ref := range p.GetReferences() {
		e.Record.Refs = append(e.Record.Refs, catalog.Ref{Target: catalog.Key{Tenant: ref.GetTenant(), Kind: catalog.Kind(ref.GetKind()), UID: ref.GetUid()},
			Mode: catalog.RefMode(ref.GetMode())})
	}
	if err := e.Record.Validate(); err != nil {
		return e, err
	}
	if (!e.Deleted || p.GetGivenUp()) && e.Record.Node != node {
		return e, fmt.Errorf("the journal of node %s has %s, which is of node %q", node, e.Record.Key, e.Record.Node)
	}
	if e.Point.IsZero() || e.Record.Revision == 0 {
		return e, fmt.Errorf("the journal of node %s has %s without a point or revision", node, e.Record.Key)
	}
	return e, e.Point.Validate()
}
