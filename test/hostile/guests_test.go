package hostile

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"testing"
	"time"

	"github.com/dormouse-run/dormouse/pkg/client"
	"github.com/dormouse-run/dormouse/pkg/errs"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// TestHostileInitNeverStarts: guest inits that do not answer, end, or refuse. The start fails, typed.
func TestHostileInitNeverStarts(t *testing.T) {
	w := enter(t)
	var wg sync.WaitGroup
	for name, want := range map[string]errs.Reason{"silent": errs.GuestSilent, "exit": errs.SandboxFailed, "refuses": errs.NotSupported} {
		wg.Go(func() {
			_, err := w.try("hostile-"+name, nil)
			if errs.ReasonOf(err) != want {
				t.Errorf("%s: %v, want %s", name, err, want)
			}
			var e *errs.Error
			if errors.As(err, &e) && len(e.Message) > 2048 {
				t.Errorf("%s: a message of %d bytes", name, len(e.Message))
			}
		})
	}
	w.neighbour()
	wg.Wait()
}

// attacks are the guest inits that say hello.
var attacks = []string{"leaves", "closes", "deaf", "restless", "noise", "liar"}

// TestHostileInits: all of them at the same time, each used as a tenant of it may, and more.
func TestHostileInits(t *testing.T) {
	w := enter(t)
	boxes := make(map[string]*client.Sandbox)
	for _, name := range attacks {
		boxes[name] = w.create("hostile-"+name, nil)
	}
	var wg sync.WaitGroup
	for name, s := range boxes {
		for range 3 {
			wg.Go(func() { w.abuse(name, s) })
		}
		wg.Go(func() { w.checkpoint(name, s) })
	}
	for range 3 {
		w.neighbour()
	}
	wg.Wait()
	w.neighbour()
	w.eventually("the sandbox without its init has failed", func() bool {
		w.ok(boxes["leaves"].Refresh(w.ctx))
		st := boxes["leaves"].Last.GetStatus()
		return st.GetPhase() == dormousev1.SandboxPhase_SANDBOX_PHASE_FAILED && st.GetReason() == "Killed"
	})
	for _, s := range boxes {
		w.ok(s.Delete(w.ctx, ""))
	}
	w.neighbour()
}

// abuse makes every call that reaches a guest init. What comes of it is an answer or a typed error,
// in time, of bounded size.
func (w *world) abuse(name string, s *client.Sandbox) {
	calls := map[string]func(context.Context) error{
		"list": func(ctx context.Context) error { _, err := s.Processes(ctx); return err },
		"start": func(ctx context.Context) error {
			_, err := s.Start(ctx, &dormousev1.ProcessSpec{Argv: []string{"true"}}, "")
			return err
		},
		"wait":   func(ctx context.Context) error { _, err := s.Process("p").Wait(ctx); return err },
		"get":    func(ctx context.Context) error { return s.Process("p").Refresh(ctx) },
		"signal": func(ctx context.Context) error { return s.Process("p").Signal(ctx, 15, true) },
		"write":  func(ctx context.Context) error { return s.Process("p").Write(ctx, make([]byte, 30<<10), true) },
		"output": func(ctx context.Context) error {
			_, err := s.Process("p").Follow(ctx, &client.Output{Stdout: io.Discard, Stderr: io.Discard}, true)
			return err
		},
	}
	var wg sync.WaitGroup
	for what, call := range calls {
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(w.ctx, 3*time.Second)
			defer cancel()
			err := call(ctx)
			var e *errs.Error
			if err != nil && !errors.As(err, &e) {
				w.Errorf("%s, %s: %v", name, what, err)
			}
			if e != nil && len(e.Message) > 4096 {
				w.Errorf("%s, %s: a message of %d bytes", name, what, len(e.Message))
			}
		})
	}
	wg.Wait()
}

// checkpoint tries; a snapshot that there is must be of use or refused, and the sandbox goes on either way.
func (w *world) checkpoint(name string, s *client.Sandbox) {
	ctx, cancel := context.WithTimeout(w.ctx, time.Minute)
	defer cancel()
	snap, err := s.Checkpoint(ctx, &dormousev1.CheckpointSandboxRequest{})
	if err != nil {
		w.Logf("checkpoint of %s: %v", name, err)
		return
	}
	// What there is has to go, however long that takes; a restore that hangs ends with the guest's time to say hello.
	copied, err := snap.Restore(w.ctx, &dormousev1.RestoreSandboxRequest{Name: fmt.Sprintf("copy-of-%s", name)})
	w.Logf("restore of %s: %v", name, err)
	if err == nil {
		err = copied.Delete(w.ctx, "")
	}
	if errs.Has(err, errs.ArtefactDamaged) {
		w.Errorf("the snapshot of %s was published and cannot be read: %v", name, err)
	}
	if err := snap.Delete(w.ctx, ""); err != nil {
		w.Errorf("delete the snapshot of %s: %v", name, err)
	}
}
