// Package boltfile opens bbolt files that may have been damaged.
//
// bbolt maps its file and believes what the pages say: a damaged one makes it panic, loop for hours or touch memory behind the
// file's end, in goroutines of its own too. So a file is walked page by page before bbolt sees it, and
// bbolt's own check runs before anybody uses the database. The caller learns which of three it is: damage, another holder,
// or the host.
package boltfile

import (
	"errors"
	"fmt"
	"os"
	"runtime/debug"
	"syscall"
	"time"

	bolt "go.etcd.io/bbolt"
	berrors "go.etcd.io/bbolt/errors"
)

var (
	// ErrDamaged is in the chain of each error that the file's content is the reason of.
	ErrDamaged = errors.New("the file is damaged")
	// ErrInUse is in the chain where another process holds the file's lock.
	ErrInUse = errors.New("another process has the file open")
)

// Open opens a file that was checked, or makes one where none is; wait bounds the wait for its lock. An error that is neither ErrDamaged nor
// ErrInUse is the host's: no access, no room, no folder, a disk that fails. An existing file is not changed.
func Open(path string, wait time.Duration) (db *bolt.DB, err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if p := recover(); p != nil {
			// The database is not closed: its lock goes with the process, and closing would unmap what
			// has just faulted.
			db, err = nil, damaged(fmt.Errorf("%v", p))
		}
	}()
	if err := refuseForeign(path); err != nil {
		return nil, err
	}
	if err := verifyFile(path); err != nil {
		return nil, err
	}
	db, err = bolt.Open(path, 0o600, &bolt.Options{Timeout: wait})
	var host syscall.Errno
	switch {
	case errors.Is(err, berrors.ErrTimeout):
		return nil, errors.Join(ErrInUse, err)
	case errors.As(err, &host):
		return nil, err
	case err != nil:
		return nil, damaged(err)
	}
	if err := check(db); err != nil {
		return nil, errors.Join(err, db.Close())
	}
	return db, nil
}

func damaged(cause error) error { return fmt.Errorf("%w: %w", ErrDamaged, cause) }

// refuseForeign keeps bbolt from initialising a file that is there but empty: it was truncated.
func refuseForeign(path string) error {
	info, err := os.Stat(path)
	if os.IsNotExist(err) {
		return nil
	}
	if err != nil {
		return err
	}
	if info.Size() == 0 || !info.Mode().IsRegular() {
		return damaged(errors.New("it is empty or no regular file"))
	}
	return nil
}

func check(db *bolt.DB) error {
	return db.View(func(tx *bolt.Tx) error {
		info, err := os.Stat(db.Path())
		if err != nil {
			return err
		}
		if info.Size() < tx.Size() {
			return damaged(fmt.Errorf("it has %d bytes of %d", info.Size(), tx.Size()))
		}
		var first error
		for err := range tx.Check() {
			if first == nil {
				first = damaged(err)
			}
		}
		return first
	})
}
