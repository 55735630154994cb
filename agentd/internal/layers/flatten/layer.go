// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package flatten

import (
	"archive/tar"
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"math"
	"os"
	"strings"
	"sync/atomic"
	"syscall"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
	"github.com/opencontainers/go-digest"
)

// Layer is one layer of an image, the lowest first.
type Layer struct {
	// Name is for messages: the layer's digest.
	Name string
	// DiffID is the digest of the layer's uncompressed archive; empty is not checked.
	DiffID digest.Digest
	// Open gives the layer's bytes: a tar archive, plain or compressed with gzip or zstd.
	Open func(context.Context) (io.ReadCloser, error)
}

// Limits bound what an image may ask of the node. All are sums over the image's layers.
type Limits struct {
	Bytes   int64 // decompressed bytes, and separately the bytes of all sparse files
	Entries int64 // entries of all archives
	Depth   int   // nested directories
	Layers  int
}

// DefaultLimits are far above any useful image.
func DefaultLimits() Limits {
	return Limits{Bytes: 64 << 30, Entries: 4 << 20, Depth: 1024, Layers: 512}
}

const (
	xattrPrefix    = "SCHILY.xattr."
	maxXattrBytes  = 32 << 10 // of one file
	maxZstdWindow  = 128 << 20
	readChunk      = 512 << 10
	sparseBlock    = 4096
	maxDeviceMajor = 1<<12 - 1
	maxDeviceMinor = 1<<20 - 1
)

// budget is what is left of the limits; layers draw on it together.
type budget struct {
	limits  Limits
	bytes   atomic.Int64
	sparse  atomic.Int64
	entries atomic.Int64
}

func (b *budget) takeBytes(n int64) error {
	if n > b.limits.Bytes || b.bytes.Add(n) > b.limits.Bytes {
		return malformedf("the image decompresses to more than %d bytes", b.limits.Bytes)
	}
	return nil
}

func (b *budget) takeSparse(n int64) error {
	if n > b.limits.Bytes || b.sparse.Add(n) > b.limits.Bytes {
		return malformedf("the image's sparse files are larger than %d bytes", b.limits.Bytes)
	}
	return nil
}

func (b *budget) takeEntry() error {
	if b.entries.Add(1) > b.limits.Entries {
		return malformedf("the image has more than %d entries", b.limits.Entries)
	}
	return nil
}

// spool hands on a layer's decompressed bytes and keeps a copy of them in a file, so that content can be
// read from there later. It counts, hashes and bounds them on the way.
type spool struct {
	ctx    context.Context // of the one call that reads the layer
	src    io.Reader
	file   *os.File
	hash   hash.Hash
	budget *budget
	buf    []byte
	r, w   int
	off    int64 // handed on so far
	err    error
}

func (s *spool) Read(p []byte) (int, error) {
	if s.r == s.w {
		s.fill()
		if s.r == s.w {
			return 0, s.err
		}
	}
	n := copy(p, s.buf[s.r:s.w])
	s.r += n
	s.off += int64(n)
	return n, nil
}

func (s *spool) fill() {
	s.r, s.w = 0, 0
	for s.err == nil && s.w < len(s.buf) {
		if s.err = s.ctx.Err(); s.err != nil {
			break
		}
		var n int
		n, s.err = s.src.Read(s.buf[s.w:])
		s.w += n
	}
	if s.w == 0 {
		return
	}
	if err := s.budget.takeBytes(int64(s.w)); err != nil {
		s.w, s.err = 0, err
		return
	}
	s.hash.Write(s.buf[:s.w])
	if _, err := s.file.Write(s.buf[:s.w]); err != nil {
		s.w, s.err = 0, &hostError{err}
	}
}

// hostError is a failure of this machine while an image is read: never the image's fault.
type hostError struct{ error }

func (e *hostError) Unwrap() error { return e.error }

// stored are a layer's bytes as this machine keeps them: that they cannot be read says nothing of the image.
type stored struct{ io.Reader }

func (s stored) Read(p []byte) (int, error) {
	n, err := s.Reader.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		err = &hostError{err}
	}
	return n, err
}

// decompress finds out how a layer is compressed from its first bytes: media types are often wrong.
func decompress(r io.Reader) (io.ReadCloser, error) {
	br := bufio.NewReaderSize(r, 256<<10)
	head, err := br.Peek(4)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	switch {
	case bytes.HasPrefix(head, []byte{0x1f, 0x8b}):
		return gzip.NewReader(br)
	case bytes.Equal(head, []byte{0x28, 0xb5, 0x2f, 0xfd}):
		zr, err := zstd.NewReader(br, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(maxZstdWindow))
		if err != nil {
			return nil, err
		}
		return zr.IOReadCloser(), nil
	}
	return io.NopCloser(br), nil
}

