package records

import (
	"bytes"
	"testing"

	"github.com/dormouse-run/dormouse/pkg/catalog"
)

// FuzzRecords: a body of any kind is read or refused, and what was read is written and read as the same.
func FuzzRecords(f *testing.F) {
	for which, v := range []any{Sandbox{}, Snapshot{SourceNode: "n"}, Volume{}, Node{Name: "n"}, Event{UID: "e"}} {
		body, err := Encode(v)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(uint8(which), body)
		f.Add(uint8(which), []byte(`{"format":1}`))
		f.Add(uint8(which), []byte(`{"format":2,"body":{}}`))
		f.Add(uint8(which), []byte(`{"format":1,"body":null}`))
	}
	f.Fuzz(func(t *testing.T, which uint8, body []byte) {
		r := catalog.Record{Body: body}
		read := func(r catalog.Record) (rec any, put catalog.Put, err error) {
			switch which % 5 {
			case 0:
				s, err := SandboxOf(r)
				if err != nil {
					return nil, put, err
				}
				put, err = s.Put()
				return s, put, err
			case 1:
				s, err := SnapshotOf(r)
				if err != nil {
					return nil, put, err
				}
				put, err = s.Put()
				return s, put, err
			case 2:
				v, err := VolumeOf(r)
				if err != nil {
					return nil, put, err
				}
				put, err = v.Put()
				return v, put, err
			case 3:
				n, err := NodeOf(r)
				if err != nil {
					return nil, put, err
				}
				put, err = n.Put()
				return n, put, err
			}
			e, err := EventOf(r)
			if err != nil {
				return nil, put, err
			}
			put, err = e.Put("t")
			return e, put, err
		}
		_, once, err := read(r)
		if err != nil {
			return
		}
		_, twice, err := read(catalog.Record{Body: once.Record.Body})
		if err != nil || !bytes.Equal(once.Record.Body, twice.Record.Body) {
			t.Fatalf("%s became %s, %v", once.Record.Body, twice.Record.Body, err)
		}
	})
}
