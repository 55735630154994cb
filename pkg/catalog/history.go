package catalog

import (
	"time"

	"github.com/dormouse-run/dormouse/pkg/errs"
)

// Point is a place in the history of a catalog: all that was committed up to a sequence. Its Digest is
// chained over those commits, so that two histories which differ anywhere before differ here, too. The
// zero Point is before every history.
type Point struct {
	Incarnation string
	Seq         uint64
	Digest      string
}

// IsZero tells whether the point says nothing.
func (p Point) IsZero() bool { return p.Incarnation == "" }

// History is what a store knows of its own past, for others to keep as a witness.
type History struct {
	// Head is the last applied commit.
	Head Point
	// Mark is an earlier point that the store remembers much longer: 16 million commits, where
	// others are known for as long as the change log reaches. Zero while there is none.
	Mark Point
}

// Relation is what a point is to a store's history.
type Relation string

const (
	// Part is a point in the history, or in one that it goes on from.
	Part Relation = "part"
	// Lost is a point that was once true of this catalog and that the store does not have: it came back older.
	Lost Relation = "lost"
	// Foreign is a point of a catalog that this one does not go on from: it is another one, or was emptied.
	Foreign Relation = "foreign"
	// Forgotten is a point older than the store can tell.
	Forgotten Relation = "forgotten"
)

// Missing tells whether the store does not have the point.
func (r Relation) Missing() bool { return r == Lost || r == Foreign }

// MarkEvery is the distance of marks in commits.
const MarkEvery = 256

// Suspension is why a catalog takes no commits but those of a repair (CATALOG_REWOUND).
type Suspension struct {
	Since time.Time
	// By names who found it: a coordinator's or node's name.
	By string
	// Witness is the highest point that was shown to be lost.
	Witness Point
	// At is the sequence at which the catalog was suspended, or that of the backup that it was restored from; the store sets it.
	At uint64
	// Restoring is the id of the backup whose records are being put into it; the store sets it.
	Restoring string
}

// Validate checks the form.
func (s Suspension) Validate() error {
	if err := printable("by", s.By, MaxName); err != nil {
		return err
	}
	return s.Witness.Validate()
}

// Validate checks the form.
func (p Point) Validate() error {
	if p.Seq > MaxCounter {
		return errs.New(errs.InvalidField, "a sequence is above %d", uint64(MaxCounter)).With("field", "seq")
	}
	if err := printable("incarnation", p.Incarnation, MaxID); err != nil {
		return err
	}
	return printable("digest", p.Digest, MaxID)
}
