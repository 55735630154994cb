package guestwire

import (
	"bytes"
	"reflect"
	"testing"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	guestv1 "github.com/dormouse-run/dormouse/proto/dormouse/guest/v1"
)

// pairs holds every message with its generated twin.
var pairs = []struct {
	ours record
	gen  proto.Message
}{
	{&Hello{}, &guestv1.Hello{}}, {&Welcome{}, &guestv1.Welcome{}}, {&Rejected{}, &guestv1.Rejected{}},
	{&Configure{}, &guestv1.Configure{}}, {&HostEntry{}, &guestv1.HostEntry{}}, {&Resolver{}, &guestv1.Resolver{}},
	{&Configured{}, &guestv1.Configured{}}, {&Quiesce{}, &guestv1.Quiesce{}}, {&Quiesced{}, &guestv1.Quiesced{}},
	{&Resume{}, &guestv1.Resume{}}, {&Resumed{}, &guestv1.Resumed{}}, {&Ping{}, &guestv1.Ping{}}, {&Pong{}, &guestv1.Pong{}},
	{&Error{}, &guestv1.Error{}}, {&Credit{}, &guestv1.Credit{}}, {&StreamClose{}, &guestv1.StreamClose{}},
	{&Tag{}, &guestv1.Tag{}}, {&Start{}, &guestv1.Start{}}, {&Started{}, &guestv1.Started{}},
	{&ProcessInfo{}, &guestv1.ProcessInfo{}}, {&Exit{}, &guestv1.Exit{}}, {&List{}, &guestv1.List{}}, {&Listed{}, &guestv1.Listed{}},
	{&Signal{}, &guestv1.Signal{}}, {&Signaled{}, &guestv1.Signaled{}}, {&Wait{}, &guestv1.Wait{}}, {&Exited{}, &guestv1.Exited{}},
	{&OutputOpen{}, &guestv1.OutputOpen{}}, {&OutputData{}, &guestv1.OutputData{}}, {&OutputEnd{}, &guestv1.OutputEnd{}},
	{&StdinOpen{}, &guestv1.StdinOpen{}}, {&StdinData{}, &guestv1.StdinData{}}, {&StdinClose{}, &guestv1.StdinClose{}},
	{&StdinState{}, &guestv1.StdinState{}}, {&Forget{}, &guestv1.Forget{}}, {&Forgotten{}, &guestv1.Forgotten{}},
	{&Terminal{}, &guestv1.Terminal{}}, {&Resize{}, &guestv1.Resize{}}, {&Resized{}, &guestv1.Resized{}},
}

// TestWireEqualsGenerated fills every message with distinct values and holds this package's bytes
// equal to the generated code's, both ways, with every field of the schema in it.
func TestWireEqualsGenerated(t *testing.T) {
	for _, p := range pairs {
		name := string(p.gen.ProtoReflect().Descriptor().Name())
		t.Run(name, func(t *testing.T) {
			gen := proto.Clone(p.gen)
			seed := uint64(200)
			fill(gen.ProtoReflect(), &seed)
			want, err := proto.MarshalOptions{Deterministic: true}.Marshal(gen)
			if err != nil {
				t.Fatal(err)
			}
			ours := reflect.New(reflect.TypeOf(p.ours).Elem()).Interface().(record)
			if err := unmarshal(want, ours); err != nil {
				t.Fatalf("decode what the generated code encoded: %v", err)
			}
			if got := marshal(ours); !bytes.Equal(got, want) {
				t.Fatalf("bytes differ:\n ours %x\n want %x", got, want)
			}
			if v := reflect.ValueOf(ours).Elem(); v.NumField() != gen.ProtoReflect().Descriptor().Fields().Len() {
				t.Fatalf("%d fields here, %d in the schema", v.NumField(), gen.ProtoReflect().Descriptor().Fields().Len())
			}
			back := p.gen.ProtoReflect().New().Interface()
			if err := proto.Unmarshal(marshal(ours), back); err != nil || !proto.Equal(back, gen) {
				t.Fatalf("the generated code reads something else: %v %v", back, err)
			}
			if m, ok := ours.(Message); ok {
				values := guestv1.FrameType(0).Descriptor().Values()
				v := values.ByNumber(protoreflect.EnumNumber(m.Type()))
				if v == nil || screaming(name) != string(v.Name()) {
					t.Fatalf("frame type %d is %v in the schema", m.Type(), v)
				}
			}
		})
	}
	if n := guestv1.File_dormouse_guest_v1_guest_proto.Messages().Len(); n != len(pairs) {
		t.Fatalf("the schema has %d messages, %d are tested", n, len(pairs))
	}
}

