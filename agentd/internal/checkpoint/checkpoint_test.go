package checkpoint

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/dormouse-run/dormouse/agentd/internal/runtime"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/snapshot"
	"github.com/dormouse-run/dormouse/pkg/uid"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// box is a sandbox that notes what is done to it and fails where it is told to.
type box struct {
	mu     sync.Mutex
	calls  []string
	fail   map[string]error
	files  map[string]string
	saving func(ctx context.Context) error
}

func (b *box) note(what string) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.calls = append(b.calls, what)
	return b.fail[what]
}

func (b *box) Pause(context.Context, string) error  { return b.note("pause") }
func (b *box) Resume(context.Context, string) error { return b.note("resume") }
func (b *box) Save(ctx context.Context, _ string, o runtime.SaveOptions) error {
	if err := b.note(fmt.Sprintf("save direct=%t", o.Direct)); err != nil {
		return err
	}
	for name, content := range b.files {
		if err := os.WriteFile(filepath.Join(o.Dir, name), []byte(content), 0o644); err != nil {
			return err
		}
	}
	if b.saving != nil {
		return b.saving(ctx)
	}
	return nil
}

type line struct{ *box }

func (l line) Quiesce(context.Context) error { return l.note("quiesce") }
func (l line) Drain(context.Context) error   { return l.note("drain") }
func (l line) Resume(ctx context.Context) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return l.note("resume channel")
}

func newBox() *box {
	return &box{fail: map[string]error{}, files: map[string]string{"checkpoint.img": "state", "pages.img": "memory"}}
}

func (b *box) subject() Subject { return Subject{ID: "s", Machine: b, Channel: line{b}} }

func newStore(t *testing.T) *Store {
	t.Helper()
	s, err := OpenStore(StoreOptions{Root: filepath.Join(t.TempDir(), "snapshots"), Require: []string{"checkpoint.img", "pages.img"}})
	must(t, err)
	return s
}

