// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package flatten

import (
	"fmt"
	"io"
	"maps"
	"path"
	"slices"
	"strings"
)

// kind is what an inode is; the values are tar's type flags.
type kind byte

const (
	regular   kind = '0'
	hardLink  kind = '1' // only while the target is still to be found in a lower layer
	symlink   kind = '2'
	charDev   kind = '3'
	blockDev  kind = '4'
	directory kind = '5'
	fifo      kind = '6'
)

// Bounds that Linux file systems have of their own. What exceeds them could not be unpacked either.
const (
	maxName     = 255
	maxPath     = 4095
	maxSymlinks = 255
	maxLinks    = 65000
)

// inode is a file's attributes and where its content is. Names that are hard links share one.
type inode struct {
	kind         kind
	mode         uint32 // permission bits with setuid, setgid and sticky
	uid, gid     uint32
	major, minor uint32
	sec          int64
	nsec         int32
	names        int // counted when the tree is complete
	size         int64
	content      io.ReaderAt // with off: where a regular file's bytes are
	off          int64
	target       string // of a symbolic link; of a hard link not yet resolved
	xattrs       map[string]string
}

// adopt takes the attributes of a hard link's entry, as unpacking one changes the file itself.
func (i *inode) adopt(link *inode) {
	if i.kind != symlink {
		i.mode = link.mode
	}
	i.uid, i.gid, i.sec, i.nsec = link.uid, link.gid, link.sec, link.nsec
	for k, v := range link.xattrs {
		if i.kind != hardLink && !keepXattr(i.kind, k) {
			continue
		}
		if i.xattrs == nil {
			i.xattrs = make(map[string]string, len(link.xattrs))
		}
		i.xattrs[k] = v
	}
}

// node is a name in a tree.
type node struct {
	ino      *inode
	children map[string]*node // of a directory
	whiteout bool             // the name is hidden in lower layers; ino is nil
	opaque   bool             // a directory whose lower content is hidden
	implicit bool             // a directory that its layer does not list
}

func (n *node) isDir() bool { return n != nil && !n.whiteout && n.ino.kind == directory }

func newDir() *node {
	return &node{ino: &inode{kind: directory, mode: 0o755}, children: map[string]*node{}}
}

// tree is one layer, or all of them merged.
type tree struct {
	root    *node
	pending []*node // hard links whose targets are below
	depth   int     // the deepest directory allowed
}

func newTree(depth int) *tree { return &tree{root: newDir(), depth: depth} }

// malformed is a fault of the image, as opposed to one of ours.
type malformed struct{ what string }

func (m *malformed) Error() string { return m.what }

func malformedf(format string, args ...any) error {
	return &malformed{what: fmt.Sprintf(format, args...)}
}

// split cuts a path of an archive into its names. It refuses what leaves the root and what no file
// system could hold; the root itself has no names.
func split(name string) ([]string, error) {
	clean := path.Clean(strings.TrimLeft(name, "/"))
	switch {
	case clean == "." || clean == "":
		return nil, nil
	case clean == ".." || strings.HasPrefix(clean, "../"):
		return nil, malformedf("%q leads out of the image", shorten(name))
	case len(clean) > maxPath:
		return nil, malformedf("%q is a path of %d bytes, %d are possible", shorten(name), len(clean), maxPath)
	case strings.IndexByte(clean, 0) >= 0:
		return nil, malformedf("%q holds a zero byte", shorten(name))
	}
	parts := strings.Split(clean, "/")
	for _, p := range parts {
		if len(p) > maxName {
			return nil, malformedf("%q has a name of %d bytes, %d are possible", shorten(name), len(p), maxName)
		}
	}
	return parts, nil
}

// walk finds the directory of the given names, following symbolic links inside the tree. With create it
// makes those that are missing; without, it returns nil for them.
func (t *tree) walk(parts []string, create bool) (*node, error) {
	stack := []*node{t.root}
	queue := slices.Clone(parts)
	for hops := 0; len(queue) > 0; {
		name := queue[0]
		queue = queue[1:]
		switch name {
		case "", ".":
			continue
		case "..":
			stack = stack[:max(1, len(stack)-1)]
			continue
		}
		cur := stack[len(stack)-1]
		child := cur.children[name]
		if child == nil || child.whiteout {
			if !create {
				return nil, nil
			}
			made := newDir()
			// What was hidden and is a directory again starts empty, and owes nothing to the one below.
			made.opaque, made.implicit = child != nil, child == nil
			cur.children[name], child = made, made
		}
		switch {
		case child.isDir():
			stack = append(stack, child)
			if len(stack) > t.depth {
				return nil, malformedf("directories are nested deeper than %d", t.depth)
			}
		case child.ino.kind == symlink:
			if hops++; hops > maxSymlinks {
				return nil, malformedf("symbolic links at %q lead nowhere", shorten(path.Join(parts...)))
			}
			if strings.HasPrefix(child.ino.target, "/") {
				stack = stack[:1]
			}
			queue = append(strings.Split(child.ino.target, "/"), queue...)
		case create:
			return nil, malformedf("%q is below something that is not a directory", shorten(path.Join(parts...)))
		default:
			return nil, nil
		}
	}
	return stack[len(stack)-1], nil
}

// find gives the node of a name without following it if it is a link itself, or nil.
func (t *tree) find(parts []string) (*node, error) {
	if len(parts) == 0 {
		return t.root, nil
	}
	dir, err := t.walk(parts[:len(parts)-1], false)
	if err != nil || dir == nil {
		return nil, err
	}
	n := dir.children[parts[len(parts)-1]]
	if n == nil || n.whiteout {
		return nil, nil
	}
	return n, nil
}

