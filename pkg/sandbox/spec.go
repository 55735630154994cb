package sandbox

import (
	"maps"
	"slices"
	"time"
)

// Resources of a sandbox. CPU in thousandths of a core, memory and disk in bytes. Zero takes the
// node's default.
type Resources struct {
	CPURequestMillis   int64 `json:"cpu_request_millis,omitempty"`
	CPULimitMillis     int64 `json:"cpu_limit_millis,omitempty"`
	MemoryRequestBytes int64 `json:"memory_request_bytes,omitempty"`
	MemoryLimitBytes   int64 `json:"memory_limit_bytes,omitempty"`
	DiskLimitBytes     int64 `json:"disk_limit_bytes,omitempty"`
}

// Defaults and floors of resources.
const (
	DefaultCPURequestMillis   = 100
	DefaultMemoryLimitBytes   = 512 << 20
	DefaultMemoryRequestBytes = 32 << 20
	DefaultDiskLimitBytes     = 1 << 30
	FloorCPULimitMillis       = 10
	FloorMemoryLimitBytes     = 16 << 20
	FloorDiskLimitBytes       = 1 << 20
)

// WithDefaults fills what is zero. The request never exceeds the limit.
func (r Resources) WithDefaults() Resources {
	if r.MemoryLimitBytes == 0 {
		r.MemoryLimitBytes = max(DefaultMemoryLimitBytes, r.MemoryRequestBytes)
	}
	if r.MemoryRequestBytes == 0 {
		r.MemoryRequestBytes = min(DefaultMemoryRequestBytes, r.MemoryLimitBytes)
	}
	if r.CPURequestMillis == 0 {
		r.CPURequestMillis = DefaultCPURequestMillis
		if r.CPULimitMillis > 0 {
			r.CPURequestMillis = min(r.CPURequestMillis, r.CPULimitMillis)
		}
	}
	if r.DiskLimitBytes == 0 {
		r.DiskLimitBytes = DefaultDiskLimitBytes
	}
	return r
}

// VolumeMount attaches a volume, by uid, at an absolute path inside.
type VolumeMount struct {
	VolumeUID string `json:"volume_uid"`
	Path      string `json:"path"`
	ReadOnly  bool   `json:"read_only,omitempty"`
}

// NetworkMode says what a sandbox can reach.
type NetworkMode string

// NetworkNone is loopback only. NetworkOutbound reaches out by NAT, under the policy of Egress.
const (
	NetworkNone     NetworkMode = "none"
	NetworkOutbound NetworkMode = "outbound"
)

// IdleAction is what happens to a sandbox that is not used; none is IdlePause.
type IdleAction string

// The actions.
const (
	IdlePause     IdleAction = "pause"
	IdleHibernate IdleAction = "hibernate"
	IdleDelete    IdleAction = "delete"
)

// Spec is what is asked. It holds no secret: secret environment travels beside it and is stored nowhere.
type Spec struct {
	Image           string            `json:"image"`
	Command         []string          `json:"command,omitempty"`
	RunImageCommand bool              `json:"run_image_command,omitempty"`
	Env             map[string]string `json:"env,omitempty"`
	User            string            `json:"user,omitempty"`
	WorkingDir      string            `json:"working_dir,omitempty"`
	Resources       Resources         `json:"resources"`
	Volumes         []VolumeMount     `json:"volumes,omitempty"`
	Network         NetworkMode       `json:"network,omitempty"`
	RuntimeClass    string            `json:"runtime_class,omitempty"`
	NodeSelector    map[string]string `json:"node_selector,omitempty"`
	Hostname        string            `json:"hostname,omitempty"`
	IdleTimeout     time.Duration     `json:"idle_timeout,omitempty"`
	OnIdle          IdleAction        `json:"on_idle,omitempty"`
	Lifetime        time.Duration     `json:"lifetime,omitempty"`
	WakeOnUse       bool              `json:"wake_on_use,omitempty"`
	// Egress is what it may reach, with NetworkOutbound only. Nil: all but what is always blocked.
	Egress *Egress `json:"egress,omitempty"`
	// ExposedPorts are the TCP ports inside that are served over HTTP.
	ExposedPorts []uint32 `json:"exposed_ports,omitempty"`
}

// Clone gives a copy that shares nothing.
func (s Spec) Clone() Spec {
	s.Command = slices.Clone(s.Command)
	s.Env = maps.Clone(s.Env)
	s.Volumes = slices.Clone(s.Volumes)
	s.NodeSelector = maps.Clone(s.NodeSelector)
	s.Egress = s.Egress.Clone()
	s.ExposedPorts = slices.Clone(s.ExposedPorts)
	return s
}

// Condition is one observed fact with its reason.
type Condition struct {
	Type               string    `json:"type"`
	Status             bool      `json:"status"`
	Reason             string    `json:"reason,omitempty"`
	Message            string    `json:"message,omitempty"`
	LastTransitionTime time.Time `json:"last_transition_time"`
}

// Status is what is observed.
type Status struct {
	Phase              Phase         `json:"phase"`
	ObservedGeneration int64         `json:"observed_generation,omitempty"`
	Conditions         []Condition   `json:"conditions,omitempty"`
	Node               string        `json:"node,omitempty"`
	ImageDigest        string        `json:"image_digest,omitempty"`
	ErofsDigest        string        `json:"erofs_digest,omitempty"`
	RuntimeBundle      string        `json:"runtime_bundle,omitempty"`
	RestoredFrom       string        `json:"restored_from,omitempty"`
	StartTime          time.Time     `json:"start_time,omitzero"`
	ExitCode           *int32        `json:"exit_code,omitempty"`
	Reason             string        `json:"reason,omitempty"`
	Message            string        `json:"message,omitempty"`
	LastFreeze         time.Duration `json:"last_freeze,omitempty"`
	// StartQueued is how long its last start, restore or wake waited on its node for its turn, StartService how long the node worked at it.
	StartQueued  time.Duration `json:"start_queued,omitempty"`
	StartService time.Duration `json:"start_service,omitempty"`
	Observation  uint64        `json:"observation,omitempty"`
}

// Reasons of Stopped and Failed.
const (
	ReasonCompleted   = "Completed"   // the command ended with code 0
	ReasonError       = "Error"       // the command ended with another code
	ReasonOOMKilled   = "OOMKilled"   // the cgroup's counter says so
	ReasonKilled      = "Killed"      // its sentry was killed, and not for memory
	ReasonStartFailed = "StartFailed" // it never ran
	ReasonLost        = "Lost"        // its node came back without it
)

// Sandbox is the whole object.
type Sandbox struct {
	UID        string            `json:"uid"`
	Tenant     string            `json:"tenant"`
	Name       string            `json:"name,omitempty"`
	Labels     map[string]string `json:"labels,omitempty"`
	Generation int64             `json:"generation"`
	Created    time.Time         `json:"created"`
	Spec       Spec              `json:"spec"`
	Status     Status            `json:"status"`
	// OperationID is the operation that made it.
	OperationID string `json:"operation_id,omitempty"`
}

// SetCondition sets or replaces a condition, keeping the transition time while the status is the same.
func (s *Status) SetCondition(c Condition) {
	for i, old := range s.Conditions {
		if old.Type == c.Type {
			if old.Status == c.Status {
				c.LastTransitionTime = old.LastTransitionTime
			}
			s.Conditions[i] = c
			return
		}
	}
	s.Conditions = append(s.Conditions, c)
}
