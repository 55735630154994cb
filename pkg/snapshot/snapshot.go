// Package snapshot has what a snapshot is: a sandbox at one instant, bound to the image, the
// runtime bundle and the CPU features that made it, and to the volumes it refers to.
// It is pure: no I/O, no clock.
package snapshot

import (
	"time"

	"github.com/dormouse-run/dormouse/pkg/phase"
)

// Phase is where a snapshot stands.
type Phase string

// The phases. A snapshot is immutable once Ready. Deleting still owns the artefact; Deleted is a
// tombstone without references.
const (
	Preparing Phase = "Preparing"
	Ready     Phase = "Ready"
	Deleting  Phase = "Deleting"
	Deleted   Phase = "Deleted"
	Failed    Phase = "Failed"
	Gone      Phase = "" // before the first record and after the tombstone expired
)

// Phases lists all but Gone.
func Phases() []Phase { return []Phase{Preparing, Ready, Deleting, Deleted, Failed} }

var moves = phase.NewTable("snapshot", map[Phase][]Phase{
	Gone:      {Preparing},
	Preparing: {Ready, Failed, Deleting},
	Ready:     {Deleting},
	Failed:    {Deleting},
	Deleting:  {Deleted},
	Deleted:   {Gone},
})

// Move checks a transition; staying where it is counts as allowed.
func Move(from, to Phase) error { return moves.Move(from, to) }

// OwnsArtefact tells whether files of a snapshot in this phase must be kept.
func (p Phase) OwnsArtefact() bool { return p == Preparing || p == Ready || p == Deleting }

// VolumeReference is a volume that the processes had attached.
type VolumeReference struct {
	VolumeUID string `json:"volume_uid"`
	Path      string `json:"path"`
	ReadOnly  bool   `json:"read_only,omitempty"`
}

// File is one file of the artefact. Digest is empty until the scrub has read it.
type File struct {
	Name      string `json:"name"`
	SizeBytes int64  `json:"size_bytes"`
	Digest    string `json:"digest,omitempty"`
}

// Status is what is observed.
type Status struct {
	Phase          Phase             `json:"phase"`
	SizeBytes      int64             `json:"size_bytes,omitempty"`
	Image          string            `json:"image,omitempty"`
	ImageDigest    string            `json:"image_digest,omitempty"`
	ErofsDigest    string            `json:"erofs_digest,omitempty"`
	RuntimeBundle  string            `json:"runtime_bundle,omitempty"`
	RuntimeVersion string            `json:"runtime_version,omitempty"`
	CPUFeatures    []string          `json:"cpu_features,omitempty"`
	Volumes        []VolumeReference `json:"volumes,omitempty"`
	Nodes          []string          `json:"nodes,omitempty"`
	Freeze         time.Duration     `json:"freeze,omitempty"`
	FreezeTime     time.Time         `json:"freeze_time,omitzero"`
	Queued         time.Duration     `json:"queued,omitempty"`  // the capture waited for its turn
	Service        time.Duration     `json:"service,omitempty"` // the node worked at it, until it was synced and in its place
	Files          []File            `json:"files,omitempty"`
	ReadyTime      time.Time         `json:"ready_time,omitzero"`
	Reason         string            `json:"reason,omitempty"`
	Message        string            `json:"message,omitempty"`
}

// Snapshot is the whole object.
type Snapshot struct {
	UID              string            `json:"uid"`
	Tenant           string            `json:"tenant"`
	Name             string            `json:"name,omitempty"`
	Labels           map[string]string `json:"labels,omitempty"`
	Generation       int64             `json:"generation"`
	Created          time.Time         `json:"created"`
	SourceSandboxUID string            `json:"source_sandbox_uid"`
	OperationID      string            `json:"operation_id,omitempty"`
	Status           Status            `json:"status"`
}
