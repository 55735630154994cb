package nodestate

import (
	"encoding/binary"
	"slices"
	"sync"
	"time"

	bolt "go.etcd.io/bbolt"

	"github.com/dormouse-run/dormouse/pkg/errs"
)

// Command is a finished command and what it gave.
type Command struct {
	ID string `json:"id"`
	// Kind is the method, Digest that of its body without epochs and request id.
	Kind   string `json:"kind"`
	Digest string `json:"digest"`
	// Result is the encoded answer; Error the encoded envelope of a failure that is final.
	Result []byte    `json:"result,omitempty"`
	Error  []byte    `json:"error,omitempty"`
	Done   time.Time `json:"done"`
}

// Command reads the result of a finished command. ok is false when there is none.
// OPERATION_BODY_MISMATCH when the id was used with another body.
func (s *Store) Command(id, kind, digest string) (cmd Command, ok bool, err error) {
	if cmd, ok = s.results.find(id); ok {
		return cmd.sameAs(kind, digest)
	}
	err = s.view(func(tx *bolt.Tx) error {
		data := tx.Bucket(bucketCommands).Get([]byte(id))
		if data == nil {
			return nil
		}
		if err := decode(data, &cmd, "command", id); err != nil {
			return err
		}
		ok = true
		return nil
	})
	if err != nil || !ok {
		return Command{}, false, err
	}
	return cmd.sameAs(kind, digest)
}

func (c Command) sameAs(kind, digest string) (Command, bool, error) {
	if c.Kind != kind || c.Digest != digest {
		return Command{}, false, errs.New(errs.OperationBodyMismatch, "the command id %s was used with another body", c.ID)
	}
	return c, true, nil
}

// results are kept but not in the file yet; see PutCommandLater.
type results struct {
	mu  sync.Mutex
	all []Command
}

func (r *results) find(id string) (Command, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	i := slices.IndexFunc(r.all, func(c Command) bool { return c.ID == id })
	if i < 0 {
		return Command{}, false
	}
	return r.all[i], true
}

func (r *results) waiting() []Command {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.all)
}

// written forgets the first n, which are in the file.
func (r *results) written(n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.all = slices.Delete(r.all, 0, n)
}

// PutCommandLater keeps a result that the records themselves give again, and so is not worth a sync of
// its own. It is known at once, and becomes durable with the next write, or with Close. As long as there
// was none the records are still those that the result was made from, and a crash that forgets it loses nothing.
func (s *Store) PutCommandLater(cmd Command) {
	cmd.Done = s.now()
	s.results.mu.Lock()
	defer s.results.mu.Unlock()
	s.results.all = append(s.results.all, cmd)
}

// PutCommand keeps a result. The oldest ones go when there are too many.
func (s *Store) PutCommand(cmd Command) error {
	cmd.Done = s.now()
	return s.update(func(tx *bolt.Tx) error { return s.writeCommand(tx, cmd) })
}

func (s *Store) writeCommand(tx *bolt.Tx, cmd Command) error {
	b, byTime := tx.Bucket(bucketCommands), tx.Bucket(bucketByTime)
	if b.Get([]byte(cmd.ID)) != nil {
		return nil
	}
	if err := put(b, cmd.ID, cmd); err != nil {
		return err
	}
	// In the order in which they were kept, also where the clock was set back: else the newest would go first.
	at := uint64(cmd.Done.UnixNano())
	if last, _ := byTime.Cursor().Last(); len(last) > 8 {
		at = max(at, binary.BigEndian.Uint64(last)+1)
	}
	if err := byTime.Put(timeKey(at, cmd.ID), nil); err != nil {
		return err
	}
	// The sequence counts what was put and dropped, so that nothing has to be counted by walking.
	n := byTime.Sequence() + 1
	c := byTime.Cursor()
	for k, _ := c.First(); k != nil && n > uint64(s.commands); k, _ = c.First() {
		if err := b.Delete(k[8:]); err != nil {
			return err
		}
		if err := c.Delete(); err != nil {
			return err
		}
		n--
	}
	return byTime.SetSequence(n)
}

func timeKey(at uint64, id string) []byte {
	return append(binary.BigEndian.AppendUint64(nil, at), id...)
}