// nameless gives a file that vanishes with its descriptor, also when the process is killed.
func nameless(dir string) (*os.File, error) {
	fd, err := syscall.Open(dir, 0x410000|syscall.O_RDWR|syscall.O_CLOEXEC, 0o600) // O_TMPFILE
	if err == nil {
		return os.NewFile(uintptr(fd), "spool"), nil
	}
	f, err := os.CreateTemp(dir, "spool-")
	if err != nil {
		return nil, err
	}
	return f, os.Remove(f.Name())
}

// layerReader reads one layer into a tree.
type layerReader struct {
	dir    string
	budget *budget
	tree   *tree
	spool  *spool
	sparse *os.File // contents of sparse files, expanded with holes; made when first needed
	end    int64
	files  *[]*os.File
}

// readLayer reads a layer. The files it adds hold the contents and are the caller's to close.
func readLayer(ctx context.Context, dir string, l Layer, b *budget) (_ *tree, files []*os.File, err error) {
	raw, err := l.Open(ctx)
	if err != nil {
		return nil, nil, named(ctx, l.Name, &hostError{err})
	}
	defer raw.Close()
	src, err := decompress(stored{raw})
	if err != nil {
		return nil, nil, named(ctx, l.Name, err)
	}
	defer src.Close()
	file, err := nameless(dir)
	if err != nil {
		return nil, nil, &hostError{err}
	}
	files = append(files, file)
	r := &layerReader{dir: dir, budget: b, tree: newTree(b.limits.Depth), files: &files,
		spool: &spool{ctx: ctx, src: src, file: file, hash: sha256.New(), budget: b, buf: make([]byte, readChunk)}}
	if err := r.entries(); err != nil {
		return nil, files, named(ctx, l.Name, err)
	}
	// What follows the archive's end belongs to the digest.
	if _, err := io.Copy(io.Discard, r.spool); err != nil {
		return nil, files, named(ctx, l.Name, err)
	}
	if got := hex.EncodeToString(r.spool.hash.Sum(nil)); l.DiffID != "" && l.DiffID.Algorithm() == digest.SHA256 && l.DiffID.Encoded() != got {
		return nil, files, malformedf("layer %s decompresses to sha256:%s, the image's configuration says %s", l.Name, got, l.DiffID)
	}
	return r.tree, files, nil
}

// named puts the layer's name to an error and decides whose fault it is: whatever is not this machine's
// or the caller's is the layer's.
func named(ctx context.Context, layer string, err error) error {
	var host *hostError
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if errors.As(err, &host) {
		return fmt.Errorf("layer %s: %w", layer, err)
	}
	return malformedf("layer %s: %v", layer, err)
}

func (r *layerReader) entries() error {
	tr := tar.NewReader(r.spool)
	for {
		hdr, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if hdr.Typeflag == tar.TypeXGlobalHeader {
			continue
		}
		if err := r.budget.takeEntry(); err != nil {
			return err
		}
		parts, err := split(hdr.Name)
		if err != nil {
			return err
		}
		ino, err := toInode(hdr)
		if err != nil {
			return fmt.Errorf("%q: %w", shorten(hdr.Name), err)
		}
		if len(parts) == 0 {
			// Of the root only its time is taken: see the package comment.
			r.tree.root.ino.sec, r.tree.root.ino.nsec = ino.sec, ino.nsec
			continue
		}
		if ino.kind == regular {
			if err := r.place(tr, hdr, ino); err != nil {
				return err
			}
		}
		if err := r.tree.put(parts, ino); err != nil {
			return err
		}
	}
}

