// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package load

import (
	"bytes"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"
)

// Plan is what a run does.
type Plan struct {
	// Name of the run, for people.
	Name string `yaml:"name" json:"name"`
	// Subjects is how many there are, 1 to 4096.
	Subjects int `yaml:"subjects" json:"subjects"`
	// HeapMiB of random bytes in the memory of each, and FileMiB in its private file.
	HeapMiB int `yaml:"heap_mib" json:"heap_mib"`
	FileMiB int `yaml:"file_mib" json:"file_mib"`
	// Volume gives each subject an exclusive volume of its own.
	Volume bool `yaml:"volume" json:"volume"`
	// Rounds of checkpoint, deletion, restore and proof.
	Rounds int `yaml:"rounds" json:"rounds"`
	// Clients is how many processes share the subjects.
	Clients int `yaml:"clients" json:"clients"`
	// Pace is how many calls a second all clients together begin in a phase; 0: all at once.
	Pace float64 `yaml:"pace" json:"pace"`
	// Seed of the order in which subjects are taken in each phase.
	Seed uint64 `yaml:"seed" json:"seed"`
	// StepTimeout is the caller's budget for one step.
	StepTimeout Duration `yaml:"step_timeout" json:"step_timeout"`
	// Nodes is how many nodes the harness starts; without meaning for a cluster that is there already.
	Nodes int `yaml:"nodes" json:"nodes"`
	// Simulated nodes have no machine: sandboxes without programs, to load the coordinator and the store alone. Nothing is begun and proved.
	Simulated bool `yaml:"simulated" json:"simulated"`
	// Floor measures in the same run what the product is compared with, with as many subjects: "", "bare" for the rates of bare runsc, or
	// "disk" for the throughput of checkpoints beside dd's and that of all bare checkpoints at once.
	Floor string `yaml:"floor" json:"floor"`
	// Targets that the figures are told beside.
	Targets Targets `yaml:"targets" json:"targets,omitzero"`
}

// Targets of a plan; 0 is none. A miss is told, and does not make the run fail.
type Targets struct {
	// DiskRate is the throughput of checkpoints, in that of dd, at least; CrowdRate in that of all bare checkpoints at once.
	DiskRate  float64 `yaml:"disk_rate" json:"disk_rate,omitempty"`
	CrowdRate float64 `yaml:"crowd_rate" json:"crowd_rate,omitempty"`
	// FreezeP50 and FreezeP99 are of a checkpoint, RestoreP50 of a restore without its queueing, GetP99 of reading a sandbox in any phase; at most.
	FreezeP50  Duration `yaml:"freeze_p50" json:"freeze_p50,omitzero"`
	FreezeP99  Duration `yaml:"freeze_p99" json:"freeze_p99,omitzero"`
	RestoreP50 Duration `yaml:"restore_p50" json:"restore_p50,omitzero"`
	GetP99     Duration `yaml:"get_p99" json:"get_p99,omitzero"`
	// PublishP99 is of the coordinator's publications, CoordinatorMiB and RedisMiB the most memory of the two; at most.
	PublishP99     Duration `yaml:"publish_p99" json:"publish_p99,omitzero"`
	CoordinatorMiB float64  `yaml:"coordinator_mib" json:"coordinator_mib,omitempty"`
	RedisMiB       float64  `yaml:"redis_mib" json:"redis_mib,omitempty"`
}

// Duration is a time.Duration that YAML and JSON write as Go does: 90s.
type Duration time.Duration

// UnmarshalText implements encoding.TextUnmarshaler.
func (d *Duration) UnmarshalText(text []byte) error {
	v, err := time.ParseDuration(string(text))
	*d = Duration(v)
	return err
}

// MarshalText implements encoding.TextMarshaler.
func (d Duration) MarshalText() ([]byte, error) { return []byte(time.Duration(d).String()), nil }

// String is as Go writes it.
func (d Duration) String() string { return time.Duration(d).String() }

// plans are the named ones.
//
//go:embed plans/*.yaml
var plans embed.FS

// PlanNames are the plans that come with the harness.
func PlanNames() []string {
	files, _ := fs.Glob(plans, "plans/*.yaml") // the pattern is right
	for i, f := range files {
		files[i] = strings.TrimSuffix(path.Base(f), ".yaml")
	}
	slices.Sort(files)
	return files
}

// ReadPlan reads a plan that comes with the harness, or a file.
func ReadPlan(nameOrFile string) (Plan, error) {
	data, err := plans.ReadFile("plans/" + nameOrFile + ".yaml")
	if err != nil {
		if data, err = os.ReadFile(nameOrFile); err != nil {
			return Plan{}, fmt.Errorf("%q is neither a plan (%s) nor a file that can be read: %w", nameOrFile, strings.Join(PlanNames(), ", "), err)
		}
	}
	p := Plan{Rounds: 1, Clients: 1, Nodes: 1, StepTimeout: Duration(10 * time.Minute)}
	dec := yaml.NewDecoder(bytes.NewReader(data))
	dec.KnownFields(true)
	if err := dec.Decode(&p); err != nil {
		return Plan{}, fmt.Errorf("plan %s: %w", nameOrFile, err)
	}
	return p, p.Check()
}

// Check says what is wrong with a plan.
func (p Plan) Check() error {
	var wrong []error
	in := func(name string, v, low, high int) {
		if v < low || v > high {
			wrong = append(wrong, fmt.Errorf("%s is %d; it must be %d to %d", name, v, low, high))
		}
	}
	if p.Name == "" {
		wrong = append(wrong, errors.New("the plan has no name"))
	}
	in("subjects", p.Subjects, 1, 4096)
	in("heap_mib", p.HeapMiB, 0, 4096)
	in("file_mib", p.FileMiB, 1, 4096)
	in("rounds", p.Rounds, 1, 100)
	in("clients", p.Clients, 1, 64)
	in("nodes", p.Nodes, 1, 13)
	if p.Pace < 0 {
		wrong = append(wrong, fmt.Errorf("pace is %v; it must not be negative", p.Pace))
	}
	if p.StepTimeout < Duration(time.Second) || p.StepTimeout > Duration(2*time.Hour) {
		wrong = append(wrong, fmt.Errorf("step_timeout is %s; it must be 1s to 2h", time.Duration(p.StepTimeout)))
	}
	if p.Simulated && p.Floor != "" {
		wrong = append(wrong, errors.New("bare runsc is no floor for simulated nodes"))
	}
	if p.Floor != "" && p.Floor != "bare" && p.Floor != "disk" {
		wrong = append(wrong, fmt.Errorf("floor is %q; it must be empty, bare or disk", p.Floor))
	}
	t := p.Targets
	for name, v := range map[string]float64{
		"disk_rate": t.DiskRate, "crowd_rate": t.CrowdRate, "freeze_p50": float64(t.FreezeP50), "freeze_p99": float64(t.FreezeP99), "restore_p50": float64(t.RestoreP50),
		"get_p99": float64(t.GetP99), "publish_p99": float64(t.PublishP99), "coordinator_mib": t.CoordinatorMiB, "redis_mib": t.RedisMiB,
	} {
		if v < 0 {
			wrong = append(wrong, fmt.Errorf("the target %s is negative; leave it out if there is none", name))
		}
	}
	return errors.Join(wrong...)
}
