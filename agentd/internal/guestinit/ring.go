package guestinit

// ring keeps the newest bytes of an output. Offsets count from the first byte ever written.
// It grows with what is written, up to its limit; a silent process costs nothing.
type ring struct {
	limit int
	buf   []byte
	end   uint64 // offset after the newest byte
	size  int    // bytes held
}

const ringFirst = 4 << 10

func (r *ring) start() uint64 { return r.end - uint64(r.size) }

func (r *ring) write(p []byte) {
	if len(p) > r.limit {
		r.end += uint64(len(p) - r.limit)
		r.size = 0
		p = p[len(p)-r.limit:]
	}
	r.grow(len(p))
	// The byte of offset o is at o modulo the length of buf.
	for len(p) > 0 {
		at := int(r.end % uint64(len(r.buf)))
		n := copy(r.buf[at:], p)
		p = p[n:]
		r.end += uint64(n)
		r.size = min(r.size+n, len(r.buf))
	}
}

func (r *ring) grow(more int) {
	want := min(r.size+more, r.limit)
	if want <= len(r.buf) {
		return
	}
	length := max(len(r.buf), ringFirst)
	for length < want {
		length *= 2
	}
	r.resize(min(length, r.limit))
}

func (r *ring) resize(length int) {
	next := make([]byte, length)
	for o := r.start(); o < r.end; {
		part := r.at(o)
		for len(part) > 0 {
			n := copy(next[o%uint64(length):], part)
			part = part[n:]
			o += uint64(n)
		}
	}
	r.buf = next
}

// trim gives back what an ended process will not need.
func (r *ring) trim() {
	if r.size == 0 {
		r.buf = nil
	} else if r.size < len(r.buf) {
		r.resize(r.size)
	}
}

// at gives the bytes from offset on that lie in one piece; offset must be held.
func (r *ring) at(offset uint64) []byte {
	if offset >= r.end {
		return nil
	}
	i := int(offset % uint64(len(r.buf)))
	n := min(int(r.end-offset), len(r.buf)-i)
	return r.buf[i : i+n]
}

// from gives the first piece at or after offset, where it begins, and how many bytes are gone.
func (r *ring) from(offset uint64) (data []byte, begins, gap uint64) {
	if s := r.start(); offset < s {
		gap, offset = s-offset, s
	}
	return r.at(offset), offset, gap
}

// clear drops what is held; the offset stays.
func (r *ring) clear() { r.buf, r.size = nil, 0 }
