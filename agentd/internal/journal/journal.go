// Package journal is the node's copy of what the catalog records of it: one bbolt file, written as
// the coordinator sends, and read only to rebuild a catalog that lost what it had acknowledged.
//
// # Schema
//
//	meta
//	  node, witness, mark, complete   the node's name; nodev1.CatalogPoint, protobuf
//	  whole                           the number of the whole that is being received, or was last
//	  traces                          how many there are of what was deleted
//	entries
//	  <tenant/kind/uid>               8 bytes, big endian: the whole that it was sent in; then nodev1.JournalEntry
//	deleted
//	  <8 bytes, big endian: sequence><tenant/kind/uid>   empty; the order in which traces are forgotten
//
// # Invariants
//
//   - A message is applied in one transaction, which is on the disk before it is acknowledged.
//   - Within one incarnation an entry is never replaced by one of a lower revision: revisions only grow and uids are never used again, so
//     that is the word of a catalog that came back older. In the next one, which goes on from a repair, what the repair did without
//     does not count any more: else what became of it since would not be kept.
//   - What a whole did not send, when it ended, and what its own history had seen is deleted, or another node's by now: a trace says so.
//     What an earlier incarnation had seen may also be what a repair went on without: its trace says that it was given up, and has all that it was. That proves
//     no deletion, and makes way for the same record if it is adopted.
//   - The traces of what was deleted are bounded (MaxDeleted); the oldest go first.
//   - A file that cannot be read is put aside and a new one begun: the coordinator sends the whole again. It is a copy,
//     and nothing that runs depends on it; the log and `agentctl doctor` say what was put aside.
//
// # Crash points
//
// Between the transaction and its acknowledgement the coordinator does not know that the message is kept. It sends
// it again in the next session, and it changes nothing.
package journal

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"time"

	bolt "go.etcd.io/bbolt"
	"google.golang.org/protobuf/proto"

	"github.com/dormouse-run/dormouse/agentd/internal/boltfile"
	"github.com/dormouse-run/dormouse/pkg/durable"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/fault"
	nodev1 "github.com/dormouse-run/dormouse/proto/dormouse/node/v1"
)

// MaxDeleted is how many traces of deleted records are kept.
const MaxDeleted = 20_000

// MaxPage is the most entries of one page; maxPageBytes about the most bytes.
const (
	MaxPage      = 1000
	maxPageBytes = 2 << 20
)

var (
	bucketMeta    = []byte("meta")
	bucketEntries = []byte("entries")
	bucketDeleted = []byte("deleted")
	keyNode       = []byte("node")
	keyWitness    = []byte("witness")
	keyMark       = []byte("mark")
	keyComplete   = []byte("complete")
	keyWhole      = []byte("whole")
	keyTraces     = []byte("traces")
)

// Journal is an open journal.
type Journal struct{ db *bolt.DB }

// Open opens the journal in the folder, or begins one. Close it.
func Open(dir, node string, log *slog.Logger) (*Journal, error) {
	path := filepath.Join(dir, "journal.db")
	j, err := open(path, node)
	if !errors.Is(err, boltfile.ErrDamaged) && !errors.Is(err, errForeign) {
		return j, err
	}
	aside := fmt.Sprintf("%s%d", path+asideMark, time.Now().UnixNano())
	if renamed := os.Rename(path, aside); renamed != nil {
		return nil, errors.Join(err, renamed)
	}
	if synced := durable.SyncDir(dir); synced != nil {
		return nil, errors.Join(err, synced)
	}
	log.Error("the journal cannot be read; it was put aside and a new one is begun", "error", err, "aside", filepath.Base(aside))
	return open(path, node)
}

// asideMark is in the name of a journal that was put aside.
const asideMark = ".damaged-"

// Aside lists the journals that Open put aside in the folder, by path.
func Aside(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	var paths []string
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), "journal.db"+asideMark) {
			paths = append(paths, filepath.Join(dir, e.Name()))
		}
	}
	return paths, nil
}

// errForeign: the file is another node's, or what is in it is no journal.
var errForeign = errors.New("it is not this node's journal")

