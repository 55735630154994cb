package integration

import (
	"fmt"
	"strings"
	"testing"

	"github.com/dormouse-run/dormouse/pkg/client"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/uid"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
	"github.com/dormouse-run/dormouse/test/cluster"
)

const (
	running = dormousev1.SandboxPhase_SANDBOX_PHASE_RUNNING
	paused  = dormousev1.SandboxPhase_SANDBOX_PHASE_PAUSED
)

// phase reads the recorded phase.
func (w *world) phase(s *client.Sandbox) dormousev1.SandboxPhase {
	w.Helper()
	w.ok(s.Refresh(w.ctx))
	return s.Last.GetStatus().GetPhase()
}

// is checks an answer and what is recorded.
func (w *world) is(s *client.Sandbox, want dormousev1.SandboxPhase) {
	w.Helper()
	answered := s.Last.GetStatus().GetPhase()
	if recorded := w.phase(s); answered != want || recorded != want {
		w.Fatalf("answered %s, recorded %s, want %s", answered, recorded, want)
	}
}

// counting is a program that counts in memory and in a file.
const counting = `i=0; while :; do i=$((i+1)); echo $i >/tmp/n; usleep 10000; done`

// TestB08EditsPersistOverPauses: pause, resume, edit, five times.
func TestB08EditsPersistOverPauses(t *testing.T) {
	w := enter(t)
	s := w.create(w.spec("sh", "-c", counting))
	for i := range 5 {
		w.ok(s.Pause(w.ctx, ""))
		w.is(s, paused)
		w.ok(s.Resume(w.ctx, ""))
		w.is(s, running)
		w.sh(s, fmt.Sprintf("echo %d >>/etc/edits; mkdir /srv/%d 2>/dev/null || mkdir -p /srv/%d", i, i, i))
	}
	w.ok(s.Pause(w.ctx, ""))
	w.ok(s.Resume(w.ctx, ""))
	if got := w.sh(s, "cat /etc/edits | tr '\n' ' '; ls /srv | tr '\n' ' '"); got != "0 1 2 3 4 0 1 2 3 4 " {
		t.Fatalf("what is left of the edits: %q", got)
	}
}

// TestB13PauseThenResumeAtOnce: the reported state is the runtime's, each time.
func TestB13PauseThenResumeAtOnce(t *testing.T) {
	w := enter(t)
	s := w.create(w.spec("sh", "-c", counting))
	for i := range 25 {
		w.ok(s.Pause(w.ctx, ""))
		if got := s.Last.GetStatus().GetPhase(); got != paused {
			t.Fatalf("round %d: paused it is %s", i, got)
		}
		w.ok(s.Resume(w.ctx, ""))
		if got := s.Last.GetStatus().GetPhase(); got != running {
			t.Fatalf("round %d: resumed it is %s", i, got)
		}
		if got := w.sh(s, "echo here"); got != "here" {
			t.Fatalf("round %d: it says %q", i, got)
		}
	}
	w.is(s, running)
}

// TestAPausedSandboxStandsStill: it does nothing, says what to do, and outlives a kill of its agentd as it is; a program with a memory goes on
// where it was.
func TestAPausedSandboxStandsStill(t *testing.T) {
	w := enter(t)
	s := w.create(w.spec("sh", "-c", counting))
	w.await("it counts", func() error {
		out, err := cluster.Exec(w.ctx, s, "cat", "/tmp/n")
		if err == nil && strings.TrimSpace(string(out)) == "" {
			err = errs.New(errs.InternalError, "not yet")
		}
		return err
	})
	id := uid.New()
	w.ok(s.Pause(w.ctx, id))
	w.ok(s.Pause(w.ctx, id)) // the same answer
	w.is(s, paused)
	w.ok(s.Pause(w.ctx, ""))
	refused := func() {
		_, err := cluster.Exec(w.ctx, s, "true")
		if e := w.refusal(err, errs.SandboxPaused); !strings.Contains(e.Message, "resume") {
			t.Errorf("it does not say what to do: %v", e)
		}
	}
	refused()
	w.restartAgentd(w.nodeOf(s))
	w.nodesOnline()
	w.is(s, paused)
	refused()

	// A snapshot of it can be taken; it stays paused.
	snap := w.checkpoint(s)
	w.is(s, paused)
	copied, err := snap.Restore(w.ctx, &dormousev1.RestoreSandboxRequest{})
	w.ok(err)
	if got := w.sh(copied, "cat /tmp/n"); got == "" {
		t.Error("the copy does not count")
	}
	w.ok(s.Resume(w.ctx, ""))
	w.is(s, running)
	w.ok(s.Resume(w.ctx, ""))

	// Deletion works from here too.
	w.ok(s.Pause(w.ctx, ""))
	w.ok(s.Delete(w.ctx, ""))
	w.refused(s.Pause(w.ctx, ""), errs.ObjectNotFound)
}

// TestPauseOverREST: the routes are there and answer with the object.
func TestPauseOverREST(t *testing.T) {
	w := enter(t)
	s := w.create(w.spec())
	for _, turn := range []struct{ verb, phase string }{{"pause", "SANDBOX_PHASE_PAUSED"}, {"resume", "SANDBOX_PHASE_RUNNING"}} {
		a := w.rest(w.key, "POST", "/v1/sandboxes/"+s.UID+":"+turn.verb, "{}")
		if a.status != 200 || !strings.Contains(string(a.body), turn.phase) {
			t.Fatalf("%s: %d %s", turn.verb, a.status, a.body)
		}
	}
	w.refusedREST(w.rest(w.key, "POST", "/v1/sandboxes/"+uid.New()+":pause", "{}"), errs.ObjectNotFound)
}
