// Package warm has what templates and pools are: sandboxes that were set up once, to be had many times and at once.
// It is pure: no I/O, no clock.
package warm

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"time"

	"github.com/dormouse-run/dormouse/pkg/phase"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
)

// TemplatePhase is where a template stands.
type TemplatePhase string

// The phases of a template.
const (
	Preparing TemplatePhase = "Preparing" // a builder is being set up and captured
	Ready     TemplatePhase = "Ready"     // the golden snapshot is there
	Failed    TemplatePhase = "Failed"    // it holds nothing; there is a reason
	Deleting  TemplatePhase = "Deleting"  // the intent is durable
	Gone      TemplatePhase = ""
)

// TemplatePhases lists all but Gone.
func TemplatePhases() []TemplatePhase { return []TemplatePhase{Preparing, Ready, Failed, Deleting} }

var templateMoves = phase.NewTable("template", map[TemplatePhase][]TemplatePhase{
	Gone:      {Preparing},
	Preparing: {Ready, Failed, Deleting},
	Ready:     {Deleting},
	Failed:    {Deleting},
	Deleting:  {Gone},
})

// MoveTemplate checks a transition; staying where it is counts as allowed.
func MoveTemplate(from, to TemplatePhase) error { return templateMoves.Move(from, to) }

// Limits at the door.
const (
	MaxSetup         = 64
	MaxSetupBytes    = 128 << 10
	MaxStepTime      = time.Hour
	FloorStepTime    = time.Second
	DefaultSetupTime = 10 * time.Minute
	DefaultReadyTime = time.Minute
	// MaxTail bounds the output that is kept of a command that failed.
	MaxTail = 4 << 10
)

// Command is a set-up command.
type Command struct {
	Argv       []string          `json:"argv"`
	Env        map[string]string `json:"env,omitempty"`
	User       string            `json:"user,omitempty"`
	WorkingDir string            `json:"working_dir,omitempty"`
	Timeout    time.Duration     `json:"timeout,omitempty"`
}

// Readiness is the command that tells when the set-up has taken effect. The zero value is none.
type Readiness struct {
	Argv    []string      `json:"argv,omitempty"`
	Timeout time.Duration `json:"timeout,omitempty"`
}

// TemplateSpec is what is asked.
type TemplateSpec struct {
	Sandbox   sandbox.Spec `json:"sandbox"`
	Setup     []Command    `json:"setup,omitempty"`
	Readiness Readiness    `json:"readiness,omitzero"`
}

// Failure is the command that a template failed with.
type Failure struct {
	Step     string `json:"step"` // setup or readiness
	Index    int    `json:"index"`
	ExitCode int    `json:"exit_code"`
	TimedOut bool   `json:"timed_out,omitempty"`
	Tail     string `json:"tail,omitempty"`
}

// TemplateStatus is what is observed.
type TemplateStatus struct {
	Phase       TemplatePhase `json:"phase"`
	SnapshotUID string        `json:"snapshot_uid,omitempty"`
	Node        string        `json:"node,omitempty"`
	SetupDone   int           `json:"setup_done,omitempty"`
	Reason      string        `json:"reason,omitempty"`
	Message     string        `json:"message,omitempty"`
	Failure     *Failure      `json:"failure,omitempty"`
	ReadyTime   time.Time     `json:"ready_time,omitzero"`
}

// Template is the whole object.
type Template struct {
	UID        string            `json:"uid"`
	Tenant     string            `json:"tenant"`
	Name       string            `json:"name,omitempty"`
	Labels     map[string]string `json:"labels,omitempty"`
	Generation int64             `json:"generation"`
	Created    time.Time         `json:"created"`
	Spec       TemplateSpec      `json:"spec"`
	Status     TemplateStatus    `json:"status"`
	// OperationID is the operation that made it.
	OperationID string `json:"operation_id,omitempty"`
}

// Clone gives a copy that shares nothing.
func (s TemplateSpec) Clone() TemplateSpec {
	s.Sandbox = s.Sandbox.Clone()
	s.Setup = slices.Clone(s.Setup)
	for i := range s.Setup {
		s.Setup[i].Argv, s.Setup[i].Env = slices.Clone(s.Setup[i].Argv), maps.Clone(s.Setup[i].Env)
	}
	s.Readiness.Argv = slices.Clone(s.Readiness.Argv)
	return s
}

