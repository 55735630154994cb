// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package volumes

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/dormouse-run/dormouse/pkg/durable"
)

// limiter enforces a size on a folder.
type limiter interface {
	// limit bounds what is in an empty folder, by a project id that nothing else has.
	limit(dir string, project uint32, bytes int64) error
	// clear forgets the limit of a project, on the file system that root is on.
	clear(root string, project uint32) error
}

// firstProject is where the project ids begin: above those that people give by hand.
const firstProject = 0x444d0000

// nextProject gives a project id that was never given before. A crash wastes one.
func (s *Store) nextProject() (uint32, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	path := s.dir("project")
	last := uint64(firstProject)
	data, err := os.ReadFile(path)
	switch {
	case err == nil:
		if last, err = strconv.ParseUint(strings.TrimSpace(string(data)), 10, 32); err != nil {
			return 0, fmt.Errorf("the file of project ids: %w", err)
		}
	case !errors.Is(err, os.ErrNotExist):
		return 0, err
	}
	last++
	return uint32(last), durable.WriteJSON(path, last)
}

// The kernel's interface to project quota: <linux/quota.h>, <linux/dqblk_xfs.h> and <linux/fs.h>.
const (
	prjQuota       = 2
	qSetQuota      = 0x800008
	qXGetQStat     = 'X'<<8 + 5
	projectEnforce = 1 << 5
	qifBLimits     = 1
	quotaBlock     = 1024
	fsGetXattr     = 0x801c581f
	fsSetXattr     = 0x401c5820
	projInherit    = 0x200
)

// dqblk is struct if_dqblk; blocks are of 1 KiB.
type dqblk struct {
	bHard, bSoft, space  uint64
	iHard, iSoft, inodes uint64
	bTime, iTime         uint64
	valid, _             uint32
}

// fsQuotaStat is struct fs_quota_stat, of which only the flags are read.
type fsQuotaStat struct {
	version int8
	_       byte
	flags   uint16
	_       [76]byte
}

// fsxattr is struct fsxattr.
type fsxattr struct {
	xflags, extsize, nextents, projid, cowext uint32
	_                                         [8]byte
}

func quotactl(dir string, cmd int, id uint32, arg unsafe.Pointer) error {
	fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if _, _, e := unix.Syscall6(unix.SYS_QUOTACTL_FD, uintptr(fd), uintptr(cmd<<8|prjQuota), uintptr(id), uintptr(arg), 0, 0); e != 0 {
		return e
	}
	return nil
}

// projectQuota is project quota of ext4 or XFS.
type projectQuota struct{}

// detectQuota gives a limiter if the file system of the folder enforces project quota, else nil.
func detectQuota(dir string) (limiter, error) {
	st := fsQuotaStat{version: 1}
	err := quotactl(dir, qXGetQStat, 0, unsafe.Pointer(&st))
	switch {
	case err == nil && st.flags&projectEnforce != 0:
		return projectQuota{}, nil
	case err == nil, errors.Is(err, unix.ENOSYS), errors.Is(err, unix.ESRCH), errors.Is(err, unix.ENOTSUP), errors.Is(err, unix.EINVAL), errors.Is(err, unix.EPERM), errors.Is(err, unix.ENOTBLK):
		return nil, nil
	}
	return nil, fmt.Errorf("ask for project quota: %w", err)
}

func (projectQuota) limit(dir string, project uint32, bytes int64) error {
	if err := setProject(dir, project); err != nil {
		return err
	}
	blocks := uint64(bytes+quotaBlock-1) / quotaBlock
	q := dqblk{bHard: blocks, bSoft: blocks, valid: qifBLimits}
	return quotactl(filepath.Dir(dir), qSetQuota, project, unsafe.Pointer(&q))
}

func (projectQuota) clear(root string, project uint32) error {
	q := dqblk{valid: qifBLimits}
	return quotactl(root, qSetQuota, project, unsafe.Pointer(&q))
}

// setProject gives an empty folder a project id that what is made in it inherits.
func setProject(dir string, project uint32) error {
	fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	var x fsxattr
	if _, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), fsGetXattr, uintptr(unsafe.Pointer(&x))); e != 0 {
		return e
	}
	x.projid = project
	x.xflags |= projInherit
	if _, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), fsSetXattr, uintptr(unsafe.Pointer(&x))); e != 0 {
		return e
	}
	return nil
}
