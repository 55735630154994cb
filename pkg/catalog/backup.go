package catalog

import (
	"github.com/dormouse-run/dormouse/pkg/errs"
)

// Kinds lists the kinds in use, what is referred to mostly before what refers to it.
func Kinds() []Kind {
	return []Kind{KindNode, KindImage, KindVolume, KindSnapshot, KindSandbox, KindOperation, KindEvent}
}

// ByItself tells whether records of the kind come to be without anybody asking for them: a catalog that has no others is empty.
func (k Kind) ByItself() bool { return k == KindNode || k == KindEvent }

// Delta is what changed in a part of the history, as it is now. All of it is of one moment.
type Delta struct {
	// Head is where the history stood at that moment.
	Head Point
	// Upto is the last commit that was gone through. If it is the head's, the records are exactly what there is.
	Upto uint64
	// Records that changed and live; Gone are those that do not.
	Records []Record
	Gone    []Key
}

// DeltaBytes is what a delta holds before it ends with the commit at hand.
const DeltaBytes = 1 << 20

// MaxAncestors bounds the incarnations that a catalog goes on from.
const MaxAncestors = 1000

// Restore says which backup an empty catalog is to take.
type Restore struct {
	// ID names the backup.
	ID string
	// By names who asked.
	By string
	// Point is what the backup is of.
	Point Point
	// Ancestors are the incarnations that the backed-up catalog went on from, and up to which sequence.
	Ancestors map[string]uint64
}

// Validate checks the form.
func (r Restore) Validate() error {
	if r.ID == "" || r.Point.Incarnation == "" {
		return errs.New(errs.InvalidField, "a restore needs the backup's id and point").With("field", "restore")
	}
	if err := printable("id", r.ID, MaxID); err != nil {
		return err
	}
	if err := printable("by", r.By, MaxName); err != nil {
		return err
	}
	if n := len(r.Ancestors); n > MaxAncestors {
		return tooLarge("ancestors", MaxAncestors, n)
	}
	for inc, seq := range r.Ancestors {
		if err := (Point{Incarnation: inc, Seq: seq}).Validate(); err != nil {
			return err
		}
	}
	return r.Point.Validate()
}

// NotEmpty is the refusal to restore into a catalog that has objects.
func NotEmpty(kind Kind) *errs.Error {
	return errs.New(errs.CatalogNotEmpty, "the catalog has records of kind %s; a backup is restored into an empty one only: give the coordinator an empty server, or another redis.catalog", kind).
		With("kind", string(kind))
}

// Unfinished is the refusal to do something else than to go on with the restore of a backup.
func Unfinished(id string) *errs.Error {
	return errs.New(errs.RestoreUnfinished, "the restore of backup %s is not finished; run it again with the same file, or begin anew with an empty server", id).
		With("backup_id", id)
}
