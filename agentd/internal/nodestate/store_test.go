package nodestate

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	bolt "go.etcd.io/bbolt"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func open(t *testing.T, path string, opts Options) *Store {
	t.Helper()
	opts.Path, opts.Node = path, "n1"
	s, err := Open(opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

func wantReason(t *testing.T, err error, want errs.Reason) {
	t.Helper()
	if errs.ReasonOf(err) != want {
		t.Fatalf("got %v, want reason %s", err, want)
	}
}

func TestRecordsSurviveReopening(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.db")
	s := open(t, path, Options{})
	if err := s.PutSandbox(Sandbox{UID: "a", Tenant: "t", Intent: IntentStart, Phase: sandbox.Starting, Observation: 3}); err != nil {
		t.Fatal(err)
	}
	if err := s.PutSnapshot(Snapshot{UID: "x", State: SnapshotSaving}); err != nil {
		t.Fatal(err)
	}
	if err := s.SetSession(4, 9); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = open(t, path, Options{})
	all, err := s.Sandboxes()
	if err != nil || len(all) != 1 || all[0].Observation != 3 {
		t.Fatalf("%v %v", all, err)
	}
	if e, err := s.Epochs(); err != nil || e != (Epochs{4, 9}) {
		t.Fatalf("%v %v", e, err)
	}
	_, err = s.Sandbox("b")
	wantReason(t, err, errs.ObjectNotFound)
}

func TestObservationNeverGoesDown(t *testing.T) {
	s := open(t, filepath.Join(t.TempDir(), "s.db"), Options{})
	if err := s.PutSandbox(Sandbox{UID: "a", Observation: 3}); err != nil {
		t.Fatal(err)
	}
	wantReason(t, s.PutSandbox(Sandbox{UID: "a", Observation: 2}), errs.StaleRevision)
	if err := s.AckSandbox("a", 3); err != nil {
		t.Fatal(err)
	}
	// A writer that read the record before the acknowledgement does not undo it.
	if err := s.PutSandbox(Sandbox{UID: "a", Observation: 4}); err != nil {
		t.Fatal(err)
	}
	if rec, err := s.Sandbox("a"); err != nil || rec.Acked != 3 {
		t.Fatalf("%+v %v", rec, err)
	}
}

func TestUnreported(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s.db")
	s := open(t, path, Options{})
	due := func(want ...string) {
		t.Helper()
		all, err := s.Unreported()
		got := []string{}
		for _, rec := range all {
			got = append(got, rec.UID)
		}
		if err != nil || !slices.Equal(got, want) {
			t.Errorf("due: %v, %v, want %v", got, err, want)
		}
	}
	put := func(uid string, observation uint64) {
		t.Helper()
		if err := s.PutSandbox(Sandbox{UID: uid, Observation: observation}); err != nil {
			t.Fatal(err)
		}
	}
	ack := func(uid string, observation uint64) {
		t.Helper()
		if err := s.AckSandbox(uid, observation); err != nil {
			t.Fatal(err)
		}
	}
	put("b", 1)
	put("a", 1)
	put("silent", 0)
	due("a", "b")
	ack("a", 1)
	due("b")
	put("a", 2)
	due("a", "b")
	ack("a", 1) // late
	due("a", "b")
	ack("unknown", 7)
	ack("a", 2)
	ack("b", 1)
	due()
	if err := s.RemoveSandbox("b"); err != nil {
		t.Fatal(err)
	}
	put("c", 1)
	ack("c", 1)
	due()
	// What was acknowledged is in the file once it was closed.
	if err := errors.Join(s.Close(), s.Close()); err != nil {
		t.Fatal(err)
	}
	s = open(t, path, Options{})
	due()
	put("c", 2)
	due("c")
}

func TestCoordinatorEpochNeverGoesDown(t *testing.T) {
	s := open(t, filepath.Join(t.TempDir(), "s.db"), Options{})
	wantReason(t, s.AdmitCoordinator(0), errs.Fenced)
	if err := s.AdmitCoordinator(5); err != nil {
		t.Fatal(err)
	}
	wantReason(t, s.AdmitCoordinator(4), errs.Fenced)
	wantReason(t, s.SetSession(4, 1), errs.Fenced)
	if e, err := s.Epochs(); err != nil || e.Coordinator != 5 {
		t.Fatalf("%v %v", e, err)
	}
}

func TestCommandsAreKeptAndBounded(t *testing.T) {
	clock := time.Unix(100, 0)
	s := open(t, filepath.Join(t.TempDir(), "s.db"), Options{Commands: 3, Now: func() time.Time { clock = clock.Add(time.Second); return clock }})
	for i := range 5 {
		if err := s.PutCommand(Command{ID: fmt.Sprint(i), Kind: "k", Digest: "d", Result: []byte{byte(i)}}); err != nil {
			t.Fatal(err)
		}
	}
	for i := range 5 {
		cmd, ok, err := s.Command(fmt.Sprint(i), "k", "d")
		if err != nil || ok != (i >= 2) || (ok && cmd.Result[0] != byte(i)) {
			t.Fatalf("command %d: %v %v %v", i, cmd, ok, err)
		}
	}
	_, _, err := s.Command("4", "k", "other")
	wantReason(t, err, errs.OperationBodyMismatch)
}

// A clock that was set back does not make the newest result the first to go: the same command would run again.
func TestCommandsAreKeptInOrderAcrossAStepOfTheClock(t *testing.T) {
	clock := time.Unix(1_000_000, 0)
	s := open(t, filepath.Join(t.TempDir(), "s.db"), Options{Commands: 3, Now: func() time.Time { return clock }})
	for i, step := range []time.Duration{0, time.Second, time.Second, -time.Hour, 0, 2 * time.Hour, -time.Hour} {
		clock = clock.Add(step)
		if err := s.PutCommand(Command{ID: fmt.Sprint("c", 9-i), Kind: "k", Digest: "d"}); err != nil {
			t.Fatal(err)
		}
		for j := range i + 1 {
			if _, ok, err := s.Command(fmt.Sprint("c", 9-j), "k", "d"); err != nil || ok != (j > i-3) {
				t.Fatalf("after %d commands: command %d is there: %v (%v)", i+1, j+1, ok, err)
			}
		}
	}
}

// A result that waits is known, goes with the next write whatever that is about, or with Close, and only a
// crash before either forgets it.
func TestResultsThatWaitAreWrittenWithTheNext(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s.db")
	s := open(t, path, Options{})
	has := func(id string, want bool) {
		t.Helper()
		cmd, ok, err := s.Command(id, "k", "d")
		if err != nil || ok != want || ok && string(cmd.Result) != id {
			t.Fatalf("command %s: %+v %v %v", id, cmd, ok, err)
		}
	}
	later := func(id string) { s.PutCommandLater(Command{ID: id, Kind: "k", Digest: "d", Result: []byte(id)}) }
	crash := func() {
		t.Helper()
		copied, err := os.ReadFile(path)
		if err == nil {
			path = filepath.Join(t.TempDir(), "s.db")
			err = os.WriteFile(path, copied, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
		s = open(t, path, Options{})
	}
	later("a")
	has("a", true)
	_, _, err := s.Command("a", "k", "other")
	wantReason(t, err, errs.OperationBodyMismatch)
	crash()
	has("a", false)
	later("a")
	later("b")
	if err := s.PutVolume(Volume{UID: "v"}); err != nil {
		t.Fatal(err)
	}
	later("c")
	crash()
	has("a", true)
	has("b", true)
	has("c", false)
	later("d")
	if err := errors.Join(s.Close(), s.Close()); err != nil {
		t.Fatal(err)
	}
	s = open(t, path, Options{})
	has("d", true)
}

func TestSecondAgentdIsKeptOut(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s.db")
	open(t, path, Options{})
	_, err := Open(Options{Path: path, Node: "n1", LockTimeout: time.Millisecond})
	wantReason(t, err, errs.AlreadyAttached)
}

func TestFileOfAnotherNodeIsRefused(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s.db")
	open(t, path, Options{}).Close()
	_, err := Open(Options{Path: path, Node: "n2"})
	wantReason(t, err, errs.StateDamaged)
}

func TestDamagedFileIsRefusedAndKept(t *testing.T) {
	good := filepath.Join(t.TempDir(), "good.db")
	s := open(t, good, Options{})
	for i := range 200 {
		if err := s.PutSandbox(Sandbox{UID: fmt.Sprintf("%04d", i), Message: string(bytes.Repeat([]byte("x"), 500))}); err != nil {
			t.Fatal(err)
		}
	}
	s.Close()
	data, err := os.ReadFile(good)
	if err != nil {
		t.Fatal(err)
	}
	noise := bytes.Clone(data)
	for i := range noise {
		if i > 8192 {
			noise[i] ^= 0x5a
		}
	}
	for name, content := range map[string][]byte{
		"empty":     {},
		"text":      []byte("not a database at all, but some text"),
		"truncated": data[:len(data)/3],
		"metas":     append(make([]byte, 8192), data[8192:]...),
		"noise":     noise,
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "s.db")
			if err := os.WriteFile(path, content, 0o600); err != nil {
				t.Fatal(err)
			}
			_, err := Open(Options{Path: path, Node: "n1"})
			wantReason(t, err, errs.StateDamaged)
			if after, err := os.ReadFile(path); err != nil || !bytes.Equal(after, content) {
				t.Fatalf("the file was changed: %d bytes, were %d, %v", len(after), len(content), err)
			}
		})
	}
}

func TestMigrations(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s.db")
	open(t, path, Options{}).Close()
	db, err := bolt.Open(path, 0o600, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	version := func() (v string) {
		_ = db.View(func(tx *bolt.Tx) error { v = string(tx.Bucket(bucketMeta).Get(keyVersion)); return nil })
		return v
	}
	var ran []string
	step := func(name string, err error) migration {
		return func(tx *bolt.Tx) error {
			ran = append(ran, name)
			return errors.Join(tx.Bucket(bucketMeta).Put([]byte(name), nil), err)
		}
	}
	// A step that fails leaves the old file whole.
	wantReason(t, migrate(db, "n1", 3, []migration{step("two", nil), step("three", errors.New("no"))}), errs.InternalError)
	if version() != "1" {
		t.Fatalf("version %s after a failed migration", version())
	}
	ran = nil
	if err := migrate(db, "n1", 3, []migration{step("two", nil), step("three", nil)}); err != nil {
		t.Fatal(err)
	}
	if version() != "3" || fmt.Sprint(ran) != "[two three]" {
		t.Fatalf("version %s, ran %v", version(), ran)
	}
	// An older agentd leaves a newer file alone.
	wantReason(t, migrate(db, "n1", 1, nil), errs.NotSupported)
	db.Close()
	_, err = Open(Options{Path: path, Node: "n1"})
	wantReason(t, err, errs.NotSupported)
}

// A disk that is read-only is said to be, and not that the file is damaged: nobody is to move it away.
func TestF10ReadOnlyDisk(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "state.db")
	if err := open(t, path, Options{}).Close(); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount(dir, dir, "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	if err := unix.Mount(dir, dir, "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY, ""); err != nil {
		t.Fatal(err)
	}
	_, err := Open(Options{Path: path, Node: "n1"})
	wantReason(t, err, errs.InternalError)
	if !strings.Contains(err.Error(), "mount it writable") {
		t.Errorf("no way out: %v", err)
	}
}

// A record that is made anew counts its observations on from the removed one's, also in a file that was opened again, so that
// nothing of before is taken for it.
func TestObservationsOfARemovedRecordStayCounted(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s.db")
	s := open(t, path, Options{})
	last := func(want uint64) {
		t.Helper()
		if got, err := s.LastObservation(); err != nil || got != want {
			t.Fatalf("the last observation is %d, not %d (%v)", got, want, err)
		}
	}
	last(0)
	for uid, observation := range map[string]uint64{"a": 7, "b": 3} {
		if err := s.PutSandbox(Sandbox{UID: uid, Observation: observation}); err != nil {
			t.Fatal(err)
		}
	}
	last(0)
	for _, uid := range []string{"a", "b", "a", "none"} {
		if err := s.RemoveSandbox(uid); err != nil {
			t.Fatal(err)
		}
		last(7)
	}
	s.Close()
	s = open(t, path, Options{})
	last(7)
}
