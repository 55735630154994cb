package app_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"github.com/dormouse-run/dormouse/pkg/catalog/backup"
	"github.com/dormouse-run/dormouse/pkg/catalog/memory"
	"github.com/dormouse-run/dormouse/pkg/errs"
	nodev1 "github.com/dormouse-run/dormouse/proto/dormouse/node/v1"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// backup takes one through the API, and looks at the bounds of its messages.
func (r *rig) backup() *backup.File {
	r.t.Helper()
	stream, err := dormousev1.NewCatalogServiceClient(r.conn(r.root)).BackupCatalog(context.Background(), &dormousev1.BackupCatalogRequest{})
	if err != nil {
		r.t.Fatal(err)
	}
	var b bytes.Buffer
	w := backup.NewWriter(&b)
	for {
		msg, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		if err == nil && len(msg.GetEntries()) > 256 {
			r.t.Errorf("%d entries in a message", len(msg.GetEntries()))
		}
		if err == nil && msg.GetHeader() != nil {
			err = w.Header(msg.GetHeader())
		}
		for _, e := range msg.GetEntries() {
			err = errors.Join(err, w.Entry(e))
		}
		if err == nil && msg.GetEnd() != nil {
			_, err = w.End(msg.GetEnd())
		}
		if err != nil {
			r.t.Fatal(err)
		}
	}
	f, err := backup.Open(bytes.NewReader(b.Bytes()))
	if err != nil {
		r.t.Fatal(err)
	}
	return f
}

// A backup is put into the empty catalog of a coordinator that never saw the old one: suspended before the first record and after the last,
// above the old epoch, and in service at an operator's word only.
func TestC29BackupIntoAnotherCoordinator(t *testing.T) {
	r := newRig(t)
	n := r.node("n1")
	for range 30 {
		r.create("")
	}
	file := r.backup()
	head, epoch := r.status().GetHead(), r.status().GetCoordinatorEpoch()
	if file.End.GetPoint().GetIncarnation() != head.GetIncarnation() || file.Records < 60 || file.Header.GetCoordinatorEpoch() != epoch {
		t.Fatalf("%v, %d records", file.End, file.Records)
	}
	n.hangUp()
	r.app.Stop()
	empty := memory.New(memory.Options{})
	t.Cleanup(func() { _ = empty.Close() })
	r.store = &keptStore{empty}
	r.start()

	ctx := context.Background()
	c := dormousev1.NewCatalogServiceClient(r.conn(r.root, grpc.WithDefaultCallOptions(grpc.WaitForReady(true))))
	begin := &dormousev1.BeginCatalogRestoreRequest{BackupId: file.ID, Point: file.End.GetPoint(), CoordinatorEpoch: epoch + 50, Ancestors: file.Header.GetAncestors()}
	_, err := dormousev1.NewCatalogServiceClient(r.conn(r.user)).BeginCatalogRestore(ctx, begin)
	wantReason(t, err, errs.NotAllowed)
	_, err = c.BeginCatalogRestore(ctx, &dormousev1.BeginCatalogRestoreRequest{BackupId: "mine", Point: begin.GetPoint()})
	wantReason(t, err, errs.InvalidField)
	var records []*dormousev1.CatalogRecord
	for p, err := range file.Entries() {
		if err != nil {
			t.Fatal(err)
		}
		records = append(records, p)
	}
	put := func(some []*dormousev1.CatalogRecord) error {
		_, err := c.RestoreCatalogRecords(ctx, &dormousev1.RestoreCatalogRecordsRequest{BackupId: file.ID, Records: some})
		return err
	}
	end := &dormousev1.EndCatalogRestoreRequest{BackupId: file.ID, Records: file.Records, Sum: file.Sum}
	wantReason(t, put(records[:1]), errs.WrongPhase)
	wantReason(t, put(slices.Repeat(records[:1], 257)), errs.LimitExceeded)
	for range 2 {
		if _, err := c.BeginCatalogRestore(ctx, begin); err != nil {
			t.Fatal(err)
		}
	}
	if err := put(records[:50]); err != nil {
		t.Fatal(err)
	}
	if st := r.status(); st.GetSuspended().GetRestoring() != file.ID || st.GetCoordinatorEpoch() <= epoch+50 {
		t.Errorf("status: %v", st)
	}
	// A half is never taken into service.
	_, err = c.RepairCatalog(ctx, &dormousev1.RepairCatalogRequest{AcceptLoss: true, WithoutNodes: []string{"n1"}})
	wantReason(t, err, errs.RestoreUnfinished)
	_, err = c.EndCatalogRestore(ctx, end)
	wantReason(t, err, errs.RestoreUnfinished)
	other := proto.CloneOf(begin)
	other.BackupId = strings.Repeat("0", 64)
	_, err = c.BeginCatalogRestore(ctx, other)
	wantReason(t, err, errs.RestoreUnfinished)
	for some := range slices.Chunk(records, 50) {
		if err := put(some); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 {
		if _, err := c.EndCatalogRestore(ctx, end); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "it leads anew, suspended", func() bool {
		_, err := c.RepairCatalog(ctx, &dormousev1.RepairCatalogRequest{WithoutNodes: []string{"n1"}})
		return errs.Has(err, errs.CatalogRewound) && strings.Contains(err.Error(), "does not know which nodes there were")
	})
	if list, err := dormousev1.NewSandboxServiceClient(r.conn(r.user)).ListSandboxes(ctx, &dormousev1.ListSandboxesRequest{PageSize: 500}); err != nil || len(list.GetSandboxes()) != 30 {
		t.Errorf("%d sandboxes, %v", len(list.GetSandboxes()), err)
	}
	_, err = dormousev1.NewSandboxServiceClient(r.conn(r.user)).CreateSandbox(ctx, box(""))
	wantReason(t, err, errs.CatalogRewound)
	// The node is let in; what it saw after the backup is lost, what it saw before is not.
	n.witness = &nodev1.CatalogPoint{Incarnation: head.GetIncarnation(), Seq: head.GetSeq() + 1, Digest: "after"}
	eventually(t, "the node is let in", func() bool { return n.dial(r.app.Addresses("node")[0], 20*time.Millisecond) == nil })
	if w := r.status().GetSuspended().GetWitness(); w.GetSeq() != head.GetSeq()+1 {
		t.Errorf("the witness is %v", w)
	}
}
