package operations_test

import (
	"context"
	"encoding/json"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/dormouse-run/dormouse/coordinator/internal/operations"
	"github.com/dormouse-run/dormouse/coordinator/internal/placement"
	"github.com/dormouse-run/dormouse/coordinator/internal/records"
	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
	"github.com/dormouse-run/dormouse/pkg/uid"
	"github.com/dormouse-run/dormouse/pkg/volume"
)

// eventually polls until the condition holds.
func eventually(t *testing.T, what string, cond func() bool) {
	t.Helper()
	deadline := time.After(time.Minute)
	for !cond() {
		select {
		case <-deadline:
			t.Fatalf("never: %s", what)
		case <-time.After(time.Millisecond):
		}
	}
}

// inTime asks for something that does not end, each time for longer, until the time sufficed to learn more than
// that it was over.
func inTime(ask func(context.Context) error) error {
	for wait := 50 * time.Millisecond; ; wait *= 2 {
		ctx, cancel := context.WithTimeout(context.Background(), wait)
		err := ask(ctx)
		cancel()
		if !errs.Has(err, errs.DeadlineExpired) || wait > time.Minute {
			return err
		}
	}
}

func wantReason(t *testing.T, err error, want errs.Reason) {
	t.Helper()
	if !errs.Has(err, want) {
		t.Fatalf("got %v, want %s", err, want)
	}
}

func wantEnvelope(t *testing.T, err error, want errs.Reason) *errs.Error {
	t.Helper()
	wantReason(t, err, want)
	return errs.From(err)
}

func TestC24SameOperationSameSnapshotAlsoAfterRestart(t *testing.T) {
	w := newWorld(t)
	e := w.lead()
	u := madeSandbox(t, e)
	c, req := call(uid.New()), operations.CheckpointSandbox{UID: u, Name: "snap"}
	first := must(e.CheckpointSandbox(context.Background(), c, req))(t)
	e.stop()
	e = w.lead()
	defer e.stop()
	again := must(e.CheckpointSandbox(context.Background(), c, req))(t)
	a, _ := json.Marshal(first.Result)
	b, _ := json.Marshal(again.Result)
	if string(a) != string(b) || again.Result.Snapshot == nil || again.Result.Snapshot.Revision == 0 {
		t.Fatalf("first %s\nagain %s", a, b)
	}
	if len(w.node.snapshots) != 1 {
		t.Fatalf("the node has %d snapshots", len(w.node.snapshots))
	}
}

func TestC25SameOperationOtherBodyIsConflict(t *testing.T) {
	w := newWorld(t)
	e := w.lead()
	defer e.stop()
	c := call(uid.New())
	must(create("one")(context.Background(), e, c))(t)
	_, err := create("two")(context.Background(), e, c)
	env := wantEnvelope(t, err, errs.OperationBodyMismatch)
	if env.Code != errs.Conflict || env.Outcome != errs.NotStarted || env.Retry != errs.Never {
		t.Fatalf("%+v", env)
	}
	_, err = e.DeleteSandbox(context.Background(), c, operations.Delete{UID: uid.New()})
	wantReason(t, err, errs.OperationBodyMismatch)
}

func TestC26DeletingAReferencedVolumeNamesTheSnapshots(t *testing.T) {
	w := newWorld(t)
	e := w.lead()
	defer e.stop()
	ctx := context.Background()
	v := madeVolume(t, e, "data")
	box := madeSandbox(t, e, v)
	snap := madeSnapshot(t, e, box)
	_, err := e.DeleteVolume(ctx, call(""), operations.Delete{UID: v})
	if env := wantEnvelope(t, err, errs.AlreadyAttached); env.Details["holder"] != box {
		t.Fatalf("%v names %v", env, env.Details)
	}
	must(e.DeleteSandbox(ctx, call(""), operations.Delete{UID: box}))(t)
	_, err = e.DeleteVolume(ctx, call(""), operations.Delete{UID: v})
	if env := wantEnvelope(t, err, errs.StillReferenced); env.Details["references"] != snap || env.Details["count"] != "1" {
		t.Fatalf("%v names %v", env, env.Details)
	}
	must(e.DeleteSnapshot(ctx, call(""), operations.Delete{UID: snap}))(t)
	must(e.DeleteVolume(ctx, call(""), operations.Delete{UID: v}))(t)
	w.agree(e)
}

