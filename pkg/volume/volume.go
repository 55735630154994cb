// Package volume has what a volume is: a folder with a uid that outlives sandboxes.
// It is pure: no I/O, no clock.
package volume

import (
	"time"

	"github.com/dormouse-run/dormouse/pkg/phase"
)

// Phase is where a volume stands.
type Phase string

// The phases. Deleting still owns the folder; Deleted is a tombstone.
const (
	Creating Phase = "Creating"
	Ready    Phase = "Ready"
	Deleting Phase = "Deleting"
	Deleted  Phase = "Deleted"
	Failed   Phase = "Failed"
	Gone     Phase = ""
)

// Phases lists all but Gone.
func Phases() []Phase { return []Phase{Creating, Ready, Deleting, Deleted, Failed} }

var moves = phase.NewTable("volume", map[Phase][]Phase{
	Gone:     {Creating},
	Creating: {Ready, Failed, Deleting},
	Ready:    {Deleting},
	Failed:   {Deleting},
	Deleting: {Deleted},
	Deleted:  {Gone},
})

// Move checks a transition; staying where it is counts as allowed.
func Move(from, to Phase) error { return moves.Move(from, to) }

// Access says who may attach it.
type Access string

// Exclusive: one sandbox at a time. SharedReadOnly: any number, none of which writes.
const (
	Exclusive      Access = "exclusive"
	SharedReadOnly Access = "shared_read_only"
)

// Spec is what is asked.
type Spec struct {
	// SizeLimitBytes of 0 is no limit.
	SizeLimitBytes  int64  `json:"size_limit_bytes,omitempty"`
	Node            string `json:"node,omitempty"`
	Access          Access `json:"access"`
	SourceVolumeUID string `json:"source_volume_uid,omitempty"`
}

// Status is what is observed. Attachments and references are the catalog's, not the volume's.
type Status struct {
	Phase      Phase  `json:"phase"`
	Node       string `json:"node,omitempty"`
	UsageBytes int64  `json:"usage_bytes,omitempty"`
	Reason     string `json:"reason,omitempty"`
	Message    string `json:"message,omitempty"`
}

// Volume is the whole object.
type Volume struct {
	UID         string            `json:"uid"`
	Tenant      string            `json:"tenant"`
	Name        string            `json:"name,omitempty"`
	Labels      map[string]string `json:"labels,omitempty"`
	Generation  int64             `json:"generation"`
	Created     time.Time         `json:"created"`
	OperationID string            `json:"operation_id,omitempty"`
	Spec        Spec              `json:"spec"`
	Status      Status            `json:"status"`
}
