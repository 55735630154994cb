package app

import (
	"context"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"

	"github.com/dormouse-run/dormouse/agentd/internal/nodestate"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/wire"
	nodev1 "github.com/dormouse-run/dormouse/proto/dormouse/node/v1"
)

// maxInventory is the most objects of one page of the inventory, maxInventoryBytes about the most bytes.
const (
	maxInventory      = 1000
	maxInventoryBytes = 2 << 20
)

// item is one object of the inventory, by its place in the order of pages.
type item struct {
	key string                                 // kind/uid; the kinds in the order of their letters
	add func(*nodev1.GetInventoryResponse) int // gives the size
}

// Inventory is a page of what the node holds, from its records: a sandbox that is still being made is in it, since its
// uid is taken, and so is a snapshot that is being deleted, until it is gone. It is complete, or an error.
func (n *node) Inventory(ctx context.Context, after string, limit int) (*nodev1.GetInventoryResponse, error) {
	if limit < 0 || limit > maxInventory {
		return nil, errs.New(errs.InvalidField, "page_size: %d is outside 1..%d", limit, maxInventory).With("field", "page_size")
	}
	if limit == 0 {
		limit = maxInventory
	}
	all, err := n.items(ctx)
	if err != nil {
		return nil, err
	}
	slices.SortFunc(all, func(a, b item) int { return strings.Compare(a.key, b.key) })
	first, found := slices.BinarySearchFunc(all, after, func(i item, key string) int { return strings.Compare(i.key, key) })
	if found {
		first++
	}
	inv := &nodev1.GetInventoryResponse{}
	last, size := first, 0
	for last < min(first+limit, len(all)) && size <= maxInventoryBytes {
		size += all[last].add(inv)
		last++
	}
	if last < len(all) {
		inv.Next = all[last-1].key
	}
	return inv, nil
}

// items looks at the folders before the records, so that what is made meanwhile is never taken for unowned.
func (n *node) items(ctx context.Context) ([]item, error) {
	lying, err := n.run.Snapshots.Observe()
	if err != nil {
		return nil, err
	}
	boxes, err := n.state.Sandboxes()
	if err != nil {
		return nil, err
	}
	snaps, err := n.state.Snapshots()
	if err != nil {
		return nil, err
	}
	vols, err := n.volumes.list(ctx)
	if err != nil {
		return nil, err
	}
	images, err := n.imageProtos(ctx)
	if err != nil {
		return nil, err
	}
	all := make([]item, 0, len(boxes)+len(snaps)+len(vols)+len(images))
	owned := make(map[string]bool, len(boxes)+len(snaps))
	for _, rec := range boxes {
		owned[rec.UID] = true
		all = append(all, item{"sandbox/" + rec.UID, func(inv *nodev1.GetInventoryResponse) int {
			p := observed(rec).Proto()
			inv.Sandboxes = append(inv.Sandboxes, p)
			return proto.Size(p)
		}})
	}
	for _, rec := range snaps {
		owned[rec.UID] = true
		if rec.State == nodestate.SnapshotSaving {
			continue
		}
		all = append(all, item{"snapshot/" + rec.UID, func(inv *nodev1.GetInventoryResponse) int {
			p := wire.SnapshotObservationToProto(snapshotOf(rec))
			inv.Snapshots = append(inv.Snapshots, p)
			return proto.Size(p)
		}})
	}
	unowned, err := n.stillThere(slices.DeleteFunc(lying.Published, func(id string) bool { return owned[id] }))
	if err != nil {
		return nil, err
	}
	for _, id := range unowned {
		all = append(all, item{"unowned/" + id, func(inv *nodev1.GetInventoryResponse) int {
			inv.UnownedArtefacts = append(inv.UnownedArtefacts, id)
			return len(id)
		}})
	}
	for _, v := range vols {
		all = append(all, item{"volume/" + v.UID, func(inv *nodev1.GetInventoryResponse) int {
			p := wire.VolumeObservationToProto(v)
			inv.Volumes = append(inv.Volumes, p)
			return proto.Size(p)
		}})
	}
	for _, img := range images {
		all = append(all, item{"image/" + img.GetDigest() + "@" + img.GetReference(), func(inv *nodev1.GetInventoryResponse) int {
			inv.Images = append(inv.Images, img)
			return proto.Size(img)
		}})
	}
	return all, nil
}

// stillThere looks again: what was deleted between the two looks went with its record.
func (n *node) stillThere(ids []string) ([]string, error) {
	if len(ids) == 0 {
		return nil, nil
	}
	now, err := n.run.Snapshots.Observe()
	return slices.DeleteFunc(ids, func(id string) bool { return !slices.Contains(now.Published, id) }), err
}
