package backup_test

import (
	"bytes"
	"fmt"
	"strings"
	"testing"

	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/catalog/backup"
	"github.com/dormouse-run/dormouse/pkg/errs"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

func record(uid string, revision uint64) *dormousev1.CatalogRecord {
	return backup.RecordToProto(catalog.Record{Key: catalog.Key{Tenant: "acme", Kind: catalog.KindSandbox, UID: uid}, Revision: revision, Name: uid, Phase: "Running",
		Node: "n1", Identity: "i", Sealed: true, Body: []byte(fmt.Sprintf(`{"of":%q}`, uid)),
		Refs: []catalog.Ref{{Target: catalog.Key{Tenant: "acme", Kind: catalog.KindVolume, UID: "v"}, Mode: catalog.Shared}}})
}

func entry(uid string, revision uint64, changed bool) *dormousev1.CatalogBackupEntry {
	return &dormousev1.CatalogBackupEntry{Record: record(uid, revision), Changed: changed}
}

func gone(uid string) *dormousev1.CatalogBackupEntry {
	return &dormousev1.CatalogBackupEntry{Gone: backup.KeyToProto(catalog.Key{Tenant: "acme", Kind: catalog.KindSandbox, UID: uid}), Changed: true}
}

func write(t *testing.T, entries ...*dormousev1.CatalogBackupEntry) (file []byte, id string) {
	t.Helper()
	var b bytes.Buffer
	w := backup.NewWriter(&b)
	if err := w.Header(&dormousev1.CatalogBackupHeader{CoordinatorEpoch: 7, Ancestors: map[string]uint64{"older": 3}}); err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if err := w.Entry(e); err != nil {
			t.Fatal(err)
		}
	}
	id, err := w.End(&dormousev1.CatalogBackupEnd{Point: &dormousev1.HistoryPoint{Incarnation: "inc", Seq: 9, Digest: "d"}, Entries: int64(len(entries))})
	if err != nil {
		t.Fatal(err)
	}
	return b.Bytes(), id
}

func list(t *testing.T, f *backup.File) string {
	t.Helper()
	var all []string
	for r, err := range f.Entries() {
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, fmt.Sprint(r.GetUid(), "@", r.GetRevision()))
	}
	return strings.Join(all, " ")
}

// The entry that was written last counts, whether it came by a scan or a delta.
func TestLastEntryCounts(t *testing.T) {
	file, id := write(t,
		entry("a", 1, false), entry("b", 1, false),
		entry("b", 2, true), entry("d", 1, true), // a delta, ahead of the scan
		entry("c", 1, false), entry("d", 2, false), entry("e", 1, false),
		gone("a"), entry("c", 2, true), gone("e"), entry("b", 3, true), gone("unlisted"))
	f, err := backup.Open(bytes.NewReader(file))
	if err != nil {
		t.Fatal(err)
	}
	if got, want := list(t, f), "d@2 c@2 b@3"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	if f.ID != id || f.Records != 3 || f.End.GetPoint().GetSeq() != 9 || f.Header.GetCoordinatorEpoch() != 7 || f.Header.GetAncestors()["older"] != 3 {
		t.Errorf("%+v", f)
	}
	var sum backup.Sum
	for _, p := range []*dormousev1.CatalogRecord{record("b", 3), record("c", 2), record("d", 2)} {
		r, err := backup.RecordOf(p)
		if err != nil {
			t.Fatal(err)
		}
		sum.Add(r)
	}
	if f.Sum != sum.String() {
		t.Errorf("digest %s, of the same records in another order %s", f.Sum, sum.String())
	}
}

func TestSumTellsRecordsApart(t *testing.T) {
	seen := map[string]string{}
	base, err := backup.RecordOf(record("a", 1))
	if err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string]func(*catalog.Record){
		"nothing": func(*catalog.Record) {}, "uid": func(r *catalog.Record) { r.UID = "b" }, "revision": func(r *catalog.Record) { r.Revision++ },
		"name": func(r *catalog.Record) { r.Name = "x" }, "phase": func(r *catalog.Record) { r.Phase = "x" }, "node": func(r *catalog.Record) { r.Node = "x" },
		"identity": func(r *catalog.Record) { r.Identity = "x" }, "sealed": func(r *catalog.Record) { r.Sealed = false },
		"refs": func(r *catalog.Record) { r.Refs = nil }, "body": func(r *catalog.Record) { r.Body = nil },
	} {
		r := base
		change(&r)
		var sum backup.Sum
		sum.Add(r)
		if other, ok := seen[sum.String()]; ok {
			t.Errorf("%s and %s have one digest", name, other)
		}
		seen[sum.String()] = name
	}
	var empty backup.Sum
	if empty.String() != strings.Repeat("0", 64) {
		t.Errorf("of nothing: %s", empty.String())
	}
}

// Whatever is changed in a file, or cut from it, it is refused before anything is used.
func TestDamagedFileIsRefused(t *testing.T) {
	file, _ := write(t, entry("a", 1, false), entry("b", 1, true), gone("a"))
	if _, err := backup.Open(bytes.NewReader(file)); err != nil {
		t.Fatal(err)
	}
	for cut := range file {
		if _, err := backup.Open(bytes.NewReader(file[:cut])); !errs.Has(err, errs.StateDamaged) {
			t.Fatalf("cut at %d of %d: %v", cut, len(file), err)
		}
		flipped := bytes.Clone(file)
		flipped[cut] ^= 1
		if _, err := backup.Open(bytes.NewReader(flipped)); err == nil {
			t.Fatalf("another byte at %d: nothing", cut)
		}
	}
	for name, text := range map[string]string{
		"twice":       string(file) + string(file),
		"a long line": strings.Repeat("x", backup.MaxLine+1),
		"no lines":    "",
		"other":       "{}\n",
	} {
		if _, err := backup.Open(strings.NewReader(text)); !errs.Has(err, errs.StateDamaged) {
			t.Errorf("%s: %v", name, err)
		}
	}
	newer := strings.Replace(string(file), `"version":1`, `"version":2`, 1)
	if _, err := backup.Open(strings.NewReader(newer)); !errs.Has(err, errs.NotSupported) {
		t.Errorf("a newer version: %v", err)
	}
	bad := record("bad", 1)
	bad.References[0].Mode = "mine"
	file, _ = write(t, &dormousev1.CatalogBackupEntry{Record: bad})
	if _, err := backup.Open(bytes.NewReader(file)); !errs.Has(err, errs.StateDamaged) {
		t.Errorf("a record that no commit would take: %v", err)
	}
}

func TestEndCountsEntries(t *testing.T) {
	w := backup.NewWriter(&bytes.Buffer{})
	if err := w.Entry(entry("a", 1, false)); err != nil {
		t.Fatal(err)
	}
	if _, err := w.End(&dormousev1.CatalogBackupEnd{Entries: 2}); !errs.Has(err, errs.StateDamaged) {
		t.Errorf("an entry did not come: %v", err)
	}
}
