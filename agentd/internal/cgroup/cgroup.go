// Package cgroup gives each sandbox a control group of its own, on cgroup v1, on v2 and where both
// are mounted, behind one small API.
//
// A group has one path below the root of every mounted hierarchy:
//
//	/dormouse/<node instance>/<sandbox uid>
//
// so that a sandbox never shares a group with the node agent (whose pod or unit may be stopped) and
// so that what a crashed agent left behind can be listed and removed by name.
//
// # Who joins
//
// No thread of the agent ever enters a group, not even for the moment of a fork: v1 lists a process as a
// member as soon as one of its threads is, and what kills the group would kill the agent. In v2 the
// runtime is born in the group (CLONE_INTO_CGROUP, OpenV2); in v1 the runtime joins the group that Create
// made before it forks the sandbox, and leaves it again.
//
// Every operation is idempotent and looks at the kernel, not at memory: a group made by an earlier
// process is handled like one's own. Where v1 controllers and a bare v2 hierarchy are both mounted,
// the group exists in both; v2 then serves to kill everything at one stroke.
package cgroup

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/dormouse-run/dormouse/pkg/errs"
)

// hierarchy is one mounted v1 hierarchy with the controllers it carries.
type hierarchy struct {
	mount       string
	controllers []string
}

// Manager makes and finds groups below one parent path.
type Manager struct {
	parent  string
	v1      []hierarchy
	unified string // mount point of the v2 hierarchy, "" where there is none
	self    string // /proc/self/cgroup
}

// Options say where to look.
type Options struct {
	// Parent is the path below which the groups live, "/dormouse/<node instance>".
	Parent string
	// Mountinfo lists the mounts, /proc/self/mountinfo by default. An agent in a mount namespace of its
	// own reads /proc/1/mountinfo instead, with HostRoot /proc/1/root.
	Mountinfo string
	// Self has the agent's own groups, /proc/self/cgroup by default.
	Self string
	// HostRoot is put before every mount point.
	HostRoot string
}

// Open finds the mounted hierarchies. It changes nothing.
func Open(opts Options) (*Manager, error) {
	if !strings.HasPrefix(opts.Parent, "/") || filepath.Clean(opts.Parent) != opts.Parent || opts.Parent == "/" {
		return nil, errs.New(errs.InvalidField, "the parent of the control groups must be an absolute clean path such as /dormouse/node-1, not %q", opts.Parent)
	}
	if opts.Mountinfo == "" {
		opts.Mountinfo = "/proc/self/mountinfo"
	}
	if opts.Self == "" {
		opts.Self = "/proc/self/cgroup"
	}
	m := &Manager{parent: opts.Parent, self: opts.Self}
	if err := m.readMounts(opts.Mountinfo, opts.HostRoot); err != nil {
		return nil, err
	}
	if len(m.v1) == 0 && m.unified == "" {
		return nil, errs.New(errs.NotSupported, "no cgroup hierarchy is mounted; mount cgroup2 on /sys/fs/cgroup").With("feature", "cgroup")
	}
	return m, nil
}

func (m *Manager) readMounts(path, root string) error {
	f, err := os.Open(path)
	if err != nil {
		return errs.Wrap(err, errs.InternalError, "read the mount table: %v", err)
	}
	defer f.Close()
	scan := bufio.NewScanner(f)
	for scan.Scan() {
		pre, post, ok := strings.Cut(scan.Text(), " - ")
		left, right := strings.Fields(pre), strings.Fields(post)
		if !ok || len(left) < 5 || len(right) < 3 {
			continue
		}
		mount := filepath.Join(root, left[4])
		switch right[0] {
		case "cgroup2":
			if m.unified == "" {
				m.unified = mount
			}
		case "cgroup":
			m.addV1(mount, strings.Split(right[2], ","))
		}
	}
	return scan.Err()
}

// addV1 takes a hierarchy once, also when it is mounted in several places.
func (m *Manager) addV1(mount string, superOptions []string) {
	var controllers []string
	for _, o := range superOptions {
		switch {
		case o == "rw" || o == "ro" || o == "xattr" || strings.HasPrefix(o, "release_agent="):
		default:
			controllers = append(controllers, o)
		}
	}
	for _, h := range m.v1 {
		if slices.Equal(h.controllers, controllers) {
			return
		}
	}
	m.v1 = append(m.v1, hierarchy{mount: mount, controllers: controllers})
}

// V2Only tells whether resources are controlled by v2.
func (m *Manager) V2Only() bool { return len(m.v1) == 0 }

// Path is the group's path below each hierarchy's root, as linux.cgroupsPath takes it.
func (m *Manager) Path(id string) string { return filepath.Join(m.parent, id) }

// Group names a group; it says nothing about whether the group exists.
func (m *Manager) Group(id string) *Group { return &Group{m: m, id: id} }

// At is Group for a path made by Path, and refuses any other.
func (m *Manager) At(path string) (*Group, error) {
	if filepath.Dir(path) != m.parent {
		return nil, errs.New(errs.InvalidField, "the control group %q is not below %q", path, m.parent)
	}
	return m.Group(filepath.Base(path)), nil
}

// List gives the ids of all groups below the parent, in order: the union over all hierarchies.
func (m *Manager) List() ([]string, error) {
	seen := make(map[string]bool)
	for _, mount := range m.mounts() {
		entries, err := os.ReadDir(filepath.Join(mount, m.parent))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, errs.Wrap(err, errs.InternalError, "list the control groups in %s: %v", mount, err)
		}
		for _, e := range entries {
			if e.IsDir() {
				seen[e.Name()] = true
			}
		}
	}
	ids := make([]string, 0, len(seen))
	for id := range seen {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	return ids, nil
}

