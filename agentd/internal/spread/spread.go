// Package spread has a file system keep the folders of sandboxes and artefacts far from each other.
//
// ext4 puts a folder and the files in it near the folder above, and gives a new file the first free inode there. Without a journal
// it does not give out an inode that was freed within the last minutes, and looks at each of those before it finds another: after
// a thousand sandboxes were deleted, each new file costs a look at thousands. Folders that it takes for the tops of hierarchies
// are laid out over the whole disk instead, and the files in them go with them.
//
// It is a hint. Where it cannot be given nothing changes but the speed.
package spread

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// topFlag marks a folder, on ext4, whose folders are the tops of hierarchies: `chattr +T`.
const topFlag = 0x20000

// Below asks that the folders which will be made directly in dir be laid out far from each other. The error says why it will not be so.
func Below(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer func() { _ = d.Close() }() // only read
	fd := int(d.Fd())                //nolint:gosec // a descriptor
	flags, err := unix.IoctlGetUint32(fd, unix.FS_IOC_GETFLAGS)
	if err == nil && flags&topFlag == 0 {
		err = unix.IoctlSetPointerInt(fd, unix.FS_IOC_SETFLAGS, int(flags|topFlag))
	}
	if err != nil {
		return fmt.Errorf("have the folders in %s laid out apart: %w", dir, err)
	}
	return nil
}
