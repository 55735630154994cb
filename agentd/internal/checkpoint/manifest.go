package checkpoint

import (
	"slices"
	"strings"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
	"github.com/dormouse-run/dormouse/pkg/snapshot"
)

// ManifestVersion is the version that this package writes and reads.
const ManifestVersion = 1

// Manifest is all that is known of an artefact.
type Manifest struct {
	Version          int    `json:"version"`
	UID              string `json:"uid"`
	Tenant           string `json:"tenant"`
	SourceSandboxUID string `json:"source_sandbox_uid"`
	SourceName       string `json:"source_name,omitempty"`
	Generation       int64  `json:"generation"`

	// FrozenAt is the instant that the artefact shows; Freeze is how long the source stood still.
	FrozenAt time.Time     `json:"frozen_at"`
	Freeze   time.Duration `json:"freeze"`
	// Queued is how long the capture waited for its turn, Service how long the rest of it took, until the artefact was in its place: so
	// neither is written into it.
	Queued  time.Duration `json:"-"`
	Service time.Duration `json:"-"`

	Runtime RuntimeIdentity `json:"runtime"`
	Image   ImageIdentity   `json:"image"`
	// Spec is the whole OCI spec that ran; Sandbox is what was asked for.
	Spec    *specs.Spec  `json:"spec"`
	Sandbox sandbox.Spec `json:"sandbox"`

	Architecture string   `json:"architecture"`
	CPUFeatures  []string `json:"cpu_features"`

	Volumes []snapshot.VolumeReference `json:"volumes,omitempty"`

	GuestGeneration uint64          `json:"guest_generation"`
	HasMain         bool            `json:"has_main,omitempty"`
	Defaults        ProcessDefaults `json:"defaults"`
	Processes       []ProcessEntry  `json:"processes,omitempty"`

	Files     []snapshot.File `json:"files"`
	SizeBytes int64           `json:"size_bytes"`
}

// ProcessDefaults are what processes get where their caller says nothing.
type ProcessDefaults struct {
	Env  []string `json:"env,omitempty"`
	User string   `json:"user,omitempty"`
	Dir  string   `json:"dir,omitempty"`
}

// RuntimeIdentity is what drove the source, and has to drive what is restored.
type RuntimeIdentity struct {
	Driver  string   `json:"driver"`
	Bundle  string   `json:"bundle"`
	Version string   `json:"version"`
	Flags   []string `json:"flags,omitempty"`
}

// ImageIdentity is the read-only layer that the artefact is bound to.
type ImageIdentity struct {
	Reference   string `json:"reference"`
	Digest      string `json:"digest"`
	ErofsDigest string `json:"erofs_digest"`
	Path        string `json:"path"`
}

// ProcessEntry is a process that guest init knew when the sandbox was frozen.
type ProcessEntry struct {
	ID        string    `json:"id"`
	Pid       int32     `json:"pid"`
	Argv      []string  `json:"argv,omitempty"`
	StartTime time.Time `json:"start_time"`
	Main      bool      `json:"main,omitempty"`
	Ended     bool      `json:"ended,omitempty"`
}

// Host is what a node offers to a restore.
type Host struct {
	Node         string
	Driver       string
	Architecture string
	CPUFeatures  []string
}

// CheckHost tells whether the node can run the artefact at all, from the manifest alone.
func (m *Manifest) CheckHost(h Host) error {
	if m.Runtime.Driver != h.Driver {
		return errs.New(errs.IncompatibleRuntime, "the snapshot was made by the runtime %q, this node has %q", m.Runtime.Driver, h.Driver).
			With("want", m.Runtime.Driver).With("has", h.Driver)
	}
	if m.Architecture != h.Architecture {
		return errs.New(errs.IncompatibleNode, "the snapshot is of a %s node, this is %s", m.Architecture, h.Architecture).
			With("node", h.Node).With("missing", m.Architecture)
	}
	var missing []string
	for _, f := range m.CPUFeatures {
		if !slices.Contains(h.CPUFeatures, f) {
			missing = append(missing, f)
		}
	}
	if len(missing) > 0 {
		return errs.New(errs.IncompatibleNode, "this node's CPU lacks features that the snapshot's processes may use: %s; restore it on a node that has them", strings.Join(missing, ", ")).
			With("node", h.Node).With("missing", strings.Join(missing, ","))
	}
	return nil
}

// CheckVolumes tells whether the paths and access asked for are those of the artefact, neither more nor
// less: a restore can put another volume at a path, but not change the paths.
func (m *Manifest) CheckVolumes(asked []snapshot.VolumeReference) error {
	want := make(map[string]snapshot.VolumeReference, len(m.Volumes))
	for _, v := range m.Volumes {
		want[v.Path] = v
	}
	for _, v := range asked {
		has, ok := want[v.Path]
		switch {
		case !ok:
			return errs.New(errs.InvalidField, "the snapshot has no volume at %s (or it is given twice); a restore attaches at exactly the snapshot's paths", v.Path).
				With("field", "volumes").With("path", v.Path)
		case has.ReadOnly != v.ReadOnly:
			return errs.New(errs.InvalidField, "the volume at %s was attached with read_only=%t and has to be again", v.Path, has.ReadOnly).
				With("field", "volumes").With("path", v.Path)
		}
		delete(want, v.Path)
	}
	for p := range want {
		return errs.New(errs.InvalidField, "the snapshot has a volume at %s; say which volume goes there", p).With("field", "volumes").With("path", p)
	}
	return nil
}

// Status is the manifest as the snapshot's observed status.
func (m *Manifest) Status() snapshot.Status {
	return snapshot.Status{
		Phase: snapshot.Ready, SizeBytes: m.SizeBytes, Image: m.Image.Reference, ImageDigest: m.Image.Digest,
		ErofsDigest: m.Image.ErofsDigest, RuntimeBundle: m.Runtime.Bundle, RuntimeVersion: m.Runtime.Version,
		CPUFeatures: m.CPUFeatures, Volumes: m.Volumes, Freeze: m.Freeze, FreezeTime: m.FrozenAt, Files: m.Files,
		Queued: m.Queued, Service: m.Service,
	}
}
