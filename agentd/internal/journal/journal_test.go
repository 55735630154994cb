package journal

import (
	"bytes"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	bolt "go.etcd.io/bbolt"
	"google.golang.org/protobuf/proto"

	nodev1 "github.com/dormouse-run/dormouse/proto/dormouse/node/v1"
)

func begin(t *testing.T, dir string) *Journal {
	t.Helper()
	j, err := Open(dir, "n1", slog.New(slog.NewTextHandler(io.Discard, nil)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = j.Close() })
	return j
}

func at(seq uint64) *nodev1.CatalogPoint {
	return &nodev1.CatalogPoint{Incarnation: "inc", Seq: seq, Digest: fmt.Sprint("digest of ", seq)}
}

func box(uid string, revision uint64) *nodev1.JournalEntry {
	return &nodev1.JournalEntry{Tenant: "acme", Kind: "sandbox", Uid: uid, Revision: revision, Node: "n1", Body: []byte(fmt.Sprint(revision))}
}

func gone(uid string, revision, seq uint64) *nodev1.JournalEntry {
	return &nodev1.JournalEntry{Tenant: "acme", Kind: "sandbox", Uid: uid, Revision: revision, Seq: seq, Deleted: true}
}

func (j *Journal) must(t *testing.T, msg *nodev1.Journal) {
	t.Helper()
	if err := j.Apply(msg); err != nil {
		t.Fatal(err)
	}
}

// all reads page by page: uid, revision and whether it is deleted.
func (j *Journal) all(t *testing.T, page int) []string {
	t.Helper()
	var got []string
	for after := ""; ; {
		entries, next, err := j.Read(after, page)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			if e.GetPoint().GetIncarnation() == "" {
				t.Errorf("%v has no point", e)
			}
			s := fmt.Sprint(e.GetUid(), "@", e.GetRevision())
			if e.GetDeleted() {
				s += " deleted"
			}
			got = append(got, s)
		}
		if after = next; next == "" {
			return got
		}
	}
}

