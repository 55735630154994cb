package wire

import (
	"google.golang.org/grpc/encoding"
	_ "google.golang.org/grpc/encoding/proto" // the codec that this one stands on
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/proto"
)

// Frame is a message that is passed on as it came: received into a Frame and sent from it, its bytes are
// neither decoded nor copied. It is sent once.
type Frame struct{ data mem.BufferSlice }

// Len is its size in bytes, until it is sent.
func (f *Frame) Len() int { return f.data.Len() }

// Again gives the same message to be sent once more, or freed.
func (f *Frame) Again() *Frame {
	f.data.Ref()
	return &Frame{data: f.data}
}

// Free lets go a message that is not sent.
func (f *Frame) Free() {
	f.data.Free()
	f.data = nil
}

// frameCodec is gRPC's codec of protos, and knows Frames, Incoming and Outgoing.
//
// It has a pool of its own for the messages that carry pieces of files. gRPC's has nothing between 32 KiB and
// 1 MiB, and clears a buffer whenever it gives it out.
type frameCodec struct {
	encoding.CodecV2
	pool mem.BufferPool
}

// Sizes of the pool, as powers of two: a piece of a file and what is around it is at most 128 KiB.
const smallest, piece, largest = 15, 17, 20

var codec = newCodec()

// Codec is what all connections of DialOptions and Options encode with.
func Codec() encoding.CodecV2 { return codec }

func newCodec() frameCodec {
	pool, err := mem.NewBinaryTieredBufferPool(smallest, piece, largest)
	if err != nil {
		panic(err) // the powers are constants
	}
	return frameCodec{encoding.GetCodecV2("proto"), pool}
}

// Marshal implements encoding.CodecV2. What it gives is the transport's to free.
func (c frameCodec) Marshal(v any) (mem.BufferSlice, error) {
	switch v := v.(type) {
	case *Frame:
		data := v.data
		v.data = nil
		return data, nil
	case *Outgoing:
		return v.marshal(), nil
	case proto.Message:
		size := proto.Size(v)
		if size < 1<<smallest {
			return c.CodecV2.Marshal(v)
		}
		buf := c.pool.Get(size)
		if _, err := (proto.MarshalOptions{UseCachedSize: true}).MarshalAppend((*buf)[:0], v); err != nil {
			c.pool.Put(buf)
			return nil, err
		}
		return mem.BufferSlice{mem.NewBuffer(buf, c.pool)}, nil
	}
	return c.CodecV2.Marshal(v)
}

// Unmarshal implements encoding.CodecV2. The bytes are the transport's, which keeps them no longer than this
// call, unless they are held on to.
func (c frameCodec) Unmarshal(data mem.BufferSlice, v any) error {
	switch v := v.(type) {
	case *Frame:
		data.Ref()
		v.data = data
		return nil
	case *Incoming:
		if v.take(data) {
			return nil
		}
		return v.decodeInto(c, data)
	case proto.Message:
		if data.Len() < 1<<smallest {
			break
		}
		buf := data.MaterializeToBuffer(c.pool)
		defer buf.Free()
		return proto.Unmarshal(buf.ReadOnlyData(), v)
	}
	return c.CodecV2.Unmarshal(data, v)
}
