package nodestate

import (
	"errors"
	"fmt"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	bolt "go.etcd.io/bbolt"
	berrors "go.etcd.io/bbolt/errors"

	"github.com/dormouse-run/dormouse/agentd/internal/boltfile"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/fence"
)

// Version is the schema version that this package writes.
const Version = 1

var (
	bucketMeta      = []byte("meta")
	bucketSandboxes = []byte("sandboxes")
	bucketSnapshots = []byte("snapshots")
	bucketVolumes   = []byte("volumes")
	bucketCommands  = []byte("commands")
	bucketByTime    = []byte("commands_by_time")

	keyVersion     = []byte("version")
	keyNode        = []byte("node")
	keyCoordinator = []byte("coordinator_epoch")
	keySession     = []byte("session_epoch")
)

// Options say which file and whose it is.
type Options struct {
	// Path of the file; its folder exists.
	Path string
	// Node is the name that the file belongs to.
	Node string
	// LockTimeout bounds the wait for another agentd to let go of the file. 0 is one second.
	LockTimeout time.Duration
	// Commands is how many results are kept. 0 is 20000.
	Commands int
	// Now is the clock, time.Now by default.
	Now func() time.Time
}

// Store is the open file. All methods may be called concurrently.
type Store struct {
	db       *bolt.DB
	commands int
	now      func() time.Time
	reports  reports
	results  results
	writing  sync.Mutex // of update: a result that waits is written once
}

// Open opens or makes the file, takes its lock, checks it and migrates it.
//
// ALREADY_ATTACHED: another agentd has it. STATE_DAMAGED: it cannot be read, or is another node's.
// NOT_SUPPORTED: a newer agentd wrote it. The file is unchanged after any of them.
func Open(opts Options) (*Store, error) {
	if opts.LockTimeout == 0 {
		opts.LockTimeout = time.Second
	}
	if opts.Commands == 0 {
		opts.Commands = 20000
	}
	if opts.Now == nil {
		opts.Now = time.Now
	}
	db, err := openFile(opts)
	if err != nil {
		return nil, err
	}
	s := &Store{db: db, commands: opts.Commands, now: opts.Now}
	err = s.fail(migrate(db, opts.Node, Version, migrations))
	if err == nil {
		err = s.recallReports()
	}
	if err != nil {
		return nil, errors.Join(err, db.Close())
	}
	return s, nil
}

// Close writes what waits and lets go of the file. Idempotent.
func (s *Store) Close() error {
	var err error
	if len(s.reports.waiting()) > 0 || len(s.results.waiting()) > 0 {
		err = s.update(func(*bolt.Tx) error { return nil })
		if errs.Has(err, errs.ShuttingDown) {
			err = nil // closed before
		}
	}
	return errors.Join(err, s.db.Close())
}

// Path is the file's path.
func (s *Store) Path() string { return s.db.Path() }

func damaged(path string, cause error) error {
	return errs.Wrap(cause, errs.StateDamaged,
		"the state file %s cannot be used (%v). It is left as it is. To go on without it: stop agentd, move the file away, start agentd with an empty state, "+
			"look at what `agentctl doctor` finds on the node, and remove it with `agentctl doctor --fix` once nothing there is needed", path, cause)
}

// openFile gives each reason why the file could not be opened its own way out.
func openFile(opts Options) (*bolt.DB, error) {
	db, err := boltfile.Open(opts.Path, opts.LockTimeout)
	switch {
	case errors.Is(err, boltfile.ErrInUse):
		return nil, errs.Wrap(err, errs.AlreadyAttached, "the state file %s is in use by another agentd; stop that one, or give this one a state folder of its own", opts.Path).With("holder", "agentd")
	case errors.Is(err, boltfile.ErrDamaged):
		return nil, damaged(opts.Path, err)
	case err != nil:
		return nil, errs.Wrap(err, errs.InternalError, "open the state file %s: %v", opts.Path, err)
	}
	return db, nil
}

// migration brings a file from one version to the next, in the transaction that it is given.
type migration func(tx *bolt.Tx) error

// migrations[i] brings version i+1 to i+2.
var migrations = []migration{}

// migrate makes the buckets of a new file, or brings an old one to the version.
func migrate(db *bolt.DB, node string, version int, steps []migration) error {
	return db.Update(func(tx *bolt.Tx) error {
		meta := tx.Bucket(bucketMeta)
		if meta == nil {
			if k, _ := tx.Cursor().First(); k != nil {
				return damaged(db.Path(), errors.New("it is not a state file of agentd"))
			}
			return initialise(tx, node, version)
		}
		if owner := string(meta.Get(keyNode)); owner != node {
			return damaged(db.Path(), fmt.Errorf("it belongs to node %q, this is %q", owner, node))
		}
		has, err := strconv.Atoi(string(meta.Get(keyVersion)))
		if err != nil || has < 1 {
			return damaged(db.Path(), fmt.Errorf("its version %q is no number", meta.Get(keyVersion)))
		}
		if has > version {
			return errs.New(errs.NotSupported, "the state file %s has version %d, this agentd reads up to %d: start the newer agentd again", db.Path(), has, version).
				With("feature", "state version "+strconv.Itoa(has))
		}
		for ; has < version; has++ {
			if err := steps[has-1](tx); err != nil {
				return errs.Wrap(err, errs.InternalError, "bring the state file %s from version %d to %d: %v", db.Path(), has, has+1, err)
			}
		}
		for _, name := range buckets {
			if tx.Bucket(name) == nil {
				return damaged(db.Path(), fmt.Errorf("it has no bucket %q", name))
			}
		}
		return meta.Put(keyVersion, []byte(strconv.Itoa(version)))
	})
}

