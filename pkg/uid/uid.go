// Package uid makes and checks the identifiers of objects and operations: UUIDv7, in lower case,
// 36 characters. They sort by time of creation, are never reused, and have one length, so that no
// sandbox id is a prefix of another.
//
// The order is that of one process, and across processes that of their clocks. Where a clock was set back
// by more than a little, the ids follow it: they sort before the ones made shortly before, and differ from
// them by their 62 random bits. An id that went on from where the clock was would be of the future.
package uid

import (
	"encoding/binary"
	"fmt"
	"sync"
	"time"

	"github.com/google/uuid"
)

// Len is the length of every uid.
const Len = 36

// slew is how far behind the last uid the clock may be while uids go on from that one: so much it is set
// back in the ordinary course of things.
const slew = 10 * time.Second

// maker makes the uids of one process.
type maker struct {
	mu   sync.Mutex
	last int64 // what tick gave last
	now  func() time.Time
}

var process = maker{now: time.Now}

// New makes a uid. It panics only if the system has no randomness.
func New() string { return process.next() }

func (m *maker) next() string {
	u := uuid.New() // version 4: all of it random, and the variant set
	t := m.tick()
	binary.BigEndian.PutUint64(u[:8], uint64(t>>12)<<16|7<<12|uint64(t&0xfff))
	return u.String()
}

// tick gives the time in 4096ths of a millisecond, later than the one before unless the clock was set back.
func (m *maker) tick() int64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	now := m.now()
	t := now.UnixMilli()<<12 | int64(now.Nanosecond()%1_000_000)<<12/1_000_000
	if t <= m.last && m.last-t < slew.Milliseconds()<<12 {
		t = m.last + 1
	}
	m.last = t
	return t
}

// Check tells why s is not a uid, or nil.
func Check(s string) error {
	_, err := parse(s)
	return err
}

// Time gives the time in a uid, to the millisecond.
func Time(s string) (time.Time, error) {
	u, err := parse(s)
	if err != nil {
		return time.Time{}, err
	}
	ms := int64(u[0])<<40 | int64(u[1])<<32 | int64(u[2])<<24 | int64(u[3])<<16 | int64(u[4])<<8 | int64(u[5])
	return time.UnixMilli(ms), nil
}

func parse(s string) (uuid.UUID, error) {
	if len(s) != Len {
		return uuid.Nil, fmt.Errorf("a uid has %d characters, this has %d", Len, len(s))
	}
	u, err := uuid.Parse(s)
	if err != nil {
		return uuid.Nil, fmt.Errorf("not a uid: %w", err)
	}
	if u.Version() != 7 || u.String() != s {
		return uuid.Nil, fmt.Errorf("a uid is a UUIDv7 in lower case")
	}
	return u, nil
}