const (
	whiteoutPrefix = ".wh."
	opaqueMarker   = ".wh..wh..opq"
)

// put places an entry of the layer, or what it stands for if it is a marker.
func (t *tree) put(parts []string, ino *inode) error {
	dir, err := t.walk(parts[:len(parts)-1], true)
	if err != nil {
		return err
	}
	name := parts[len(parts)-1]
	old := dir.children[name]
	switch {
	case name == opaqueMarker:
		dir.opaque = true
	case strings.HasPrefix(name, whiteoutPrefix):
		hidden := name[len(whiteoutPrefix):]
		if hidden == "" || hidden == "." || hidden == ".." {
			return malformedf("%q is not a whiteout of anything", shorten(path.Join(parts...)))
		}
		switch own := dir.children[hidden]; {
		case own == nil:
			dir.children[hidden] = &node{whiteout: true}
		case own.isDir():
			own.opaque = true
		}
	case ino.kind == charDev && ino.major == 0 && ino.minor == 0:
		dir.children[name] = &node{whiteout: true}
	case ino.kind == directory && old.isDir():
		old.ino, old.implicit = ino, false
	case ino.kind == directory:
		dir.children[name] = &node{ino: ino, children: map[string]*node{}, opaque: old != nil && old.whiteout}
	case ino.kind == hardLink:
		return t.link(dir, name, ino)
	default:
		dir.children[name] = &node{ino: ino}
	}
	return nil
}

// link makes a hard link: to a file of this layer, or a pending one to a file of a lower layer.
func (t *tree) link(dir *node, name string, ino *inode) error {
	parts, err := split(ino.target)
	if err != nil {
		return fmt.Errorf("hard link %q: %w", shorten(name), err)
	}
	target, err := t.find(parts)
	switch {
	case err != nil:
		return err
	case target.isDir():
		return malformedf("hard link %q is to a directory", shorten(name))
	case target != nil:
		n := &node{ino: target.ino}
		dir.children[name] = n
		if target.ino.kind == hardLink {
			t.pending = append(t.pending, n)
		}
		target.ino.adopt(ino)
		return nil
	}
	n := &node{ino: ino}
	dir.children[name] = n
	t.pending = append(t.pending, n)
	return nil
}

// overlay lays the upper tree over this one, as overlayfs would. The upper tree is used up.
func (t *tree) overlay(upper *tree) error {
	if err := t.resolve(upper.pending); err != nil {
		return err
	}
	if upper.root.ino.sec != 0 || upper.root.ino.nsec != 0 {
		t.root.ino = upper.root.ino
	}
	merge(t.root, upper.root)
	return nil
}

// resolve finds the targets of the upper layer's hard links in what is below it. As on a mounted overlay the
// file is copied up for it: target and link are one inode from here on, and other names that the file has
// below stay with what they had.
func (t *tree) resolve(pending []*node) error {
	copied := make(map[*inode]*inode, len(pending))
	for _, n := range pending {
		link := n.ino
		if done := copied[link]; done != nil {
			n.ino = done
			continue
		}
		parts, err := split(link.target)
		if err != nil {
			return err
		}
		target, err := t.find(parts)
		if err != nil {
			return err
		}
		if target == nil || target.isDir() {
			return malformedf("a hard link is to %q, which is no file of this or a lower layer", shorten(link.target))
		}
		up := copied[target.ino]
		if up == nil {
			c := *target.ino
			c.xattrs = maps.Clone(c.xattrs)
			up = &c
			copied[up] = up // a second link to it finds it as it is now
		}
		up.adopt(link)
		target.ino, n.ino = up, up
		copied[link] = up
	}
	return nil
}

// merge lays the children of one directory over another's. Depth is bounded by walk.
func merge(low, up *node) {
	if up.opaque {
		low.children = make(map[string]*node, len(up.children))
	}
	for name, u := range up.children {
		l := low.children[name]
		switch {
		case u.whiteout:
			delete(low.children, name)
		case u.isDir() && l.isDir():
			if !u.implicit {
				l.ino = u.ino
			}
			merge(l, u)
		case u.isDir():
			settle(u)
			low.children[name] = u
		default:
			low.children[name] = u
		}
	}
}

// settle drops the markers of a directory that has nothing below it.
func settle(n *node) {
	n.opaque, n.implicit = false, false
	for name, c := range n.children {
		switch {
		case c.whiteout:
			delete(n.children, name)
		case c.isDir():
			settle(c)
		}
	}
}

// visit calls fn for every name of the tree in sorted order, parents first; the root comes last, as ".".
func (t *tree) visit(fn func(name string, ino *inode) error) error {
	if err := visitBelow("", t.root, fn); err != nil {
		return err
	}
	return fn(".", t.root.ino)
}

func visitBelow(prefix string, n *node, fn func(string, *inode) error) error {
	names := make([]string, 0, len(n.children))
	for c := range n.children {
		names = append(names, c)
	}
	slices.Sort(names)
	for _, c := range names {
		child := n.children[c]
		if err := fn(prefix+c, child.ino); err != nil {
			return err
		}
		if child.isDir() {
			if err := visitBelow(prefix+c+"/", child, fn); err != nil {
				return err
			}
		}
	}
	return nil
}

// shorten keeps a hostile name from filling a message.
func shorten(s string) string {
	if len(s) > 120 {
		return s[:120] + "..."
	}
	return s
}