func TestC27StaleVolumeUID(t *testing.T) {
	w := newWorld(t)
	e := w.lead()
	defer e.stop()
	ctx := context.Background()
	old := madeVolume(t, e, "data")
	must(e.DeleteVolume(ctx, call(""), operations.Delete{UID: old}))(t)
	_, err := e.DeleteVolume(ctx, call(""), operations.Delete{UID: old})
	wantReason(t, err, errs.ObjectNotFound) // nobody has the name now
	heir := madeVolume(t, e, "data")
	if heir == old {
		t.Fatal("the uid was used again")
	}
	_, deleted := e.DeleteVolume(ctx, call(""), operations.Delete{UID: old})
	_, attached := create("box", old)(ctx, e, call(""))
	for _, err := range []error{deleted, attached} {
		env := wantEnvelope(t, err, errs.StaleUID)
		if env.Code != errs.Conflict || env.Outcome != errs.NotStarted || env.Retry != errs.Never || env.Details["current_uid"] != heir {
			t.Fatalf("%+v", env)
		}
	}
	h, err := w.store.Referrers(ctx, records.VolumeKey(tenant, heir), "", 10)
	if err != nil || h.Count != 0 {
		t.Fatalf("the new volume has holders %v, %v", h, err)
	}
	w.agree(e)
}

func TestSecondAttachmentNamesTheHolder(t *testing.T) {
	w := newWorld(t)
	e := w.lead()
	defer e.stop()
	v := madeVolume(t, e, "data")
	box := madeSandbox(t, e, v)
	_, err := create("", v)(context.Background(), e, call(""))
	if env := wantEnvelope(t, err, errs.AlreadyAttached); !strings.Contains(env.Details["holder"], box) {
		t.Fatalf("%v names %v", env, env.Details)
	}
	w.agree(e)
}

// Two commits make a sandbox: the one that accepts and places it, and the one that records that it runs
// and ends the operation.
func TestCreateIsTwoCommits(t *testing.T) {
	w := newWorld(t)
	e := w.lead()
	defer e.stop()
	for _, volumes := range [][]string{nil, {madeVolume(t, e, "data")}} {
		op := must(create("", volumes...)(context.Background(), e, call("")))(t)
		rec, err := w.store.Get(context.Background(), records.OperationKey(tenant, op.ID))
		if err != nil || rec.Revision != 2 {
			t.Fatalf("the operation is at revision %d: %v", rec.Revision, err)
		}
		made := op.Result.Sandboxes[0]
		rec, err = w.store.Get(context.Background(), records.SandboxKey(tenant, made.UID))
		if err != nil || rec.Revision != 2 || made.Revision != 2 || made.Status.Phase != sandbox.Running {
			t.Fatalf("the sandbox is at revision %d, the result says %d %s: %v", rec.Revision, made.Revision, made.Status.Phase, err)
		}
	}
	w.agree(e)
}

func TestSharedVolumes(t *testing.T) {
	w := newWorld(t)
	e := w.lead()
	defer e.stop()
	ctx := context.Background()
	op := must(e.CreateVolume(ctx, call(""), operations.CreateVolume{Spec: volume.Spec{Access: volume.SharedReadOnly}}))(t)
	s := spec(op.Plan.VolumeUID)
	_, err := e.CreateSandbox(ctx, call(""), operations.CreateSandbox{Spec: s})
	wantReason(t, err, errs.InvalidField)
	s.Volumes[0].ReadOnly = true
	var last string
	for range 2 {
		made := must(e.CreateSandbox(ctx, call(""), operations.CreateSandbox{Spec: s}))(t)
		last = made.Plan.Copies[0].SandboxUID
	}
	fork := must(e.ForkSandbox(ctx, call(""), operations.ForkSandbox{SandboxUID: last, Count: 2}))(t)
	if len(fork.Plan.Copies[0].Clones) != 0 {
		t.Fatal("a shared volume was copied")
	}
	w.agree(e)
}

