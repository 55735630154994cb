package records

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"time"
	"unicode/utf8"

	"github.com/google/uuid"

	"github.com/dormouse-run/dormouse/pkg/uid"
)

// Trace is the body of a tombstone. When it was deleted is the tombstone's own.
type Trace struct {
	Name        string `json:"name,omitempty"`
	OperationID string `json:"operation_id,omitempty"`
	// Source and Created are of snapshots.
	Source  string    `json:"source,omitempty"`
	Created time.Time `json:"created,omitzero"`
}

// tracePacked begins a trace that is packed; another begins as JSON does. There may be ten tombstones for each living record, and
// half of one in JSON would be the names of its fields.
//
//	byte 0       tracePacked
//	1 to 16      the operation's id, all zero if there is none
//	17 to 32     the source's uid, likewise
//	33 to 40     created, in nanoseconds; 0 if not known
//	41 to the end the name
const (
	tracePacked = byte(2)
	traceHead   = 41
)

// EncodeTrace gives the body of a tombstone.
func EncodeTrace(t Trace) ([]byte, error) {
	b := make([]byte, traceHead, traceHead+len(t.Name))
	b[0] = tracePacked
	for i, id := range []string{t.OperationID, t.Source} {
		if id == "" {
			continue
		}
		u, err := uuid.Parse(id)
		if err != nil || uid.Check(id) != nil {
			return Encode(t) // not one of ours: as it is
		}
		copy(b[1+16*i:], u[:])
	}
	if !t.Created.IsZero() {
		ns := t.Created.UnixNano()
		if ns == 0 || !time.Unix(0, ns).Equal(t.Created) {
			return Encode(t) // 0 says that it is not known, and not every year is one of nanoseconds
		}
		binary.BigEndian.PutUint64(b[33:], uint64(ns))
	}
	return append(b, t.Name...), nil
}

// DecodeTrace reads what EncodeTrace made, and the JSON that was written before it.
func DecodeTrace(b []byte) (Trace, error) {
	var t Trace
	if bytes.HasPrefix(b, []byte("{")) {
		err := Decode(b, &t)
		t.Created = t.Created.UTC()
		return t, err
	}
	if len(b) < traceHead || b[0] != tracePacked {
		return t, fmt.Errorf("a trace of %d bytes is in no form that this coordinator knows; run the newer version", len(b))
	}
	for i, id := range []*string{&t.OperationID, &t.Source} {
		if u := uuid.UUID(b[1+16*i : 17+16*i]); u != uuid.Nil {
			*id = u.String()
		}
	}
	if ns := int64(binary.BigEndian.Uint64(b[33:])); ns != 0 {
		t.Created = time.Unix(0, ns).UTC()
	}
	if !utf8.Valid(b[traceHead:]) {
		return Trace{}, errors.New("a trace has a name that is no text")
	}
	t.Name = string(b[traceHead:])
	return t, nil
}
