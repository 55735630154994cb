// Package uid makes and checks the identifiers of objects and operations: UUIDv7, in lower case,
// 36 characters. They sort by time of creation, are never reused, and have one length, so that no
// sandbox id is a prefix of another.
package uid

import (
	"fmt"
	"time"

	"github.com/google/uuid"
)

// Len is the length of every uid.
const Len = 36

// New makes a uid. It panics only if the system has no randomness.
func New() string { return uuid.Must(uuid.NewV7()).String() }

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