func TestDeleteOvertakesStart(t *testing.T) {
	w := newWorld(t)
	e := w.lead()
	defer e.stop()
	ctx := context.Background()
	w.node.hold = make(chan struct{}) // never let go: only the deletion ends it
	c := call(uid.New())
	ended := make(chan error, 1)
	go func() {
		_, err := create("box")(ctx, e, c)
		ended <- err
	}()
	var u string
	eventually(t, "the sandbox is Starting", func() bool {
		page, err := w.store.List(ctx, catalog.Query{Kind: catalog.KindSandbox})
		if err != nil || len(page.Records) != 1 || page.Records[0].Phase != string(sandbox.Starting) {
			return false
		}
		u = page.Records[0].UID
		return true
	})
	must(e.DeleteSandbox(ctx, call(""), operations.Delete{UID: u}))(t)
	wantReason(t, <-ended, errs.WrongPhase)
	w.agree(e)
}

// A containerd that is being started again costs a moment, one that stays away the operation.
func TestContainerdAway(t *testing.T) {
	w := newWorld(t)
	e := w.lead()
	defer e.stop()
	for _, c := range []struct{ times, fails int }{{4, 0}, {1000, 1}} {
		left := c.times
		w.node.mu.Lock()
		w.node.away = func(string) error {
			if left--; left < 0 {
				return nil
			}
			return errs.New(errs.ContainerdAway, "containerd does not answer")
		}
		w.node.mu.Unlock()
		w.node.mu.Lock()
		w.node.calls = nil
		w.node.mu.Unlock()
		_, err := create("")(context.Background(), e, call(""))
		if ids := slices.Compact(slices.Clone(w.node.calls)); len(w.node.calls) < c.times && c.fails == 0 || len(ids) != 1 && c.fails == 0 {
			t.Fatalf("asked as %v", ids) // another id would not be known to have made what it made
		}
		if c.fails == 0 && err != nil {
			t.Fatalf("containerd was away %d times: %v", c.times, err)
		}
		if c.fails > 0 {
			_ = wantEnvelope(t, err, errs.ContainerdAway) // only the reason counts
		}
	}
}

func TestNodeAwayIsUnknownNotAbsent(t *testing.T) {
	w := newWorld(t)
	e := w.lead()
	defer e.stop()
	u := madeSandbox(t, e)
	w.node.mu.Lock()
	w.node.away = func(string) error { return errs.New(errs.NodeAway, "away").With("node", "n1") }
	w.node.mu.Unlock()
	c := call(uid.New())
	err := inTime(func(ctx context.Context) error {
		_, err := e.DeleteSandbox(ctx, c, operations.Delete{UID: u})
		return err
	})
	env := wantEnvelope(t, err, errs.NodeAway)
	if env.Outcome != errs.Unknown || env.Retry != errs.SameOperation || env.OperationID != c.OperationID {
		t.Fatalf("%+v", env)
	}
	rec, err := w.store.Get(context.Background(), records.SandboxKey(tenant, u))
	if err != nil || rec.Phase != string(sandbox.Deleting) {
		t.Fatalf("%v, %v", rec.Phase, err)
	}
	w.node.mu.Lock()
	w.node.away = nil
	w.node.mu.Unlock()
	must(e.DeleteSandbox(context.Background(), c, operations.Delete{UID: u}))(t)
	w.agree(e)
}

