package reconcile

import (
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"

	"github.com/dormouse-run/dormouse/agentd/internal/checkpoint"
	"github.com/dormouse-run/dormouse/agentd/internal/network"
	"github.com/dormouse-run/dormouse/agentd/internal/nodestate"
	"github.com/dormouse-run/dormouse/agentd/internal/runtime"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
)

// Kind is a kind of difference.
type Kind string

// The kinds.
const (
	OrphanSandbox    Kind = "orphan-sandbox"     // the runtime has it, no record does
	OrphanGroup      Kind = "orphan-cgroup"      // a control group below the node's
	OrphanFolder     Kind = "orphan-folder"      // a folder of a sandbox
	OrphanMount      Kind = "orphan-mount"       // a mount below the sandboxes' folder
	OrphanImageHold  Kind = "orphan-image-hold"  // an image is kept for nobody
	OrphanVolumeHold Kind = "orphan-volume-hold" // a volume is attached to nobody
	OrphanLease      Kind = "orphan-lease"       // an address is kept for nobody
	OrphanNetwork    Kind = "orphan-network"     // a device or rules of an address that nobody has
	OrphanStaging    Kind = "orphan-staging"     // what a failed capture left
	OrphanArtefact   Kind = "orphan-artefact"    // an artefact without a record
	LostSandbox      Kind = "lost-sandbox"       // recorded as running, and not there
	StuckDelete      Kind = "stuck-delete"       // its removal goes on, or fails again and again
	LostArtefact     Kind = "lost-artefact"      // recorded as ready, and not there
	StuckSnapshot    Kind = "stuck-snapshot"     // its removal goes on, or failed
	PutAside         Kind = "put-aside"          // a file of agentd's that could not be read, and was replaced
)

// Observed is what there is on the node.
type Observed struct {
	Runtime   []runtime.Status
	Groups    []string
	Folders   []string
	Mounts    []string // mount points below the sandboxes' folder
	Artefacts checkpoint.Observed
	// ImageHolds and VolumeHolds give what each holder has, by holder.
	ImageHolds  map[string][]string
	VolumeHolds map[string][]string
	Network     network.Inventory
	// Aside are the files that agentd put aside and goes on without.
	Aside []string
}

// Counts is how much was looked at, by kind of object.
func (o Observed) Counts() map[string]int {
	return map[string]int{
		"runtime": len(o.Runtime), "cgroups": len(o.Groups), "folders": len(o.Folders), "mounts": len(o.Mounts),
		"artefacts": len(o.Artefacts.Published), "staging": len(o.Artefacts.Staging) + len(o.Artefacts.Trash),
		"image-holds": len(o.ImageHolds), "volume-holds": len(o.VolumeHolds),
		"leases": len(o.Network.Holders), "networks": len(o.Network.Leftovers),
		"put-aside": len(o.Aside),
	}
}

// Finding is one difference.
type Finding struct {
	Kind     Kind
	Name     string
	Recorded string
	Observed string
	// Remedy is the command that removes it safely.
	Remedy string
	// Fixable: Fix may remove it.
	Fixable bool
}

const (
	fixIt   = "agentctl doctor --fix"
	unknown = "no record"
)

// Diff names every difference between the records and what was seen before they were read. Sorted.
func Diff(rec Records, seen Observed, sandboxRoot, snapshotRoot string) []Finding {
	d := differ{boxes: make(map[string]nodestate.Sandbox), snaps: make(map[string]nodestate.Snapshot), running: make(map[string]runtime.Status)}
	for _, s := range rec.Sandboxes {
		d.boxes[s.UID] = s
	}
	for _, s := range rec.Snapshots {
		d.snaps[s.UID] = s
	}
	for _, s := range seen.Runtime {
		d.running[s.ID] = s
	}
	d.sandboxes(seen, sandboxRoot)
	d.holds(seen)
	d.snapshots(seen, snapshotRoot)
	for _, path := range seen.Aside {
		d.out = append(d.out, Finding{Kind: PutAside, Name: filepath.Base(path), Recorded: "in use no more", Observed: path,
			Remedy: "find out what damaged it (disk, memory), then rm " + path})
	}
	slices.SortFunc(d.out, func(a, b Finding) int {
		return strings.Compare(a.Key(), b.Key())
	})
	return d.out
}

type differ struct {
	boxes   map[string]nodestate.Sandbox
	snaps   map[string]nodestate.Snapshot
	running map[string]runtime.Status
	out     []Finding
}

func (d *differ) orphan(kind Kind, name, observed string) {
	d.out = append(d.out, Finding{Kind: kind, Name: name, Recorded: unknown, Observed: observed, Remedy: fixIt, Fixable: true})
}

