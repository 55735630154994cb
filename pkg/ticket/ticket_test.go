package ticket

import (
	"encoding/base64"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/dormouse-run/dormouse/pkg/dataplane"
	"github.com/dormouse-run/dormouse/pkg/errs"
)

func open(t *testing.T) (*Keys, string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "tickets.yaml")
	k, err := OpenKeys(path, nil)
	if err != nil {
		t.Fatal(err)
	}
	return k, path
}

func TestTicketMatrix(t *testing.T) {
	keys, _ := open(t)
	other, _ := open(t)
	now := time.Now()
	issue := func(k *Keys, node string) string {
		s, err := k.Issue("acme", "u", node, []dataplane.Verb{dataplane.Process}, time.Minute)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	good := issue(keys, "n1")
	head, sig, _ := cutLast(good)
	forged := strings.Replace(head, base64.RawURLEncoding.EncodeToString([]byte(`{"kid"`))[:8], base64.RawURLEncoding.EncodeToString([]byte(`{"kiD"`))[:8], 1)
	for name, c := range map[string]struct {
		ticket string
		at     time.Time
		why    string
	}{
		"good": {good, now, ""}, "its last second": {good, now.Add(58 * time.Second), ""},
		"expired": {good, now.Add(time.Minute), "expired"}, "another node": {issue(keys, "n2"), now, "node"},
		"another's key": {issue(other, "n1"), now, "signature"}, "changed": {forged + "." + sig, now, "signature"},
		"no signature": {head + ".", now, "signature"}, "nothing": {"", now, "form"}, "garbage": {"dt1.!!.!!", now, "form"},
		"another form": {"dt2" + good[3:], now, "form"}, "too long": {"dt1." + strings.Repeat("A", 1<<16) + ".A", now, "form"},
	} {
		v := Verifier{Node: "n1"}
		if _, err := v.Verify(c.ticket, c.at); !errs.Has(err, errs.TicketInvalid) {
			t.Errorf("%s without keys: %v", name, err)
		}
		v.SetKeys(keys.Public())
		got, err := v.Verify(c.ticket, c.at)
		if c.why == "" {
			if err != nil || got.Tenant != "acme" || got.SandboxUID != "u" || !got.May(dataplane.Process) || got.May(dataplane.File) {
				t.Errorf("%s: %+v, %v", name, got, err)
			}
		} else if !errs.Has(err, errs.TicketInvalid) || errs.From(err).Details["why"] != c.why || got.SandboxUID != "" {
			t.Errorf("%s: %+v, %v", name, got, err)
		}
	}
}

// TestRotation: the first key signs, all are in use, and what is taken out is worth nothing.
func TestRotation(t *testing.T) {
	keys, path := open(t)
	more, second := open(t)
	read := func(p string) string {
		data, err := os.ReadFile(p)
		if err != nil {
			t.Fatal(err)
		}
		_, entry, _ := strings.Cut(string(data), "\n")
		return entry
	}
	a, b := read(path), read(second)
	verify := func(k *Keys, published []PublicKey) error {
		s, err := k.Issue("acme", "u", "n1", nil, time.Minute)
		if err != nil {
			t.Fatal(err)
		}
		v := Verifier{Node: "n1"}
		v.SetKeys(published)
		_, err = v.Verify(s, time.Now())
		return err
	}
	write := func(entries string) {
		if err := os.WriteFile(path, []byte("keys:\n"+entries), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(path, time.Time{}, time.Now().Add(time.Duration(len(entries))*time.Second)); err != nil {
			t.Fatal(err)
		}
	}
	write(a + b)
	if err := verify(more, keys.Public()); err != nil {
		t.Errorf("the second key is told: %v", err)
	}
	write(b)
	if err := verify(keys, more.Public()); err != nil {
		t.Errorf("the only key signs: %v", err)
	}
	write("garbage")
	if err := verify(keys, more.Public()); err != nil {
		t.Errorf("a file that cannot be read leaves the keys: %v", err)
	}
}

func TestKeyFile(t *testing.T) {
	seed := base64.StdEncoding.EncodeToString(make([]byte, 32))
	for name, c := range map[string]struct {
		body string
		mode os.FileMode
	}{
		"others may read it": {"keys: [{id: a, seed: " + seed + "}]", 0o644}, "empty": {"", 0o600}, "no keys": {"keys: []", 0o600},
		"short": {"keys: [{id: a, seed: AAAA}]", 0o600}, "no id": {"keys: [{seed: " + seed + "}]", 0o600},
		"twice": {"keys: [{id: a, seed: " + seed + "}, {id: a, seed: " + seed + "}]", 0o600}, "unknown": {"keyz: []", 0o600},
	} {
		path := filepath.Join(t.TempDir(), "k")
		if err := os.WriteFile(path, []byte(c.body), c.mode); err != nil {
			t.Fatal(err)
		}
		if _, err := OpenKeys(path, nil); err == nil || strings.Contains(err.Error(), seed) {
			t.Errorf("%s: %v", name, err)
		}
	}
	_, path := open(t)
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", info, err)
	}
}

func FuzzVerify(f *testing.F) {
	f.Add("dt1.e30.AA")
	f.Fuzz(func(t *testing.T, s string) {
		v := Verifier{Node: "n1"}
		if _, err := v.Verify(s, time.Now()); !errs.Has(err, errs.TicketInvalid) {
			t.Fatal(err)
		}
	})
}
