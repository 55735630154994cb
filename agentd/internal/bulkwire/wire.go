// Package bulkwire is what agentd and a bulk helper say to each other over the helper's standard input and
// output: frames of bounded length, on pipes that only the two of them hold.
//
// A frame is a kind, a length of three bytes (the lowest first) and as many bytes. The host begins with one
// Request. Then, by the request's operation:
//
//	host:    Data* End               where the operation takes bytes
//	helper:  Answer* Data* End       where it went well; the answer says what was found, End what was done
//	helper:  ... Failure             anywhere, and nothing after it
//
// End is a half-close: the other direction goes on. A pipe that is closed means that its owner is gone,
// and everything is dropped; so a helper never outlives the agentd that started it, and what was being
// sent ends with its End or is known to be torn.
//
// Texts are JSON, and a frame of them is at most MaxText. What comes from a helper comes from the sandbox:
// the sandbox's owner may have replaced it by anything. Readers take no length for granted.
package bulkwire

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
)

// Kind is what a frame is.
type Kind byte

// The kinds.
const (
	Request Kind = 'Q'
	Answer  Kind = 'A'
	Data    Kind = 'D'
	End     Kind = 'E'
	Failure Kind = 'F'
)

const (
	// HeaderLen is the length of a frame's header.
	HeaderLen = 4
	// MaxData is the most bytes of a Data frame: whole blocks of 4 KiB, and with what gRPC puts around it no
	// more than 128 KiB.
	MaxData = 124 << 10
	// MaxText is the most bytes of any other frame.
	MaxText = 64 << 10
)

// ErrGarbage is a frame that cannot be.
var ErrGarbage = errors.New("a frame that cannot be")

func limitOf(k Kind) int {
	switch k {
	case Data:
		return MaxData
	case Request, Answer, End, Failure:
		return MaxText
	}
	return -1
}

// Reader reads frames.
type Reader struct {
	r    io.Reader
	buf  []byte
	head [HeaderLen]byte
	have int // bytes of head that were read
}

// NewReader reads frames from r. A frame of which all is there costs one read, which takes the next one's header along,
// and its bytes are copied once.
func NewReader(r io.Reader) *Reader { return &Reader{r: r} }

// Next gives the next frame. The bytes are good until the next call. io.EOF is the end between two
// frames, io.ErrUnexpectedEOF one in the middle, ErrGarbage a frame that cannot be.
func (r *Reader) Next() (Kind, []byte, error) {
	if n, err := io.ReadFull(r.r, r.head[r.have:]); err != nil {
		if r.have += n; r.have > 0 && errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return 0, nil, err
	}
	r.have = 0
	kind, n := Kind(r.head[0]), int(r.head[1])|int(r.head[2])<<8|int(r.head[3])<<16
	if limit := limitOf(kind); n > limit {
		return 0, nil, fmt.Errorf("%w: kind %#x with %d bytes, at most %d are", ErrGarbage, byte(kind), n, limit)
	}
	if len(r.buf) < n+HeaderLen {
		r.buf = make([]byte, n+HeaderLen)
	}
	got, err := io.ReadAtLeast(r.r, r.buf[:n+HeaderLen], n)
	if err != nil {
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return 0, nil, err
	}
	r.have = copy(r.head[:], r.buf[n:got])
	return kind, r.buf[:n], nil
}

// Swap gives the memory of which the last frame's bytes are the beginning, and takes other for what comes. With
// memory of at least MaxData+HeaderLen bytes no frame of data makes the reader get its own.
func (r *Reader) Swap(other []byte) []byte {
	old := r.buf
	r.buf = other
	return old
}

// Writer writes frames, each with one call of Write. Not safe for concurrent use.
type Writer struct {
	w     io.Writer
	buf   []byte
	parts [][]byte
}

// NewWriter writes frames to w.
func NewWriter(w io.Writer) *Writer { return &Writer{w: w} }

// Room gives a place of MaxData bytes to put data in for WriteRoom, which saves a copy.
func (w *Writer) Room() []byte {
	w.grow(MaxData)
	return w.buf[HeaderLen : HeaderLen+MaxData]
}

// WriteRoom writes a Data frame of the first n bytes of Room.
func (w *Writer) WriteRoom(n int) error { return w.flush(Data, n) }

// WriteData writes the bytes in as many frames as they need.
func (w *Writer) WriteData(data []byte) error {
	for len(data) > 0 {
		n := copy(w.Room(), data)
		if err := w.WriteRoom(n); err != nil {
			return err
		}
		data = data[n:]
	}
	return nil
}

// Vector is what takes several pieces of memory in one call.
type Vector interface {
	WriteVector(parts [][]byte) error
}

// WriteParts writes a Data frame of the parts, which are size bytes, at most MaxData. They are not copied where what
// is written to is a Vector.
func (w *Writer) WriteParts(parts [][]byte, size int) error {
	if v, ok := w.w.(Vector); ok {
		w.grow(0)
		w.header(Data, size)
		w.parts = append(append(w.parts[:0], w.buf[:HeaderLen]), parts...)
		err := v.WriteVector(w.parts)
		clear(w.parts)
		return err
	}
	room := w.Room()
	n := 0
	for _, p := range parts {
		n += copy(room[n:], p)
	}
	return w.WriteRoom(n)
}

// WriteText writes a frame of the value's JSON. A nil value is an empty frame.
func (w *Writer) WriteText(kind Kind, v any) error {
	var text []byte
	if v != nil {
		var err error
		if text, err = json.Marshal(v); err != nil {
			return err
		}
	}
	if len(text) > MaxText {
		return fmt.Errorf("%w: a text of %d bytes, at most %d are", ErrGarbage, len(text), MaxText)
	}
	w.grow(len(text))
	copy(w.buf[HeaderLen:], text)
	return w.flush(kind, len(text))
}

func (w *Writer) grow(n int) {
	if cap(w.buf) < HeaderLen+n {
		w.buf = make([]byte, HeaderLen+n)
	}
	w.buf = w.buf[:cap(w.buf)]
}

func (w *Writer) flush(kind Kind, n int) error {
	w.header(kind, n)
	_, err := w.w.Write(w.buf[:HeaderLen+n])
	return err
}

func (w *Writer) header(kind Kind, n int) {
	w.buf[0], w.buf[1], w.buf[2], w.buf[3] = byte(kind), byte(n), byte(n>>8), byte(n>>16)
}

// Decode reads a text. An empty one leaves v as it is.
func Decode(text []byte, v any) error {
	if len(text) == 0 {
		return nil
	}
	if err := json.Unmarshal(text, v); err != nil {
		return fmt.Errorf("%w: %w", ErrGarbage, err)
	}
	return nil
}