// traces is the count that is kept of them.
func (j *Journal) traces(t *testing.T) (count []byte) {
	t.Helper()
	if err := j.db.View(func(tx *bolt.Tx) error {
		count = bytes.Clone(tx.Bucket(bucketMeta).Get(keyTraces))
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	return count
}

func (j *Journal) want(t *testing.T, want ...string) {
	t.Helper()
	for _, page := range []int{1, 2, 0} {
		if got := j.all(t, page); fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("in pages of %d: %v, want %v", page, got, want)
		}
	}
}

func TestWhatIsAppliedStays(t *testing.T) {
	dir := t.TempDir()
	j := begin(t, dir)
	j.want(t)
	j.must(t, &nodev1.Journal{Point: at(9), Entries: []*nodev1.JournalEntry{box("b", 1), box("a", 2), gone("c", 4, 8)}, WholeBegins: true})
	if p, err := j.Points(); err != nil || p.Complete != nil || !proto.Equal(p.Witness, at(9)) {
		t.Errorf("a whole that goes on: %+v, %v", p, err)
	}
	j.must(t, &nodev1.Journal{Point: at(12), Mark: at(3), Complete: at(9), WholeEnds: true})
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	j = begin(t, dir)
	j.want(t, "a@2", "b@1", "c@4 deleted")
	if p, err := j.Points(); err != nil || !proto.Equal(p.Witness, at(12)) || !proto.Equal(p.Mark, at(3)) || !proto.Equal(p.Complete, at(9)) {
		t.Errorf("%+v, %v", p, err)
	}
	if err := j.Apply(&nodev1.Journal{Entries: []*nodev1.JournalEntry{box("z", 1)}}); err == nil {
		t.Error("a message without a point was applied")
	}
}

// The word of a catalog that came back older replaces nothing.
func TestC21LowerRevisionReplacesNothing(t *testing.T) {
	j := begin(t, t.TempDir())
	j.must(t, &nodev1.Journal{Point: at(20), Entries: []*nodev1.JournalEntry{box("a", 5), gone("b", 3, 19)}})
	j.must(t, &nodev1.Journal{Point: at(10), Entries: []*nodev1.JournalEntry{box("a", 4), box("b", 3), box("b", 2), gone("a", 4, 9)}})
	j.want(t, "a@5", "b@3 deleted")
	j.must(t, &nodev1.Journal{Point: at(21), Entries: []*nodev1.JournalEntry{gone("a", 5, 21)}})
	j.want(t, "a@5 deleted", "b@3 deleted")
}

// What a repair went on without does not keep out what became of it since: the node was away, and its journal has more than the catalog.
func TestC21TheNextIncarnationCounts(t *testing.T) {
	j := begin(t, t.TempDir())
	j.must(t, &nodev1.Journal{Point: at(20), WholeBegins: true, WholeEnds: true, Entries: []*nodev1.JournalEntry{box("a", 5), gone("b", 3, 19), box("c", 2)}})
	next := &nodev1.CatalogPoint{Incarnation: "next", Seq: 31, Digest: "x"}
	j.must(t, &nodev1.Journal{Point: next, WholeBegins: true, WholeEnds: true, Complete: next, Entries: []*nodev1.JournalEntry{box("a", 3), box("b", 2)}})
	j.want(t, "a@3", "b@2", "c@2 deleted")
	j.must(t, &nodev1.Journal{Point: next, Entries: []*nodev1.JournalEntry{box("a", 2), gone("b", 2, 31)}})
	j.want(t, "a@3", "b@2 deleted", "c@2 deleted")
	j.must(t, &nodev1.Journal{Point: at(40), Entries: []*nodev1.JournalEntry{gone("a", 3, 40)}})
	if got := number(j.traces(t)); got != 3 {
		t.Errorf("%d traces are counted", got)
	}
}

// What an earlier incarnation had, and a repair went on without, is given up, not deleted: that is told apart from what was deleted, keeps all that it was, and makes way
// when it is adopted, with whatever revision.
func TestWhatARepairGaveUpIsKept(t *testing.T) {
	j := begin(t, t.TempDir())
	j.must(t, &nodev1.Journal{Point: at(20), WholeBegins: true, WholeEnds: true, Entries: []*nodev1.JournalEntry{box("a", 5), box("b", 3), box("c", 2)}})
	next := &nodev1.CatalogPoint{Incarnation: "next", Seq: 31, Digest: "x"}
	j.must(t, &nodev1.Journal{Point: next, WholeBegins: true, WholeEnds: true, Complete: next, Entries: []*nodev1.JournalEntry{box("a", 3), gone("b", 4, 30)}})
	j.want(t, "a@3", "b@4 deleted", "c@2 deleted")
	key := func(name string) string { return string(keyOf(box(name, 1))) }
	kept, err := j.Get(key("c"))
	want := box("c", 2)
	want.Seq, want.Deleted, want.GivenUp, want.Point = 31, true, true, next
	if err != nil || !proto.Equal(kept, want) {
		t.Errorf("what was given up is %v, %v; want %v", kept, err, want)
	}
	if b, err := j.Get(key("b")); err != nil || b.GetGivenUp() {
		t.Errorf("what was deleted is %v, %v", b, err)
	}
	j.must(t, &nodev1.Journal{Point: next, Entries: []*nodev1.JournalEntry{box("c", 1)}})
	j.want(t, "a@3", "b@4 deleted", "c@1")
	if got := number(j.traces(t)); got != 1 {
		t.Errorf("%d traces are counted", got)
	}
}

// What a whole did not send is gone, if its history had seen it: a catalog that comes back with it has come back older.
func TestWholeBuriesWhatItDoesNotSend(t *testing.T) {
	j := begin(t, t.TempDir())
	j.must(t, &nodev1.Journal{Point: at(10), Entries: []*nodev1.JournalEntry{box("moved", 1), box("stays", 1), gone("trace", 1, 9)}})
	j.must(t, &nodev1.Journal{Point: at(30), Entries: []*nodev1.JournalEntry{box("ahead", 1)}})
	j.must(t, &nodev1.Journal{Point: at(20), WholeBegins: true, Entries: []*nodev1.JournalEntry{box("stays", 1)}})
	j.want(t, "ahead@1", "moved@1", "stays@1", "trace@1 deleted") // until it ends
	j.must(t, &nodev1.Journal{Point: at(20), Complete: at(20), WholeEnds: true, Entries: []*nodev1.JournalEntry{box("new", 1)}})
	j.want(t, "ahead@1", "moved@1 deleted", "new@1", "stays@1", "trace@1 deleted")
}

func TestTracesAreBounded(t *testing.T) {
	j := begin(t, t.TempDir())
	msg := &nodev1.Journal{Point: at(1)}
	for i := range uint64(MaxDeleted + 10) {
		msg.Entries = append(msg.Entries, gone(fmt.Sprintf("%08d", i), 1, i))
	}
	msg.Entries = append(msg.Entries, box("living", 1))
	j.must(t, msg)
	j.must(t, msg) // again changes nothing
	got := j.all(t, 0)
	if len(got) != MaxDeleted+1 || got[0] != "00000010@1 deleted" || got[len(got)-1] != "living@1" {
		t.Errorf("%d entries, from %s to %s", len(got), got[0], got[len(got)-1])
	}
}

// What cannot be read is put aside: the coordinator sends the whole again.
func TestDamagedIsPutAside(t *testing.T) {
	for name, damage := range map[string]func(path string) error{
		"cut": func(path string) error { return os.Truncate(path, 100) },
		"page": func(path string) error { // what bbolt believes, and then walks four billion steps
			data, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			for at := 2 * os.Getpagesize(); at < len(data); at += os.Getpagesize() {
				copy(data[at+10:], []byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff})
			}
			return os.WriteFile(path, data, 0o600)
		},
		"empty":   func(path string) error { return os.Truncate(path, 0) },
		"garbage": func(path string) error { return os.WriteFile(path, make([]byte, 1<<16), 0o600) },
		"foreign": func(path string) error {
			if err := os.Remove(path); err != nil {
				return err
			}
			j, err := Open(filepath.Dir(path), "another", slog.New(slog.DiscardHandler))
			if err != nil {
				return err
			}
			return j.Close()
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			j := begin(t, dir)
			j.must(t, &nodev1.Journal{Point: at(9), Complete: at(9), Entries: []*nodev1.JournalEntry{box("a", 1)}})
			if err := j.Close(); err != nil {
				t.Fatal(err)
			}
			if err := damage(filepath.Join(dir, "journal.db")); err != nil {
				t.Fatal(err)
			}
			j = begin(t, dir)
			j.want(t)
			if p, err := j.Points(); err != nil || p.Complete != nil || p.Witness != nil {
				t.Errorf("%+v %v", p, err)
			}
			if aside, err := Aside(dir); err != nil || len(aside) != 1 {
				t.Errorf("put aside: %v, %v", aside, err)
			}
		})
	}
}