// buckets are those that a file of this version has.
var buckets = [][]byte{bucketMeta, bucketSandboxes, bucketSnapshots, bucketVolumes, bucketCommands, bucketByTime}

func initialise(tx *bolt.Tx, node string, version int) error {
	for _, name := range buckets {
		if _, err := tx.CreateBucket(name); err != nil {
			return err
		}
	}
	meta := tx.Bucket(bucketMeta)
	if err := meta.Put(keyVersion, []byte(strconv.Itoa(version))); err != nil {
		return err
	}
	return meta.Put(keyNode, []byte(node))
}

// Epochs are the highest coordinator epoch seen and the current session's.
type Epochs struct {
	Coordinator fence.Epoch
	Session     fence.Epoch
}

// Epochs reads the epochs.
func (s *Store) Epochs() (Epochs, error) {
	var e Epochs
	err := s.view(func(tx *bolt.Tx) error {
		meta := tx.Bucket(bucketMeta)
		e = Epochs{epoch(meta.Get(keyCoordinator)), epoch(meta.Get(keySession))}
		return nil
	})
	return e, err
}

func epoch(b []byte) fence.Epoch {
	n, err := strconv.ParseUint(string(b), 10, 64)
	if err != nil {
		return 0
	}
	return fence.Epoch(n)
}

// AdmitCoordinator checks an epoch against the highest seen, and persists it if it is newer before it
// returns. FENCED when it is lower.
func (s *Store) AdmitCoordinator(carried fence.Epoch) error {
	now, err := s.Epochs()
	if err != nil {
		return err
	}
	switch fence.Check(now.Coordinator, carried) {
	case fence.Current:
		return nil
	case fence.Stale:
		return fenced("coordinator", carried, now.Coordinator)
	}
	return s.update(func(tx *bolt.Tx) error {
		meta := tx.Bucket(bucketMeta)
		// Another call may have brought a newer one meanwhile.
		if has := epoch(meta.Get(keyCoordinator)); fence.Check(has, carried) == fence.Stale {
			return fenced("coordinator", carried, has)
		}
		return meta.Put(keyCoordinator, []byte(strconv.FormatUint(uint64(carried), 10)))
	})
}

// SetSession persists a new session, and its coordinator's epoch with it. FENCED when the
// coordinator's is lower than the highest seen.
func (s *Store) SetSession(coordinator, session fence.Epoch) error {
	return s.update(func(tx *bolt.Tx) error {
		meta := tx.Bucket(bucketMeta)
		if has := epoch(meta.Get(keyCoordinator)); fence.Check(has, coordinator) == fence.Stale {
			return fenced("coordinator", coordinator, has)
		}
		if err := meta.Put(keyCoordinator, []byte(strconv.FormatUint(uint64(coordinator), 10))); err != nil {
			return err
		}
		return meta.Put(keySession, []byte(strconv.FormatUint(uint64(session), 10)))
	})
}

func fenced(whose string, carried, current fence.Epoch) error {
	return errs.New(errs.Fenced, "the %s epoch %d is not the one in force, %d; ask the current coordinator", whose, carried, current).
		With("epoch", strconv.FormatUint(uint64(carried), 10)).With("current_epoch", strconv.FormatUint(uint64(current), 10))
}

func (s *Store) view(fn func(*bolt.Tx) error) error {
	return s.fail(s.db.View(fn))
}

// update is one transaction, with the acknowledgements and results that wait for one. bbolt lets one
// write at a time anyway.
func (s *Store) update(fn func(*bolt.Tx) error) error {
	s.writing.Lock()
	defer s.writing.Unlock()
	acks, results := s.reports.waiting(), s.results.waiting()
	err := s.db.Update(func(tx *bolt.Tx) error {
		if err := fn(tx); err != nil {
			return err
		}
		for _, cmd := range results {
			if err := s.writeCommand(tx, cmd); err != nil {
				return err
			}
		}
		return writeAcks(tx, acks)
	})
	if err == nil {
		s.reports.written(acks)
		s.results.written(len(results))
	}
	return s.fail(err)
}

// fail gives foreign errors an envelope.
func (s *Store) fail(err error) error {
	var e *errs.Error
	switch {
	case err == nil || errors.As(err, &e):
		return err
	case errors.Is(err, berrors.ErrDatabaseNotOpen):
		return errs.Wrap(err, errs.ShuttingDown, "agentd is stopping; ask again once it has started")
	}
	return errs.Wrap(err, errs.InternalError, "the state file %s: %v", filepath.Base(s.db.Path()), err)
}
