package client

import (
	"context"
	"errors"
	"io"
	"iter"

	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// CatalogStatus tells how the catalog is: where its history stands, what waits, whether it takes writes, with the journals
// of all nodes. For operators.
func (c *Client) CatalogStatus(ctx context.Context) (*dormousev1.CatalogStatus, error) {
	var st *dormousev1.CatalogStatus
	for token := ""; ; {
		resp, err := retry(ctx, func(ctx context.Context) (*dormousev1.GetCatalogStatusResponse, error) {
			return c.catalog.GetCatalogStatus(ctx, &dormousev1.GetCatalogStatusRequest{PageToken: token})
		})
		if err != nil {
			return nil, err
		}
		if st == nil {
			st = resp.GetCatalog()
		} else {
			st.Journals = append(st.Journals, resp.GetCatalog().GetJournals()...)
		}
		if token = resp.GetNextPageToken(); token == "" {
			return st, nil
		}
	}
}

// VerifyCatalog compares the catalog with what the nodes have and gives each difference. It changes nothing. For operators.
func (c *Client) VerifyCatalog(ctx context.Context) iter.Seq2[*dormousev1.CatalogFinding, error] {
	return func(yield func(*dormousev1.CatalogFinding, error) bool) {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		stream, err := c.catalog.VerifyCatalog(ctx, &dormousev1.VerifyCatalogRequest{})
		for err == nil {
			var msg *dormousev1.VerifyCatalogResponse
			if msg, err = stream.Recv(); err != nil {
				if errors.Is(err, io.EOF) {
					err = io.ErrUnexpectedEOF // the last message says so
				}
				break
			}
			for _, f := range msg.GetFindings() {
				if !yield(f, nil) {
					return
				}
			}
			if msg.GetDone() {
				return
			}
		}
		yield(nil, err)
	}
}

// RepairCatalog puts back into a suspended catalog what the nodes' journals have of what it lost. It is refused with
// CATALOG_REWOUND while something may be lost for ever that the caller does not accept: acceptLoss is for what nobody knows, without
// names nodes that are away. It is tried once: another coordinator may know of other losses. For operators.
func (c *Client) RepairCatalog(ctx context.Context, acceptLoss bool, without ...string) (*dormousev1.RepairCatalogResponse, error) {
	return c.catalog.RepairCatalog(ctx, &dormousev1.RepairCatalogRequest{AcceptLoss: acceptLoss, WithoutNodes: without})
}

// CompactCatalog forgets the traces of what was deleted whose time is over, a bounded number in each call, and says how
// many there were. For operators.
func (c *Client) CompactCatalog(ctx context.Context) (total int64, err error) {
	for {
		resp, err := retry(ctx, func(ctx context.Context) (*dormousev1.CompactCatalogResponse, error) {
			return c.catalog.CompactCatalog(ctx, &dormousev1.CompactCatalogRequest{})
		})
		if total += resp.GetForgotten(); err != nil || !resp.GetMore() {
			return total, err
		}
	}
}

// DropOrphan has a node remove what it holds without a record, if it is proven that it was deleted or that a repair gave it up, or with acceptLoss all the
// same. One that the node does not have is Absent in the answer. For operators.
func (c *Client) DropOrphan(ctx context.Context, node, uid string, acceptLoss bool) (*dormousev1.DropOrphanResponse, error) {
	return retry(ctx, func(ctx context.Context) (*dormousev1.DropOrphanResponse, error) {
		return c.catalog.DropOrphan(ctx, &dormousev1.DropOrphanRequest{Node: node, Uid: uid, AcceptLoss: acceptLoss})
	})
}

// AdoptOrphan gives a record again to what a node holds and a repair of the catalog gave up. For operators.
func (c *Client) AdoptOrphan(ctx context.Context, node, uid string) (*dormousev1.AdoptOrphanResponse, error) {
	return retry(ctx, func(ctx context.Context) (*dormousev1.AdoptOrphanResponse, error) {
		return c.catalog.AdoptOrphan(ctx, &dormousev1.AdoptOrphanRequest{Node: node, Uid: uid})
	})
}

// BackupCatalog gives a backup message by message: the header, entries, and the end. It is tried once: what was given is of no use
// without the end. For operators.
func (c *Client) BackupCatalog(ctx context.Context) iter.Seq2[*dormousev1.BackupCatalogResponse, error] {
	return func(yield func(*dormousev1.BackupCatalogResponse, error) bool) {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		stream, err := c.catalog.BackupCatalog(ctx, &dormousev1.BackupCatalogRequest{})
		for err == nil {
			var msg *dormousev1.BackupCatalogResponse
			if msg, err = stream.Recv(); err != nil {
				if errors.Is(err, io.EOF) {
					err = io.ErrUnexpectedEOF // the last message says so
				}
				break
			}
			if !yield(msg, nil) || msg.GetEnd() != nil {
				return
			}
		}
		yield(nil, err)
	}
}

// BeginCatalogRestore suspends an empty catalog, so that it takes the records of one backup. It may be repeated. For operators.
func (c *Client) BeginCatalogRestore(ctx context.Context, req *dormousev1.BeginCatalogRestoreRequest) error {
	_, err := retry(ctx, func(ctx context.Context) (*dormousev1.BeginCatalogRestoreResponse, error) {
		return c.catalog.BeginCatalogRestore(ctx, req)
	})
	return err
}

// RestoreCatalogRecords puts records of the backup into the catalog, and gives the places of those that refer to what is not there
// yet and are to be sent again. It may be repeated. For operators.
func (c *Client) RestoreCatalogRecords(ctx context.Context, backupID string, records []*dormousev1.CatalogRecord) (waiting []int32, err error) {
	resp, err := retry(ctx, func(ctx context.Context) (*dormousev1.RestoreCatalogRecordsResponse, error) {
		return c.catalog.RestoreCatalogRecords(ctx, &dormousev1.RestoreCatalogRecordsRequest{BackupId: backupID, Records: records})
	})
	return resp.GetWaiting(), err
}

// EndCatalogRestore has the catalog compared with what the backup had. It may be repeated. For operators.
func (c *Client) EndCatalogRestore(ctx context.Context, req *dormousev1.EndCatalogRestoreRequest) error {
	_, err := retry(ctx, func(ctx context.Context) (*dormousev1.EndCatalogRestoreResponse, error) {
		return c.catalog.EndCatalogRestore(ctx, req)
	})
	return err
}