// place notes where a file's content is. That of a sparse file is written out first, holes left holes.
func (r *layerReader) place(tr *tar.Reader, hdr *tar.Header, ino *inode) error {
	if hdr.Size < 0 || hdr.Size > r.budget.limits.Bytes {
		return malformedf("%q is said to have %d bytes", shorten(hdr.Name), hdr.Size)
	}
	ino.size = hdr.Size
	if !isSparse(hdr) {
		ino.content, ino.off = r.spool.file, r.spool.off
		return nil
	}
	if err := r.budget.takeSparse(hdr.Size); err != nil {
		return err
	}
	if r.sparse == nil {
		f, err := nameless(r.dir)
		if err != nil {
			return &hostError{err}
		}
		*r.files = append(*r.files, f)
		r.sparse = f
	}
	ino.content, ino.off = r.sparse, r.end
	block := make([]byte, sparseBlock)
	var done int64
	for done < hdr.Size {
		n, err := io.ReadFull(tr, block[:min(sparseBlock, hdr.Size-done)])
		if err != nil {
			return err
		}
		if !allZero(block[:n]) {
			if _, err := r.sparse.WriteAt(block[:n], r.end+done); err != nil {
				return &hostError{err}
			}
		}
		done += int64(n)
	}
	r.end += (hdr.Size + sparseBlock - 1) / sparseBlock * sparseBlock
	if err := r.sparse.Truncate(r.end); err != nil {
		return &hostError{err}
	}
	return nil
}

func allZero(p []byte) bool {
	for _, b := range p {
		if b != 0 {
			return false
		}
	}
	return true
}

func isSparse(hdr *tar.Header) bool {
	if hdr.Typeflag == tar.TypeGNUSparse {
		return true
	}
	for k := range hdr.PAXRecords {
		if strings.HasPrefix(k, "GNU.sparse.") {
			return true
		}
	}
	return false
}

func toInode(hdr *tar.Header) (*inode, error) {
	ino := &inode{mode: uint32(hdr.Mode) & 0o7777, target: hdr.Linkname}
	switch hdr.Typeflag {
	case tar.TypeReg, tar.TypeGNUSparse:
		ino.kind = regular
	case tar.TypeDir, tar.TypeChar, tar.TypeBlock, tar.TypeFifo, tar.TypeLink:
		ino.kind = kind(hdr.Typeflag)
	case tar.TypeSymlink:
		ino.kind = symlink
		ino.mode = 0o777
		if hdr.Linkname == "" || len(hdr.Linkname) > maxPath {
			return nil, malformedf("a symbolic link with a target of %d bytes", len(hdr.Linkname))
		}
	default:
		return nil, malformedf("an entry of the unknown kind %q", hdr.Typeflag)
	}
	if ino.kind == charDev || ino.kind == blockDev {
		if hdr.Devmajor < 0 || hdr.Devmajor > maxDeviceMajor || hdr.Devminor < 0 || hdr.Devminor > maxDeviceMinor {
			return nil, malformedf("device number %d:%d is not possible", hdr.Devmajor, hdr.Devminor)
		}
		ino.major, ino.minor = uint32(hdr.Devmajor), uint32(hdr.Devminor)
	}
	if !validID(hdr.Uid) || !validID(hdr.Gid) {
		return nil, malformedf("owner %d:%d is not possible", hdr.Uid, hdr.Gid)
	}
	ino.uid, ino.gid = uint32(hdr.Uid), uint32(hdr.Gid)
	// Times before 1970 and after what 64 bits of nanoseconds hold are set to 1970, as when unpacked.
	if s := hdr.ModTime.Unix(); s >= 0 && s <= math.MaxInt64/1_000_000_000 {
		ino.sec, ino.nsec = s, int32(hdr.ModTime.Nanosecond())
	}
	return ino, setXattrs(ino, hdr.PAXRecords)
}

// validID leaves out the largest number, which means "unchanged" to chown.
func validID(id int) bool { return id >= 0 && int64(id) < math.MaxUint32 }

func setXattrs(ino *inode, records map[string]string) error {
	total := 0
	for k, v := range records {
		name, ok := strings.CutPrefix(k, xattrPrefix)
		if !ok || !keepXattr(ino.kind, name) {
			continue
		}
		if total += len(name) + len(v); len(name) > maxName || total > maxXattrBytes {
			return malformedf("more than %d bytes of extended attributes", maxXattrBytes)
		}
		if ino.xattrs == nil {
			ino.xattrs = make(map[string]string, 1)
		}
		ino.xattrs[name] = v
	}
	return nil
}

// keepXattr tells whether an unpacked file would have the attribute.
func keepXattr(k kind, name string) bool {
	switch {
	case strings.HasPrefix(name, "user."):
		return len(name) > len("user.") && (k == regular || k == directory || k == hardLink)
	case strings.HasPrefix(name, "security."):
		return len(name) > len("security.")
	case name == "system.posix_acl_access", name == "system.posix_acl_default":
		return k != symlink
	}
	return false
}