func TestSecretsStayInMemory(t *testing.T) {
	const secret = "hunter2-hunter2"
	w := newWorld(t)
	e := w.lead()
	ctx := context.Background()
	req := operations.CreateSandbox{Name: "box", Spec: spec(), SecretEnv: map[string]string{"TOKEN": secret}}
	must(e.CreateSandbox(ctx, call(""), req))(t)
	if w.node.secrets["TOKEN"] != secret {
		t.Fatal("the node did not get it")
	}
	for _, kind := range []catalog.Kind{catalog.KindSandbox, catalog.KindOperation, catalog.KindEvent} {
		page := must(w.store.List(ctx, catalog.Query{Kind: kind}))(t)
		for _, r := range page.Records {
			if strings.Contains(string(r.Body), secret) {
				t.Fatalf("%s holds the secret", r.Key)
			}
		}
	}
	// An operation that is resumed without its secrets fails, and says so.
	w.node.hold = make(chan struct{})
	req.Name = "late"
	c := call(uid.New())
	ended := make(chan error, 1)
	go func() {
		_, err := e.CreateSandbox(ctx, c, req)
		ended <- err
	}()
	eventually(t, "it is accepted", func() bool { _, err := e.Operation(ctx, tenant, c.OperationID); return err == nil })
	e.stop()
	wantReason(t, <-ended, errs.NoLeader)
	w.node.hold = nil
	e = w.lead()
	defer e.stop()
	eventually(t, "the operation fails", func() bool {
		op, err := e.Operation(ctx, tenant, c.OperationID)
		return err == nil && op.State == operations.Failed && op.Error.Reason == errs.SecretsLost
	})
	w.agree(e)
}

func TestNoNodeFitsSaysWhy(t *testing.T) {
	w := newWorld(t)
	w.nodes.all = append(w.nodes.all, placement.Node{Name: "n2", Allocatable: placement.Resources{CPUMillis: 1, MemoryBytes: 1}})
	w.nodes.all[0].Cordoned = true
	e := w.lead()
	defer e.stop()
	_, err := create("box")(context.Background(), e, call(""))
	env := wantEnvelope(t, err, errs.NoNodeFits)
	if env.Details["node.n1"] != "it is cordoned" || env.Details["node.n2"] == "" {
		t.Fatalf("%v", env.Details)
	}
	s := spec()
	s.Resources.MemoryRequestBytes = 1 << 50
	_, err = e.CreateSandbox(context.Background(), call(""), operations.CreateSandbox{Spec: s})
	wantReason(t, err, errs.AboveEveryNode)
	w.agree(e)
}

func TestOperationIDs(t *testing.T) {
	w := newWorld(t)
	e := w.lead()
	defer e.stop()
	_, err := create("")(context.Background(), e, call("not-a-uid"))
	wantReason(t, err, errs.InvalidField)
	_, err = create("")(context.Background(), e, call("01900000-0000-7000-8000-000000000000")) // of 2024
	wantReason(t, err, errs.OperationExpired)
}

func TestObservations(t *testing.T) {
	w := newWorld(t)
	e := w.lead()
	defer e.stop()
	ctx := context.Background()
	u := madeSandbox(t, e)
	code := int32(3)
	o := operations.Observation{UID: u, Tenant: tenant, Phase: sandbox.Stopped, ExitCode: &code, Reason: sandbox.ReasonError, Number: 100, Session: w.node.epoch}
	if err := e.Observe(ctx, "n1", o); err != nil {
		t.Fatal(err)
	}
	o.Number, o.Phase = 99, sandbox.Failed // older, and late
	if err := e.Observe(ctx, "n1", o); err != nil {
		t.Fatal(err)
	}
	sb := must(records.SandboxOf(must(w.store.Get(ctx, records.SandboxKey(tenant, u)))(t)))(t)
	if sb.Status.Phase != sandbox.Stopped || sb.Status.ExitCode == nil || *sb.Status.ExitCode != 3 {
		t.Fatalf("%+v", sb.Status)
	}
	if got := e.PlacedUIDs("n1"); len(got) != 0 {
		t.Fatalf("a stopped sandbox is counted: %v", got)
	}
	for _, r := range must(w.store.List(ctx, catalog.Query{Kind: catalog.KindEvent}))(t).Records {
		if ev := must(records.EventOf(r))(t); ev.Message != strings.TrimSpace(ev.Message) {
			t.Fatalf("an event's message has blanks around it: %+v", ev)
		}
	}
	o.Session--
	o.Number = 200
	wantReason(t, e.Observe(ctx, "n1", o), errs.Fenced)
	o.Session++
	wantReason(t, e.Observe(ctx, "n2", o), errs.WrongPhase) // it is on n1
	o.UID = uid.New()
	wantReason(t, e.Observe(ctx, "n1", o), errs.ObjectNotFound)
}

