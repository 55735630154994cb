// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package load

import (
	"errors"
	"time"

	"github.com/dormouse-run/dormouse/pkg/errs"
)

// Phase is a kind of step.
type Phase string

// The phases of a run, in their order.
const (
	Volumes    Phase = "volumes"    // a volume for each subject
	Create     Phase = "create"     // a sandbox for each
	Begin      Phase = "begin"      // start the program and take its first answer
	Checkpoint Phase = "checkpoint" // all at once
	Delete     Phase = "delete"     // the sandboxes
	Restore    Phase = "restore"    // all at once
	Prove      Phase = "prove"      // by the answers of the programs
	Forget     Phase = "forget"     // snapshots, and then volumes
)

// Event is a line of events.jsonl: a step of a subject, or one try of a call of it.
type Event struct {
	// At is when the step ended.
	At time.Time `json:"at"`
	// What is "step" or "attempt".
	What    string `json:"what"`
	Phase   Phase  `json:"phase"`
	Round   int    `json:"round"` // from 1; 0 before the first and after the last
	Client  int    `json:"client"`
	Subject int    `json:"subject"`
	// Wall is from the beginning of the phase, Call from the beginning of the call, both in milliseconds.
	Wall float64 `json:"wall_ms"`
	Call float64 `json:"call_ms"`
	// UID of the object.
	UID string `json:"uid,omitempty"`
	// Freeze is how long the subject stood still, in milliseconds, and Bytes the size of the snapshot; of a checkpoint.
	Freeze float64 `json:"freeze_ms,omitempty"`
	Bytes  int64   `json:"bytes,omitempty"`
	// Queued is how long it waited on its node for its turn, and Service how long the node worked at it, as the product tells; in milliseconds.
	Queued  float64 `json:"queued_ms,omitempty"`
	Service float64 `json:"service_ms,omitempty"`
	// Method of an attempt.
	Method string `json:"method,omitempty"`
	// Error is empty when it succeeded; Reason and Outcome are the envelope's.
	Error   string `json:"error,omitempty"`
	Reason  string `json:"reason,omitempty"`
	Outcome string `json:"outcome,omitempty"`
}

// fail notes an error.
func (e *Event) fail(err error) {
	if err == nil {
		return
	}
	e.Error = err.Error()
	var typed *errs.Error
	if errors.As(err, &typed) {
		e.Reason, e.Outcome = string(typed.Reason), string(typed.Outcome)
	}
}

func milliseconds(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
