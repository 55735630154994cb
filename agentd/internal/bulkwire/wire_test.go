package bulkwire

import (
	"bytes"
	"errors"
	"io"
	"strings"
	"testing"
)

func TestRoundTrip(t *testing.T) {
	var buf bytes.Buffer
	w := NewWriter(&buf)
	long := bytes.Repeat([]byte("x"), MaxData+7)
	for _, err := range []error{
		w.WriteText(Request, Order{Op: Read, Path: "/etc/passwd", Offset: 7}), w.WriteData([]byte("hello")), w.WriteData(nil),
		w.WriteData(long), w.WriteRoom(copy(w.Room(), "room")), w.WriteText(End, nil),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	r := NewReader(&buf)
	kind, text, err := r.Next()
	var o Order
	if err != nil || kind != Request || Decode(text, &o) != nil || o.Op != Read || o.Path != "/etc/passwd" || o.Offset != 7 {
		t.Fatalf("%c %s %v", kind, text, err)
	}
	for _, want := range []string{"hello", string(long[:MaxData]), "xxxxxxx", "room"} {
		if kind, data, err := r.Next(); err != nil || kind != Data || string(data) != want {
			t.Fatalf("%c with %d bytes, %v; want %d", kind, len(data), err, len(want))
		}
	}
	if kind, data, err := r.Next(); err != nil || kind != End || len(data) != 0 {
		t.Fatal(kind, data, err)
	}
	if _, _, err := r.Next(); !errors.Is(err, io.EOF) {
		t.Fatal(err)
	}
}

func TestTooLongATextIsNotSent(t *testing.T) {
	var buf bytes.Buffer
	if err := NewWriter(&buf).WriteText(Failure, Refusal{Message: strings.Repeat("x", MaxText)}); !errors.Is(err, ErrGarbage) || buf.Len() > 0 {
		t.Fatal(err, buf.Len())
	}
}

// FuzzReader: no input makes a reader hold more than a frame, loop, or panic.
func FuzzReader(f *testing.F) {
	f.Add([]byte{'D', 1, 0, 0, 'x', 'E', 0, 0, 0})
	f.Add([]byte{'A', 2, 0, 0, '{', '}', 'F', 255, 255, 255})
	f.Fuzz(func(t *testing.T, in []byte) {
		r, left := NewReader(bytes.NewReader(in)), len(in)
		for {
			kind, data, err := r.Next()
			if err != nil {
				if !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) && !errors.Is(err, ErrGarbage) {
					t.Fatalf("an error of its own: %v", err)
				}
				return
			}
			if left -= HeaderLen + len(data); left < 0 || len(data) > limitOf(kind) {
				t.Fatalf("%c with %d bytes, %d were left", kind, len(data), left)
			}
			var o Order
			var d Done
			var e Entries
			for _, v := range []any{&o, &d, &e, &Refusal{}, &Events{}} {
				_ = Decode(data, v)
			}
		}
	})
}
