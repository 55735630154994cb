package guestwire

import (
	"hash/crc32"
	"sync"
)

// HeaderSize is the size of a frame's header.
const HeaderSize = 40

// MaxFrame is the size of the largest frame.
const MaxFrame = HeaderSize + MaxPayload

const (
	frameVersion = 1
	flagMore     = 1
)

var magic = [4]byte{0xD3, 'M', 0x9C, 's'}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Channel is what every frame of a channel carries: which generation and which hello.
type Channel struct {
	Generation uint64
	Key        uint64
}

// Frame is one frame. Payload is valid until the decoder is used again.
type Frame struct {
	Type    Type
	More    bool
	Stream  uint32
	Channel Channel
	Payload []byte
}

func put16(b []byte, v uint16) { b[0], b[1] = byte(v), byte(v>>8) }
func put32(b []byte, v uint32) {
	b[0], b[1], b[2], b[3] = byte(v), byte(v>>8), byte(v>>16), byte(v>>24)
}
func put64(b []byte, v uint64) { put32(b, uint32(v)); put32(b[4:], uint32(v>>32)) }
func get16(b []byte) uint16    { return uint16(b[0]) | uint16(b[1])<<8 }
func get32(b []byte) uint32 {
	return uint32(b[0]) | uint32(b[1])<<8 | uint32(b[2])<<16 | uint32(b[3])<<24
}
func get64(b []byte) uint64 { return uint64(get32(b)) | uint64(get32(b[4:]))<<32 }

// AppendFrame appends a frame to dst. The payload must not exceed MaxPayload; it is cut there,
// so that a mistake here cannot make a frame that the other side would take for garbage.
func AppendFrame(dst []byte, f Frame) []byte {
	if len(f.Payload) > MaxPayload {
		f.Payload = f.Payload[:MaxPayload]
	}
	at := len(dst)
	dst = append(dst, make([]byte, HeaderSize)...)
	dst = append(dst, f.Payload...)
	putHeader(dst[at:], f)
	return dst
}

// putHeader fills the header before a payload that is in place.
func putHeader(frame []byte, f Frame) {
	h, payload := frame[:HeaderSize], frame[HeaderSize:]
	copy(h, magic[:])
	h[4], h[5] = frameVersion, 0
	if f.More {
		h[5] = flagMore
	}
	put16(h[6:], uint16(f.Type))
	put32(h[8:], uint32(len(payload)))
	put32(h[12:], f.Stream)
	put64(h[16:], f.Channel.Generation)
	put64(h[24:], f.Channel.Key)
	put32(h[32:], crc32.Checksum(h[:32], castagnoli))
	put32(h[36:], crc32.Checksum(payload, castagnoli))
}

// AppendMessage appends a message as one frame, or as several when it is large.
// It reports false, and appends nothing, when the message is over MaxMessage.
func AppendMessage(dst []byte, ch Channel, stream uint32, m Message) ([]byte, bool) {
	at := len(dst)
	c := codec{out: append(dst, make([]byte, HeaderSize)...)}
	m.fields(&c)
	f := Frame{Type: m.Type(), Stream: stream, Channel: ch}
	body := c.out[at+HeaderSize:]
	if len(body) <= MaxPayload {
		putHeader(c.out[at:], f)
		return c.out, true
	}
	if len(body) > MaxMessage {
		return dst, false
	}
	body = append([]byte(nil), body...)
	for dst = c.out[:at]; len(body) > 0; {
		f.Payload = body[:min(len(body), MaxPayload)]
		body = body[len(f.Payload):]
		f.More = len(body) > 0
		dst = AppendFrame(dst, f)
	}
	return dst, true
}

// Decoder finds frames in a stream of bytes. It holds at most one frame's worth of bytes.
// Accept decides from a header whether the frame is wanted; a frame that is not is not even
// skipped as a whole, because its length may be a lie: the decoder goes on looking right after
// its magic, and what lies in its payload would have to guess the channel's key.
type Decoder struct {
	// Accept looks at a header (Payload is nil).
	Accept func(Frame) bool
	// Skipped counts the bytes that belonged to no wanted frame.
	Skipped uint64

	buf        []byte
	start, end int
	// frame is the length of the frame that Next returned last.
	frame int
}