// screaming turns StdinOpen into FRAME_TYPE_STDIN_OPEN.
func screaming(name string) string {
	out := []byte("FRAME_TYPE")
	for _, r := range []byte(name) {
		if r >= 'A' && r <= 'Z' {
			out = append(out, '_', r)
		} else {
			out = append(out, r-'a'+'A')
		}
	}
	return string(out)
}

func fill(m protoreflect.Message, seed *uint64) {
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		fd := fields.Get(i)
		one := func() protoreflect.Value {
			*seed++
			switch fd.Kind() {
			case protoreflect.StringKind:
				return protoreflect.ValueOfString("s" + string(rune('a'+*seed%26)))
			case protoreflect.BytesKind:
				return protoreflect.ValueOfBytes([]byte{'b', byte(*seed), 0xff})
			case protoreflect.Uint32Kind:
				return protoreflect.ValueOfUint32(uint32(*seed))
			case protoreflect.Uint64Kind:
				return protoreflect.ValueOfUint64(*seed << 40)
			case protoreflect.BoolKind:
				return protoreflect.ValueOfBool(true)
			case protoreflect.EnumKind:
				return protoreflect.ValueOfEnum(1)
			}
			v := m.NewField(fd)
			if fd.IsList() {
				v = v.List().NewElement()
			}
			fill(v.Message(), seed)
			return v
		}
		if fd.IsList() {
			l := m.Mutable(fd).List()
			l.Append(one())
			l.Append(one())
			continue
		}
		m.Set(fd, one())
	}
}

func TestUnknownFieldsArePassedOver(t *testing.T) {
	payload := append(marshal(&Ping{Nonce: 7}), 0x9d, 0x06, 1, 2, 3, 4, 0x91, 0x06, 1, 2, 3, 4, 5, 6, 7, 8, 0xaa, 0x06, 1, 'x')
	var p Ping
	if err := Unmarshal(payload, &p); err != nil || p.Nonce != 7 {
		t.Fatalf("got %v, %v", p, err)
	}
}

func decodeAll(d *Decoder, stream []byte, step int) []Frame {
	var got []Frame
	for len(stream) > 0 {
		n := copy(d.Space(), stream[:min(step, len(stream))])
		d.Filled(n)
		stream = stream[n:]
		for {
			f, ok := d.Next()
			if !ok {
				break
			}
			f.Payload = bytes.Clone(f.Payload)
			got = append(got, f)
		}
		if len(stream)%2 == 0 {
			d.Rest()
		}
	}
	return got
}

// TestDecoderRests: one that holds nothing has no memory, and one that holds a part of a frame keeps it.
func TestDecoderRests(t *testing.T) {
	d := &Decoder{}
	stream := AppendFrame(nil, Frame{Type: TypeOutputData, Payload: []byte("payload")})
	for _, cut := range []int{0, 1, HeaderSize, len(stream) - 1} {
		d.Filled(copy(d.Space(), stream[:cut]))
		if f, ok := d.Next(); ok {
			t.Fatalf("%v of %d bytes", f, cut)
		}
		d.Rest()
		if (d.buf == nil) != (cut == 0) {
			t.Errorf("with %d bytes it has %d of memory", cut, len(d.buf))
		}
		d.Filled(copy(d.Space(), stream[cut:]))
		if f, ok := d.Next(); !ok || string(f.Payload) != "payload" {
			t.Errorf("cut at %d: %v, %v", cut, f, ok)
		}
		d.Rest()
		if d.buf != nil || d.Buffered() != 0 {
			t.Errorf("cut at %d: it kept its memory", cut)
		}
	}
}

