package wire

import (
	"fmt"

	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
)

// A message that carries a piece of a file is one field of bytes and nothing else. Decoding it would copy the bytes into
// memory that is garbage right after, and encoding it copies them again. So what moves files receives such messages
// into an Incoming and sends them as an Outgoing, which leave the bytes where they are.

// maxHead is the length of the longest tag and length.
const maxHead = 2 * 10

// Incoming receives a message of one field of bytes. What else comes is decoded into Message. One value serves a
// stream, message after message; it holds a message's bytes until the next is received, or until Free.
type Incoming struct {
	// Field is the field's number.
	Field protowire.Number
	// Message takes what is not that field alone.
	Message proto.Message

	data  mem.BufferSlice // with the head
	parts [][]byte
	size  int
}

// Bytes tells whether the last message was the field alone, and gives its bytes, in parts, and how many they are.
// They are not to be changed.
func (p *Incoming) Bytes() (parts [][]byte, size int, ok bool) {
	return p.parts, p.size, p.data != nil
}

// Free gives up the bytes that are held.
func (p *Incoming) Free() {
	p.data.Free()
	clear(p.parts)
	p.data, p.parts, p.size = nil, p.parts[:0], 0
}

// take keeps the message if it is the field alone.
func (p *Incoming) take(data mem.BufferSlice) bool {
	p.Free()
	var room [maxHead]byte
	head := room[:data.CopyTo(room[:])]
	field, kind, n := protowire.ConsumeTag(head)
	if n < 0 || field != p.Field || kind != protowire.BytesType {
		return false
	}
	size, m := protowire.ConsumeVarint(head[n:])
	if m < 0 || size != uint64(data.Len()-n-m) {
		return false
	}
	data.Ref()
	p.data, p.size = data, int(size)
	skip := n + m
	for _, b := range data {
		part := b.ReadOnlyData()
		over := min(skip, len(part))
		skip -= over
		if part = part[over:]; len(part) > 0 {
			p.parts = append(p.parts, part)
		}
	}
	return true
}

// PieceRoom is how many bytes a Room has.
const PieceRoom = 1 << piece

// Room gives memory for a piece. What it holds is whatever it held before.
func Room() []byte { return *codec.pool.Get(PieceRoom) }

// Outgoing is a message of one field of bytes. It may be sent more than once, and is held until Free.
type Outgoing struct {
	head []byte
	data mem.Buffer
}

// NewOutgoing makes a message of the first n bytes of what Room gave, which is its own from then on.
func NewOutgoing(field protowire.Number, room []byte, n int) *Outgoing {
	room = room[:n]
	return newOutgoing(field, mem.NewBuffer(&room, codec.pool))
}

func newOutgoing(field protowire.Number, data mem.Buffer) *Outgoing {
	head := protowire.AppendTag(make([]byte, 0, maxHead), field, protowire.BytesType)
	return &Outgoing{head: protowire.AppendVarint(head, uint64(data.Len())), data: data}
}

// Len is how many bytes the field has.
func (o *Outgoing) Len() int { return o.data.Len() }

// Bytes are the field's, not to be changed.
func (o *Outgoing) Bytes() []byte { return o.data.ReadOnlyData() }

// After gives a message without the first n bytes.
func (o *Outgoing) After(n int) *Outgoing {
	field, _, _ := protowire.ConsumeTag(o.head)
	return newOutgoing(field, o.data.Slice(n, o.data.Len()))
}

// Free gives up the bytes; a transport that still sends them has a hold of its own.
func (o *Outgoing) Free() { o.data.Free() }

// marshal gives the transport the message.
func (o *Outgoing) marshal() mem.BufferSlice {
	o.data.Ref()
	return mem.BufferSlice{mem.SliceBuffer(o.head), o.data}
}

// decodeInto decodes what is not the field alone.
func (p *Incoming) decodeInto(c frameCodec, data mem.BufferSlice) error {
	if p.Message == nil {
		return fmt.Errorf("a message that is not field %d alone", p.Field)
	}
	return c.Unmarshal(data, p.Message)
}
