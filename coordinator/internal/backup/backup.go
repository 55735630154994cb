// Package backup copies the catalog as of one point of its history while commits go on, and puts such a copy into an empty one.
// Decision 43 has the states, the argument that the copy is of one point, and the crash points.
package backup

import (
	"context"

	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/catalog/backup"
	"github.com/dormouse-run/dormouse/pkg/errs"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// pageSize bounds what is read of a kind at once, and deltaSize the commits of one delta.
const (
	pageSize  = 256
	deltaSize = 256
)

// copier is a backup that is being taken.
type copier struct {
	store   catalog.Store
	emit    func(*dormousev1.CatalogBackupEntry) error
	began   catalog.Point
	at      uint64 // deltas were read up to here
	entries int64
}

// Header gives what a backup begins with.
func Header(ctx context.Context, store catalog.Store) (*dormousev1.CatalogBackupHeader, error) {
	st, err := store.Status(ctx)
	if err != nil {
		return nil, err
	}
	if st.Suspended != nil {
		return nil, catalog.Refusal(errs.CatalogRewound)
	}
	ancestors, err := store.Ancestors(ctx)
	return &dormousev1.CatalogBackupHeader{CoordinatorEpoch: uint64(st.Epoch), Ancestors: ancestors}, err
}

// Copy gives every record to emit, and then the point that all of it is of. It holds one page at a time.
func Copy(ctx context.Context, store catalog.Store, emit func(*dormousev1.CatalogBackupEntry) error) (*dormousev1.CatalogBackupEnd, error) {
	h, err := store.History(ctx)
	if err != nil {
		return nil, err
	}
	c := &copier{store: store, emit: emit, began: h.Head, at: h.Head.Seq}
	for _, kind := range catalog.Kinds() {
		if err := c.scan(ctx, kind); err != nil {
			return nil, err
		}
	}
	for {
		head, err := c.delta(ctx)
		if err != nil {
			return nil, err
		}
		if c.at == head.Seq {
			end := &dormousev1.CatalogBackupEnd{Entries: c.entries,
				Point: &dormousev1.HistoryPoint{Incarnation: head.Incarnation, Seq: head.Seq, Digest: head.Digest}}
			return end, nil
		}
	}
}

func (c *copier) scan(ctx context.Context, kind catalog.Kind) error {
	q := catalog.Query{Kind: kind, PageSize: pageSize}
	for {
		page, err := c.store.List(ctx, q)
		if err != nil {
			return err
		}
		for _, r := range page.Records {
			if err := c.put(&dormousev1.CatalogBackupEntry{Record: backup.RecordToProto(r)}); err != nil {
				return err
			}
		}
		// As often as a page is read, so that the log does not forget what is needed of it.
		if _, err := c.delta(ctx); err != nil {
			return err
		}
		if q.After = page.Next; page.Next == "" {
			return nil
		}
	}
}

// delta writes what changed since the last one, and gives where the history stood.
func (c *copier) delta(ctx context.Context) (catalog.Point, error) {
	d, err := c.store.Delta(ctx, c.at, deltaSize)
	if err == nil && d.Head.Incarnation != c.began.Incarnation {
		err = catalog.TooOld(c.at, 0, d.Head.Seq)
	}
	if errs.Has(err, errs.ResumeTooOld) {
		return d.Head, errs.Wrap(err, errs.ResumeTooOld, "the catalog was repaired, or changed faster than it could be read, while the backup was taken; take it again")
	}
	if err != nil {
		return d.Head, err
	}
	for _, r := range d.Records {
		if err := c.put(&dormousev1.CatalogBackupEntry{Record: backup.RecordToProto(r), Changed: true}); err != nil {
			return d.Head, err
		}
	}
	for _, k := range d.Gone {
		if err := c.put(&dormousev1.CatalogBackupEntry{Gone: backup.KeyToProto(k), Changed: true}); err != nil {
			return d.Head, err
		}
	}
	c.at = d.Upto
	return d.Head, nil
}

func (c *copier) put(e *dormousev1.CatalogBackupEntry) error {
	c.entries++
	return c.emit(e)
}
