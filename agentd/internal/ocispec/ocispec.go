// Package ocispec turns the description of a sandbox into the OCI spec that runs it, and a saved spec
// into the one that restores it.
//
// It is pure: the same description gives the same spec, byte for byte once marshalled. That matters,
// because gVisor compares the spec of a restore with the one that was saved, and because the whole
// spec is in a snapshot's manifest.
//
// # What a sandbox sees
//
//   - / is the image's EROFS file, mapped by gVisor itself, under a writable layer in memory that is
//     bounded: filling it gives ENOSPC. /tmp is part of it.
//   - /.dormouse is guest init's own EROFS file, so that images keep their digest.
//   - /dev/shm is a private tmpfs of docker's size. It counts against the memory limit.
//   - Volumes are bind mounts.
//
// # Limits
//
// The control group's memory limit is the user's limit, plus the size of the writable layer, plus a
// share for the sentry, because all three live in the same group, and past its limit the kernel ends
// the whole sandbox, not one process of it.
package ocispec

import (
	"cmp"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/dormouse-run/dormouse/pkg/errs"
)

const (
	// InitDir is where guest init's file system is mounted.
	InitDir = "/.dormouse"
	// InitPath is its program.
	InitPath = InitDir + "/guestinit"
	// BulkPath is the program beside it that moves bulk bytes, started for each transfer.
	BulkPath = InitDir + "/guestbulk"

	// SentryMemory is the runtime's own share of a sandbox's memory limit: the sentry's heap, its
	// stacks and what it needs to write a snapshot.
	SentryMemory = 64 << 20
	// ShmBytes is the size of /dev/shm, docker's default.
	ShmBytes = 64 << 20
	// MinMemory is the least memory limit that a sandbox works with.
	MinMemory = 16 << 20
	// MinLayer is the least size of the writable layer.
	MinLayer = 1 << 20

	// tmpGuard keeps gVisor from putting an unbounded tmpfs over an empty /tmp: a mount below it makes
	// /tmp not empty, so it stays part of the bounded writable layer.
	tmpGuard = "/tmp/.dormouse"

	cpuPeriod = 100_000
	version   = "1.2.0" // of the OCI runtime spec; gVisor compares it on restore
)

// Annotations by which gVisor takes an EROFS file as the root without a gofer.
const (
	annRootSource  = "dev.gvisor.spec.rootfs.source"
	annRootType    = "dev.gvisor.spec.rootfs.type"
	annRootOverlay = "dev.gvisor.spec.rootfs.overlay"
	annRootOptions = "dev.gvisor.spec.rootfs.options"
)

// Volume is a folder of the host inside the sandbox.
type Volume struct {
	Source   string // the host's folder
	Path     string // absolute and clean, in the sandbox
	ReadOnly bool
}

// Sandbox describes a new sandbox.
type Sandbox struct {
	Hostname string
	// Rootfs is the image's EROFS file at its canonical path, which is the same on every node and is
	// part of what a restore compares.
	Rootfs string
	// Init is guest init's EROFS file, from the runtime bundle.
	Init string
	// InitArgs follow InitPath; a restore needs the same. Nothing secret, nothing that differs
	// between a sandbox and its forks.
	InitArgs []string

	MemoryBytes   int64 // the user's limit, 0 for none
	MemoryRequest int64 // what is left to it when memory is short, 0 for nothing
	LayerBytes    int64 // size of the writable layer, at least MinLayer
	CPUMillis     int64 // limit in thousandths of a core, 0 for none
	CPURequest    int64 // share when cores are short, in thousandths; 0 for the usual
	HostThreads   int64 // limit of the host's threads, 0 for none

	Volumes []Volume
	// NetNS is the path of the network namespace to enter.
	NetNS string
}

// capabilities is docker's default set.
var capabilities = []string{
	"CAP_AUDIT_WRITE", "CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_KILL", "CAP_MKNOD",
	"CAP_NET_BIND_SERVICE", "CAP_NET_RAW", "CAP_SETFCAP", "CAP_SETGID", "CAP_SETPCAP", "CAP_SETUID", "CAP_SYS_CHROOT",
}

// initOnly is what guest init has besides, to set the host name of a sandbox that is claimed. It takes it out of its bounding set before it
// starts anything, so that nothing else can have it.
const initOnly = "CAP_SYS_ADMIN"

// Capabilities are those of everything in a sandbox: docker's default set.
func Capabilities() []string { return slices.Clone(capabilities) }

// reserved are the places of ours, at and below which no volume goes.
var reserved = []string{"/proc", "/sys", "/dev", InitDir, tmpGuard}

// New builds the spec of a new sandbox. Errors are INVALID_ARGUMENT and name the field.
func New(s Sandbox) (*specs.Spec, error) {
	if err := check(s); err != nil {
		return nil, err
	}
	own := func() []string { return append(slices.Clone(capabilities), initOnly) }
	return &specs.Spec{
		Version:  version,
		Hostname: s.Hostname,
		Root:     &specs.Root{Path: "rootfs"},
		Process: &specs.Process{
			Args:         append([]string{InitPath}, s.InitArgs...),
			Cwd:          "/",
			Env:          []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
			Capabilities: &specs.LinuxCapabilities{Bounding: own(), Effective: own(), Permitted: own()},
			Rlimits: []specs.POSIXRlimit{
				{Type: "RLIMIT_NOFILE", Hard: 1 << 20, Soft: 1 << 20},
			},
		},
		Mounts: mounts(s),
		Annotations: map[string]string{
			annRootSource:  s.Rootfs,
			annRootType:    "erofs",
			annRootOverlay: "memory",
			annRootOptions: "size=" + strconv.FormatInt(s.LayerBytes, 10),
		},
		Linux: &specs.Linux{
			Namespaces: []specs.LinuxNamespace{
				{Type: specs.PIDNamespace}, {Type: specs.IPCNamespace}, {Type: specs.UTSNamespace},
				{Type: specs.MountNamespace}, {Type: specs.NetworkNamespace, Path: s.NetNS},
			},
			Resources: resources(s),
		},
	}, nil
}