// Validate checks a template as it comes in at the door. The first problem is returned, nil for none.
func (s TemplateSpec) Validate() *sandbox.Problem {
	if p := s.Sandbox.Validate(); p != nil {
		p.Field = "spec.sandbox." + trimSpec(p.Field)
		return p
	}
	if len(s.Sandbox.Volumes) > 0 {
		return invalid("spec.sandbox.volumes", "a template has none: a volume cannot be in all that is made from it; attach volumes to sandboxes that are created or restored")
	}
	if s.Sandbox.Hostname != "" {
		return invalid("spec.sandbox.hostname", "a template has none: what is made from it takes its hostname from its name, or from its uid")
	}
	if len(s.Setup) > MaxSetup {
		return over("spec.setup", "commands", MaxSetup, len(s.Setup))
	}
	total := 0
	for i, c := range s.Setup {
		at := fmt.Sprintf("spec.setup[%d].", i)
		if p := firstOf(
			needed(at+"argv", c.Argv),
			sandbox.ValidateEnv(at+"env", c.Env),
			sandbox.ValidateUser(at+"user", c.User),
			sandbox.ValidatePath(at+"working_dir", c.WorkingDir),
			stepTime(at+"timeout", c.Timeout),
		); p != nil {
			return p
		}
		for _, a := range c.Argv {
			total += len(a) + 1
		}
		for k, v := range c.Env {
			total += len(k) + len(v) + 2
		}
	}
	if len(s.Readiness.Argv) == 0 && s.Readiness.Timeout != 0 {
		return invalid("spec.readiness.timeout", "only with a command in spec.readiness.argv")
	}
	for _, a := range s.Readiness.Argv {
		total += len(a) + 1
	}
	if total > MaxSetupBytes {
		return over("spec.setup", "bytes in all, with the readiness check", MaxSetupBytes, total)
	}
	return firstOf(sandbox.ValidateArgv("spec.readiness.argv", s.Readiness.Argv), stepTime("spec.readiness.timeout", s.Readiness.Timeout))
}

// WithDefaults fills what is zero.
func (s TemplateSpec) WithDefaults() TemplateSpec {
	s = s.Clone()
	s.Sandbox.Resources = s.Sandbox.Resources.WithDefaults()
	if s.Sandbox.Network == "" {
		s.Sandbox.Network = sandbox.NetworkNone
	}
	for i := range s.Setup {
		if s.Setup[i].Timeout == 0 {
			s.Setup[i].Timeout = DefaultSetupTime
		}
	}
	if len(s.Readiness.Argv) > 0 && s.Readiness.Timeout == 0 {
		s.Readiness.Timeout = DefaultReadyTime
	}
	return s
}

func trimSpec(field string) string {
	const prefix = "spec."
	if len(field) > len(prefix) && field[:len(prefix)] == prefix {
		return field[len(prefix):]
	}
	return field
}

func firstOf(all ...*sandbox.Problem) *sandbox.Problem {
	for _, p := range all {
		if p != nil {
			return p
		}
	}
	return nil
}

func needed(field string, argv []string) *sandbox.Problem {
	if len(argv) == 0 {
		return invalid(field, "name a program")
	}
	return sandbox.ValidateArgv(field, argv)
}

func stepTime(field string, d time.Duration) *sandbox.Problem {
	switch {
	case d == 0:
		return nil
	case d < FloorStepTime:
		return &sandbox.Problem{Reason: "BELOW_FLOOR", Field: field, Message: fmt.Sprintf("%s: at least %s, got %s", field, FloorStepTime, d),
			Details: map[string]string{"floor": FloorStepTime.String(), "got": d.String()}}
	case d > MaxStepTime:
		return &sandbox.Problem{Reason: "LIMIT_EXCEEDED", Field: field, Message: fmt.Sprintf("%s: at most %s, got %s", field, MaxStepTime, d),
			Details: map[string]string{"limit": MaxStepTime.String(), "got": d.String()}}
	}
	return nil
}

func invalid(field, message string) *sandbox.Problem {
	return &sandbox.Problem{Reason: "INVALID_FIELD", Field: field, Message: field + ": " + message}
}

func over(field, unit string, limit, got int) *sandbox.Problem {
	return &sandbox.Problem{Reason: "LIMIT_EXCEEDED", Field: field, Message: fmt.Sprintf("%s: at most %d %s, got %d", field, limit, unit, got),
		Details: map[string]string{"limit": strconv.Itoa(limit), "got": strconv.Itoa(got)}}
}
