// Package backup is the file that a copy of the catalog is kept in.
//
// # Format, version 1
//
// Lines of JSON, each at most MaxLine bytes:
//
//	{"format":"dormouse-catalog-backup","version":1,"header":{...}}
//	{"entry":{"record":{...}}}         what became of one record; a later entry of a record counts instead of an earlier one
//	{"entry":{"gone":{...}}}
//	{"end":{...}}
//	{"bytes":N,"sha256":"..."}         of all bytes before this line; nothing follows it
//
// Header, entries and end are the messages of the same names of dormouse.v1. The SHA-256 is the backup's id.
//
// # Invariants
//
//   - A file is read as a whole, and every record in it checked, before anything of it is used.
//   - Reading holds one line, and the keys of the records that changed while the backup was taken, at most MaxChanged.
package backup

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"math/big"

	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/errs"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// RecordToProto is how a record is kept and sent.
func RecordToProto(r catalog.Record) *dormousev1.CatalogRecord {
	p := &dormousev1.CatalogRecord{Tenant: r.Tenant, Kind: string(r.Kind), Uid: r.UID, Revision: r.Revision, Name: r.Name, Phase: r.Phase, Node: r.Node,
		Identity: r.Identity, Sealed: r.Sealed, Body: r.Body}
	for _, ref := range r.Refs {
		p.References = append(p.References, &dormousev1.CatalogReference{Tenant: ref.Target.Tenant, Kind: string(ref.Target.Kind), Uid: ref.Target.UID, Mode: string(ref.Mode)})
	}
	return p
}

// KeyToProto names a record.
func KeyToProto(k catalog.Key) *dormousev1.CatalogRecord {
	return &dormousev1.CatalogRecord{Tenant: k.Tenant, Kind: string(k.Kind), Uid: k.UID}
}

// KeyOf reads a record's name.
func KeyOf(p *dormousev1.CatalogRecord) (catalog.Key, error) {
	k := catalog.Key{Tenant: p.GetTenant(), Kind: catalog.Kind(p.GetKind()), UID: p.GetUid()}
	return k, k.Validate()
}

// RecordOf reads a record, and checks it as a commit's is.
func RecordOf(p *dormousev1.CatalogRecord) (catalog.Record, error) {
	r := catalog.Record{Key: catalog.Key{Tenant: p.GetTenant(), Kind: catalog.Kind(p.GetKind()), UID: p.GetUid()}, Revision: p.GetRevision(),
		Name: p.GetName(), Phase: p.GetPhase(), Node: p.GetNode(), Identity: p.GetIdentity(), Sealed: p.GetSealed(), Body: p.GetBody()}
	for _, ref := range p.GetReferences() {
		r.Refs = append(r.Refs, catalog.Ref{Target: catalog.Key{Tenant: ref.GetTenant(), Kind: catalog.Kind(ref.GetKind()), UID: ref.GetUid()}, Mode: catalog.RefMode(ref.GetMode())})
	}
	if r.Revision == 0 || r.Revision > catalog.MaxCounter {
		return r, errs.New(errs.InvalidField, "%s has revision %d, which no record has", r.Key, r.Revision).With("field", "revision")
	}
	return r, r.Validate()
}

// Sum is the digest of a set of records, in whatever order they are added: the sum of the SHA-256 of each.
type Sum struct {
	records int64
	total   big.Int
}

// Add takes a record in. The times and the sequence, which are the store's, do not count.
func (s *Sum) Add(r catalog.Record) {
	h := sha256.New()
	var n [8]byte
	field := func(text string) {
		binary.BigEndian.PutUint64(n[:], uint64(len(text)))
		h.Write(n[:])
		h.Write([]byte(text))
	}
	number := func(v uint64) {
		binary.BigEndian.PutUint64(n[:], v)
		h.Write(n[:])
	}
	sealed := uint64(0)
	if r.Sealed {
		sealed = 1
	}
	field(r.Key.String())
	number(r.Revision)
	number(sealed)
	for _, text := range []string{r.Name, r.Phase, r.Node, r.Identity, string(r.Body)} {
		field(text)
	}
	for _, ref := range r.Refs {
		field(ref.Target.String())
		field(string(ref.Mode))
	}
	var one big.Int
	s.total.Add(&s.total, one.SetBytes(h.Sum(nil)))
	s.total.SetBit(&s.total, 256, 0) // both were below 2^256
	s.records++
}

// Records is how many were added.
func (s *Sum) Records() int64 { return s.records }

// String is the digest, in hex.
func (s *Sum) String() string {
	var b [32]byte
	return hex.EncodeToString(s.total.FillBytes(b[:]))
}
