// Package catalog is the coordinator's memory: records of sandboxes, snapshots, volumes, nodes,
// images and operations, written in atomic commits that the store itself checks.
//
// The catalog knows nothing of the domain. A Record is a header that stores understand (identity,
// name, revision, phase, node, references) and an opaque body.
//
// # Invariants that every store keeps
//
//   - A Commit is applied whole or not at all; every check precedes every write.
//   - The sequence grows by exactly one with each applied commit and never otherwise, so a reader
//     of the change log sees a gap if there is one.
//   - A record's revision grows by exactly one with each write to it. Being referred to is not a
//     write: a thousand records may come to refer to one volume without defeating each other.
//   - The reverse index agrees with the records' Refs at every instant. A record that is referred
//     to cannot be deleted, and a sealed one takes no new reference.
//   - At most one living record of a tenant and kind has a given name. UIDs are never reused; that
//     is the duty of who makes them.
//   - Epochs (coordinator, node session) only grow. A commit whose owner is not the one in force
//     changes nothing.
//   - Each commit's digest covers its predecessor's, so that a store which came back older, and
//     even grew past its old sequence since, cannot show a point that it once gave out (History, Compare).
//   - A commit with an ID leaves its receipt in the same atomic step. Refused commits leave none.
//
// # Crash points
//
// Between sending a commit and reading its reply the outcome is unknown to the caller, never to
// the store. Settle resolves it: it returns the receipt, or makes certain that this attempt
// is never applied later (a script may sit in the socket of a stopped server). A commit without an
// ID cannot be settled; the commit queue gives one to every commit.
package catalog

import (
	"context"
	"time"

	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/fence"
)

// SystemTenant owns what belongs to no tenant: nodes, images.
const SystemTenant = "_system"

// Kind is a class of records.
type Kind string

// The kinds in use. A store accepts any kind of the same form.
const (
	KindSandbox   Kind = "sandbox"
	KindSnapshot  Kind = "snapshot"
	KindVolume    Kind = "volume"
	KindTemplate  Kind = "template"
	KindPool      Kind = "pool"
	KindNode      Kind = "node"
	KindImage     Kind = "image"
	KindOperation Kind = "operation"
	KindEvent     Kind = "event"
)

// Key is the identity of a record. See Key.Validate for the form.
type Key struct {
	Tenant string
	Kind   Kind
	UID    string
}

// RefMode says what a reference does to its target, besides protecting it from deletion.
type RefMode string

const (
	// Reference only protects.
	Reference RefMode = "reference"
	// Shared is an attachment that tolerates other shared ones.
	Shared RefMode = "shared"
	// Exclusive is an attachment that tolerates no other attachment.
	Exclusive RefMode = "exclusive"
)

// Attaches tells whether the mode takes part in attachment exclusion.
func (m RefMode) Attaches() bool { return m == Shared || m == Exclusive }

// Ref is a reference from the record that holds it. A record has at most one Ref to a target;
// who needs two modes takes the stronger.
type Ref struct {
	Target Key
	Mode   RefMode
}

// Record is one object.
type Record struct {
	Key
	// Name is unique among the living records of the tenant and kind; "" has no name.
	Name string
	// Phase is the domain's; stores filter and check by it.
	Phase string
	// Node is a secondary index: the node that the record concerns, or "".
	Node string
	// Identity is a digest of what never changes. Once it is set no Put may change it.
	Identity string
	// Sealed records take no new reference (WRONG_PHASE). Existing ones stay until given up.
	Sealed bool
	Refs   []Ref
	// Body is opaque, at most MaxBody bytes.
	Body []byte

	// Set by the store, ignored in a Put. Revision counts from 1; Seq is the sequence of the
	// commit that wrote the record last; the times are of the store's clock, in UTC.
	Revision uint64
	Seq      uint64
	Created  time.Time
	Updated  time.Time
}

// Put creates a record (ExpectRevision 0) or replaces the one that has ExpectRevision.
type Put struct {
	Record         Record
	ExpectRevision uint64
	// Revision, in a repair only, is the revision that the record gets, above ExpectRevision: the one that it had.
	Revision uint64
}

