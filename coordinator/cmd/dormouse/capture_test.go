package main

import (
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/dormouse-run/dormouse/pkg/errs"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// changes are the mutations that were asked for, by their short names, and whether each had an operation id of its own.
func (f *fake) changes(t *testing.T) []string {
	t.Helper()
	f.mu.Lock()
	defer f.mu.Unlock()
	var names []string
	ids := map[string]bool{}
	for _, r := range f.requests {
		name := string(r.ProtoReflect().Descriptor().Name())
		op, isChange := r.(interface {
			proto.Message
			GetOperationId() string
		})
		if !isChange {
			continue
		}
		if id := op.GetOperationId(); id == "" || ids[id] {
			t.Errorf("%s has the operation id %q", name, id)
		} else {
			ids[id] = true
		}
		names = append(names, strings.TrimSuffix(name, "SandboxRequest"))
	}
	f.requests = nil
	return names
}

// checkpoint --hibernate is three calls: the snapshot is of the instant from which the sandbox goes on. What fails leaves the
// sandbox as it was, and a snapshot that was taken is told all the same.
func TestCheckpointAndHibernate(t *testing.T) {
	const (
		running    = dormousev1.SandboxPhase_SANDBOX_PHASE_RUNNING
		paused     = dormousev1.SandboxPhase_SANDBOX_PHASE_PAUSED
		hibernated = dormousev1.SandboxPhase_SANDBOX_PHASE_HIBERNATED
	)
	full := errs.New(errs.DiskFull, "the disk is full")
	for name, c := range map[string]struct {
		before  dormousev1.SandboxPhase
		fail    map[string]error
		changes string
		after   dormousev1.SandboxPhase
		code    int
		out     string
		err     string
	}{
		"running":                        {running, nil, "Pause Checkpoint Hibernate", hibernated, 0, uidAt(2) + "\n", ""},
		"paused":                         {paused, nil, "Pause Checkpoint Hibernate", hibernated, 0, uidAt(2) + "\n", ""},
		"no pause":                       {running, map[string]error{"PauseSandbox": full}, "Pause", running, 1, "", "DISK_FULL"},
		"no snapshot":                    {running, map[string]error{"CheckpointSandbox": full}, "Pause Checkpoint Resume", running, 1, "", "DISK_FULL"},
		"no snapshot of a paused one":    {paused, map[string]error{"CheckpointSandbox": full}, "Pause Checkpoint", paused, 1, "", "DISK_FULL"},
		"no hibernation":                 {running, map[string]error{"HibernateSandbox": full}, "Pause Checkpoint Hibernate Resume", running, 1, uidAt(2) + "\n", "DISK_FULL"},
		"no hibernation of a paused one": {paused, map[string]error{"HibernateSandbox": full}, "Pause Checkpoint Hibernate", paused, 1, uidAt(2) + "\n", "DISK_FULL"},
		"it failed for good": {running, map[string]error{"HibernateSandbox": errs.New(errs.DeadlineExpired, "late").AsAnswer().WithOutcome(errs.Unknown, errs.Never)},
			"Pause Checkpoint Hibernate Resume", running, 124, uidAt(2) + "\n", "DEADLINE_EXPIRED"},
		"nobody knows": {running, map[string]error{"HibernateSandbox": errs.New(errs.ReplyLost, "lost").WithOutcome(errs.Unknown, errs.Never)},
			"Pause Checkpoint Hibernate", paused, 5, uidAt(2) + "\n", "REPLY_LOST"},
		"it stays paused": {running, map[string]error{"CheckpointSandbox": full, "ResumeSandbox": errs.New(errs.StateDamaged, "damaged")},
			"Pause Checkpoint Resume", paused, 1, "", uidAt(1) + " may still be paused"},
	} {
		t.Run(name, func(t *testing.T) {
			f := serve(t)
			f.fail = c.fail
			s := f.add("box", nil, nil)
			s.Status.Phase = c.before
			r := dormouse(t, "checkpoint", "--hibernate", "box")
			if r.code != c.code || r.out != c.out || !strings.Contains(r.err, c.err) {
				t.Errorf("%+v", r)
			}
			if got := f.changes(t); !slices.Equal(got, strings.Fields(c.changes)) {
				t.Errorf("asked %v", got)
			}
			if got := s.GetStatus().GetPhase(); got != c.after {
				t.Errorf("it is %s", got)
			}
		})
	}
}