func TestLostReplyOfANodeIsAskedAgain(t *testing.T) {
	w := newWorld(t)
	cuts := 2
	w.node.away = func(verb string) error {
		if verb == "start" && cuts > 0 {
			cuts--
			return errs.Wrap(errCut, errs.ReplyLost, "the reply was lost")
		}
		return nil
	}
	e := w.lead()
	defer e.stop()
	u := madeSandbox(t, e)
	if len(w.node.calls) != 3 || w.node.calls[0] != w.node.calls[2] || !strings.HasSuffix(w.node.calls[0], "/start:"+u) {
		t.Fatalf("calls %v", w.node.calls)
	}
	w.agree(e)
}

func TestSweepForgetsOnlyWhatExpired(t *testing.T) {
	w := newWorld(t)
	later := time.Duration(0)
	w.now = func() time.Time { return time.Now().Add(later) }
	e := w.lead()
	defer e.stop()
	ctx := context.Background()
	u := madeSandbox(t, e)
	count := func(kind catalog.Kind) int {
		return len(must(w.store.List(ctx, catalog.Query{Kind: kind}))(t).Records)
	}
	for _, step := range []struct {
		later              time.Duration
		operations, events bool
	}{{0, true, true}, {2 * time.Hour, true, false}, {27 * time.Hour, false, false}} {
		later = step.later
		if err := e.Sweep(ctx); err != nil {
			t.Fatal(err)
		}
		if got := count(catalog.KindOperation) > 0; got != step.operations {
			t.Fatalf("after %s: operations are kept: %v", step.later, got)
		}
		if got := count(catalog.KindEvent) > 0; got != step.events {
			t.Fatalf("after %s: events are kept: %v", step.later, got)
		}
	}
	must(w.store.Get(ctx, records.SandboxKey(tenant, u)))(t)
}

func TestTooLargeToGrowIsRefusedAtTheDoor(t *testing.T) {
	w := newWorld(t)
	e := w.lead()
	defer e.stop()
	s := spec()
	s.Env = map[string]string{"BIG": strings.Repeat("x", 200<<10)}
	_, err := e.CreateSandbox(context.Background(), call(""), operations.CreateSandbox{Spec: s})
	wantReason(t, err, errs.LimitExceeded)
	s.Env["BIG"] = strings.Repeat("x", 180<<10)
	c := call(uid.New())
	for range 2 { // its result is too large to keep, and is read from the record
		op := must(e.CreateSandbox(context.Background(), c, operations.CreateSandbox{Spec: s}))(t)
		if made := must(e.Copies(context.Background(), op))(t); len(made) != 1 {
			t.Fatalf("made %v", made)
		}
	}
	w.agree(e)
}

// TestAnOperationIsWhereItsObjectIs: the record of an operation is copied to the node of what it made, also where that was
// not placed when the operation was accepted. A volume never is.
func TestAnOperationIsWhereItsObjectIs(t *testing.T) {
	w := newWorld(t)
	e := w.lead()
	defer e.stop()
	op := must(e.CreateVolume(context.Background(), call(""), operations.CreateVolume{Spec: volume.Spec{Access: volume.Exclusive}}))(t)
	rec, err := w.store.Get(context.Background(), records.OperationKey(tenant, op.ID))
	if err != nil || rec.Node == "" || rec.Node != op.Result.Volume.Status.Node {
		t.Errorf("the operation is on node %q, its volume on %q: %v", rec.Node, op.Result.Volume.Status.Node, err)
	}
}
