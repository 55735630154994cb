package bulkguest

import (
	"errors"
	"io"
	"os"
	"syscall"

	"github.com/dormouse-run/dormouse/agentd/internal/guestinit"
)

// accountBytes is how much of an account file is read; larger ones are cut.
const accountBytes = 1 << 20

// accountFile reads a file of the image that may be anything, or not there.
func accountFile(path string) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK|syscall.O_CLOEXEC, 0)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if st, err := f.Stat(); err != nil || !st.Mode().IsRegular() {
		return nil, err
	}
	return io.ReadAll(io.LimitReader(f, accountBytes))
}

// account resolves a user[:group] inside.
func account(spec string) (*syscall.Credential, error) {
	passwd, err := accountFile("/etc/passwd")
	if err != nil {
		return nil, err
	}
	group, err := accountFile("/etc/group")
	if err != nil {
		return nil, err
	}
	cred, reason, message := guestinit.Account(spec, passwd, group)
	if reason != "" {
		return nil, refuse(reason, "%s", message).with("user", spec)
	}
	return cred, nil
}

// actAs makes the whole process the user's, for good.
func actAs(spec string) error {
	cred, err := account(spec)
	if err != nil {
		return err
	}
	groups := make([]int, len(cred.Groups))
	for i, g := range cred.Groups {
		groups[i] = int(g)
	}
	if err := syscall.Setgroups(groups); err != nil {
		return err
	}
	if err := syscall.Setresgid(int(cred.Gid), int(cred.Gid), int(cred.Gid)); err != nil {
		return err
	}
	return syscall.Setresuid(int(cred.Uid), int(cred.Uid), int(cred.Uid))
}
