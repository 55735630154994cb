package backup

import (
	"context"
	"slices"

	"github.com/google/uuid"

	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/catalog/backup"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/fault"
	"github.com/dormouse-run/dormouse/pkg/fence"
)

// Restorer puts the records of a backup into a catalog that is being restored, in a coordinator's name.
type Restorer struct {
	Store catalog.Store
	Epoch fence.Epoch
}

// Clear removes what came to be by itself in a catalog that a restore was begun in.
func (r *Restorer) Clear(ctx context.Context) error {
	for _, kind := range slices.DeleteFunc(catalog.Kinds(), func(k catalog.Kind) bool { return !k.ByItself() }) {
		for {
			page, err := r.Store.List(ctx, catalog.Query{Kind: kind, PageSize: catalog.MaxPage})
			if err != nil {
				return err
			}
			batch := make([]catalog.Commit, len(page.Records))
			for i, rec := range page.Records {
				batch[i] = r.commit(catalog.Commit{Deletes: []catalog.Delete{{Key: rec.Key, ExpectRevision: rec.Revision}}})
			}
			results, err := r.send(ctx, batch)
			if err != nil {
				return err
			}
			for i := range results {
				if e := results[i].Err; e != nil && e.Reason != errs.StaleRevision {
					return e
				}
			}
			if page.Next == "" {
				break
			}
		}
	}
	return nil
}

func (r *Restorer) commit(c catalog.Commit) catalog.Commit {
	c.Repair, c.Owner, c.Attempt = true, fence.Owner{Coordinator: r.Epoch}, uuid.NewString()
	return c
}

// send applies a batch. A reply that was lost is an error, after which it is harmless to do all of it again.
func (r *Restorer) send(ctx context.Context, batch []catalog.Commit) ([]catalog.Result, error) {
	if len(batch) == 0 {
		return nil, nil
	}
	fault.At("restore.records.before")
	results, err := r.Store.Commit(ctx, batch)
	fault.At("restore.records.after")
	if err != nil {
		return nil, err
	}
	for i := range results {
		if e := results[i].Err; e != nil && (e.Reason == errs.Fenced || e.Reason == errs.CatalogRewound) {
			return nil, e
		}
	}
	return results, nil
}

// Put puts records, each at the revision that it had, and gives the places of those that refer to what is not there yet. One that is
// there already, in all the same, is left.
func (r *Restorer) Put(ctx context.Context, records []catalog.Record) (waiting []int, err error) {
	batch := make([]catalog.Commit, len(records))
	for i, rec := range records {
		batch[i] = r.commit(catalog.Commit{Puts: []catalog.Put{{Record: rec, Revision: rec.Revision}}})
	}
	results, err := r.send(ctx, batch)
	if err != nil {
		return nil, err
	}
	for i := range results {
		e := results[i].Err
		switch {
		case e == nil:
		case e.Reason == errs.StaleUID:
			waiting = append(waiting, i)
		case e.Reason == errs.StaleRevision:
			if err := r.there(ctx, records[i]); err != nil {
				return nil, err
			}
		default:
			return nil, errs.Wrap(e, errs.StateDamaged, "record %s does not go into the catalog: %s; the backup contradicts itself: begin with an empty server and another one", records[i].Key, e)
		}
	}
	return waiting, nil
}

func (r *Restorer) there(ctx context.Context, want catalog.Record) error {
	has, err := r.Store.Get(ctx, want.Key)
	if err != nil {
		return err
	}
	var a, b backup.Sum
	a.Add(has)
	b.Add(want)
	if a.String() != b.String() {
		return errs.New(errs.StateDamaged, "record %s is there, and another than the backup's; begin with an empty server", want.Key)
	}
	return nil
}

// Compare tells whether the catalog has exactly so many records of that digest.
func (r *Restorer) Compare(ctx context.Context, records int64, sum string) error {
	var has backup.Sum
	for _, kind := range catalog.Kinds() {
		q := catalog.Query{Kind: kind, PageSize: pageSize}
		for {
			page, err := r.Store.List(ctx, q)
			if err != nil {
				return err
			}
			for _, rec := range page.Records {
				has.Add(rec)
			}
			if q.After = page.Next; page.Next == "" {
				break
			}
		}
	}
	if has.Records() != records || has.String() != sum {
		return errs.New(errs.RestoreUnfinished, "the catalog has %d records of digest %s, the backup %d of digest %s; run the restore again with the same file",
			has.Records(), has.String(), records, sum)
	}
	return nil
}
