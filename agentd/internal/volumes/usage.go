// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package volumes

import (
	"context"

	"golang.org/x/sys/unix"
)

// Usage is what a volume takes on the disk.
type Usage struct {
	Bytes int64 // of blocks, not of lengths; 0 for holes; blocks shared with a clone count for both
	Files int64 // every inode, the volume's own folder not counted
}

// Usage counts what a volume takes. It walks the volume, so it takes as long as there are files; the
// context bounds it.
func (s *Store) Usage(ctx context.Context, uid string) (Usage, error) {
	m, err := s.Get(ctx, uid)
	if err != nil {
		return Usage{}, err
	}
	var u Usage
	seen := map[uint64]bool{}
	root, err := openDir(unix.AT_FDCWD, m.Path)
	if err != nil {
		return Usage{}, s.fail("measure", uid, err)
	}
	defer root.Close()
	err = walk(ctx, root, 0, func(_ dirFD, _ string, st *unix.Stat_t) error {
		if st.Mode&unix.S_IFMT != unix.S_IFDIR && st.Nlink > 1 {
			if seen[st.Ino] {
				return nil
			}
			seen[st.Ino] = true
		}
		u.Bytes += st.Blocks * 512
		u.Files++
		return nil
	})
	if err != nil {
		return Usage{}, s.fail("measure", uid, err)
	}
	return u, nil
}