func open(path, node string) (*Journal, error) {
	db, err := boltfile.Open(path, 5*time.Second)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", filepath.Base(path), err)
	}
	err = db.Update(func(tx *bolt.Tx) error {
		for _, name := range [][]byte{bucketMeta, bucketEntries, bucketDeleted} {
			if _, err := tx.CreateBucketIfNotExists(name); err != nil {
				return fmt.Errorf("%w: %w", errForeign, err)
			}
		}
		meta := tx.Bucket(bucketMeta)
		if owner := meta.Get(keyNode); owner != nil && string(owner) != node {
			return fmt.Errorf("%w: it is of node %q", errForeign, owner)
		}
		return meta.Put(keyNode, []byte(node))
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open %s: %w", filepath.Base(path), err), db.Close())
	}
	return &Journal{db}, nil
}

// Close ends it.
func (j *Journal) Close() error { return j.db.Close() }

// Points are what the node says of its journal in a hello.
type Points struct{ Witness, Mark, Complete *nodev1.CatalogPoint }

// Points reads the points.
func (j *Journal) Points() (p Points, err error) {
	err = j.db.View(func(tx *bolt.Tx) error {
		meta := tx.Bucket(bucketMeta)
		var errs [3]error
		p.Witness, errs[0] = point(meta, keyWitness)
		p.Mark, errs[1] = point(meta, keyMark)
		p.Complete, errs[2] = point(meta, keyComplete)
		return errors.Join(errs[:]...)
	})
	return p, err
}

func point(meta *bolt.Bucket, key []byte) (*nodev1.CatalogPoint, error) {
	data := meta.Get(key)
	if data == nil {
		return nil, nil //nolint:nilnil // none is no error
	}
	p := new(nodev1.CatalogPoint)
	return p, proto.Unmarshal(data, p)
}

func putPoint(meta *bolt.Bucket, key []byte, p *nodev1.CatalogPoint) error {
	data, err := proto.Marshal(p)
	if err != nil {
		return err
	}
	return meta.Put(key, data)
}

// Apply makes a message durable. Applying it again changes nothing.
func (j *Journal) Apply(msg *nodev1.Journal) error {
	if msg.GetPoint().GetIncarnation() == "" {
		return errs.New(errs.InvalidField, "a journal message has no point").With("field", "journal.point")
	}
	fault.At("journal.apply.before")
	err := j.db.Update(func(tx *bolt.Tx) error { return apply(tx, msg) })
	fault.At("journal.apply.after")
	return err
}

func apply(tx *bolt.Tx, msg *nodev1.Journal) error {
	meta := tx.Bucket(bucketMeta)
	whole := number(meta.Get(keyWhole))
	if msg.GetWholeBegins() {
		whole++
		if err := meta.Put(keyWhole, binary.BigEndian.AppendUint64(nil, whole)); err != nil {
			return err
		}
		if err := meta.Delete(keyComplete); err != nil {
			return err
		}
	}
	for _, e := range msg.GetEntries() {
		if err := keep(tx, e, msg.GetPoint(), whole); err != nil {
			return err
		}
	}
	if msg.GetWholeEnds() {
		if err := buryUnsent(tx, msg.GetPoint(), whole); err != nil {
			return err
		}
	}
	if err := forgetDeleted(tx); err != nil {
		return err
	}
	for key, p := range map[*[]byte]*nodev1.CatalogPoint{&keyWitness: msg.GetPoint(), &keyMark: msg.GetMark(), &keyComplete: msg.GetComplete()} {
		if p.GetIncarnation() == "" {
			continue
		}
		if err := putPoint(meta, *key, p); err != nil {
			return err
		}
	}
	return nil
}

func number(b []byte) uint64 {
	if len(b) < 8 {
		return 0
	}
	return binary.BigEndian.Uint64(b)
}

func keyOf(e *nodev1.JournalEntry) []byte {
	return []byte(e.GetTenant() + "/" + e.GetKind() + "/" + e.GetUid())
}

func deletedKey(e *nodev1.JournalEntry) []byte {
	return append(binary.BigEndian.AppendUint64(nil, e.GetSeq()), keyOf(e)...)
}

func decode(data []byte) (*nodev1.JournalEntry, error) {
	if len(data) < 8 {
		return nil, errors.New("an entry of the journal is cut off")
	}
	e := new(nodev1.JournalEntry)
	return e, proto.Unmarshal(data[8:], e)
}