// Delete removes the record that has ExpectRevision (at least 1).
type Delete struct {
	Key            Key
	ExpectRevision uint64
	// Tombstone keeps a trace apart from the living for the store's tombstone retention, with
	// Body (at most MaxTombstone bytes; may be nil). A tombstone holds no name and no reference.
	Tombstone bool
	Body      []byte
}

// Commit is one atomic change.
//
// Everything is checked against the state before the commit, except that a reference may name a
// record created in it, and that its own Puts exclude each other (two of one name, two exclusive
// attachments). A key appears in at most one Put or Delete. A batch of commits is applied in
// order, each seeing what the earlier ones did.
type Commit struct {
	// ID names the operation within the tenant and makes the commit idempotent: the same ID and
	// Digest replays the first one's Result while the receipt lives. "" leaves no receipt.
	ID     string
	Tenant string // of the receipt
	Digest string // of the request; the same ID with another one is OPERATION_BODY_MISMATCH
	// Minted is when the ID was made. An ID without a receipt that is older than the receipts' life is
	// OPERATION_EXPIRED: it may have been applied. The receipt of one made in the future, by up to MaxAhead, lives
	// until the ID is that old. Zero is not checked.
	Minted time.Time
	// Transient receipts live for TransientLife only. The commit queue uses them to settle commits
	// that are not a client's operation.
	Transient bool
	// Attempt names this sending of the commit, for Settle. The commit queue sets it.
	Attempt string
	// Repair commits are the only ones that a suspended catalog takes, and it alone takes them. They may refer to what is
	// sealed, as what they put back did.
	Repair bool

	Owner   fence.Owner
	Checks  []Check
	Puts    []Put
	Deletes []Delete
	// Result is kept in the receipt and returned by every replay, at most MaxResult bytes.
	Result []byte
}

// Result is what became of one commit.
type Result struct {
	// Err is nil when the commit was applied, now or (Replayed) earlier. Otherwise nothing was
	// changed, and Err is of outcome not_started:
	//
	//	FENCED                   the coordinator's or session's epoch is not the one in force, or was granted to another since
	//	OPERATION_BODY_MISMATCH  the ID was used with another digest
	//	OPERATION_EXPIRED        the ID is older than the receipts' life
	//	ATTEMPT_VOID             Settle has voided this attempt
	//	STALE_REVISION           a record is not at the revision expected; read and decide again
	//	STALE_UID                a name belongs to another uid, or a reference's target is gone
	//	IDENTITY_MISMATCH        the immutable identity differs
	//	NAME_TAKEN               details: name, uid
	//	ALREADY_ATTACHED         details: target, holder
	//	STILL_REFERENCED         details: references (bounded), count
	//	CATALOG_REWOUND          the catalog is suspended: it lost what it had acknowledged
	//	WRONG_PHASE              a phase check failed, or the target of a new reference is sealed
	//	INVALID_FIELD, LIMIT_EXCEEDED  the commit is malformed
	Err *errs.Error
	// Seq is the sequence that the commit took.
	Seq uint64
	// Revisions are the new revisions of what was put, by key.
	Revisions map[Key]uint64
	// Replayed tells that the receipt of an earlier commit answered.
	Replayed bool
	Result   []byte
}

// Receipt is the proof of an applied commit.
type Receipt struct {
	Tenant, ID, Digest string
	Seq                uint64
	Revisions          map[Key]uint64
	Result             []byte
	At                 time.Time
}

// Query selects living records of one kind. Empty fields select all.
type Query struct {
	Kind   Kind
	Tenant string // "" is all tenants
	Node   string
	Phases []string
	// PageSize is 1..MaxPage; 0 is DefaultPage. A page may be shorter (byte limit, filter), even
	// empty: only Next == "" ends the list.
	PageSize int
	After    string // Next of the page before; opaque
}

// Page is a part of a list, in order of uid, which for UUIDv7 is order of creation. A record that
// lives through the whole listing appears in it once.
type Page struct {
	Records []Record
	Next    string
}

// Holder is a record that refers to a target.
type Holder struct {
	Key  Key
	Mode RefMode
}