// buffers are those of decoders that hold nothing.
var buffers = sync.Pool{New: func() any { return new([MaxFrame]byte) }}

// Space is where the next bytes are to be put; it is never empty after Next has returned false.
func (d *Decoder) Space() []byte {
	if d.buf == nil {
		d.buf = buffers.Get().(*[MaxFrame]byte)[:]
	}
	d.release()
	if d.start > 0 {
		copy(d.buf, d.buf[d.start:d.end])
		d.end -= d.start
		d.start = 0
	}
	return d.buf[d.end:]
}

// Rest gives the memory back until the next Space, if no byte of a frame is held: many channels are silent most of the
// time. The payload of a frame that Next gave is not valid any more.
func (d *Decoder) Rest() {
	d.release()
	if d.buf == nil || d.start < d.end {
		return
	}
	buffers.Put((*[MaxFrame]byte)(d.buf))
	d.buf, d.start, d.end = nil, 0, 0
}

// Filled says how many bytes were put into Space.
func (d *Decoder) Filled(n int) { d.end += n }

// Buffered tells how many bytes of a frame not yet whole are held.
func (d *Decoder) Buffered() int { return d.end - d.start - d.frame }

func (d *Decoder) release() {
	d.start += d.frame
	d.frame = 0
}

// Next returns the next wanted frame that is whole, or false when more bytes are needed.
func (d *Decoder) Next() (Frame, bool) {
	d.release()
	for {
		d.seek()
		b := d.buf[d.start:d.end]
		if len(b) < HeaderSize {
			return Frame{}, false
		}
		length := int(get32(b[8:]))
		f := Frame{
			Type: Type(get16(b[6:])), More: b[5]&flagMore != 0, Stream: get32(b[12:]),
			Channel: Channel{Generation: get64(b[16:]), Key: get64(b[24:])},
		}
		if b[4] != frameVersion || length > MaxPayload || get32(b[32:]) != crc32.Checksum(b[:32], castagnoli) ||
			(d.Accept != nil && !d.Accept(f)) {
			d.skip(1)
			continue
		}
		if len(b) < HeaderSize+length {
			return Frame{}, false
		}
		f.Payload = b[HeaderSize : HeaderSize+length]
		if get32(b[36:]) != crc32.Checksum(f.Payload, castagnoli) {
			d.skip(1)
			continue
		}
		d.frame = HeaderSize + length
		return f, true
	}
}

func (d *Decoder) skip(n int) {
	d.start += n
	d.Skipped += uint64(n)
}

// seek moves to the next place where a magic, or the beginning of one, stands.
func (d *Decoder) seek() {
	for d.start < d.end {
		b := d.buf[d.start:d.end]
		n := min(len(b), len(magic))
		if string(b[:n]) == string(magic[:n]) {
			return
		}
		d.skip(1)
	}
}

// Assembler joins the frames of a message. Frames of one message are consecutive, so that it
// holds one message at most; a frame that does not go on with it drops it.
type Assembler struct {
	typ    Type
	stream uint32
	open   bool
	buf    []byte
}

// Add takes a frame and returns the payload of a whole message when it was the last one.
// The payload is valid until the next call.
func (a *Assembler) Add(f Frame) ([]byte, bool) {
	if a.open && (f.Type != a.typ || f.Stream != a.stream) {
		a.open, a.buf = false, nil
	}
	if !a.open && !f.More {
		return f.Payload, true
	}
	if !a.open {
		a.open, a.typ, a.stream, a.buf = true, f.Type, f.Stream, nil
	}
	if len(a.buf)+len(f.Payload) > MaxMessage {
		a.open, a.buf = false, nil
		return nil, false
	}
	a.buf = append(a.buf, f.Payload...)
	if f.More {
		return nil, false
	}
	whole := a.buf
	a.open, a.buf = false, nil
	return whole, true
}