// Guarantee gives the groups together the bytes, the sum of what each has reserved: v2 protects no group beyond what those above it have. What is
// above the parent has at least the sum of all in it, so that several nodes of one machine take nothing from each other. On v1, which knows no such
// bound, and before the first group was made it does nothing. Idempotent.
func (m *Manager) Guarantee(bytes int64) error {
	if !m.V2Only() {
		return nil
	}
	dir := filepath.Join(m.unified, m.parent)
	for want := uint64(max(bytes, 0)); dir != filepath.Clean(m.unified); dir = filepath.Dir(dir) {
		has, err := os.ReadFile(filepath.Join(dir, low))
		own := dir == filepath.Join(m.unified, m.parent)
		if errors.Is(err, fs.ErrNotExist) || !own && (strings.TrimSpace(string(has)) == "max" || number(dir, low) >= want) {
			return nil // not made yet, or it has enough
		}
		if err := write(dir, low, strconv.FormatUint(want, 10)); err != nil {
			return err
		}
		beside, err := filepath.Glob(filepath.Join(filepath.Dir(dir), "*", low))
		if err != nil {
			return errs.Wrap(err, errs.InternalError, "list the control groups beside %s: %v", dir, err)
		}
		want = 0
		for _, file := range beside {
			want += number(filepath.Dir(file), low)
		}
	}
	return nil
}

// RemoveParent removes the parent itself once no group is left in it, and what of the path above it is
// empty then. Idempotent.
func (m *Manager) RemoveParent() error {
	var all []error
	for _, mount := range m.mounts() {
		if err := rmdir(filepath.Join(mount, m.parent)); err != nil {
			all = append(all, err)
			continue
		}
		for above := filepath.Dir(m.parent); above != "/"; above = filepath.Dir(above) {
			if err := rmdir(filepath.Join(mount, above)); err != nil {
				break // another node instance's, or not empty for a reason of its own
			}
		}
	}
	return errors.Join(all...)
}

// mounts gives the mount points of all hierarchies.
func (m *Manager) mounts() []string {
	out := make([]string, 0, len(m.v1)+1)
	for _, h := range m.v1 {
		out = append(out, h.mount)
	}
	if m.unified != "" {
		out = append(out, m.unified)
	}
	return out
}

// Group is one sandbox's group.
type Group struct {
	m  *Manager
	id string
}

// ID is the last part of the group's path.
func (g *Group) ID() string { return g.id }

func (g *Group) dir(mount string) string { return filepath.Join(mount, g.m.parent, g.id) }

func (g *Group) v1dir(controller string) (string, bool) {
	for _, h := range g.m.v1 {
		if slices.Contains(h.controllers, controller) {
			return g.dir(h.mount), true
		}
	}
	return "", false
}

func (g *Group) unifiedDir() (string, bool) {
	if g.m.unified == "" {
		return "", false
	}
	return g.dir(g.m.unified), true
}

// Create makes the group in every hierarchy and sets its limits. Idempotent: limits are set anew.
// After an error parts of it may exist; Remove removes them.
func (g *Group) Create(res *specs.LinuxResources) error {
	for _, h := range g.m.v1 {
		if err := os.MkdirAll(g.dir(h.mount), 0o755); err != nil {
			return errs.Wrap(err, errs.InternalError, "make the control group %s: %v", g.dir(h.mount), err)
		}
		if slices.Contains(h.controllers, "cpuset") {
			if err := inheritCpuset(h.mount, filepath.Join(g.m.parent, g.id)); err != nil {
				return err
			}
		}
	}
	if dir, ok := g.unifiedDir(); ok {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return errs.Wrap(err, errs.InternalError, "make the control group %s: %v", dir, err)
		}
	}
	if res == nil {
		res = &specs.LinuxResources{}
	}
	if g.m.V2Only() {
		if err := g.enableV2(); err != nil {
			return err
		}
		return g.limitV2(res)
	}
	return g.limitV1(res)
}

// inheritCpuset fills the cpus and mems that a new v1 cpuset group lacks, since no process can join
// without them.
func inheritCpuset(mount, path string) error {
	dir := mount
	for _, part := range strings.Split(strings.Trim(path, "/"), "/") {
		parent := dir
		dir = filepath.Join(dir, part)
		for _, file := range []string{"cpuset.cpus", "cpuset.mems"} {
			own, err := os.ReadFile(filepath.Join(dir, file))
			if err == nil && strings.TrimSpace(string(own)) != "" {
				continue
			}
			above, err := os.ReadFile(filepath.Join(parent, file))
			if err != nil {
				return errs.Wrap(err, errs.InternalError, "read %s of %s: %v", file, parent, err)
			}
			if err := write(dir, file, strings.TrimSpace(string(above))); err != nil {
				return err
			}
		}
	}
	return nil
}

// OpenV2 opens the group's v2 folder for CLONE_INTO_CGROUP; -1 where there is no v2 hierarchy.
// The caller closes it.
func (g *Group) OpenV2() (int, error) {
	dir, ok := g.unifiedDir()
	if !ok {
		return -1, nil
	}
	fd, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, errs.Wrap(err, errs.InternalError, "open the control group %s: %v", dir, err)
	}
	return fd, nil
}

// write writes a control file in one call, as the kernel wants it.
func write(dir, file, value string) error {
	path := filepath.Join(dir, file)
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err == nil {
		_, err = f.WriteString(value)
		err = errors.Join(err, f.Close())
	}
	if err != nil {
		return errs.Wrap(err, errs.InternalError, "write %q to %s: %v", value, path, err)
	}
	return nil
}

func rmdir(dir string) error {
	err := unix.Rmdir(dir)
	if err == nil || errors.Is(err, unix.ENOENT) {
		return nil
	}
	return fmt.Errorf("remove %s: %w", dir, err)
}
