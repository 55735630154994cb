package backup

import (
	"bufio"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"iter"

	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/errs"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// MaxChanged bounds how many records may have changed while a backup was taken.
const MaxChanged = 500_000

// File is a backup that was found whole.
type File struct {
	// ID names the backup.
	ID     string
	Header *dormousev1.CatalogBackupHeader
	End    *dormousev1.CatalogBackupEnd
	// Records and Sum are of what the backup has.
	Records int64
	Sum     string

	from io.ReadSeeker
	// last is where the entry that counts is, of the records that have several or are gone.
	last map[catalog.Key]int64
}

// MaxWaiting bounds the records, in bytes, that refer to what comes after them: who restores keeps them.
const MaxWaiting = 256 << 20

// gone is no entry's place.
const gone = -1

// Open reads the whole file and checks it: format, length, digest, and each record. It is read again by Entries.
func Open(from io.ReadSeeker) (*File, error) {
	f := &File{from: from, Header: new(dormousev1.CatalogBackupHeader), End: new(dormousev1.CatalogBackupEnd), last: make(map[catalog.Key]int64)}
	if err := f.check(); err != nil {
		return nil, damaged(err)
	}
	// The second look counts what counts.
	var sum Sum
	for r, err := range f.records() {
		if err != nil {
			return nil, damaged(err)
		}
		sum.Add(r)
	}
	f.Records, f.Sum = sum.Records(), sum.String()
	return f, nil
}

func damaged(err error) error {
	var typed *errs.Error
	if errors.As(err, &typed) && (typed.Reason == errs.NotSupported || typed.Reason == errs.LimitExceeded) {
		return err
	}
	return errs.Wrap(err, errs.StateDamaged, "the backup cannot be used: %s; nothing of it was used: take another", err)
}

// scan reads the file line by line from its beginning.
func (f *File) scan() iter.Seq2[[]byte, error] {
	return func(yield func([]byte, error) bool) {
		if _, err := f.from.Seek(0, io.SeekStart); err != nil {
			yield(nil, err)
			return
		}
		r := bufio.NewReaderSize(f.from, MaxLine)
		for {
			text, err := r.ReadSlice('\n')
			switch {
			case errors.Is(err, io.EOF) && len(text) == 0:
				return
			case errors.Is(err, io.EOF):
				err = errors.New("it ends within a line")
			case errors.Is(err, bufio.ErrBufferFull):
				err = errors.New("a line is too long")
			}
			if !yield(text, err) || err != nil {
				return
			}
		}
	}
}

// check is the first look: form, length and digest, and which entries count.
func (f *File) check() error {
	sum := sha256.New()
	var at, read int64
	ended, whole := false, false
	for text, err := range f.scan() {
		if err != nil {
			return err
		}
		var l line
		if err := json.Unmarshal(text, &l); err != nil {
			return err
		}
		switch {
		case whole:
			return errors.New("something follows its end")
		case ended:
			whole, f.ID = true, hex.EncodeToString(sum.Sum(nil))
			if l.SHA256 != f.ID || l.Bytes != read || f.End.GetEntries() != at-2 || f.End.GetPoint().GetIncarnation() == "" {
				err = errors.New("its digest or length is another than it says")
			}
		case at == 0:
			if l.Format != Format {
				return errors.New("it is no backup of a catalog")
			}
			if l.Version != Version {
				return errs.New(errs.NotSupported, "the backup is of version %d, this program reads %d; use the newer one", l.Version, Version).With("feature", "backup version")
			}
			err = decode(l.Header, f.Header)
		case len(l.End) > 0:
			ended = true
			err = decode(l.End, f.End)
		default:
			err = f.entry(at, l.Entry)
		}
		if err != nil {
			return err
		}
		sum.Write(text)
		at, read = at+1, read+int64(len(text))
	}
	if !whole {
		return errors.New("its end is missing")
	}
	return nil
}

// entry notes the place of an entry that follows another of its record.
func (f *File) entry(at int64, raw json.RawMessage) error {
	e := new(dormousev1.CatalogBackupEntry)
	if err := decode(raw, e); err != nil {
		return err
	}
	if e.GetGone() != nil {
		key, err := KeyOf(e.GetGone())
		if err != nil {
			return err
		}
		f.last[key] = gone
		return f.bounded()
	}
	r, err := RecordOf(e.GetRecord())
	if err != nil {
		return err
	}
	// A scan lists in order, so that the first look cannot tell which record comes again: deltas say so.
	if _, again := f.last[r.Key]; again || e.GetChanged() {
		f.last[r.Key] = at
	}
	return f.bounded()
}

func (f *File) bounded() error {
	if len(f.last) > MaxChanged {
		return errs.New(errs.LimitExceeded, "more than %d records changed while the backup was taken; take it when less happens", MaxChanged).With("field", "changed")
	}
	return nil
}

// Entries gives each record of the backup once, in the file's order.
func (f *File) Entries() iter.Seq2[*dormousev1.CatalogRecord, error] {
	return func(yield func(*dormousev1.CatalogRecord, error) bool) {
		var at int64 = -1
		for text, err := range f.scan() {
			at++
			e := new(dormousev1.CatalogBackupEntry)
			if err == nil && at > 0 && at <= f.End.GetEntries() {
				var l line
				if err = json.Unmarshal(text, &l); err == nil {
					err = decode(l.Entry, e)
				}
			}
			if err != nil {
				yield(nil, err)
				return
			}
			p := e.GetRecord()
			if p == nil {
				continue
			}
			if where, several := f.last[catalog.Key{Tenant: p.GetTenant(), Kind: catalog.Kind(p.GetKind()), UID: p.GetUid()}]; several && where != at {
				continue
			}
			if !yield(p, nil) {
				return
			}
		}
	}
}

func (f *File) records() iter.Seq2[catalog.Record, error] {
	return func(yield func(catalog.Record, error) bool) {
		for p, err := range f.Entries() {
			var r catalog.Record
			if err == nil {
				r, err = RecordOf(p)
			}
			if !yield(r, err) || err != nil {
				return
			}
		}
	}
}