// Holders is a page of referrers in order of key. Count is of all of them.
type Holders struct {
	Holders []Holder
	Count   int
	Next    string
}

// Tombstone is the trace of a deleted record.
type Tombstone struct {
	Key      Key
	Revision uint64 // the last one it had
	Seq      uint64 // of the commit that deleted it
	Body     []byte
	At       time.Time
	Expires  time.Time
}

// Tombstones is a page of tombstones in order of uid.
type Tombstones struct {
	Tombstones []Tombstone
	Next       string
}

// Change is one applied commit in the change log. Records are named, not copied.
type Change struct {
	Seq    uint64
	Digest string // of the history up to it
	Items  []ChangedRecord
}

// ChangedRecord is one record of a Change, as it was after that commit.
type ChangedRecord struct {
	Key      Key
	Revision uint64
	Phase    string
	Node     string
	Deleted  bool
}

// Claim asks for leadership.
type Claim struct {
	// Holder names the claimant, unique per process start; others read it to forward to.
	Holder string
	// TTL is counted by the store's clock from the moment the claim is granted or renewed.
	TTL time.Duration
	// Above is the highest epoch known from elsewhere (nodes): a granted epoch exceeds it.
	Above fence.Epoch
}

// Lease is leadership as the store sees it.
type Lease struct {
	Holder string
	Epoch  fence.Epoch
	// Left is how long the lease lives from the reply on; 0 is expired or released. The epoch
	// stays in force until another one is granted or the lease is released.
	Left time.Duration
}

// Status describes the store, for operators.
type Status struct {
	Server      string // product and version
	Incarnation string // made when the catalog was; a different one is a different catalog
	RunID       string // of the server process
	Seq         uint64
	Epoch       fence.Epoch
	Durability  string
	Tombstones  int
	// Suspended is nil in service.
	Suspended *Suspension
	// Restored is the id of the backup that was restored last.
	Restored string
}

// Reader reads. Reads see every commit that was applied before they began.
// Errors: OBJECT_NOT_FOUND; STORE_UNAVAILABLE when it could not be read, which never means absent.
type Reader interface {
	Get(ctx context.Context, key Key) (Record, error)
	// GetByName finds the living record of the name.
	GetByName(ctx context.Context, tenant string, kind Kind, name string) (Record, error)
	// GetMany gives the records that exist, by key. At most MaxPage keys.
	GetMany(ctx context.Context, keys []Key) (map[Key]Record, error)
	// Living tells which of the keys have a record, in whatever phase. It reads none of them. At most MaxPage keys.
	Living(ctx context.Context, keys []Key) (map[Key]bool, error)
	List(ctx context.Context, q Query) (Page, error)
	// Referrers pages through who refers to the target. An absent target has none. A page, its modes
	// and its count are of one moment.
	Referrers(ctx context.Context, target Key, after string, limit int) (Holders, error)
	// Receipt finds the receipt of an operation. Not found is (Receipt{}, false, nil), and says
	// nothing of a commit that may still be on its way: see Settle.
	Receipt(ctx context.Context, tenant, id string) (Receipt, bool, error)
}

