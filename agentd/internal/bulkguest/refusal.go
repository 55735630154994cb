package bulkguest

import (
	"errors"
	"fmt"
	"io/fs"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/dormouse-run/dormouse/agentd/internal/bulkwire"
)

// refusal is an error with its reason.
type refusal struct{ bulkwire.Refusal }

func (r *refusal) Error() string { return r.Message }

// maxValue bounds a refusal's texts.
const maxValue = 1024

func refuse(reason, format string, args ...any) *refusal {
	return &refusal{bulkwire.Refusal{Reason: reason, Message: shortened(fmt.Sprintf(format, args...))}}
}

func (r *refusal) with(key, value string) *refusal {
	r.Key, r.Value = key, shortened(value)
	return r
}

func shortened(s string) string {
	s = strings.ToValidUTF8(s, "?")
	if len(s) > maxValue {
		s = strings.ToValidUTF8(s[:maxValue], "") + "..."
	}
	return s
}

// meanings of error numbers for whoever asked for a file.
var meanings = []struct {
	errno           unix.Errno
	reason, message string
}{
	{unix.ENOENT, "FILE_NOT_FOUND", "no such file or directory; check the path, or make its folders first"},
	{unix.ENOTDIR, "NOT_A_DIRECTORY", "a part of the path is a file and no directory"},
	{unix.EISDIR, "IS_A_DIRECTORY", "there is a directory; name a file, or use an archive"},
	{unix.EEXIST, "FILE_EXISTS", "there is something already; remove it first, or ask for it to be replaced"},
	{unix.ENOTEMPTY, "DIRECTORY_NOT_EMPTY", "the directory is not empty; remove it recursively"},
	{unix.EACCES, "FILE_DENIED", "the user may not do that; act as another user, or change the mode"},
	{unix.EPERM, "FILE_DENIED", "the user may not do that; act as another user, or change the mode"},
	{unix.EROFS, "READ_ONLY_PATH", "the file system is read-only; choose another path, or attach the volume writable"},
	{unix.ENOSPC, "SANDBOX_DISK_FULL", "the sandbox's disk is full; remove files, or give the sandbox a larger disk"},
	{unix.EDQUOT, "SANDBOX_DISK_FULL", "the quota of the file system is used up; remove files, or use a larger volume"},
	{unix.EFBIG, "SANDBOX_DISK_FULL", "the file is larger than the file system allows"},
	{unix.ENAMETOOLONG, "INVALID_FIELD", "the path, or a name in it, is too long"},
	{unix.ELOOP, "INVALID_FIELD", "the path has too many symbolic links, or a loop of them"},
	{unix.EINVAL, "INVALID_FIELD", "the sandbox's kernel does not take this path or value"},
	{unix.EXDEV, "CROSS_DEVICE", "the two paths are on different file systems; copy the file and remove the old one"},
	{unix.EBUSY, "FILE_BUSY", "the file is in use, or a file system is mounted there"},
	{unix.ETXTBSY, "FILE_BUSY", "the file is a program that is running; write it elsewhere and move it"},
	{unix.ECONNREFUSED, "PORT_CLOSED", "nothing listens there; start the server, or wait until it listens"},
	{unix.ENOMEM, "TOO_MANY", "the sandbox has no memory for this; end some processes, or raise its limit"},
	{unix.EMFILE, "TOO_MANY", "the sandbox has too many open files"},
	{unix.ENFILE, "TOO_MANY", "the sandbox has too many open files"},
}

// refusalOf says what an error means to whoever gave the order.
func refusalOf(err error) bulkwire.Refusal {
	var r *refusal
	if errors.As(err, &r) {
		return r.Refusal
	}
	path := ""
	var pathErr *fs.PathError
	if errors.As(err, &pathErr) {
		path = pathErr.Path
	}
	var errno unix.Errno
	if errors.As(err, &errno) {
		for _, m := range meanings {
			if m.errno == errno {
				out := refuse(m.reason, "%s", m.message)
				if path != "" {
					out = refuse(m.reason, "%s: %s", path, m.message).with("path", path)
				}
				return out.Refusal
			}
		}
	}
	return refuse("INTERNAL_ERROR", "the sandbox's kernel refused: %v", err).with("path", path).Refusal
}
