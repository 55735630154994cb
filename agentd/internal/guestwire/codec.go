package guestwire

// Message is one message of guest.proto. Its fields method names each field once, for both
// directions; so that encoding and decoding cannot drift apart.
type Message interface {
	Type() Type
	record
}

type record interface{ fields(c *codec) }

// Marshal encodes a message in the protobuf wire format, fields in the order of their numbers and
// zero values left out, as the generated code does.
func Marshal(m Message) []byte { return marshal(m) }

func marshal(r record) []byte {
	c := codec{}
	r.fields(&c)
	return c.out
}

// Unmarshal decodes a payload into a message that is zero. Byte fields alias the payload.
func Unmarshal(payload []byte, m Message) error { return unmarshal(payload, m) }

func unmarshal(payload []byte, r record) error {
	c := codec{decoding: true}
	for len(payload) > 0 {
		var ok bool
		if payload, ok = c.next(payload); !ok {
			return ErrMalformed
		}
		r.fields(&c)
		if c.bad {
			return ErrMalformed
		}
	}
	return nil
}

// The wire types in use: varint and length-delimited. The fixed ones are read and passed over.
const (
	wireVarint  = 0
	wireFixed64 = 1
	wireBytes   = 2
	wireFixed32 = 5
)

// codec is an encoder, or a decoder that stands on one field.
type codec struct {
	out []byte

	decoding bool
	bad      bool
	num      uint64
	wire     uint64
	val      uint64
	raw      []byte
}

func appendVarint(b []byte, v uint64) []byte {
	for v >= 0x80 {
		b = append(b, byte(v)|0x80)
		v >>= 7
	}
	return append(b, byte(v))
}

func varint(b []byte) (uint64, []byte, bool) {
	var v uint64
	for i := 0; i < len(b) && i < 10; i++ {
		if i == 9 && b[i] > 1 {
			return 0, nil, false
		}
		v |= uint64(b[i]&0x7f) << (7 * i)
		if b[i] < 0x80 {
			return v, b[i+1:], true
		}
	}
	return 0, nil, false
}

// next reads one field and returns what follows it.
func (c *codec) next(b []byte) ([]byte, bool) {
	tag, b, ok := varint(b)
	if !ok || tag>>3 == 0 || tag>>3 > 1<<29-1 {
		return nil, false
	}
	c.num, c.wire, c.raw, c.val = tag>>3, tag&7, nil, 0
	switch c.wire {
	case wireVarint:
		c.val, b, ok = varint(b)
		return b, ok
	case wireBytes:
		var n uint64
		if n, b, ok = varint(b); !ok || n > uint64(len(b)) {
			return nil, false
		}
		c.raw = b[:n:n]
		return b[n:], true
	case wireFixed64:
		if len(b) < 8 {
			return nil, false
		}
		return b[8:], true
	case wireFixed32:
		if len(b) < 4 {
			return nil, false
		}
		return b[4:], true
	}
	return nil, false
}

func (c *codec) here(num, wire uint64) bool { return c.num == num && c.wire == wire }

func (c *codec) u64(num uint64, v *uint64) {
	switch {
	case !c.decoding && *v != 0:
		c.out = appendVarint(appendVarint(c.out, num<<3|wireVarint), *v)
	case c.decoding && c.here(num, wireVarint):
		*v = c.val
	}
}

func (c *codec) u32(num uint64, v *uint32) {
	w := uint64(*v)
	c.u64(num, &w)
	*v = uint32(w)
}

func (c *codec) bool(num uint64, v *bool) {
	var w uint64
	if *v {
		w = 1
	}
	c.u64(num, &w)
	*v = w != 0
}

func (c *codec) put(num uint64, b []byte) {
	c.out = appendVarint(appendVarint(c.out, num<<3|wireBytes), uint64(len(b)))
	c.out = append(c.out, b...)
}

func (c *codec) str(num uint64, v *string) {
	switch {
	case !c.decoding && *v != "":
		c.put(num, []byte(*v))
	case c.decoding && c.here(num, wireBytes):
		*v = string(c.raw)
	}
}

func (c *codec) bytes(num uint64, v *[]byte) {
	switch {
	case !c.decoding && len(*v) != 0:
		c.put(num, *v)
	case c.decoding && c.here(num, wireBytes):
		*v = c.raw
	}
}

func (c *codec) strs(num uint64, v *[]string) {
	if !c.decoding {
		for _, s := range *v {
			c.put(num, []byte(s))
		}
	} else if c.here(num, wireBytes) {
		*v = append(*v, string(c.raw))
	}
}

// message is a nested message that may be absent.
func message[T any, P interface {
	*T
	record
}](c *codec, num uint64, v **T) {
	if !c.decoding {
		if *v != nil {
			c.put(num, marshal(P(*v)))
		}
	} else if c.here(num, wireBytes) {
		if *v == nil {
			*v = new(T)
		}
		c.bad = unmarshal(c.raw, P(*v)) != nil
	}
}

func messages[T any, P interface {
	*T
	record
}](c *codec, num uint64, v *[]T) {
	if !c.decoding {
		for i := range *v {
			c.put(num, marshal(P(&(*v)[i])))
		}
	} else if c.here(num, wireBytes) {
		// Two bytes on the wire are a whole struct here.
		if len(*v) >= maxRepeated {
			c.bad = true
			return
		}
		var one T
		c.bad = unmarshal(c.raw, P(&one)) != nil
		*v = append(*v, one)
	}
}

// Weight is about the encoded size of the parts of variable length.
func (m *ProcessInfo) Weight() int {
	n := len(m.ProcessID)
	for _, s := range m.Args {
		n += len(s) + 3
	}
	for _, t := range m.Tags {
		n += len(t.Key) + len(t.Value) + 8
	}
	return n
}
