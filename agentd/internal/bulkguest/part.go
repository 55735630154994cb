package bulkguest

import (
	"errors"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// An unfinished write is a hidden file beside its target. It ends in one of four ways: it takes the target's place; it is removed by who
// gave the write up, or by the write itself when it failed for good; or nobody takes it up again, because its client or its sandbox was
// gone, and a later write into the same folder removes it.
//
// That write must not remove what is still needed. Each writer holds a shared lock on its file for as long as it runs, however slow its client
// and however long the sandbox stood still, so that a file that can be locked alone has no writer; and a file is kept for partLife
// after its last byte, or after the last attempt to take it up.

const (
	// partMark ends the names of unfinished writes.
	partMark = ".dormouse-part"
	// partLife is how long an unfinished write that nobody is at is kept.
	partLife = 24 * time.Hour
	// sweepNames bounds how many names of a folder a write looks through.
	sweepNames = 4096
	// holdTries and holdPause bound the wait for a sweep, which holds its lock for moments.
	holdTries = 100
	holdPause = 5 * time.Millisecond
)

// sweep removes unfinished writes from a folder that nobody takes up any more, but for the one of a name. What it cannot look at or
// remove stays: it is the next write's to try.
func sweep(folder, own string) {
	dir, err := os.OpenFile(folder, os.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return // it is none, or may be written to but not read
	}
	defer dir.Close()
	for left := sweepNames; left > 0; {
		names, err := dir.Readdirnames(min(left, 512))
		for _, name := range names {
			if strings.HasPrefix(name, ".") && strings.HasSuffix(name, partMark) && name != own {
				removeStale(int(dir.Fd()), name)
			}
		}
		if left -= len(names); err != nil {
			return
		}
	}
}

func removeStale(dir int, name string) {
	var st unix.Stat_t
	if unix.Fstatat(dir, name, &st, unix.AT_SYMLINK_NOFOLLOW) != nil || !stale(&st) {
		return
	}
	fd, err := unix.Openat(dir, name, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return
	}
	defer func() { _ = unix.Close(fd) }() // nothing was written
	if unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB) != nil {
		return // somebody is at it
	}
	// Nobody has taken it up in between, and from here on nobody does: see hold.
	if unix.Fstat(fd, &st) == nil && stale(&st) {
		_ = unix.Unlinkat(dir, name, 0)
	}
}

// stale tells whether something is a file that was left for longer than partLife.
func stale(st *unix.Stat_t) bool {
	return st.Mode&unix.S_IFMT == unix.S_IFREG && time.Since(time.Unix(st.Mtim.Unix())) > partLife
}

// hold keeps sweeps away from an unfinished write until it is closed. It says that the file is not there when a sweep came
// first. Where files cannot be locked, its age protects it alone.
func hold(f *os.File) error {
	for range holdTries {
		if err := unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB); !errors.Is(err, unix.EWOULDBLOCK) {
			break
		}
		time.Sleep(holdPause)
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return &os.PathError{Op: "write", Path: f.Name(), Err: err}
	}
	if st.Nlink == 0 {
		return &os.PathError{Op: "write", Path: f.Name(), Err: unix.ENOENT}
	}
	return nil
}

// touch makes an unfinished write one that somebody has just been at.
func touch(f *os.File) {
	now := unix.NsecToTimeval(time.Now().UnixNano())
	_ = unix.Futimes(int(f.Fd()), []unix.Timeval{now, now}) // if it cannot be, the file is kept for less long
}
