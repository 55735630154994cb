package nodestate

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/dormouse-run/dormouse/pkg/errs"
)

// FuzzRecord: a record of any kind is read, or damaged; what was read can be written and read again.
func FuzzRecord(f *testing.F) {
	for which, v := range []any{Sandbox{UID: "u", Intent: IntentKeep, Flags: []string{"x"}, Created: time.Unix(1, 0)}, Snapshot{UID: "s"}, Volume{UID: "v"}, Command{}} {
		data, err := json.Marshal(v)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(uint8(which), data)
		f.Add(uint8(which), []byte("null"))
		f.Add(uint8(which), []byte(`{"created":"9999-99-99","spec":{"resources":null},"handle":"AAAA"}`))
	}
	f.Fuzz(func(t *testing.T, which uint8, data []byte) {
		into := []func() any{func() any { return new(Sandbox) }, func() any { return new(Snapshot) }, func() any { return new(Volume) }, func() any { return new(Command) }}[which%4]
		rec := into()
		if err := decode(data, rec, "kind", "key"); err != nil {
			if !errs.Has(err, errs.StateDamaged) {
				t.Fatal(err)
			}
			return
		}
		once, err := json.Marshal(rec)
		if err != nil {
			t.Fatal(err)
		}
		again := into()
		if err := decode(once, again, "kind", "key"); err != nil {
			t.Fatal(err)
		}
		if twice, err := json.Marshal(again); err != nil || !bytes.Equal(once, twice) {
			t.Fatalf("%s became %s, %v", once, twice, err)
		}
	})
}

// FuzzDamagedFile: bytes of the state file are overwritten. It is opened, or refused with a type; it is
// never wiped, and nothing crashes.
func FuzzDamagedFile(f *testing.F) {
	path := filepath.Join(f.TempDir(), "good.db")
	s, err := Open(Options{Path: path, Node: "n"})
	if err != nil {
		f.Fatal(err)
	}
	for _, uid := range []string{"a", "b", "c"} {
		if err := s.PutSandbox(Sandbox{UID: uid, Intent: IntentKeep}); err != nil {
			f.Fatal(err)
		}
	}
	if err := s.Close(); err != nil {
		f.Fatal(err)
	}
	good, err := os.ReadFile(path)
	if err != nil {
		f.Fatal(err)
	}
	for _, at := range []uint32{0, 16, 4096, 8192, 12300, 16384} {
		f.Add(at, []byte("\xff\xff\xff\xff\xff\xff\xff\xff"), uint32(0))
	}
	f.Add(uint32(0), []byte{}, uint32(5000))
	f.Fuzz(func(t *testing.T, at uint32, patch []byte, short uint32) {
		data := bytes.Clone(good)
		copy(data[int(at)%len(data):], patch)
		data = data[:len(data)-int(short)%len(data)]
		path := filepath.Join(t.TempDir(), "state.db")
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
		s, err := Open(Options{Path: path, Node: "n"})
		if err != nil {
			if !errs.Has(err, errs.StateDamaged) && !errs.Has(err, errs.NotSupported) {
				t.Fatal(err)
			}
			if after, _ := os.ReadFile(path); len(data) > 0 && len(after) == 0 {
				t.Fatal("the damaged file was wiped")
			}
			return
		}
		_, _ = s.Sandboxes()
		_, _ = s.Epochs()
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	})
}