func manifest() *Manifest {
	return &Manifest{UID: uid.New(), Tenant: "t", SourceSandboxUID: "s", Spec: &specs.Spec{Version: "1.2.0"}, Architecture: "amd64"}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func wantReason(t *testing.T, err error, want errs.Reason) {
	t.Helper()
	if errs.ReasonOf(err) != want {
		t.Fatalf("got %v, want reason %s", err, want)
	}
}

func wantEmpty(t *testing.T, s *Store) {
	t.Helper()
	o, err := s.Observe()
	must(t, err)
	if len(o.Published)+len(o.Staging)+len(o.Trash) > 0 {
		t.Fatalf("left: %+v", o)
	}
}

func TestTheSequenceOfACapture(t *testing.T) {
	s, b, m := newStore(t), newBox(), manifest()
	must(t, NewCapturer(s, 1, true).Capture(context.Background(), b.subject(), m, 0))
	want := []string{"quiesce", "pause", "drain", "save direct=true", "resume", "resume channel"}
	if !slices.Equal(b.calls, want) {
		t.Fatalf("got %v, want %v", b.calls, want)
	}
	got, err := s.Load(m.UID)
	must(t, err)
	if got.SizeBytes != int64(len("state")+len("memory")) || len(got.Files) != 2 || got.Freeze <= 0 || got.FrozenAt.IsZero() || got.Version != ManifestVersion {
		t.Fatalf("%+v", got)
	}
	must(t, filepath.WalkDir(s.Path(m.UID), func(path string, d os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if want := map[bool]os.FileMode{true: 0o700, false: 0o600}[d.IsDir()]; err != nil || info.Mode().Perm() != want {
			t.Errorf("%s has mode %v, want %v", path, info.Mode().Perm(), want)
		}
		return err
	}))
	// A second capture into the same uid is refused before the sandbox is touched, and costs nothing.
	b.calls = nil
	wantReason(t, NewCapturer(s, 1, true).Capture(context.Background(), b.subject(), &Manifest{UID: m.UID}, 0), errs.NameTaken)
	if _, err := s.Load(m.UID); err != nil || len(b.calls) != 0 {
		t.Fatalf("%v %v", err, b.calls)
	}
	must(t, s.Delete(m.UID))
	must(t, s.Delete(m.UID))
	wantEmpty(t, s)
	// Folders that somebody removed are made again: an undo is not to fail for ever.
	for _, name := range []string{stagingName, trashName} {
		must(t, os.Remove(s.dir(name)))
	}
	must(t, s.Delete(m.UID))
	wantEmpty(t, s)
	must(t, os.Remove(s.dir(stagingName)))
	must(t, second(s.stage(m.UID)))
	must(t, s.Delete(m.UID))
	wantEmpty(t, s)
	wantReason(t, second(s.Load(m.UID)), errs.ObjectNotFound)
}

func second[T any](_ T, err error) error { return err }

// TestB05EveryFailureEndsInResume: also that of a disk that fills while the memory is written.
func TestB05EveryFailureEndsInResume(t *testing.T) {
	full := errs.Wrap(unix.ENOSPC, errs.DiskFull, "the disk is full")
	for what, after := range map[string][]string{
		"quiesce":           {"resume channel"},
		"pause":             {"resume", "resume channel"},
		"drain":             {"resume", "resume channel"},
		"save direct=false": {"resume", "resume channel"},
	} {
		t.Run(what, func(t *testing.T) {
			s, b, m := newStore(t), newBox(), manifest()
			b.fail[what] = full
			wantReason(t, NewCapturer(s, 1, false).Capture(context.Background(), b.subject(), m, 0), errs.DiskFull)
			i := slices.Index(b.calls, what)
			if !slices.Equal(b.calls[i+1:], after) {
				t.Fatalf("after %s: %v, want %v", what, b.calls[i+1:], after)
			}
			wantEmpty(t, s)
		})
	}
	t.Run("the caller goes away", func(t *testing.T) {
		s, b, m := newStore(t), newBox(), manifest()
		ctx, cancel := context.WithCancel(context.Background())
		b.saving = func(ctx context.Context) error { cancel(); return ctx.Err() }
		if err := NewCapturer(s, 1, false).Capture(ctx, b.subject(), m, 0); !errors.Is(err, context.Canceled) {
			t.Fatal(err)
		}
		if !slices.Equal(b.calls[len(b.calls)-2:], []string{"resume", "resume channel"}) {
			t.Fatalf("%v", b.calls)
		}
		wantEmpty(t, s)
	})
	t.Run("no room", func(t *testing.T) {
		s, b, m := newStore(t), newBox(), manifest()
		wantReason(t, NewCapturer(s, 1, false).Capture(context.Background(), b.subject(), m, 1<<60), errs.DiskFull)
		if len(b.calls) != 0 {
			t.Fatalf("the sandbox was touched: %v", b.calls)
		}
		if s.reserved != 0 {
			t.Fatalf("%d bytes are still reserved", s.reserved)
		}
		wantEmpty(t, s)
	})
	t.Run("not resumed", func(t *testing.T) {
		s, b, m := newStore(t), newBox(), manifest()
		b.fail["resume"] = errors.New("broken")
		var lost *NotResumedError
		if err := NewCapturer(s, 1, false).Capture(context.Background(), b.subject(), m, 0); !errors.As(err, &lost) {
			t.Fatal(err)
		}
		wantEmpty(t, s)
	})
}

// TestNothingIncompleteIsPublished: what the runtime wrote is checked after the sandbox runs again.
func TestNothingIncompleteIsPublished(t *testing.T) {
	for name, change := range map[string]func(map[string]string){
		"missing": func(f map[string]string) { delete(f, "pages.img") },
		"empty":   func(f map[string]string) { f["checkpoint.img"] = "" },
	} {
		t.Run(name, func(t *testing.T) {
			s, b, m := newStore(t), newBox(), manifest()
			change(b.files)
			wantReason(t, NewCapturer(s, 1, false).Capture(context.Background(), b.subject(), m, 0), errs.ArtefactDamaged)
			if b.calls[len(b.calls)-1] != "resume channel" {
				t.Fatalf("%v", b.calls)
			}
			wantEmpty(t, s)
		})
	}
}

func TestOnlyAFewAreCapturedAtATime(t *testing.T) {
	s := newStore(t)
	c := NewCapturer(s, 2, false)
	inside, release := make(chan struct{}, 8), make(chan struct{})
	var group sync.WaitGroup
	failed := make(chan error, 4)
	for range 4 {
		b := newBox()
		b.saving = func(context.Context) error { inside <- struct{}{}; <-release; return nil }
		group.Go(func() { failed <- c.Capture(context.Background(), b.subject(), manifest(), 0) })
	}
	<-inside
	<-inside
	// Both slots are taken: a third, whose time is up, has not begun and says so.
	gone, cancel := context.WithCancel(context.Background())
	cancel()
	b := newBox()
	err := c.Capture(gone, b.subject(), manifest(), 0)
	if !errs.NotStartedFor(err) || len(b.calls) != 0 {
		t.Fatalf("%v %v", err, b.calls)
	}
	if len(inside) != 0 {
		t.Fatal("more than two at a time")
	}
	close(release)
	group.Wait()
	for range 4 {
		must(t, <-failed)
	}
}

// waits says when its holder begins to wait for its end.
type waits struct {
	context.Context
	begun chan struct{}
	once  sync.Once
}

func (w *waits) Done() <-chan struct{} {
	w.once.Do(func() { close(w.begun) })
	return w.Context.Done()
}

func TestL02TheWaitForATurnIsToldApart(t *testing.T) {
	c := NewCapturer(newStore(t), 1, false)
	var none time.Duration
	leave, err := c.enter(context.Background(), &none)
	must(t, err)
	ctx := &waits{Context: context.Background(), begun: make(chan struct{})}
	m, done := manifest(), make(chan error, 1)
	go func() { done <- c.Capture(ctx, newBox().subject(), m, 0) }()
	<-ctx.begun
	leave()
	must(t, <-done)
	if st := m.Status(); st.Queued <= 0 || st.Service < st.Freeze || st.Freeze <= 0 {
		t.Errorf("waited %s, worked %s, frozen %s", st.Queued, st.Service, st.Freeze)
	}
}

func TestDamagedArtefactsAreRefused(t *testing.T) {
	for name, damage := range map[string]func(dir string) error{
		"truncated": func(dir string) error { return os.Truncate(filepath.Join(dir, "pages.img"), 1) },
		"removed":   func(dir string) error { return os.Remove(filepath.Join(dir, "pages.img")) },
		"manifest":  func(dir string) error { return os.WriteFile(filepath.Join(dir, manifestName), []byte("{"), 0o600) },
		"unnamed":   func(dir string) error { return os.Remove(filepath.Join(dir, manifestName)) },
		"a folder":  func(dir string) error { return os.Mkdir(filepath.Join(dir, "x"), 0o700) },
		"another's": func(dir string) error {
			data, err := json.Marshal(manifest())
			return errors.Join(err, os.WriteFile(filepath.Join(dir, manifestName), data, 0o600))
		},
	} {
		t.Run(name, func(t *testing.T) {
			s, m := newStore(t), manifest()
			must(t, NewCapturer(s, 1, false).Capture(context.Background(), newBox().subject(), m, 0))
			must(t, damage(s.Path(m.UID)))
			wantReason(t, second(s.Load(m.UID)), errs.ArtefactDamaged)
		})
	}
	wantReason(t, second(newStore(t).Load("../../etc")), errs.InvalidField)
}

// TestReadDirect: large and not cached is read past the page cache.
func TestReadDirect(t *testing.T) {
	s := newStore(t)
	s.opts.Direct = true
	m := manifest()
	must(t, os.Mkdir(s.dir(m.UID), 0o700))
	path := filepath.Join(s.dir(m.UID), "pages.img")
	must(t, os.WriteFile(path, make([]byte, directFrom), 0o600))
	m.SizeBytes, m.Files = directFrom, []snapshot.File{{Name: "checkpoint.img", SizeBytes: 1}, {Name: "pages.img", SizeBytes: directFrom}}
	if s.ReadDirect(m) {
		t.Error("a cached artefact is read past the cache")
	}
	f, err := os.Open(path)
	must(t, err)
	defer f.Close()
	must(t, f.Sync())
	must(t, unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED))
	if !s.ReadDirect(m) {
		t.Error("an artefact that is not cached is read through the cache")
	}
	if m.SizeBytes--; s.ReadDirect(m) {
		t.Error("a small artefact is read past the cache")
	}
}