func (d *differ) sandboxes(seen Observed, root string) {
	for _, s := range seen.Runtime {
		if _, ok := d.boxes[s.ID]; !ok {
			d.orphan(OrphanSandbox, s.ID, fmt.Sprintf("the runtime has it, %s, pid %d", s.Phase, s.Pid))
		}
	}
	for _, id := range seen.Groups {
		if _, ok := d.boxes[id]; !ok {
			d.orphan(OrphanGroup, id, "a control group")
		}
	}
	for _, id := range seen.Folders {
		if _, ok := d.boxes[id]; !ok {
			d.orphan(OrphanFolder, id, filepath.Join(root, id))
		}
	}
	for _, m := range seen.Mounts {
		// Nothing of ours mounts there; what does is not ours to take away.
		d.out = append(d.out, Finding{Kind: OrphanMount, Name: m, Recorded: unknown, Observed: "a mount below the sandboxes' folder", Remedy: "umount " + m})
	}
	for id, s := range d.boxes {
		st, there := d.running[id]
		alive := there && (st.Phase == runtime.Running || st.Phase == runtime.Paused)
		switch {
		case s.Intent == nodestate.IntentKeep && awake(s) && !alive:
			observed := "the runtime does not know it"
			if there {
				observed = "the runtime says " + string(st.Phase)
			}
			d.out = append(d.out, Finding{Kind: LostSandbox, Name: id, Recorded: string(s.Phase), Observed: observed, Remedy: "dormouse rm " + id})
		case s.Intent == nodestate.IntentDelete:
			d.out = append(d.out, Finding{Kind: StuckDelete, Name: id, Recorded: "being deleted", Observed: "not finished", Remedy: fixIt, Fixable: true})
		}
	}
}

// awake tells whether the runtime is to have the sandbox.
func awake(s nodestate.Sandbox) bool {
	return s.Phase == sandbox.Running || s.Phase == sandbox.Paused || s.Phase == sandbox.Resuming && (s.Hibernation == nil || s.Hibernation.Spent)
}

func (d *differ) holds(seen Observed) {
	for _, holder := range slices.Sorted(maps.Keys(seen.ImageHolds)) {
		_, box := d.boxes[holder]
		_, snap := d.snaps[holder]
		if !box && !snap {
			d.orphan(OrphanImageHold, holder, "holds "+strings.Join(seen.ImageHolds[holder], ", "))
		}
	}
	for _, holder := range slices.Sorted(maps.Keys(seen.VolumeHolds)) {
		if _, ok := d.boxes[holder]; !ok {
			d.orphan(OrphanVolumeHold, holder, "holds "+strings.Join(seen.VolumeHolds[holder], ", "))
		}
	}
	for _, holder := range slices.Sorted(maps.Keys(seen.Network.Holders)) {
		if _, ok := d.boxes[holder]; !ok {
			d.orphan(OrphanLease, holder, "has the address "+strings.Join(seen.Network.Holders[holder], ", "))
		}
	}
	for _, left := range seen.Network.Leftovers {
		d.orphan(OrphanNetwork, left.Address, left.What)
	}
}

func (d *differ) snapshots(seen Observed, root string) {
	published := make(map[string]bool)
	for _, id := range seen.Artefacts.Published {
		published[id] = true
		if _, ok := d.snaps[id]; !ok && d.boxes[id].Hibernation == nil {
			d.out = append(d.out, Finding{Kind: OrphanArtefact, Name: id, Recorded: unknown, Observed: filepath.Join(root, id),
				Remedy: "rm -r " + filepath.Join(root, id) + "   (once `dormouse snapshot get " + id + "` says that it is not found)"})
		}
	}
	for _, id := range slices.Concat(seen.Artefacts.Staging, seen.Artefacts.Trash) {
		if _, ok := d.snaps[id]; !ok && !published[id] && d.boxes[id].Hibernation == nil {
			d.orphan(OrphanStaging, id, "files of a capture or a deletion that ended")
		}
	}
	for id, s := range d.boxes {
		if s.Phase == sandbox.Hibernated && !published[id] {
			d.out = append(d.out, Finding{Kind: LostArtefact, Name: id, Recorded: string(s.Phase), Observed: "no folder " + filepath.Join(root, id), Remedy: "dormouse rm " + id})
		}
	}
	for id, s := range d.snaps {
		if s.State == nodestate.SnapshotDeleting {
			d.out = append(d.out, Finding{Kind: StuckSnapshot, Name: id, Recorded: string(s.State), Observed: "not finished", Remedy: fixIt, Fixable: true})
		}
		if s.State == nodestate.SnapshotReady && !published[id] {
			d.out = append(d.out, Finding{Kind: LostArtefact, Name: id, Recorded: string(s.State), Observed: "no folder " + filepath.Join(root, id), Remedy: "dormouse snapshot rm " + id})
		}
	}
}
