package ocispec

import (
	"encoding/json"
	"slices"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/dormouse-run/dormouse/pkg/errs"
)

// Bindings are what a restored sandbox gets in place of what its source had. Everything else has to
// stay as it was saved, or gVisor refuses the image.
type Bindings struct {
	Hostname string
	NetNS    string
	// Init is guest init's file in the bundle on this node. Its content must be that of the source's,
	// so it is from the bundle of the same digest.
	Init string
	// Volumes gives the host's folder for each volume path of the saved spec, neither more nor less.
	// A fork's is a clone, a volume that is left out is an empty folder of the caller's.
	Volumes map[string]string
}

// ForRestore gives the spec that restores a sandbox saved with the spec. The saved one is not changed.
//
// gVisor compares the arguments, user, working folder, capabilities, rlimits, annotations (the image's
// path among them), the namespaces' types, and of the mounts all but their source. It lets the
// hostname, the namespaces' paths, the environment, the control group, its limits and the mounts'
// sources differ, which is what a fork with cloned volumes needs.
func ForRestore(saved *specs.Spec, b Bindings) (*specs.Spec, error) {
	spec, err := clone(saved)
	if err != nil {
		return nil, err
	}
	if spec.Linux == nil || spec.Process == nil || spec.Annotations[annRootSource] == "" {
		return nil, errs.New(errs.ArtefactDamaged, "the snapshot's spec lacks its process, its namespaces or its image").With("file", "spec")
	}
	spec.Hostname = b.Hostname
	spec.Linux.CgroupsPath = ""
	net := slices.IndexFunc(spec.Linux.Namespaces, func(n specs.LinuxNamespace) bool { return n.Type == specs.NetworkNamespace })
	if net < 0 {
		return nil, errs.New(errs.ArtefactDamaged, "the snapshot's spec has no network namespace").With("file", "spec")
	}
	spec.Linux.Namespaces[net].Path = b.NetNS
	used := 0
	for i := range spec.Mounts {
		m := &spec.Mounts[i]
		switch {
		case m.Destination == InitDir:
			m.Source = b.Init
		case m.Type == "bind":
			source, ok := b.Volumes[m.Destination]
			if !ok || source == "" {
				return nil, errs.New(errs.InvalidField, "the snapshot has a volume at %s; say which volume goes there", m.Destination).With("field", "volumes").With("path", m.Destination)
			}
			m.Source = source
			used++
		}
	}
	if used != len(b.Volumes) {
		return nil, errs.New(errs.InvalidField, "%d volumes are given, but the snapshot has %d; a restore cannot add one", len(b.Volumes), used).With("field", "volumes")
	}
	return spec, nil
}

// Image gives the path of the image in the spec, "" when it has none.
func Image(spec *specs.Spec) string { return spec.Annotations[annRootSource] }

// Volumes gives the volumes of the spec in its order.
func Volumes(spec *specs.Spec) []Volume {
	var out []Volume
	for _, m := range spec.Mounts {
		if m.Type == "bind" {
			out = append(out, Volume{Source: m.Source, Path: m.Destination, ReadOnly: slices.Contains(m.Options, "ro")})
		}
	}
	return out
}

func clone(spec *specs.Spec) (*specs.Spec, error) {
	data, err := json.Marshal(spec)
	if err != nil {
		return nil, errs.Wrap(err, errs.InternalError, "copy the spec: %v", err)
	}
	var out specs.Spec
	if err := json.Unmarshal(data, &out); err != nil {
		return nil, errs.Wrap(err, errs.InternalError, "copy the spec: %v", err)
	}
	return &out, nil
}