// TestDropCache: what a restore has read is given back, and what is being saved is left alone.
func TestDropCache(t *testing.T) {
	s := newStore(t)
	s.opts.Direct = true
	m := manifest()
	must(t, os.Mkdir(s.dir(m.UID), 0o700))
	f, err := os.Create(filepath.Join(s.dir(m.UID), "pages.img"))
	must(t, err)
	defer f.Close()
	must(t, f.Truncate(directFrom))
	_, err = f.Write(make([]byte, directFrom))
	must(t, err)
	must(t, f.Sync())
	m.SizeBytes, m.Files = directFrom, []snapshot.File{{Name: "pages.img", SizeBytes: directFrom}}
	if s.ReadDirect(m) {
		t.Fatal("it is not cached at all")
	}
	files, err := s.DropCache(t.Context())
	must(t, err)
	if files != 1 || !s.ReadDirect(m) {
		t.Errorf("%d files, and its pages are still cached", files)
	}
}

func TestSweepRemovesWhatACrashLeft(t *testing.T) {
	s, m := newStore(t), manifest()
	must(t, NewCapturer(s, 1, false).Capture(context.Background(), newBox().subject(), m, 0))
	for _, dir := range []string{s.dir(stagingName, uid.New()), s.dir(trashName, uid.New())} {
		must(t, os.Mkdir(dir, 0o700))
		must(t, os.WriteFile(filepath.Join(dir, "pages.img"), []byte("x"), 0o600))
	}
	must(t, s.Sweep())
	o, err := s.Observe()
	must(t, err)
	if !slices.Equal(o.Published, []string{m.UID}) || len(o.Staging)+len(o.Trash) > 0 {
		t.Fatalf("%+v", o)
	}
}

