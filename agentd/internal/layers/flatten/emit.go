// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package flatten

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"slices"
	"strconv"
)

// The archive is written here and not by archive/tar, because mkfs.erofs reads the fraction of a time as
// a number: it needs all nine digits, where archive/tar drops trailing zeros.

const (
	tarBlock  = 512
	ustarName = 100
	maxOctal7 = 1<<21 - 1
	octalSize = 1<<33 - 1
)

// emitter streams a tree as one archive.
type emitter struct {
	ctx   context.Context // of the one call that builds the image
	w     *bufio.Writer
	first map[*inode]string // the name under which an inode with several names was written
	buf   []byte
}

func emit(ctx context.Context, w io.Writer, t *tree) error {
	e := &emitter{ctx: ctx, w: bufio.NewWriterSize(w, 1<<20), first: map[*inode]string{}, buf: make([]byte, 256<<10)}
	// The root is written twice: first with a time that is not its own, last as it is. mkfs.erofs does not
	// always say so when a full disk makes it lose its place in the archive; a root with the right time was
	// read at the archive's end.
	wrong := *t.root.ino
	wrong.sec++
	if err := e.header(".", &wrong); err != nil {
		return err
	}
	if err := t.visit(e.entry); err != nil {
		return err
	}
	if _, err := e.w.Write(make([]byte, 2*tarBlock)); err != nil {
		return err
	}
	return e.w.Flush()
}

func (e *emitter) entry(name string, ino *inode) error {
	if err := e.ctx.Err(); err != nil {
		return context.Cause(e.ctx)
	}
	if ino.names > 1 && ino.kind != directory {
		if first, ok := e.first[ino]; ok {
			return e.header(name, &inode{kind: hardLink, target: first})
		}
		e.first[ino] = name
	}
	if err := e.header(name, ino); err != nil {
		return err
	}
	if ino.kind != regular || ino.size == 0 {
		return nil
	}
	n, err := io.CopyBuffer(onlyWriter{e.w}, io.NewSectionReader(ino.content, ino.off, ino.size), e.buf)
	if err != nil {
		return err
	}
	if n != ino.size {
		return fmt.Errorf("%q: %d of %d bytes in the spool", shorten(name), n, ino.size)
	}
	return e.pad(ino.size)
}

// onlyWriter hides ReadFrom, which would copy in pieces of the writer's own buffer.
type onlyWriter struct{ io.Writer }

func (e *emitter) pad(size int64) error {
	if rest := size % tarBlock; rest != 0 {
		_, err := e.w.Write(make([]byte, tarBlock-rest))
		return err
	}
	return nil
}

func (e *emitter) header(name string, ino *inode) error {
	var pax []byte
	short, link := name, ""
	if len(name) >= ustarName {
		pax = record(pax, "path", name)
		short = "long"
	}
	if ino.kind == symlink || ino.kind == hardLink {
		if link = ino.target; len(link) >= ustarName {
			pax = record(pax, "linkpath", link)
			link = "long"
		}
	}
	h := header{name: short, link: link, kind: byte(ino.kind), mode: ino.mode,
		uid: int64(ino.uid), gid: int64(ino.gid), sec: ino.sec, major: int64(ino.major), minor: int64(ino.minor)}
	if ino.kind == regular {
		h.size = ino.size
	}
	if h.uid > maxOctal7 {
		pax, h.uid = record(pax, "uid", strconv.FormatInt(h.uid, 10)), 0
	}
	if h.gid > maxOctal7 {
		pax, h.gid = record(pax, "gid", strconv.FormatInt(h.gid, 10)), 0
	}
	if h.size > octalSize {
		pax, h.size = record(pax, "size", strconv.FormatInt(h.size, 10)), 0
	}
	if ino.nsec != 0 || ino.sec > octalSize {
		pax, h.sec = record(pax, "mtime", fmt.Sprintf("%d.%09d", ino.sec, ino.nsec)), 0
	}
	keys := make([]string, 0, len(ino.xattrs))
	for k := range ino.xattrs {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	for _, k := range keys {
		pax = record(pax, xattrPrefix+k, ino.xattrs[k])
	}
	if len(pax) > 0 {
		if _, err := e.w.Write(header{name: "pax", kind: 'x', mode: 0o644, size: int64(len(pax))}.block()); err != nil {
			return err
		}
		if _, err := e.w.Write(pax); err != nil {
			return err
		}
		if err := e.pad(int64(len(pax))); err != nil {
			return err
		}
	}
	_, err := e.w.Write(h.block())
	return err
}

// record appends "LENGTH KEY=VALUE\n", where the length counts itself.
func record(pax []byte, key, value string) []byte {
	rest := len(key) + len(value) + 3 // blank, equals sign, newline
	size := rest + len(strconv.Itoa(rest))
	size = rest + len(strconv.Itoa(size))
	pax = strconv.AppendInt(pax, int64(size), 10)
	pax = append(pax, ' ')
	pax = append(pax, key...)
	pax = append(pax, '=')
	pax = append(pax, value...)
	return append(pax, '\n')
}

type header struct {
	name, link          string
	kind                byte
	mode                uint32
	uid, gid, size, sec int64
	major, minor        int64
}

// block lays the header out as POSIX.1-1988 (ustar) has it.
func (h header) block() []byte {
	b := make([]byte, tarBlock)
	octal := func(at, width int, v int64) { copy(b[at:at+width], fmt.Sprintf("%0*o", width-1, v)) }
	copy(b[0:100], h.name)
	octal(100, 8, int64(h.mode))
	octal(108, 8, h.uid)
	octal(116, 8, h.gid)
	octal(124, 12, h.size)
	octal(136, 12, h.sec)
	b[156] = h.kind
	copy(b[157:257], h.link)
	copy(b[257:265], "ustar\x0000")
	octal(329, 8, h.major)
	octal(337, 8, h.minor)
	copy(b[148:156], "        ")
	sum := int64(0)
	for _, c := range b {
		sum += int64(c)
	}
	copy(b[148:156], fmt.Sprintf("%06o\x00 ", sum))
	return b
}
