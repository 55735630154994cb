package api

import (
	"context"
	"encoding/hex"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/dormouse-run/dormouse/coordinator/internal/auth"
	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/catalog/backup"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/fence"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// What one message of a backup, or of a restore, holds at most.
const (
	maxEntries    = 256
	maxEntryBytes = 1 << 20
)

// BackupCatalog implements CatalogService.
func (s catalogService) BackupCatalog(_ *dormousev1.BackupCatalogRequest, stream grpc.ServerStreamingServer[dormousev1.BackupCatalogResponse]) error {
	ctx := stream.Context()
	if _, err := auth.Operator(ctx); err != nil {
		return err
	}
	msg, size := new(dormousev1.BackupCatalogResponse), 0
	flush := func() error {
		if len(msg.GetEntries()) == 0 {
			return nil
		}
		full := msg
		msg, size = new(dormousev1.BackupCatalogResponse), 0
		return stream.Send(full)
	}
	end, err := s.cfg.Catalog.Backup(ctx, func(h *dormousev1.CatalogBackupHeader) error {
		h.Time = timestamppb.Now()
		return stream.Send(&dormousev1.BackupCatalogResponse{Header: h})
	}, func(e *dormousev1.CatalogBackupEntry) error {
		n := proto.Size(e)
		if size+n > maxEntryBytes || len(msg.GetEntries()) == maxEntries {
			if err := flush(); err != nil {
				return err
			}
		}
		msg.Entries, size = append(msg.Entries, e), size+n
		return nil
	})
	if err != nil {
		return err
	}
	if err := flush(); err != nil {
		return err
	}
	return stream.Send(&dormousev1.BackupCatalogResponse{End: end})
}

// backupID checks the form of a backup's name.
func backupID(id string) error {
	if b, err := hex.DecodeString(id); err != nil || len(b) != 32 {
		return errs.New(errs.InvalidField, "backup_id: 64 hexadecimal digits are expected, the SHA-256 of the backup").With("field", "backup_id")
	}
	return nil
}

// BeginCatalogRestore implements CatalogService.
func (s catalogService) BeginCatalogRestore(ctx context.Context, req *dormousev1.BeginCatalogRestoreRequest) (*dormousev1.BeginCatalogRestoreResponse, error) {
	if _, err := auth.Operator(ctx); err != nil {
		return nil, err
	}
	if err := backupID(req.GetBackupId()); err != nil {
		return nil, err
	}
	if req.GetCoordinatorEpoch() >= catalog.MaxCounter {
		return nil, errs.New(errs.InvalidField, "coordinator_epoch is above %d", uint64(catalog.MaxCounter-1)).With("field", "coordinator_epoch")
	}
	p := req.GetPoint()
	r := catalog.Restore{ID: req.GetBackupId(), Ancestors: req.GetAncestors(),
		Point: catalog.Point{Incarnation: p.GetIncarnation(), Seq: p.GetSeq(), Digest: p.GetDigest()}}
	if err := r.Validate(); err != nil {
		return nil, err
	}
	err := s.cfg.Catalog.BeginRestore(ctx, r, fence.Epoch(req.GetCoordinatorEpoch()))
	return &dormousev1.BeginCatalogRestoreResponse{}, err
}

// RestoreCatalogRecords implements CatalogService.
func (s catalogService) RestoreCatalogRecords(ctx context.Context, req *dormousev1.RestoreCatalogRecordsRequest) (*dormousev1.RestoreCatalogRecordsResponse, error) {
	if _, err := auth.Operator(ctx); err != nil {
		return nil, err
	}
	if err := backupID(req.GetBackupId()); err != nil {
		return nil, err
	}
	if n := len(req.GetRecords()); n == 0 || n > maxEntries {
		return nil, errs.New(errs.LimitExceeded, "records: %d is outside 1..%d", n, maxEntries).With("field", "records")
	}
	records := make([]catalog.Record, 0, len(req.GetRecords()))
	for _, p := range req.GetRecords() {
		r, err := backup.RecordOf(p)
		if err != nil {
			return nil, err
		}
		records = append(records, r)
	}
	waiting, err := s.cfg.Catalog.RestoreRecords(ctx, req.GetBackupId(), records)
	if err != nil {
		return nil, err
	}
	resp := new(dormousev1.RestoreCatalogRecordsResponse)
	for _, i := range waiting {
		resp.Waiting = append(resp.Waiting, int32(i)) //nolint:gosec // below maxEntries
	}
	return resp, nil
}

// EndCatalogRestore implements CatalogService.
func (s catalogService) EndCatalogRestore(ctx context.Context, req *dormousev1.EndCatalogRestoreRequest) (*dormousev1.EndCatalogRestoreResponse, error) {
	if _, err := auth.Operator(ctx); err != nil {
		return nil, err
	}
	if err := backupID(req.GetBackupId()); err != nil {
		return nil, err
	}
	if req.GetRecords() < 0 || len(req.GetSum()) > catalog.MaxID {
		return nil, errs.New(errs.InvalidField, "records is negative, or sum is no digest").With("field", "sum")
	}
	return &dormousev1.EndCatalogRestoreResponse{}, s.cfg.Catalog.EndRestore(ctx, req.GetBackupId(), req.GetRecords(), req.GetSum())
}