// Store is a catalog. All methods are safe for concurrent use. A context's deadline bounds the
// call; without one the store's own reply timeout does.
type Store interface {
	Reader

	// Commit applies the batch in order, with a result for each commit, which stand on their
	// own: one refused leaves the others alone. At most MaxBatch commits. An error, instead of
	// results, of outcome not_started (errs.NotStartedFor) is certain that none was applied; any other
	// means that each may or may not have been.
	Commit(ctx context.Context, batch []Commit) ([]Result, error)
	// Settle resolves a commit of unknown outcome. Found, its receipt is returned. Not found,
	// the attempt is void from then on (for VoidLife at least) and was never applied, so that
	// the same ID may be sent again as another attempt. Repeating it is harmless.
	Settle(ctx context.Context, tenant, id, attempt string) (Receipt, bool, error)

	// Tombstone finds the trace of a deleted record; OBJECT_NOT_FOUND when there is none.
	Tombstone(ctx context.Context, key Key) (Tombstone, error)
	ListTombstones(ctx context.Context, tenant string, kind Kind, after string, limit int) (Tombstones, error)
	// Compact forgets at most limit expired tombstones and says how many it did.
	Compact(ctx context.Context, limit int) (int, error)

	// Changes gives the commits after the sequence, oldest first, waiting up to block for the
	// first. None is an empty slice. RESUME_TOO_OLD: the log no longer reaches back that far, or
	// the store is behind that sequence; list again and watch from there.
	Changes(ctx context.Context, after uint64, limit int, block time.Duration) ([]Change, error)
	// Seq is the sequence of the last applied commit.
	Seq(ctx context.Context) (uint64, error)

	// Lead claims or renews leadership. When it is granted (true) the epoch is in force at once and
	// every lower one is fenced. Asking again while the lease lives renews it under the
	// same epoch, and so does asking after it expired if no other has claimed it. When another
	// holds it (false), the Lease tells who. A lost reply is repaired by asking again.
	Lead(ctx context.Context, c Claim) (Lease, bool, error)
	// Leader reads the lease.
	Leader(ctx context.Context) (Lease, error)
	// Release ends the lease and fences its epoch. FENCED if it is no longer in force.
	Release(ctx context.Context, holder string, epoch fence.Epoch) error

	// OpenSession begins a node's session under the coordinator's epoch (else FENCED): the new
	// epoch exceeds every earlier one of the node and above. The earlier session is fenced at once.
	OpenSession(ctx context.Context, coordinator fence.Epoch, node string, above fence.Epoch) (fence.Epoch, error)
	// SessionEpoch is the session in force, 0 when the node never had one.
	SessionEpoch(ctx context.Context, node string) (fence.Epoch, error)

	// Generation counts the server processes that this store has met, from 1; the channel is closed when
	// another is met. What was concluded from reads of an earlier generation needs a proof to hold still.
	Generation() (uint64, <-chan struct{})
	// Seen is the newest point that this store was given by the server. No commit of this store is applied
	// by a server that does not have it (CATALOG_REWOUND).
	Seen() Point
	// History gives what to keep as a witness of what this store has acknowledged.
	History(ctx context.Context) (History, error)
	// Compare tells what a point that was once this catalog's is to the history that it has now.
	Compare(ctx context.Context, p Point) (Relation, error)
	// Suspend stops all commits but those of a repair, for everybody, until Resume, and takes the sequence
	// above the witness, so that none is given out twice. Under the coordinator's epoch (else FENCED).
	// Suspended already, it keeps the highest witness.
	Suspend(ctx context.Context, coordinator fence.Epoch, s Suspension) error
	// Resume ends a suspension, under the coordinator's epoch (else FENCED): the catalog goes on as a new
	// incarnation, of which all that was known to be lost counts as a part. Not suspended, it does nothing.
	// RESTORE_UNFINISHED while a backup is being put into it.
	Resume(ctx context.Context, coordinator fence.Epoch) error

	// Delta gives what changed after a sequence, up to limit commits, and where the history stands. RESUME_TOO_OLD: as Changes.
	Delta(ctx context.Context, after uint64, limit int) (Delta, error)
	// Ancestors are the incarnations that this catalog goes on from, and up to which sequence their history is part of its own.
	Ancestors(ctx context.Context) (map[string]uint64, error)
	// BeginRestore suspends an empty catalog, under the coordinator's epoch (else FENCED), until the backup's records are all in it:
	// the backup's point is the witness and its incarnation an ancestor up to there. Repeating it is harmless. CATALOG_NOT_EMPTY;
	// RESTORE_UNFINISHED: another backup was begun.
	BeginRestore(ctx context.Context, coordinator fence.Epoch, r Restore) error
	// EndRestore says that they are, under the coordinator's epoch (else FENCED): the catalog is suspended as any that came back
	// older. Repeating it is harmless. WRONG_PHASE: that backup was not begun.
	EndRestore(ctx context.Context, coordinator fence.Epoch, id string) error

	Status(ctx context.Context) (Status, error)
	// Close ends the store's connections. Calls after it fail with SHUTTING_DOWN.
	Close() error
}
