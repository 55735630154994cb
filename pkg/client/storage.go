package client

import (
	"context"
	"iter"

	"google.golang.org/protobuf/proto"

	"github.com/dormouse-run/dormouse/pkg/uid"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// Snapshot is a handle: a uid and what was last seen of it.
type Snapshot struct {
	c    *Client
	UID  string
	Last *dormousev1.Snapshot // nil until it was read
}

// Snapshot gives the handle of a uid without asking the server.
func (c *Client) Snapshot(uid string) *Snapshot { return &Snapshot{c: c, UID: uid} }

func (c *Client) seenSnapshot(s *dormousev1.Snapshot) *Snapshot {
	return &Snapshot{c: c, UID: s.GetMeta().GetUid(), Last: s}
}

// FindSnapshot gives the snapshot of a uid, or the living one of a name.
func (c *Client) FindSnapshot(ctx context.Context, ref string) (*Snapshot, error) {
	if uid.Check(ref) == nil {
		s := c.Snapshot(ref)
		return s, s.Refresh(ctx)
	}
	found, err := byName(ctx, "snapshot", ref, c.ListSnapshots(ctx, &dormousev1.ListSnapshotsRequest{Name: ref}))
	if err != nil {
		return nil, err
	}
	return c.seenSnapshot(found), nil
}

// ListSnapshots gives all snapshots that match, page by page.
func (c *Client) ListSnapshots(ctx context.Context, req *dormousev1.ListSnapshotsRequest) iter.Seq2[*dormousev1.Snapshot, error] {
	return pages(func(token string) ([]*dormousev1.Snapshot, string, error) {
		next := proto.CloneOf(req)
		if token != "" {
			next.PageToken = token
		}
		resp, err := retry(ctx, func(ctx context.Context) (*dormousev1.ListSnapshotsResponse, error) {
			return c.snapshots.ListSnapshots(ctx, next)
		})
		return resp.GetSnapshots(), resp.GetNextPageToken(), err
	})
}

// Refresh reads the snapshot.
func (s *Snapshot) Refresh(ctx context.Context) error {
	resp, err := retry(ctx, func(ctx context.Context) (*dormousev1.GetSnapshotResponse, error) {
		return s.c.snapshots.GetSnapshot(ctx, &dormousev1.GetSnapshotRequest{Uid: s.UID})
	})
	if err != nil {
		return err
	}
	s.Last = resp.GetSnapshot()
	return nil
}

// Delete returns when the artefact's absence was observed.
func (s *Snapshot) Delete(ctx context.Context, operationID string) error {
	req := &dormousev1.DeleteSnapshotRequest{Uid: s.UID, OperationId: operation(operationID)}
	_, err := retry(ctx, func(ctx context.Context) (*dormousev1.DeleteSnapshotResponse, error) {
		return s.c.snapshots.DeleteSnapshot(ctx, req)
	})
	return err
}

// Restore makes a new sandbox with the snapshot's processes. The request's snapshot is the handle's.
func (s *Snapshot) Restore(ctx context.Context, req *dormousev1.RestoreSandboxRequest) (*Sandbox, error) {
	req = proto.CloneOf(req)
	req.SnapshotUid, req.OperationId = s.UID, operation(req.GetOperationId())
	resp, err := retry(ctx, func(ctx context.Context) (*dormousev1.RestoreSandboxResponse, error) {
		return s.c.sandboxes.RestoreSandbox(ctx, req)
	})
	if err != nil {
		return nil, err
	}
	return s.c.seen(resp.GetSandbox()), nil
}

// Volume is a handle: a uid and what was last seen of it.
type Volume struct {
	c    *Client
	UID  string
	Last *dormousev1.Volume // nil until it was read
}

// Volume gives the handle of a uid without asking the server.
func (c *Client) Volume(uid string) *Volume { return &Volume{c: c, UID: uid} }

// CreateVolume returns when the volume is ready.
func (c *Client) CreateVolume(ctx context.Context, req *dormousev1.CreateVolumeRequest) (*Volume, error) {
	req = proto.CloneOf(req)
	req.OperationId = operation(req.GetOperationId())
	resp, err := retry(ctx, func(ctx context.Context) (*dormousev1.CreateVolumeResponse, error) {
		return c.volumes.CreateVolume(ctx, req)
	})
	if err != nil {
		return nil, err
	}
	return &Volume{c: c, UID: resp.GetVolume().GetMeta().GetUid(), Last: resp.GetVolume()}, nil
}

// FindVolume gives the volume of a uid, or the living one of a name.
func (c *Client) FindVolume(ctx context.Context, ref string) (*Volume, error) {
	if uid.Check(ref) == nil {
		v := c.Volume(ref)
		return v, v.Refresh(ctx)
	}
	found, err := byName(ctx, "volume", ref, c.ListVolumes(ctx, &dormousev1.ListVolumesRequest{Name: ref}))
	if err != nil {
		return nil, err
	}
	return &Volume{c: c, UID: found.GetMeta().GetUid(), Last: found}, nil
}

// ListVolumes gives all volumes that match, page by page.
func (c *Client) ListVolumes(ctx context.Context, req *dormousev1.ListVolumesRequest) iter.Seq2[*dormousev1.Volume, error] {
	return pages(func(token string) ([]*dormousev1.Volume, string, error) {
		next := proto.CloneOf(req)
		if token != "" {
			next.PageToken = token
		}
		resp, err := retry(ctx, func(ctx context.Context) (*dormousev1.ListVolumesResponse, error) {
			return c.volumes.ListVolumes(ctx, next)
		})
		return resp.GetVolumes(), resp.GetNextPageToken(), err
	})
}

// Refresh reads the volume.
func (v *Volume) Refresh(ctx context.Context) error {
	resp, err := retry(ctx, func(ctx context.Context) (*dormousev1.GetVolumeResponse, error) {
		return v.c.volumes.GetVolume(ctx, &dormousev1.GetVolumeRequest{Uid: v.UID})
	})
	if err != nil {
		return err
	}
	v.Last = resp.GetVolume()
	return nil
}

// Delete returns when the folder's absence was observed.
func (v *Volume) Delete(ctx context.Context, operationID string) error {
	req := &dormousev1.DeleteVolumeRequest{Uid: v.UID, OperationId: operation(operationID)}
	_, err := retry(ctx, func(ctx context.Context) (*dormousev1.DeleteVolumeResponse, error) {
		return v.c.volumes.DeleteVolume(ctx, req)
	})
	return err
}