func TestB07VolumesHaveToFit(t *testing.T) {
	m := manifest()
	m.Volumes = []snapshot.VolumeReference{{VolumeUID: "a", Path: "/a"}, {VolumeUID: "b", Path: "/b", ReadOnly: true}}
	good := []snapshot.VolumeReference{{VolumeUID: "x", Path: "/b", ReadOnly: true}, {VolumeUID: "y", Path: "/a"}}
	must(t, m.CheckVolumes(good))
	for name, asked := range map[string][]snapshot.VolumeReference{
		"less": good[:1], "more": append(slices.Clone(good), snapshot.VolumeReference{Path: "/c"}), "twice": {good[0], good[0]},
		"access": {{Path: "/b"}, good[1]},
	} {
		err := m.CheckVolumes(asked)
		wantReason(t, err, errs.InvalidField)
		if !strings.Contains(err.Error(), "/") {
			t.Errorf("%s: the path is not named: %v", name, err)
		}
	}
}

func TestCPUFeaturesAreThoseOfEveryCPU(t *testing.T) {
	got := parseCPUInfo("processor: 0\nflags\t\t: fpu sse avx\n\nprocessor: 1\nflags : sse fpu\n")
	if !slices.Equal(got, []string{"fpu", "sse"}) {
		t.Fatalf("%v", got)
	}
	real, err := CPUFeatures()
	if err != nil || len(real) == 0 {
		t.Fatalf("%v %v", real, err)
	}
}
