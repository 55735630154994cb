package deletion

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/dormouse-run/dormouse/pkg/client"
	"github.com/dormouse-run/dormouse/pkg/uid"
	"github.com/dormouse-run/dormouse/pkg/wait"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// finish waits for what is pending, and asks again for what had not been accepted when the coordinator died and nobody came back for.
func (r *run) finish(ctx context.Context, uids []string) error {
	err := r.poll(ctx, "what is pending comes to its end", func() error {
		st, err := r.Client.CatalogStatus(ctx)
		if err == nil && pending(st).GetPending() > 0 {
			err = fmt.Errorf("pending are %v", st.GetDeletions())
		}
		return err
	})
	if err != nil {
		return err
	}
	asked := make(map[string]bool, len(uids))
	for _, u := range uids {
		asked[u] = true
	}
	left, err := client.Collect(r.api.ListSnapshots(ctx, &dormousev1.ListSnapshotsRequest{PageSize: 500}))
	if err != nil {
		return err
	}
	for _, s := range left {
		if !asked[s.GetMeta().GetUid()] {
			continue
		}
		if phase := s.GetStatus().GetPhase(); phase != dormousev1.SnapshotPhase_SNAPSHOT_PHASE_READY {
			return fmt.Errorf("snapshot %s is %s, and nothing is pending", s.GetMeta().GetUid(), phase)
		}
		r.figures.Again++
		if err := r.remove(ctx, s.GetMeta().GetUid()); err != nil {
			return err
		}
	}
	if r.figures.Again > Callers/2 {
		return fmt.Errorf("%d deletions were not accepted, more than callers left", r.figures.Again)
	}
	r.figures.Deleted = len(uids)
	return nil
}

// restored restores one, whatever happens to the coordinator meanwhile, and deletes what that made.
func (r *run) restored(ctx context.Context, u string) error {
	req := &dormousev1.RestoreSandboxRequest{OperationId: uid.New()}
	var made *client.Sandbox
	err := insist(ctx, func() (err error) {
		made, err = r.api.Snapshot(u).Restore(ctx, req)
		return err
	})
	if err != nil {
		return err
	}
	r.extra.Add(1)
	return made.Delete(ctx, "")
}

// ended checks that nothing is left, and looks at the memory.
func (r *run) ended(ctx context.Context) (err error) {
	for _, s := range r.sources[1:] {
		r.extra.Add(1)
		if err := s.Delete(ctx, ""); err != nil {
			return err
		}
	}
	r.extra.Add(1)
	if err := r.volume.Delete(ctx, ""); err != nil {
		return err
	}
	if err := r.disks(); err != nil {
		return err
	}
	found, err := client.Collect(r.Client.VerifyCatalog(ctx))
	if err != nil || len(found) > 0 {
		return fmt.Errorf("catalog and nodes differ: %v (%w)", found, err)
	}
	st, err := r.Client.CatalogStatus(ctx)
	if err != nil {
		return err
	}
	if want := int64(len(r.uids)) + r.extra.Load(); st.GetTombstones() != want {
		return fmt.Errorf("%d tombstones are there, not %d", st.GetTombstones(), want)
	}
	if o := st.GetOrphans(); o.GetHeld()+o.GetRemoved()+o.GetUnreadNodes() != 0 {
		return fmt.Errorf("orphans: %v", o)
	}
	r.figures.Tombstones = st.GetTombstones()
	r.figures.AtNode, r.figures.Checked = r.watch.figures()
	if r.figures.Checked < len(r.uids) {
		return fmt.Errorf("%d removals of %d were looked at", r.figures.Checked, len(r.uids))
	}
	r.figures.Coordinator[1], r.figures.Redis[1], err = r.memory()
	return err
}

func (r *run) memory() (coordinator, redis float64, err error) {
	s, err := r.Look()
	return float64(s.Resident["coordinator"]) / (1 << 20), float64(s.Resident["redis"]) / (1 << 20), err
}

// disks tells what the nodes have left of snapshots.
func (r *run) disks() error {
	for i := 1; i <= r.Options.Nodes; i++ {
		for _, below := range []string{"", ".staging", ".trash"} {
			entries, err := os.ReadDir(filepath.Join(r.Disk(i), "snapshots", below))
			if err != nil {
				return err
			}
			for _, e := range entries {
				if !strings.HasPrefix(e.Name(), ".") {
					return fmt.Errorf("node %d has %s/%s still", i, below, e.Name())
				}
			}
		}
	}
	return nil
}

// poll repeats f until it succeeds.
func (r *run) poll(ctx context.Context, what string, f func() error) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		err := f()
		if err == nil {
			return nil
		}
		if wait.For(ctx, 10*time.Millisecond) != nil {
			return fmt.Errorf("%s: %w", what, errors.Join(err, context.Cause(ctx)))
		}
	}
}
