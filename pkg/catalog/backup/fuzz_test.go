package backup_test

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"testing"

	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/catalog/backup"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// FuzzFile: a file is refused, or is read as what it says: as many records as it counts, each of which a commit would take, each
// once, of the sum that it gives; and twice the same.
func FuzzFile(f *testing.F) {
	add := func(entries ...*dormousev1.CatalogBackupEntry) {
		var b bytes.Buffer
		w := backup.NewWriter(&b)
		err := w.Header(&dormousev1.CatalogBackupHeader{CoordinatorEpoch: 7, Ancestors: map[string]uint64{"older": 3}})
		for _, e := range entries {
			if err == nil {
				err = w.Entry(e)
			}
		}
		if err == nil {
			_, err = w.End(&dormousev1.CatalogBackupEnd{Point: &dormousev1.HistoryPoint{Incarnation: "inc", Seq: 9, Digest: "d"}, Entries: int64(len(entries))})
		}
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b.Bytes(), true)
	}
	add()
	add(entry("a", 1, false), entry("b", 1, true), gone("a"), entry("b", 2, true))
	f.Add([]byte("{}\n"), false)
	f.Add([]byte(`{"entry":{"record":{"tenant":"acme","kind":"sandbox","uid":"a","revision":"1"}}}`), false)
	f.Fuzz(func(t *testing.T, file []byte, sealed bool) {
		if sealed { // else nothing but a digest would be looked at
			file = sealedAgain(file)
		}
		read, err := backup.Open(bytes.NewReader(file))
		if err != nil {
			return
		}
		for range 2 {
			var sum backup.Sum
			seen := make(map[catalog.Key]bool)
			for p, err := range read.Entries() {
				if err != nil {
					t.Fatal(err)
				}
				r, err := backup.RecordOf(p)
				if err != nil || seen[r.Key] {
					t.Fatalf("record %s, seen before: %t, %v", r.Key, seen[r.Key], err)
				}
				seen[r.Key] = true
				sum.Add(r)
			}
			if int64(len(seen)) != read.Records || sum.String() != read.Sum {
				t.Fatalf("%d records of sum %s, it said %d and %s", len(seen), sum.String(), read.Records, read.Sum)
			}
		}
	})
}

// sealedAgain gives a file whose last line is that of the lines before it.
func sealedAgain(file []byte) []byte {
	body := file
	if i := bytes.LastIndexByte(bytes.TrimSuffix(file, []byte("\n")), '\n'); i >= 0 {
		body = file[:i+1]
	}
	sum := sha256.Sum256(body)
	return fmt.Appendf(bytes.Clone(body), "{\"bytes\":%d,\"sha256\":%q}\n", len(body), hex.EncodeToString(sum[:]))
}
