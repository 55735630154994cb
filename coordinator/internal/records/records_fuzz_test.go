package records

import (
	"bytes"
	"testing"
	"time"

	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/uid"
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

// FuzzTraces: what a tombstone holds is read or refused, and what was read is written and read as the same.
func FuzzTraces(f *testing.F) {
	for _, t := range []Trace{{}, {Name: "n"}, {OperationID: uid.New(), Source: uid.New(), Created: time.Unix(1, 2).UTC(), Name: "web"}, {OperationID: "not one of ours"}} {
		b, err := EncodeTrace(t)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Add([]byte(`{"format":1,"body":{"deleted":"2026-01-01T00:00:00Z","name":"web","source":"x"}}`))
	f.Add([]byte(`{"format":1,"body":{"created":"1500-01-01T00:00:00+01:00"}}`))
	f.Add([]byte(`{"format":1,"body":{"created":"1970-01-01T00:00:00Z"}}`))
	f.Add([]byte{2, 1})
	f.Add([]byte{3})
	f.Fuzz(func(t *testing.T, body []byte) {
		once, err := DecodeTrace(body)
		if err != nil {
			return
		}
		b, err := EncodeTrace(once)
		if err != nil {
			return // a time out of JSON's years
		}
		if twice, err := DecodeTrace(b); err != nil || twice != once {
			t.Fatalf("%+v became %+v, %v", once, twice, err)
		}
	})
}

// C28: what a tombstone keeps of a snapshot takes no more than the ids that it has.
func TestC28_TracesAreSmall(t *testing.T) {
	want := Trace{Name: "web", OperationID: uid.New(), Source: uid.New(), Created: time.Now().Round(0).UTC()}
	b, err := EncodeTrace(want)
	if err != nil || len(b) != traceHead+len(want.Name) {
		t.Fatalf("%d bytes, %v", len(b), err)
	}
	if has, err := DecodeTrace(b); err != nil || has != want {
		t.Errorf("%+v became %+v, %v", want, has, err)
	}
}
