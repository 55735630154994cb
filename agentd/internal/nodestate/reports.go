package nodestate

import (
	"maps"
	"slices"
	"sync"

	bolt "go.etcd.io/bbolt"
)

// reports is what is known in memory of which observations the coordinator has taken.
//
// An acknowledgement is not worth a sync of its own: one that a crash forgets makes the observation go
// out again, and the coordinator knows its number. So it waits here for the next transaction, whatever
// that is about, or for Close.
//
// The records that may hold something to report are remembered too, so that one change among a
// thousand sandboxes does not read a thousand records. All are remembered until they have been read once.
type reports struct {
	mu   sync.Mutex
	acks map[string]uint64 // by uid: not written yet
	open map[string]uint64 // by uid: how often it changed since
	next uint64
}

// changed notes that a record may have news.
func (r *reports) changed(uid string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.open == nil {
		r.open = make(map[string]uint64)
	}
	r.next++
	r.open[uid] = r.next
}

func (r *reports) acknowledged(uid string, observation uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.acks == nil {
		r.acks = make(map[string]uint64)
	}
	r.acks[uid] = max(r.acks[uid], observation)
}

func (r *reports) waiting() map[string]uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return maps.Clone(r.acks)
}

// written forgets acknowledgements that are in the file, but for what came meanwhile.
func (r *reports) written(acks map[string]uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for uid, observation := range acks {
		if r.acks[uid] == observation {
			delete(r.acks, uid)
		}
	}
}

// settled forgets a record that has nothing to report, unless it changed after seen was taken.
func (r *reports) settled(uid string, seen uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.open[uid] == seen {
		delete(r.open, uid)
	}
}

// AckSandbox notes that the coordinator took an observation. It becomes durable with the next write, or
// with Close. Unknown uids are passed over.
func (s *Store) AckSandbox(uid string, observation uint64) error {
	s.reports.acknowledged(uid, observation)
	return nil
}

// writeAcks puts acknowledgements into their records.
func writeAcks(tx *bolt.Tx, acks map[string]uint64) error {
	b := tx.Bucket(bucketSandboxes)
	for uid, observation := range acks {
		old := b.Get([]byte(uid))
		if old == nil {
			continue
		}
		var rec Sandbox
		if err := decode(old, &rec, "sandbox", uid); err != nil {
			return err
		}
		if rec.Acked >= observation {
			continue
		}
		rec.Acked = min(observation, rec.Observation)
		if err := put(b, uid, rec); err != nil {
			return err
		}
	}
	return nil
}

// Unreported gives the sandboxes whose last observation the coordinator has not acknowledged, in the
// order of their uids.
func (s *Store) Unreported() ([]Sandbox, error) {
	s.reports.mu.Lock()
	open, acks := maps.Clone(s.reports.open), maps.Clone(s.reports.acks)
	s.reports.mu.Unlock()
	var due []Sandbox
	err := s.view(func(tx *bolt.Tx) error {
		b := tx.Bucket(bucketSandboxes)
		for _, uid := range slices.Sorted(maps.Keys(open)) {
			var rec Sandbox
			if data := b.Get([]byte(uid)); data != nil {
				if err := decode(data, &rec, "sandbox", uid); err != nil {
					return err
				}
			}
			if rec.Acked = max(rec.Acked, acks[uid]); rec.Observation > rec.Acked {
				due = append(due, rec)
				continue
			}
			s.reports.settled(uid, open[uid])
		}
		return nil
	})
	return due, err
}

// recallReports remembers all sandboxes of a file that was just opened.
func (s *Store) recallReports() error {
	return s.view(func(tx *bolt.Tx) error {
		return tx.Bucket(bucketSandboxes).ForEach(func(uid, _ []byte) error {
			s.reports.changed(string(uid))
			return nil
		})
	})
}
