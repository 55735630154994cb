package backup

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"hash"
	"io"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/dormouse-run/dormouse/pkg/errs"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// Format and Version are what a file begins with.
const (
	Format  = "dormouse-catalog-backup"
	Version = 1
)

// MaxLine bounds a line: a record with the largest body and all references.
const MaxLine = 2 << 20

// line is any line of the file.
type line struct {
	Format  string          `json:"format,omitempty"`
	Version int             `json:"version,omitempty"`
	Header  json.RawMessage `json:"header,omitempty"`
	Entry   json.RawMessage `json:"entry,omitempty"`
	End     json.RawMessage `json:"end,omitempty"`
	Bytes   int64           `json:"bytes,omitempty"`
	SHA256  string          `json:"sha256,omitempty"`
}

// Writer writes a backup: a header, entries, and an end.
type Writer struct {
	to      io.Writer
	sum     hash.Hash
	bytes   int64
	entries int64
}

// NewWriter writes to w, which should be buffered.
func NewWriter(w io.Writer) *Writer { return &Writer{to: w, sum: sha256.New()} }

// Header begins the file.
func (w *Writer) Header(h *dormousev1.CatalogBackupHeader) error {
	raw, err := protojson.Marshal(h)
	if err != nil {
		return err
	}
	return w.line(line{Format: Format, Version: Version, Header: raw})
}

// Entry adds an entry.
func (w *Writer) Entry(e *dormousev1.CatalogBackupEntry) error {
	raw, err := protojson.Marshal(e)
	if err != nil {
		return err
	}
	w.entries++
	return w.line(line{Entry: raw})
}

// End ends the file and gives the backup's id. The end has to count the entries that were written.
func (w *Writer) End(end *dormousev1.CatalogBackupEnd) (id string, err error) {
	if end.GetEntries() != w.entries {
		return "", errs.New(errs.StateDamaged, "the backup is of %d entries, %d came; take it again", end.GetEntries(), w.entries)
	}
	raw, err := protojson.Marshal(end)
	if err != nil {
		return "", err
	}
	if err := w.line(line{End: raw}); err != nil {
		return "", err
	}
	id = hex.EncodeToString(w.sum.Sum(nil))
	return id, w.line(line{Bytes: w.bytes, SHA256: id})
}

func (w *Writer) line(l line) error {
	raw, err := json.Marshal(l)
	if err != nil {
		return err
	}
	raw = append(raw, '\n')
	if len(raw) > MaxLine {
		return errs.New(errs.LimitExceeded, "a line of %d bytes is over the limit of %d", len(raw), MaxLine).With("field", "entry")
	}
	w.sum.Write(raw)
	w.bytes += int64(len(raw))
	_, err = w.to.Write(raw)
	return err
}

func decode(raw json.RawMessage, into proto.Message) error {
	if len(raw) == 0 {
		return io.ErrUnexpectedEOF
	}
	return protojson.Unmarshal(raw, into)
}
