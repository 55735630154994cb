package operations

import (
	"time"

	"github.com/dormouse-run/dormouse/pkg/sandbox"
	"github.com/dormouse-run/dormouse/pkg/volume"
	"github.com/dormouse-run/dormouse/pkg/warm"
)

// Call is who asks.
type Call struct {
	Tenant      string
	OperationID string // "" lets the engine choose
	RequestID   string
}

// CreateSandbox is a request. The names of secret variables are part of its identity, their values
// are not: a digest of a weak secret would give it away.
type CreateSandbox struct {
	Name        string            `json:"name,omitempty"`
	Labels      map[string]string `json:"labels,omitempty"`
	Spec        sandbox.Spec      `json:"spec"`
	SecretNames []string          `json:"secret_names,omitempty"`

	SecretEnv map[string]string `json:"-"`
}

// Policy for a volume of a snapshot.
type Policy string

// The policies. The empty one is the default of the verb: same for restore, clone for fork (but
// same for volumes that are shared).
const (
	PolicySame    Policy = "same"
	PolicyClone   Policy = "clone"
	PolicyReplace Policy = "replace"
)

// Binding is the choice for the volume at a path.
type Binding struct {
	Path        string `json:"path"`
	Policy      Policy `json:"policy"`
	ReplaceWith string `json:"replace_with,omitempty"`
}

// CheckpointSandbox is a request.
type CheckpointSandbox struct {
	UID    string            `json:"uid"`
	Name   string            `json:"name,omitempty"`
	Labels map[string]string `json:"labels,omitempty"`
}

// RestoreSandbox is a request.
type RestoreSandbox struct {
	SnapshotUID string            `json:"snapshot_uid"`
	Name        string            `json:"name,omitempty"`
	Labels      map[string]string `json:"labels,omitempty"`
	Volumes     []Binding         `json:"volumes,omitempty"`
}

// ForkSandbox is a request.
type ForkSandbox struct {
	SandboxUID  string            `json:"sandbox_uid,omitempty"`
	SnapshotUID string            `json:"snapshot_uid,omitempty"`
	Count       int               `json:"count"`
	NamePrefix  string            `json:"name_prefix,omitempty"`
	Labels      map[string]string `json:"labels,omitempty"`
	Volumes     []Binding         `json:"volumes,omitempty"`
}

// UpdateSandbox is a request. What is nil stays as it is.
type UpdateSandbox struct {
	UID        string              `json:"uid"`
	IfRevision uint64              `json:"if_revision,omitempty"`
	Labels     *map[string]string  `json:"labels,omitempty"`
	Lifetime   *time.Duration      `json:"lifetime,omitempty"`
	WakeOnUse  *bool               `json:"wake_on_use,omitempty"`
	Idle       *time.Duration      `json:"idle_timeout,omitempty"`
	OnIdle     *sandbox.IdleAction `json:"on_idle,omitempty"`
	Egress     *EgressUpdate       `json:"egress,omitempty"`
}

// EgressUpdate is what a sandbox may reach from now on; no policy is all but what is always blocked.
type EgressUpdate struct {
	Policy *sandbox.Egress `json:"policy,omitempty"`
}

// Turn is a request to change the phase of a sandbox.
type Turn struct {
	UID string `json:"uid"`
	// IfUnusedFor has it done only if the sandbox was not used for so long.
	IfUnusedFor time.Duration `json:"if_unused_for,omitempty"`
}

// CreateVolume is a request.
type CreateVolume struct {
	Name   string            `json:"name,omitempty"`
	Labels map[string]string `json:"labels,omitempty"`
	Spec   volume.Spec       `json:"spec"`
}

// Delete is a request to delete the object of a uid.
type Delete struct {
	UID string `json:"uid"`
}

// Cordon is a request to keep new work from a node, or to allow it again.
type Cordon struct {
	Name string `json:"name"`
}

// CreateTemplate is a request.
type CreateTemplate struct {
	Name   string            `json:"name,omitempty"`
	Labels map[string]string `json:"labels,omitempty"`
	Spec   warm.TemplateSpec `json:"spec"`
}

// CreatePool is a request.
type CreatePool struct {
	Name   string            `json:"name,omitempty"`
	Labels map[string]string `json:"labels,omitempty"`
	Spec   warm.PoolSpec     `json:"spec"`
}

// UpdatePool is a request. What is nil stays as it is.
type UpdatePool struct {
	UID            string             `json:"uid"`
	IfRevision     uint64             `json:"if_revision,omitempty"`
	Labels         *map[string]string `json:"labels,omitempty"`
	Template       *string            `json:"template,omitempty"`
	Size           *int               `json:"size,omitempty"`
	MaxMembers     *int               `json:"max_members,omitempty"`
	MaxMemoryBytes *int64             `json:"max_memory_bytes,omitempty"`
}

// FillPool is the keeper's request for one more member.
type FillPool struct {
	PoolUID     string `json:"pool_uid"`
	TemplateUID string `json:"template_uid"`
}

// ClaimSandbox is a request. What is nil or empty is the template's.
type ClaimSandbox struct {
	TemplateUID string             `json:"template_uid,omitempty"`
	PoolUID     string             `json:"pool_uid,omitempty"`
	Name        string             `json:"name,omitempty"`
	Labels      map[string]string  `json:"labels,omitempty"`
	Lifetime    *time.Duration     `json:"lifetime,omitempty"`
	Idle        *time.Duration     `json:"idle_timeout,omitempty"`
	OnIdle      sandbox.IdleAction `json:"on_idle,omitempty"`
	WakeOnUse   *bool              `json:"wake_on_use,omitempty"`
	Env         map[string]string  `json:"env,omitempty"`
	// Refuse where no member is ready, instead of a restore.
	Refuse bool `json:"refuse,omitempty"`
}