func mounts(s Sandbox) []specs.Mount {
	out := []specs.Mount{
		{Destination: "/proc", Type: "proc", Source: "proc", Options: []string{"nosuid", "noexec", "nodev"}},
		{Destination: "/sys", Type: "sysfs", Source: "sysfs", Options: []string{"nosuid", "noexec", "nodev", "ro"}},
		{Destination: "/dev", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "strictatime", "mode=755", "size=65536k"}},
		{Destination: "/dev/shm", Type: "tmpfs", Source: "shm", Options: []string{"nosuid", "noexec", "nodev", "mode=1777", "size=" + strconv.Itoa(ShmBytes)}},
		{Destination: InitDir, Type: "erofs", Source: s.Init, Options: []string{"ro"}},
	}
	volumes := slices.Clone(s.Volumes)
	// By path, so that a volume inside another's path is mounted after it.
	slices.SortFunc(volumes, func(a, b Volume) int { return cmp.Compare(a.Path, b.Path) })
	if !slices.ContainsFunc(volumes, func(v Volume) bool { return within(v.Path, "/tmp") }) {
		out = append(out, specs.Mount{Destination: tmpGuard, Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "noexec", "nodev", "ro", "mode=500", "size=4096"}})
	}
	for _, v := range volumes {
		access := "rw"
		if v.ReadOnly {
			access = "ro"
		}
		out = append(out, specs.Mount{Destination: v.Path, Type: "bind", Source: v.Source, Options: []string{"rbind", access, "nosuid", "nodev"}})
	}
	return out
}

func resources(s Sandbox) *specs.LinuxResources {
	r := &specs.LinuxResources{}
	if s.MemoryBytes > 0 || s.MemoryRequest > 0 {
		r.Memory = &specs.LinuxMemory{}
	}
	if s.MemoryBytes > 0 {
		limit := s.MemoryBytes + s.LayerBytes + SentryMemory
		r.Memory.Limit = &limit
	}
	if s.MemoryRequest > 0 {
		r.Memory.Reservation = &s.MemoryRequest
	}
	if s.CPUMillis > 0 || s.CPURequest > 0 {
		r.CPU = &specs.LinuxCPU{}
	}
	if s.CPUMillis > 0 {
		period := uint64(cpuPeriod)
		// The kernel takes no quota below a thousandth of a second.
		quota := max(s.CPUMillis*cpuPeriod/1000, 1000)
		r.CPU.Period, r.CPU.Quota = &period, &quota
	}
	if s.CPURequest > 0 {
		shares := uint64(max(s.CPURequest*1024/1000, 2))
		r.CPU.Shares = &shares
	}
	if s.HostThreads > 0 {
		r.Pids = &specs.LinuxPids{Limit: &s.HostThreads}
	}
	return r
}

func check(s Sandbox) error {
	for _, p := range []struct{ field, path string }{{"rootfs", s.Rootfs}, {"init", s.Init}, {"netns", s.NetNS}} {
		if !filepath.IsAbs(p.path) || filepath.Clean(p.path) != p.path {
			return errs.New(errs.InvalidField, "%s must be an absolute, clean path of the host, not %q", p.field, p.path).With("field", p.field)
		}
	}
	if s.LayerBytes < MinLayer {
		return belowFloor("disk", MinLayer, s.LayerBytes)
	}
	if s.MemoryBytes != 0 && s.MemoryBytes < MinMemory {
		return belowFloor("memory", MinMemory, s.MemoryBytes)
	}
	seen := make(map[string]bool)
	for _, v := range s.Volumes {
		if err := CheckVolumePath(v.Path); err != nil {
			return err
		}
		if !filepath.IsAbs(v.Source) {
			return errs.New(errs.InvalidField, "the source of the volume at %s must be an absolute path of the host", v.Path).With("field", "volumes")
		}
		if seen[v.Path] {
			return errs.New(errs.DuplicatePath, "two volumes are to be mounted on %s; give each a path of its own", v.Path).With("path", v.Path)
		}
		seen[v.Path] = true
	}
	return nil
}

func belowFloor(field string, floor, got int64) error {
	return errs.New(errs.BelowFloor, "the %s limit is %d bytes; a sandbox needs at least %d", field, got, floor).
		With("field", field).With("floor", strconv.FormatInt(floor, 10)).With("got", strconv.FormatInt(got, 10))
}

// CheckVolumePath tells whether a volume may be mounted at the path in a sandbox.
func CheckVolumePath(p string) error {
	if !path.IsAbs(p) || path.Clean(p) != p || strings.ContainsRune(p, 0) {
		return errs.New(errs.UnsafePath, "the volume path %q must be absolute and without \"..\", \".\" or doubled slashes", p).With("path", p)
	}
	if p == "/" {
		return errs.New(errs.UnsafePath, "a volume cannot replace the root of the sandbox").With("path", p)
	}
	for _, r := range reserved {
		if within(p, r) {
			return errs.New(errs.UnsafePath, "the volume path %q is at or below %s, which is the sandbox's own", p, r).With("path", p)
		}
	}
	return nil
}

// within tells whether p is dir or below it.
func within(p, dir string) bool { return p == dir || strings.HasPrefix(p, dir+"/") }
