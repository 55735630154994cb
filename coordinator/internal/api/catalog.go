package api

import (
	"context"
	"slices"

	"google.golang.org/grpc"

	"github.com/dormouse-run/dormouse/coordinator/internal/auth"
	"github.com/dormouse-run/dormouse/coordinator/internal/operations"
	"github.com/dormouse-run/dormouse/coordinator/internal/repair"
	"github.com/dormouse-run/dormouse/coordinator/internal/sessions"
	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/fence"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// CatalogStatus is what is known of the catalog.
type CatalogStatus struct {
	catalog.Status
	Head                     catalog.Point
	Waiting, Queued, Unknown int64
	Nodes                    []sessions.View
	Deletions                []operations.Deletion
	// Removed, Held and Unread are of orphans: how many were removed in this term, are left alone, and on how many nodes
	// it is not known.
	Removed      int64
	Held, Unread int
}

// Catalog looks after the catalog. All of it is the leader's.
type Catalog interface {
	Status(ctx context.Context) (CatalogStatus, error)
	Verify(ctx context.Context, found func(repair.Finding) error) (records int, err error)
	Repair(ctx context.Context, acceptLoss bool, without []string) ([]repair.Finding, error)
	// Compact forgets a bounded number of expired tombstones, and tells whether there may be more.
	Compact(ctx context.Context) (forgotten int, more bool, err error)
	// DropOrphan has a node remove what no record names, with a proof that it was deleted or given up, or accepting that it may be the last copy. Absent: the node
	// does not have it, and its key is not known.
	DropOrphan(ctx context.Context, node, uid string, acceptLoss bool) (key catalog.Key, absent bool, err error)
	// AdoptOrphan gives a record again to what a node holds and a repair gave up, and tells its name.
	AdoptOrphan(ctx context.Context, node, uid string) (key catalog.Key, name string, err error)
	// Backup gives a header, entries, and the end.
	Backup(ctx context.Context, begin func(*dormousev1.CatalogBackupHeader) error, emit func(*dormousev1.CatalogBackupEntry) error) (*dormousev1.CatalogBackupEnd, error)
	// BeginRestore, RestoreRecords and EndRestore may all be repeated. RestoreRecords gives those that refer to what is not there yet.
	BeginRestore(ctx context.Context, r catalog.Restore, above fence.Epoch) error
	RestoreRecords(ctx context.Context, id string, records []catalog.Record) (waiting []int, err error)
	EndRestore(ctx context.Context, id string, records int64, sum string) error
}

// maxFindings bounds one message.
const maxFindings = 200

type catalogService struct {
	dormousev1.UnimplementedCatalogServiceServer
	*Server
}

func pointToProto(p catalog.Point) *dormousev1.HistoryPoint {
	if p.IsZero() {
		return nil
	}
	return &dormousev1.HistoryPoint{Incarnation: p.Incarnation, Seq: p.Seq, Digest: p.Digest}
}

// status gives the journals of at most size nodes after one, and the last of them if there are more.
func (s catalogService) status(ctx context.Context, after string, size int) (out *dormousev1.CatalogStatus, next string, err error) {
	st, err := s.cfg.Catalog.Status(ctx)
	if err != nil {
		return nil, "", err
	}
	out = &dormousev1.CatalogStatus{Server: st.Server, Durability: st.Durability, Head: pointToProto(st.Head), CoordinatorEpoch: uint64(st.Epoch),
		Tombstones: int64(st.Tombstones), Waiting: st.Waiting, Queued: st.Queued, Unknown: st.Unknown}
	if why := st.Suspended; why != nil {
		out.Suspended = &dormousev1.CatalogSuspension{Since: timeToProto(why.Since), FoundBy: why.By, Witness: pointToProto(why.Witness), Restoring: why.Restoring}
	}
	for _, d := range st.Deletions {
		if d.Pending > 0 || d.Ended > 0 {
			out.Deletions = append(out.Deletions, &dormousev1.DeletionProgress{Kind: string(d.Kind), Pending: int64(d.Pending), Active: int64(d.Active),
				OldestTime: timeToProto(d.Oldest), EndedLastMinute: int64(d.Ended)})
		}
	}
	out.Orphans = &dormousev1.OrphanProgress{Removed: st.Removed, Held: int64(st.Held), UnreadNodes: int64(st.Unread)}
	for _, n := range st.Nodes {
		if n.Name <= after {
			continue
		}
		if len(out.GetJournals()) == size {
			return out, out.GetJournals()[size-1].GetNode(), nil
		}
		out.Journals = append(out.Journals, &dormousev1.NodeJournal{Node: n.Name, Online: n.Online, Point: pointToProto(n.Journal)})
	}
	return out, "", nil
}

// GetCatalogStatus implements CatalogService.
func (s catalogService) GetCatalogStatus(ctx context.Context, req *dormousev1.GetCatalogStatusRequest) (*dormousev1.GetCatalogStatusResponse, error) {
	if _, err := auth.Operator(ctx); err != nil {
		return nil, err
	}
	size := int(req.GetPageSize())
	if size == 0 {
		size = catalog.MaxPage
	}
	size, err := catalog.PageSize(size)
	if err != nil {
		return nil, err
	}
	t, err := parseToken(req.GetPageToken(), filterID("journals"))
	if err != nil {
		return nil, err
	}
	st, next, err := s.status(ctx, t.After, size)
	if err != nil {
		return nil, err
	}
	resp := &dormousev1.GetCatalogStatusResponse{Catalog: st}
	if t.After = next; next != "" {
		resp.NextPageToken = t.encode()
	}
	return resp, nil
}

var differences = map[repair.Difference]dormousev1.CatalogDifference{
	repair.Lost:       dormousev1.CatalogDifference_CATALOG_DIFFERENCE_LOST,
	repair.Older:      dormousev1.CatalogDifference_CATALOG_DIFFERENCE_OLDER,
	repair.Undeleted:  dormousev1.CatalogDifference_CATALOG_DIFFERENCE_UNDELETED,
	repair.Unrecorded: dormousev1.CatalogDifference_CATALOG_DIFFERENCE_UNRECORDED,
	repair.Missing:    dormousev1.CatalogDifference_CATALOG_DIFFERENCE_MISSING,
	repair.Unknown:    dormousev1.CatalogDifference_CATALOG_DIFFERENCE_UNKNOWN,
}

func findingToProto(f repair.Finding) *dormousev1.CatalogFinding {
	return &dormousev1.CatalogFinding{Difference: differences[f.Difference], Tenant: f.Key.Tenant, Kind: string(f.Key.Kind), Uid: f.Key.UID, Name: f.Name,
		Node: f.Node, CatalogRevision: f.Catalog, JournalRevision: f.Journal, Repaired: f.Repaired, Message: f.Message}
}

// VerifyCatalog implements CatalogService.
func (s catalogService) VerifyCatalog(_ *dormousev1.VerifyCatalogRequest, stream grpc.ServerStreamingServer[dormousev1.VerifyCatalogResponse]) error {
	ctx := stream.Context()
	if _, err := auth.Operator(ctx); err != nil {
		return err
	}
	msg := new(dormousev1.VerifyCatalogResponse)
	records, err := s.cfg.Catalog.Verify(ctx, func(f repair.Finding) error {
		msg.Findings = append(msg.Findings, findingToProto(f))
		if len(msg.GetFindings()) < maxFindings {
			return nil
		}
		full := msg
		msg = new(dormousev1.VerifyCatalogResponse)
		return stream.Send(full)
	})
	if err != nil {
		return err
	}
	if len(msg.GetFindings()) > 0 {
		if err := stream.Send(msg); err != nil {
			return err
		}
	}
	return stream.Send(&dormousev1.VerifyCatalogResponse{Done: true, Records: int64(records)})
}

// RepairCatalog implements CatalogService.
func (s catalogService) RepairCatalog(ctx context.Context, req *dormousev1.RepairCatalogRequest) (*dormousev1.RepairCatalogResponse, error) {
	if _, err := auth.Operator(ctx); err != nil {
		return nil, err
	}
	if n := len(req.GetWithoutNodes()); n > catalog.MaxPage {
		return nil, errs.New(errs.LimitExceeded, "without_nodes: %d names are over the limit of %d", n, catalog.MaxPage).With("field", "without_nodes")
	}
	found, err := s.cfg.Catalog.Repair(ctx, req.GetAcceptLoss(), req.GetWithoutNodes())
	if err != nil {
		return nil, err
	}
	slices.SortStableFunc(found, func(a, b repair.Finding) int { return order(a.Repaired) - order(b.Repaired) })
	resp := &dormousev1.RepairCatalogResponse{Total: int64(len(found))}
	for _, f := range found[:min(len(found), maxFindings)] {
		resp.Findings = append(resp.Findings, findingToProto(f))
	}
	// The term in which a catalog is repaired ends with the repair: what was found is told all the same.
	if resp.Catalog, _, err = s.status(ctx, "", catalog.MaxPage); err != nil {
		s.cfg.Log.Info("the catalog is repaired; how it is now is not known yet", "error", err)
	}
	return resp, nil
}

// order has what was not put right told first.
func order(repaired bool) int {
	if repaired {
		return 1
	}
	return 0
}

// CompactCatalog implements CatalogService.
func (s catalogService) CompactCatalog(ctx context.Context, _ *dormousev1.CompactCatalogRequest) (*dormousev1.CompactCatalogResponse, error) {
	if _, err := auth.Operator(ctx); err != nil {
		return nil, err
	}
	n, more, err := s.cfg.Catalog.Compact(ctx)
	return &dormousev1.CompactCatalogResponse{Forgotten: int64(n), More: more}, err
}

// DropOrphan implements CatalogService.
func (s catalogService) DropOrphan(ctx context.Context, req *dormousev1.DropOrphanRequest) (*dormousev1.DropOrphanResponse, error) {
	if err := orphanNamed(ctx, req.GetNode(), req.GetUid()); err != nil {
		return nil, err
	}
	key, absent, err := s.cfg.Catalog.DropOrphan(ctx, req.GetNode(), req.GetUid(), req.GetAcceptLoss())
	if err != nil {
		return nil, err
	}
	return &dormousev1.DropOrphanResponse{Kind: string(key.Kind), Tenant: key.Tenant, Absent: absent}, nil
}

// AdoptOrphan implements CatalogService.
func (s catalogService) AdoptOrphan(ctx context.Context, req *dormousev1.AdoptOrphanRequest) (*dormousev1.AdoptOrphanResponse, error) {
	if err := orphanNamed(ctx, req.GetNode(), req.GetUid()); err != nil {
		return nil, err
	}
	key, name, err := s.cfg.Catalog.AdoptOrphan(ctx, req.GetNode(), req.GetUid())
	if err != nil {
		return nil, err
	}
	return &dormousev1.AdoptOrphanResponse{Kind: string(key.Kind), Tenant: key.Tenant, Name: name}, nil
}

// orphanNamed lets operators in who name a node and a uid.
func orphanNamed(ctx context.Context, node, uid string) error {
	if _, err := auth.Operator(ctx); err != nil {
		return err
	}
	if err := catalog.ValidateNode(node); err != nil {
		return err
	}
	return checkUID("uid", uid)
}
