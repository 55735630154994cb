package wire

import (
	"bytes"
	"testing"

	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/proto"

	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

func data(content []byte) *dormousev1.ReadFileResponse {
	return &dormousev1.ReadFileResponse{Event: &dormousev1.ReadFileResponse_Data{Data: content}}
}

// inFrames cuts a message as the transport does.
func inFrames(msg []byte, size int) mem.BufferSlice {
	var all mem.BufferSlice
	for len(msg) > 0 {
		n := min(size, len(msg))
		all = append(all, mem.Copy(msg[:n], codec.pool))
		msg = msg[n:]
	}
	return all
}

// TestPieces: a message of bytes alone is received and sent as one that is decoded and encoded would be, in whatever
// frames it comes.
func TestPieces(t *testing.T) {
	in := Incoming{Field: 2, Message: &dormousev1.ReadFileResponse{}}
	for _, size := range []int{0, 1, 127, 128, 16 << 10, 124 << 10} {
		content := bytes.Repeat([]byte("abcdefg"), size/7+1)[:size]
		want, err := proto.Marshal(data(content))
		if err != nil {
			t.Fatal(err)
		}
		for _, frame := range []int{1, 2, 3, 5, 16 << 10, 1 << 20} {
			came := inFrames(want, frame)
			if err := codec.Unmarshal(came, &in); err != nil {
				t.Fatal(err)
			}
			came.Free()
			parts, n, ok := in.Bytes()
			if got := bytes.Join(parts, nil); !ok || n != size || !bytes.Equal(got, content) {
				t.Fatalf("%d bytes in frames of %d: %d came, %v", size, frame, n, ok)
			}
		}
		if size == 0 {
			continue
		}
		room := Room()
		out := NewOutgoing(2, room, copy(room, content))
		for _, skip := range []int{0, size / 2} {
			part := out.After(skip)
			msg, err := codec.Marshal(part)
			part.Free()
			got := &dormousev1.ReadFileResponse{}
			if err == nil {
				err = codec.Unmarshal(msg, got)
				msg.Free()
			}
			if err != nil || !bytes.Equal(got.GetData(), content[skip:]) {
				t.Fatalf("%d bytes after %d: %d came, %v", size, skip, len(got.GetData()), err)
			}
		}
		if out.Len() != size || !bytes.Equal(out.Bytes(), content) {
			t.Fatalf("%d bytes became %d", size, out.Len())
		}
		out.Free()
	}
}

// TestNoPiece: what is not the field alone is decoded, and what cannot be is an error.
func TestNoPiece(t *testing.T) {
	msg := &dormousev1.ReadFileResponse{}
	in := Incoming{Field: 2, Message: msg}
	trailer := &dormousev1.ReadFileResponse{Event: &dormousev1.ReadFileResponse_Trailer{Trailer: &dormousev1.ReadFileTrailer{SizeBytes: 7}}}
	twice, err := proto.Marshal(data([]byte("first")))
	if err != nil {
		t.Fatal(err)
	}
	second, err := proto.Marshal(data([]byte("second")))
	if err != nil {
		t.Fatal(err)
	}
	last, err := proto.Marshal(trailer)
	if err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		name  string
		bytes []byte
		want  proto.Message
	}{
		{"empty", nil, &dormousev1.ReadFileResponse{}},
		{"trailer", last, trailer},
		{"the field twice", append(bytes.Clone(twice), second...), data([]byte("second"))},
	} {
		if err := codec.Unmarshal(inFrames(tc.bytes, 4), &in); err != nil {
			t.Fatalf("%s: %v", tc.name, err)
		}
		if _, _, ok := in.Bytes(); ok || !proto.Equal(msg, tc.want) {
			t.Errorf("%s: %v, piece %v", tc.name, msg, ok)
		}
	}
	for _, garbage := range [][]byte{twice[:4], {0x12, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 1}, {0x12}, {0xFF}} {
		if err := codec.Unmarshal(inFrames(garbage, 4), &in); err == nil {
			t.Errorf("%x was taken for %v", garbage, msg)
		}
	}
	if err := codec.Unmarshal(inFrames(last, 4), &Incoming{Field: 2}); err == nil {
		t.Error("there was nothing to decode into")
	}
}