// keep writes an entry, unless this incarnation has said a higher revision.
func keep(tx *bolt.Tx, e *nodev1.JournalEntry, at *nodev1.CatalogPoint, whole uint64) error {
	entries, traces, key := tx.Bucket(bucketEntries), tx.Bucket(bucketDeleted), keyOf(e)
	if data := entries.Get(key); data != nil {
		old, err := decode(data)
		if err != nil {
			return err
		}
		higher := old.GetRevision() > e.GetRevision() || old.GetDeleted() && !e.GetDeleted() && old.GetRevision() >= e.GetRevision()
		if higher && !old.GetGivenUp() && old.GetPoint().GetIncarnation() == at.GetIncarnation() {
			return nil
		}
		if old.GetDeleted() {
			if err := traces.Delete(deletedKey(old)); err != nil {
				return err
			}
			if err := count(tx, -1); err != nil {
				return err
			}
		}
	}
	kept := proto.CloneOf(e)
	kept.Point = at
	data, err := proto.MarshalOptions{}.MarshalAppend(binary.BigEndian.AppendUint64(nil, whole), kept)
	if err != nil {
		return err
	}
	if e.GetDeleted() {
		if err := traces.Put(deletedKey(e), nil); err != nil {
			return err
		}
		if err := count(tx, 1); err != nil {
			return err
		}
	}
	return entries.Put(key, data)
}

// count keeps how many traces there are, since bbolt would count them one by one.
func count(tx *bolt.Tx, by int64) error {
	meta := tx.Bucket(bucketMeta)
	return meta.Put(keyTraces, binary.BigEndian.AppendUint64(nil, uint64(int64(number(meta.Get(keyTraces)))+by)))
}

// buryUnsent makes traces of the living that an ended whole did not send: they are deleted, or of another node, which
// has a higher revision, by now. What was seen by a history that the whole's is not known to have is kept.
func buryUnsent(tx *bolt.Tx, at *nodev1.CatalogPoint, whole uint64) error {
	var unsent []*nodev1.JournalEntry
	err := tx.Bucket(bucketEntries).ForEach(func(_, data []byte) error {
		if number(data) == whole {
			return nil
		}
		e, err := decode(data)
		if err != nil {
			return err
		}
		p := e.GetPoint()
		if !e.GetDeleted() && (p.GetIncarnation() != at.GetIncarnation() || p.GetSeq() <= at.GetSeq()) {
			unsent = append(unsent, e)
		}
		return nil
	})
	for _, e := range unsent {
		trace := &nodev1.JournalEntry{Tenant: e.GetTenant(), Kind: e.GetKind(), Uid: e.GetUid(), Revision: e.GetRevision(), Seq: at.GetSeq(), Deleted: true}
		if e.GetPoint().GetIncarnation() != at.GetIncarnation() {
			trace = proto.CloneOf(e)
			trace.Seq, trace.Deleted, trace.GivenUp = at.GetSeq(), true, true
		}
		err = errors.Join(err, keep(tx, trace, at, whole))
	}
	return err
}

// forgetDeleted keeps the traces bounded.
func forgetDeleted(tx *bolt.Tx) error {
	traces := tx.Bucket(bucketDeleted)
	for n := int64(number(tx.Bucket(bucketMeta).Get(keyTraces))) - MaxDeleted; n > 0; n-- {
		k, _ := traces.Cursor().First()
		if err := tx.Bucket(bucketEntries).Delete(k[8:]); err != nil {
			return err
		}
		if err := traces.Delete(k); err != nil {
			return err
		}
		if err := count(tx, -1); err != nil {
			return err
		}
	}
	return nil
}

// Get gives the entry of a key, tenant/kind/uid: nil is none.
func (j *Journal) Get(key string) (e *nodev1.JournalEntry, err error) {
	err = j.db.View(func(tx *bolt.Tx) error {
		data := tx.Bucket(bucketEntries).Get([]byte(key))
		if data == nil {
			return nil
		}
		e, err = decode(data)
		return err
	})
	return e, err
}

// Read gives a page in order of key, and the key to go on after: "" at the end.
func (j *Journal) Read(after string, limit int) (page []*nodev1.JournalEntry, next string, err error) {
	if limit <= 0 || limit > MaxPage {
		limit = MaxPage
	}
	err = j.db.View(func(tx *bolt.Tx) error {
		c := tx.Bucket(bucketEntries).Cursor()
		k, data := c.Seek([]byte(after))
		if bytes.Equal(k, []byte(after)) {
			k, data = c.Next()
		}
		for size := 0; k != nil; k, data = c.Next() {
			if len(page) == limit || size > maxPageBytes {
				next = string(keyOf(page[len(page)-1]))
				return nil
			}
			e, err := decode(data)
			if err != nil {
				return err
			}
			page, size = append(page, e), size+len(data)
		}
		return nil
	})
	return page, next, err
}
