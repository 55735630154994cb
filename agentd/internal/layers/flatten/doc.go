// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

// Package flatten turns the layers of an OCI image into one EROFS file that shows what an overlayfs
// mount of the same layers shows.
//
// Each layer is decompressed once, into a nameless spool file, and read into a tree of its own, several
// layers at a time. The trees are then merged from the bottom up by overlayfs' rules, and the result is
// streamed as one tar archive, in sorted order, into mkfs.erofs. Nothing of an image is ever created in
// a file system of the host: there is no path to traverse and no device node or setuid file to leave
// behind, and root's rights are not needed for it.
//
// What decides between two readings of a layer is what containerd's overlayfs snapshotter would show:
//
//   - an entry's parents are looked up in its own layer, symbolic links of that layer followed inside
//     the image's root; a parent that the layer does not list is a directory with the attributes of the
//     one below, or 0755 root:root where there is none;
//   - a whiteout and an opaque marker hide what lower layers hold and nothing of their own layer, in
//     whichever order the archive has them; a character device 0:0 is a whiteout;
//   - attributes of the root directory are 0755 root:root whatever an archive says of ".";
//   - xattrs of the trusted namespace, and those that no file system would take, are left out;
//   - a hard link's entry changes the attributes of the file; one to a file of a lower layer, which
//     containerd refuses, is what ln(1) on the mounted overlay makes.
//
// One thing differs on purpose: a directory that a layer changes without listing it keeps the time it had,
// where an unpacked overlay has the time of unpacking.
//
// The file holds all that the kernel's overlayfs would show. gVisor, which reads it for a sandbox, shows all of
// it but two things: extended attributes, so that file capabilities have no effect in a sandbox; and the
// numbers of device nodes, so that a block device shows as 0:0, and a character device, which with these
// numbers is a whiteout, not at all. The devices in /dev of a sandbox are gVisor's own.
//
// The same layers give the same bytes: order, times, and numbering depend on the layers alone.
package flatten
