package app

import (
	"context"

	"github.com/dormouse-run/dormouse/coordinator/internal/backup"
	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/fault"
	"github.com/dormouse-run/dormouse/pkg/fence"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// Backup implements api.Catalog.
func (k keeper) Backup(ctx context.Context, begin func(*dormousev1.CatalogBackupHeader) error, emit func(*dormousev1.CatalogBackupEntry) error) (*dormousev1.CatalogBackupEnd, error) {
	if k.inForce.Load() == nil {
		return nil, notLeading()
	}
	header, err := backup.Header(ctx, k.store)
	if err != nil {
		return nil, err
	}
	if err := begin(header); err != nil {
		return nil, err
	}
	return backup.Copy(ctx, k.store, emit)
}

// BeginRestore implements api.Catalog. The term ends where it is not one of a suspended catalog, or not above the epoch that was in force
// when the backup was taken.
func (k keeper) BeginRestore(ctx context.Context, r catalog.Restore, above fence.Epoch) error {
	k.repairing.Lock()
	defer k.repairing.Unlock()
	t := k.inForce.Load()
	if t == nil {
		return notLeading()
	}
	r.By = k.cfg.Holder
	fault.At("restore.begin.before")
	if err := k.store.BeginRestore(ctx, t.epoch, r); err != nil {
		return err
	}
	fault.At("restore.begin.after")
	k.exceed(above)
	k.log.Warn("a backup is being put into the catalog", "backup_id", r.ID, "incarnation", r.Point.Incarnation, "seq", r.Point.Seq)
	st, err := k.store.Status(ctx)
	if err == nil && st.Suspended != nil && st.Suspended.Restoring == r.ID { // else it has all the backup's records already
		err = (&backup.Restorer{Store: k.store, Epoch: t.epoch}).Clear(ctx)
	}
	if !t.suspended || t.epoch <= above {
		t.end(errs.New(errs.NoLeader, "a backup is being put into the catalog; leading anew"))
	}
	return err
}

// restoring gives the term, if it is one in which the backup's records are taken; nil, if they were all taken before.
func (k keeper) restoring(ctx context.Context, id string) (*reign, error) {
	t := k.inForce.Load()
	if t == nil {
		return nil, notLeading()
	}
	st, err := k.store.Status(ctx)
	if err != nil {
		return nil, err
	}
	switch {
	case st.Restored == id && (st.Suspended == nil || st.Suspended.Restoring == ""):
		return nil, nil //nolint:nilnil // see above
	case st.Suspended == nil || st.Suspended.Restoring == "":
		return nil, catalog.Refusal(errs.WrongPhase, "uid", "catalog", "phase", "not restoring")
	case st.Suspended.Restoring != id:
		return nil, catalog.Unfinished(st.Suspended.Restoring)
	case !t.suspended:
		return nil, errs.New(errs.NoLeader, "the coordinator is about to lead anew, to restore the catalog; ask again")
	}
	return t, nil
}

// RestoreRecords implements api.Catalog.
func (k keeper) RestoreRecords(ctx context.Context, id string, records []catalog.Record) ([]int, error) {
	k.repairing.Lock()
	defer k.repairing.Unlock()
	t, err := k.restoring(ctx, id)
	if t == nil || err != nil {
		return nil, err
	}
	return (&backup.Restorer{Store: k.store, Epoch: t.epoch}).Put(ctx, records)
}

// EndRestore implements api.Catalog. The term ends, so that the nodes that were restored are known to the one that repairs.
func (k keeper) EndRestore(ctx context.Context, id string, records int64, sum string) error {
	k.repairing.Lock()
	defer k.repairing.Unlock()
	t, err := k.restoring(ctx, id)
	if t == nil || err != nil {
		return err
	}
	if err := (&backup.Restorer{Store: k.store, Epoch: t.epoch}).Compare(ctx, records, sum); err != nil {
		return err
	}
	fault.At("restore.end.before")
	if err := k.store.EndRestore(ctx, t.epoch, id); err != nil {
		return err
	}
	fault.At("restore.end.after")
	k.log.Warn("the backup is in the catalog, which stays suspended until it is repaired from the nodes' journals", "backup_id", id, "records", records)
	t.end(errs.New(errs.NoLeader, "the catalog was restored; leading anew"))
	return nil
}
