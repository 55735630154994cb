package cgroup

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/dormouse-run/dormouse/pkg/errs"
)

// Own is the group of the agent itself, with memory that is the last to be taken from it.
//
// On v1 the agent moves into a group of its own in the memory hierarchy, and in no other: what started it finds it by its own. On v2 it
// moves only out of the root, where no group can be protected; a unit or pod is a group of its own already, and is given the protection unless it has
// more.
type Own struct {
	mount     string
	dir, from string // from is where the process was
	moved     bool
}

// Protect gives this process's group the bytes: memory.low on v2, the soft limit on v1. path is that of the group to make, "/dormouse-agentd/<node>".
func (m *Manager) Protect(path string, bytes int64) (*Own, error) {
	if !strings.HasPrefix(path, "/") || filepath.Clean(path) != path || path == "/" {
		return nil, errs.New(errs.InvalidField, "the group of the agent must be an absolute clean path, not %q", path)
	}
	mount, file, key := m.unified, low, ""
	for _, h := range m.v1 {
		if slices.Contains(h.controllers, "memory") {
			mount, file, key = h.mount, softLimit, "memory"
		}
	}
	if key == "" && !m.V2Only() {
		return nil, lacking("memory")
	}
	at, err := memberOf(m.self, key)
	if err != nil {
		return nil, err
	}
	o := &Own{mount: mount, dir: filepath.Join(mount, path), from: filepath.Join(mount, at)}
	if key == "" && at != "/" {
		o.dir = o.from
	}
	if o.dir != o.from {
		if err := o.move(path, key == ""); err != nil {
			return nil, errors.Join(err, o.Leave())
		}
	}
	if has := number(o.dir, file); key == "" && has >= uint64(bytes) {
		return o, nil
	}
	if err := write(o.dir, file, strconv.FormatInt(bytes, 10)); err != nil {
		return nil, errors.Join(err, o.Leave())
	}
	return o, nil
}

// Path is where the group is.
func (o *Own) Path() string { return o.dir }

func (o *Own) move(path string, v2 bool) error {
	if err := os.MkdirAll(o.dir, 0o755); err != nil {
		return errs.Wrap(err, errs.InternalError, "make the agent's own control group: %v", err)
	}
	if v2 {
		dir := o.mount
		for _, part := range strings.Split(strings.Trim(path, "/"), "/") {
			if err := write(dir, "cgroup.subtree_control", "+memory"); err != nil {
				return err
			}
			dir = filepath.Join(dir, part)
		}
	}
	o.moved = true
	return write(o.dir, "cgroup.procs", strconv.Itoa(os.Getpid()))
}

// Leave moves this process back to where it was, and removes the group if nobody else is in it.
func (o *Own) Leave() error {
	if !o.moved {
		return nil
	}
	o.moved = false
	if err := write(o.from, "cgroup.procs", strconv.Itoa(os.Getpid())); err != nil {
		return err
	}
	for dir := o.dir; dir != o.mount; dir = filepath.Dir(dir) {
		if rmdir(dir) != nil {
			break // another agent's, or one that came after this
		}
	}
	return nil
}

// memberOf is this process's path in the hierarchy with the controller; "" is v2's.
func memberOf(file, controller string) (string, error) {
	data, err := os.ReadFile(file)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return "", errs.Wrap(err, errs.InternalError, "read the agent's control groups: %v", err)
	}
	for line := range strings.Lines(string(data)) {
		f := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(f) == 3 && slices.Contains(strings.Split(f[1], ","), controller) {
			return f[2], nil
		}
	}
	return "", errs.New(errs.InternalError, "%s has no control group of the agent", file)
}
