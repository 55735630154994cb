package boltfile

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"os"

	"golang.org/x/sys/unix"
)

// The layout of bbolt's file, as far as it is followed here. bbolt believes what its pages say of
// themselves, and so does its own check: a damaged count there is a loop of four billion steps, a damaged
// offset a fault in a goroutine where nobody can catch it. Therefore the file is walked here first, with every
// number checked against the file before it is used.
const (
	pageHeader  = 16 // id, flags, count, overflow
	elementSize = 16
	metaSize    = 64

	flagBranch   = 0x01
	flagLeaf     = 0x02
	flagFreelist = 0x10
	flagBucket   = 0x01

	boltMagic  = 0xED0CDAED
	noFreelist = ^uint64(0)
)

// verifyFile walks a file that is there, unless somebody else has it: then bbolt finds that out.
func verifyFile(path string) error {
	f, err := os.Open(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer f.Close() // and with it the lock
	if err := unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB); err != nil {
		return nil //nolint:nilerr // bbolt waits for the lock and tells
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if err := verify(data); err != nil {
		return damaged(err)
	}
	return nil
}

// file is a file being walked.
type file struct {
	data     []byte
	pageSize uint64
	pages    uint64 // below the high-water mark
	seen     map[uint64]bool
}

// meta is one of the two pages that say where the tree begins.
type meta struct{ root, freelist, pages, txid uint64 }

func readMeta(data []byte, at, pageSize uint64) (m meta, ok bool) {
	if at+pageHeader+metaSize > uint64(len(data)) {
		return m, false
	}
	b := data[at+pageHeader:][:metaSize]
	h := fnv.New64a()
	_, _ = h.Write(b[:metaSize-8]) // never fails
	if binary.LittleEndian.Uint32(b) != boltMagic || uint64(binary.LittleEndian.Uint32(b[8:])) != pageSize || binary.LittleEndian.Uint64(b[56:]) != h.Sum64() {
		return m, false
	}
	return meta{root: binary.LittleEndian.Uint64(b[16:]), freelist: binary.LittleEndian.Uint64(b[32:]),
		pages: binary.LittleEndian.Uint64(b[40:]), txid: binary.LittleEndian.Uint64(b[48:])}, true
}

// verify walks the tree of the newest good meta page. A file without one is bbolt's to refuse.
func verify(data []byte) error {
	pageSize := uint64(os.Getpagesize())
	newest, ok := readMeta(data, 0, pageSize)
	if other, good := readMeta(data, pageSize, pageSize); good && (!ok || other.txid > newest.txid) {
		newest, ok = other, true
	}
	if !ok {
		return nil
	}
	if newest.pages > uint64(len(data))/pageSize {
		return fmt.Errorf("it has %d bytes and speaks of %d pages", len(data), newest.pages)
	}
	f := &file{data: data, pageSize: pageSize, pages: newest.pages, seen: make(map[uint64]bool)}
	if newest.freelist != noFreelist {
		if err := f.freelist(newest.freelist); err != nil {
			return err
		}
	}
	return f.tree(newest.root)
}

// page gives a page with what overflows it. Each is reached once.
func (f *file) page(id uint64) ([]byte, error) {
	if id < 2 || id >= f.pages {
		return nil, fmt.Errorf("page %d is outside of it", id)
	}
	at := id * f.pageSize
	overflow := uint64(binary.LittleEndian.Uint32(f.data[at+12:]))
	if overflow >= f.pages-id || binary.LittleEndian.Uint64(f.data[at:]) != id {
		return nil, fmt.Errorf("page %d has a damaged header", id)
	}
	for i := id; i <= id+overflow; i++ {
		if f.seen[i] {
			return nil, fmt.Errorf("page %d is used twice", i)
		}
		f.seen[i] = true
	}
	return f.data[at : at+(overflow+1)*f.pageSize], nil
}

func (f *file) freelist(id uint64) error {
	page, err := f.page(id)
	if err != nil {
		return err
	}
	ids := page[pageHeader:]
	count := uint64(binary.LittleEndian.Uint16(page[10:]))
	if count == 0xffff {
		count, ids = binary.LittleEndian.Uint64(ids), ids[8:]
	}
	if binary.LittleEndian.Uint16(page[8:]) != flagFreelist || count > uint64(len(ids))/8 {
		return fmt.Errorf("page %d is no list of free pages", id)
	}
	for i := range count {
		if free := binary.LittleEndian.Uint64(ids[8*i:]); free < 2 || free >= f.pages {
			return fmt.Errorf("the free page %d is outside of it", free)
		}
	}
	return nil
}

// tree walks a page and what is below it. That no page is reached twice bounds the depth.
func (f *file) tree(id uint64) error {
	page, err := f.page(id)
	if err != nil {
		return err
	}
	return f.elements(id, page)
}

func (f *file) elements(id uint64, page []byte) error {
	if len(page) < pageHeader {
		return fmt.Errorf("page %d is too short", id)
	}
	flags, count := binary.LittleEndian.Uint16(page[8:]), uint64(binary.LittleEndian.Uint16(page[10:]))
	if flags != flagBranch && flags != flagLeaf || pageHeader+count*elementSize > uint64(len(page)) {
		return fmt.Errorf("page %d has damaged elements", id)
	}
	for i := range count {
		at := pageHeader + i*elementSize
		e := page[at:][:elementSize]
		word := func(n int) uint64 { return uint64(binary.LittleEndian.Uint32(e[n:])) }
		if flags == flagBranch {
			if at+word(0)+word(4) > uint64(len(page)) {
				return fmt.Errorf("page %d has a key outside of it", id)
			}
			if err := f.tree(binary.LittleEndian.Uint64(e[8:])); err != nil {
				return err
			}
			continue
		}
		value := at + word(4) + word(8)
		if value+word(12) > uint64(len(page)) {
			return fmt.Errorf("page %d has a value outside of it", id)
		}
		if word(0)&flagBucket != 0 {
			if err := f.bucket(id, page[value:value+word(12)]); err != nil {
				return err
			}
		}
	}
	return nil
}

// bucket walks a bucket, which has a root page or its only page inside of its value.
func (f *file) bucket(id uint64, value []byte) error {
	if len(value) < 16 {
		return fmt.Errorf("page %d has a damaged bucket", id)
	}
	if root := binary.LittleEndian.Uint64(value); root != 0 {
		return f.tree(root)
	}
	inline := value[16:]
	if len(inline) >= pageHeader && binary.LittleEndian.Uint16(inline[8:]) == flagBranch {
		return fmt.Errorf("page %d has a bucket that branches", id)
	}
	return f.elements(id, inline)
}
