package warm

import (
	"strconv"
	"time"

	"github.com/dormouse-run/dormouse/pkg/phase"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
)

// PoolPhase is where a pool stands.
type PoolPhase string

// The phases of a pool.
const (
	PoolActive   PoolPhase = "Active"
	PoolDeleting PoolPhase = "Deleting"
	PoolGone     PoolPhase = ""
)

// PoolPhases lists all but PoolGone.
func PoolPhases() []PoolPhase { return []PoolPhase{PoolActive, PoolDeleting} }

var poolMoves = phase.NewTable("pool", map[PoolPhase][]PoolPhase{
	PoolGone:     {PoolActive},
	PoolActive:   {PoolDeleting},
	PoolDeleting: {PoolGone},
})

// MovePool checks a transition; staying where it is counts as allowed.
func MovePool(from, to PoolPhase) error { return poolMoves.Move(from, to) }

// MaxPool bounds the members of a pool.
const MaxPool = 1000

// Beyond is how many members a pool may have above its size where nothing else is said: one more than is filled at a
// time, so that what is being deleted does not keep it from filling.
const Beyond = 2

// PoolSpec is what is asked.
type PoolSpec struct {
	TemplateUID string `json:"template_uid"`
	Size        int    `json:"size"`
	MaxMembers  int    `json:"max_members,omitempty"`
	// MaxMemoryBytes bounds the members' memory requests; 0 is no bound of its own.
	MaxMemoryBytes int64 `json:"max_memory_bytes,omitempty"`
}

// PoolStatus is what the keeper observed. What members there are is not in it: they are the referrers of the pool's record.
type PoolStatus struct {
	Phase       PoolPhase           `json:"phase"`
	Claimed     int64               `json:"claimed,omitempty"`
	Conditions  []sandbox.Condition `json:"conditions,omitempty"`
	Failures    int                 `json:"failures,omitempty"`
	LastError   string              `json:"last_error,omitempty"`
	LastFailure time.Time           `json:"last_failure,omitzero"`
}

// Pool is the whole object.
type Pool struct {
	UID         string            `json:"uid"`
	Tenant      string            `json:"tenant"`
	Name        string            `json:"name,omitempty"`
	Labels      map[string]string `json:"labels,omitempty"`
	Generation  int64             `json:"generation"`
	Created     time.Time         `json:"created"`
	Spec        PoolSpec          `json:"spec"`
	Status      PoolStatus        `json:"status"`
	OperationID string            `json:"operation_id,omitempty"`
}

// Validate checks a pool as it comes in at the door. The uid is checked by who looks it up.
func (s PoolSpec) Validate(prefix string) *sandbox.Problem {
	switch {
	case s.Size < 0:
		return invalid(prefix+"size", "must not be negative")
	case s.Size > MaxPool:
		return over(prefix+"size", "members", MaxPool, s.Size)
	case s.MaxMembers < 0:
		return invalid(prefix+"max_members", "must not be negative")
	case s.MaxMembers > MaxPool+Beyond:
		return over(prefix+"max_members", "members", MaxPool+Beyond, s.MaxMembers)
	case s.MaxMembers != 0 && s.MaxMembers < s.Size:
		return invalid(prefix+"max_members", "at least the size, "+strconv.Itoa(s.Size)+", or 0")
	case s.MaxMemoryBytes < 0:
		return invalid(prefix+"max_memory_bytes", "must not be negative")
	}
	return nil
}

// Bound is how many members there may be, each of which requests so much memory.
func (s PoolSpec) Bound(memory int64) int {
	n := s.MaxMembers
	if n == 0 {
		n = s.Size + Beyond
	}
	if s.MaxMemoryBytes > 0 && memory > 0 {
		n = int(min(int64(n), s.MaxMemoryBytes/memory))
	}
	return n
}

// Bounds of the pause after failures.
const (
	FirstPause = time.Second
	MaxPause   = 5 * time.Minute
)

// Pause is how long after the last of so many failures in a row the next try comes.
func Pause(failures int) time.Duration {
	if failures <= 0 {
		return 0
	}
	return min(FirstPause<<min(failures-1, 16), MaxPause)
}

// SetCondition sets or replaces a condition, keeping the transition time while the status is the same. It tells whether
// anything but the time changed.
func (s *PoolStatus) SetCondition(c sandbox.Condition) bool {
	for i, old := range s.Conditions {
		if old.Type != c.Type {
			continue
		}
		if old.Status == c.Status {
			c.LastTransitionTime = old.LastTransitionTime
		}
		s.Conditions[i] = c
		return old.Status != c.Status || old.Reason != c.Reason || old.Message != c.Message
	}
	s.Conditions = append(s.Conditions, c)
	return true
}