func TestDecoderResynchronises(t *testing.T) {
	ch := Channel{Generation: 3, Key: 99}
	frame := func(stream uint32, n int) []byte {
		return AppendFrame(nil, Frame{Type: TypeOutputData, Stream: stream, Channel: ch, Payload: bytes.Repeat([]byte{byte(stream)}, n)})
	}
	damaged := frame(2, 500)
	damaged[HeaderSize+17] ^= 1
	lying := frame(3, 10)
	put32(lying[8:], 0xffffffff)
	other := AppendFrame(nil, Frame{Type: TypeOutputData, Channel: Channel{Generation: 3, Key: 98}, Payload: frame(77, 5)[:20]})
	var stream []byte
	for _, part := range [][]byte{frame(1, MaxPayload)[900:], frame(4, 0), damaged, lying, frame(5, MaxPayload), []byte("\xd3M\x9c\xd3M\x9cs"), other, frame(6, 3), frame(7, 20)[:45]} {
		stream = append(stream, part...)
	}
	stream = append(stream, frame(8, 100)...)
	stream = append(stream, frame(9, 100)...)
	for _, step := range []int{1, 7, 4096, 1 << 20} {
		d := &Decoder{Accept: func(f Frame) bool { return f.Channel == ch }}
		var streams []uint32
		for _, f := range decodeAll(d, stream, step) {
			streams = append(streams, f.Stream)
		}
		if want := []uint32{4, 5, 6, 8, 9}; !reflect.DeepEqual(streams, want) {
			t.Fatalf("step %d: got %v, want %v", step, streams, want)
		}
	}
}

func TestAssemblerJoinsAndBounds(t *testing.T) {
	big := &Start{ProcessID: "p", Args: []string{string(bytes.Repeat([]byte("x"), 200<<10))}}
	raw, ok := AppendMessage(nil, Channel{Generation: 1, Key: 1}, 9, big)
	if !ok {
		t.Fatal("refused a message within the limit")
	}
	var a Assembler
	var whole []byte
	for _, f := range decodeAll(&Decoder{}, raw, 1000) {
		if p, ok := a.Add(f); ok {
			whole = bytes.Clone(p)
		}
	}
	var back Start
	if err := Unmarshal(whole, &back); err != nil || !reflect.DeepEqual(&back, big) {
		t.Fatalf("joined message differs: %v", err)
	}
	if _, ok := AppendMessage(nil, Channel{}, 1, &Start{Args: []string{string(make([]byte, MaxMessage))}}); ok {
		t.Fatal("a message over the limit was sent")
	}
	part := Frame{Type: TypeStart, More: true, Stream: 1, Payload: make([]byte, MaxPayload)}
	for range 100 {
		if a.Add(part); len(a.buf) > MaxMessage {
			t.Fatalf("the assembler holds %d bytes", len(a.buf))
		}
	}
	if p, ok := a.Add(Frame{Type: TypePing, Stream: 2, Payload: []byte{8, 1}}); !ok || len(p) != 2 {
		t.Fatal("an unfinished message hid the next one")
	}
}

func FuzzDecoder(f *testing.F) {
	ch := Channel{Generation: 1, Key: 2}
	good := AppendFrame(nil, Frame{Type: TypePing, Stream: 1, Channel: ch, Payload: marshal(&Ping{Nonce: 1})})
	f.Add(good, 3)
	f.Add(good[:20], 1)
	f.Add(append([]byte("\xd3M\x9c"), good...), 100)
	f.Add(append(bytes.Clone(good[:45]), good...), 9)
	f.Fuzz(func(t *testing.T, data []byte, step int) {
		if step <= 0 || step > MaxFrame {
			step = 11
		}
		d := &Decoder{Accept: func(f Frame) bool { return f.Channel == ch }}
		var a Assembler
		for _, fr := range decodeAll(d, data, step) {
			if fr.Channel != ch || len(fr.Payload) > MaxPayload {
				t.Fatalf("frame let through: %+v", fr)
			}
			a.Add(fr)
		}
		// Whatever came before, enough bytes later a whole frame is found again.
		tail := append(make([]byte, MaxFrame), good...)
		if got := decodeAll(d, tail, step); len(got) == 0 || got[len(got)-1].Type != TypePing {
			t.Fatal("the decoder did not find the next frame")
		}
	})
}

func FuzzMessages(f *testing.F) {
	for i, p := range pairs {
		f.Add(uint8(i), marshal(p.ours))
	}
	f.Add(uint8(17), marshal(&Start{ProcessID: "p", Args: []string{"a", "b"}, Tags: []Tag{{"k", "v"}}}))
	f.Fuzz(func(t *testing.T, which uint8, data []byte) {
		p := pairs[int(which)%len(pairs)]
		ours := reflect.New(reflect.TypeOf(p.ours).Elem()).Interface().(record)
		if unmarshal(data, ours) != nil {
			return
		}
		again := reflect.New(reflect.TypeOf(p.ours).Elem()).Interface().(record)
		if err := unmarshal(marshal(ours), again); err != nil {
			t.Fatalf("cannot read what was written: %v", err)
		}
		if !bytes.Equal(marshal(ours), marshal(again)) {
			t.Fatal("not stable")
		}
	})
}
