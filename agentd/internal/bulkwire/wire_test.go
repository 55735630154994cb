package bulkwire

import (
	"bytes"
	"errors"
	"io"
	"strings"
	"testing"
	"testing/iotest"
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

// TestFramesInPieces: frames that come in whatever pieces, with whatever of the next one, are what they were, and
// memory that is given away is not written to again.
func TestFramesInPieces(t *testing.T) {
	var buf bytes.Buffer
	w := NewWriter(&buf)
	long := bytes.Repeat([]byte("0123456789"), MaxData/10)
	for _, err := range []error{
		w.WriteData([]byte("a")), w.WriteParts([][]byte{[]byte("two "), nil, []byte("parts")}, 9), w.WriteData(long), w.WriteText(Answer, nil),
		w.WriteData(long), w.WriteText(End, Done{Bytes: 7}),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	for name, piecewise := range map[string]func(io.Reader) io.Reader{
		"whole": func(r io.Reader) io.Reader { return r }, "half": iotest.HalfReader, "bytes": iotest.OneByteReader, "last with its error": iotest.DataErrReader,
	} {
		r := NewReader(piecewise(bytes.NewReader(buf.Bytes())))
		var kinds []byte
		var kept, given [][]byte
		for {
			kind, data, err := r.Next()
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				t.Fatal(name, err)
			}
			kinds = append(kinds, byte(kind))
			kept = append(kept, bytes.Clone(data))
			given = append(given, r.Swap(make([]byte, MaxData+HeaderLen))[:len(data)])
		}
		if string(kinds) != "DDDADE" || string(kept[1]) != "two parts" || !bytes.Equal(kept[2], long) || !bytes.Equal(kept[4], long) || string(kept[5]) != `{"bytes":7}` {
			t.Errorf("%s: %s, %.20q", name, kinds, kept)
		}
		for i := range kept {
			if !bytes.Equal(kept[i], given[i]) {
				t.Errorf("%s: what was given away of frame %d was written to", name, i)
			}
		}
	}
	for cut := 1; cut < HeaderLen+3; cut++ {
		if _, _, err := NewReader(bytes.NewReader([]byte{'D', 3, 0, 0, 'x', 'y', 'z'}[:cut])).Next(); !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Errorf("a frame of which %d bytes came: %v", cut, err)
		}
	}
	r := NewReader(bytes.NewReader([]byte{'D', 1, 0, 0, 'x', 'D', 1}))
	if _, _, err := r.Next(); err != nil {
		t.Fatal(err)
	}
	if _, _, err := r.Next(); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("a header that was torn: %v", err)
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
