package robustness

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dormouse-run/dormouse/pkg/client"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/uid"
	"github.com/dormouse-run/dormouse/pkg/wait"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// Shape of the traffic.
const (
	workers = 12
	cells   = 8
	// budget of one call.
	budget = 8 * time.Second
	// patience is how long an operation of unknown outcome is asked for, and a fault waits for what it needs.
	patience = 3 * time.Minute
	// leaves is how many operations of a cell may stay of unknown outcome: each doubles what the checker has to think of, at least.
	leaves = 2
)

// Labels of what the traffic makes.
const labelOp, labelCell = "op", "cell"

// names that objects of a cell may have. They are few, so that they are given again.
var names = []string{"a", "b"}

// traffic is what clients do.
type traffic struct {
	world *world
	history
	count atomic.Int64 // operations that were answered, or are of unknown outcome
	quota int64        // of those
	// patience is how long an operation of unknown outcome is asked for.
	patience time.Duration

	// era counts the words of operators: what came before may have its name for ever, so that others are given after.
	era  atomic.Int64
	gate sync.RWMutex // held for writing while there is to be no traffic

	mu     sync.Mutex
	left   [cells]int // operations of unknown outcome
	latest time.Duration
	gaps   []window // between mutations that succeeded
}

func newTraffic(w *world, quota int64) *traffic {
	return &traffic{world: w, history: *newHistory(), quota: quota, patience: patience}
}

// succeededAt keeps the times in which no mutation succeeded.
func (t *traffic) succeededAt(now time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if now > t.latest {
		t.gaps = append(t.gaps, window{t.latest, now})
		t.latest = now
	}
}

// worker does operations until there were enough and the faults are over.
func (t *traffic) worker(ctx context.Context, n int, rng *rand.Rand, done <-chan struct{}) {
	for ctx.Err() == nil && !t.hopeless() {
		select {
		case <-done:
			if t.count.Load() >= t.quota {
				return
			}
		default:
		}
		t.gate.RLock()
		outcome := t.one(ctx, n, rng)
		t.gate.RUnlock()
		if outcome == NotStarted {
			_ = wait.For(ctx, 20*time.Millisecond+rand.N(30*time.Millisecond))
			continue
		}
		t.count.Add(1)
	}
}

// weights of the kinds.
var weights = []struct {
	kind  Kind
	share int
}{
	{CreateVolume, 9}, {Attach, 14}, {Publish, 17}, {Detach, 8}, {DeleteSnapshot, 11}, {DeleteVolume, 7}, {GetVolume, 12},
	{GetSandbox, 6}, {GetSnapshot, 5}, {ListVolumes, 2}, {ListSandboxes, 2}, {ListSnapshots, 2}, {Replay, 4}, {ReplayOther, 1},
}

func choose(rng *rand.Rand) Kind {
	all := 0
	for _, w := range weights {
		all += w.share
	}
	n := rng.IntN(all)
	for _, w := range weights {
		if n -= w.share; n < 0 {
			return w.kind
		}
	}
	panic("the shares add up")
}

// about tells which kind of object an operation is about.
func about(k Kind) objectKind {
	switch k {
	case CreateVolume, Attach, DeleteVolume, GetVolume, ListVolumes:
		return volumeKind
	case Publish, Detach, GetSandbox, ListSandboxes:
		return sandboxKind
	}
	return snapshotKind
}

// name is one that may be given now.
func (t *traffic) name(n int) string {
	if era := t.era.Load(); era > 0 {
		return names[n] + strconv.FormatInt(era, 10)
	}
	return names[n]
}

// one does one operation. The same seed makes the same choices; what they meet depends on the others.
func (t *traffic) one(ctx context.Context, worker int, rng *rand.Rand) Outcome {
	r := &Record{Worker: worker, Cell: rng.IntN(cells), Kind: choose(rng), Op: uid.New()}
	via, pick, stale, resolves, name := rng.IntN(coordinators), rng.IntN(1<<20), rng.IntN(5) == 0, rng.IntN(10) < 8, t.name(rng.IntN(len(names)))
	if r.Kind == Replay || r.Kind == ReplayOther {
		return t.again(ctx, r, via, pick)
	}
	switch r.Kind {
	case CreateVolume, ListVolumes:
		r.Name = name
	case ListSandboxes:
	case ListSnapshots:
		r.Cell = -1 // of all
	default:
		living, dead := t.targets(about(r.Kind), r.Cell)
		if !reads(r.Kind) {
			living, dead = slices.DeleteFunc(living, isShunned), slices.DeleteFunc(dead, isShunned)
		}
		from := living
		if stale && len(dead) > 0 || len(living) == 0 {
			from = dead
		}
		if len(from) == 0 { // there is nothing yet
			r.Kind, r.Name = CreateVolume, name
			break
		}
		o := from[pick%min(len(from), 4)]
		r.Target, r.TargetUID = o.op, o.uid
		if r.Kind == Attach {
			r.Name = name
		}
	}
	t.begin(r)
	t.do(ctx, r, via, resolves)
	return r.Outcome
}

func isShunned(o object) bool { return o.shunned }

// do makes the call and, where its outcome is unknown, asks for it again.
func (t *traffic) do(ctx context.Context, r *Record, via int, resolves bool) {
	until, cancel := context.WithTimeout(ctx, t.patience)
	defer cancel()
	for {
		r.Attempts++
		var answer Record
		err := t.call(ctx, via, r, &answer)
		outcome := classify(r.Kind, err)
		if outcome == Unknown && !t.leave(r, resolves) && until.Err() == nil {
			_ = wait.For(ctx, 50*time.Millisecond)
			via = (via + 1) % coordinators
			continue
		}
		if r.Attempts > 1 && outcome == NotStarted && until.Err() == nil { // this answer is of the last attempt alone
			_ = wait.For(ctx, 50*time.Millisecond)
			via = (via + 1) % coordinators
			continue
		}
		if r.Attempts > 1 && (outcome == NotStarted || outcome == Refused) {
			outcome = Unknown // an earlier one may still be on its way
		}
		if e := errs.From(err); e != nil && e.Code == errs.InvalidArgument {
			t.blame("%s is no request: %v", r, err)
		}
		t.end(r, func() {
			r.Outcome, r.UID, r.Seen, r.Absent = outcome, answer.UID, answer.Seen, answer.Absent
			if e := errs.From(err); e != nil {
				r.Reason, r.Message, r.Details = string(e.Reason), e.Message, e.Details
			}
		})
		if outcome == OK && !reads(r.Kind) {
			t.succeededAt(r.Return)
		}
		return
	}
}

// leave tells whether the operation stays of unknown outcome.
func (t *traffic) leave(r *Record, resolves bool) bool {
	if reads(r.Kind) {
		return true // there is nothing to learn
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if resolves || t.left[r.Cell] >= leaves {
		return false
	}
	t.left[r.Cell]++
	return true
}

func reads(k Kind) bool {
	switch k {
	case GetVolume, GetSandbox, GetSnapshot, ListVolumes, ListSandboxes, ListSnapshots:
		return true
	}
	return false
}

// excuses are why a catalog that is away, or being rebuilt, answers nothing.
var excuses = []errs.Reason{errs.CatalogRewound, errs.StoreUnavailable, errs.NoLeader, errs.NodeAway, errs.Fenced, errs.ReplyLost, errs.DeadlineExpired,
	errs.CallCancelled, errs.QueueFull, errs.ShuttingDown, errs.NoNodeFits}

// typed checks that what was not done in the window, nor refused for a reason of its own, was told one that says so.
func (t *traffic) typed(w window) {
	t.history.mu.Lock()
	defer t.history.mu.Unlock()
	for _, r := range t.records {
		if r.Call < w.from || r.Return == 0 || r.Return > w.to || r.Outcome != NotStarted && r.Outcome != Unknown {
			continue
		}
		if r.Reason != "" && !slices.Contains(excuses, errs.Reason(r.Reason)) {
			t.wrong = append(t.wrong, fmt.Sprintf("while the catalog was rebuilt an answer was %s: %s", r.Reason, r))
		}
	}
}

// refusals are the answers to a mutation that the model checks.
var refusals = []errs.Reason{errs.NameTaken, errs.AlreadyAttached, errs.StillReferenced, errs.WrongPhase, errs.StaleUID}

// classify says what an answer means. This is the contract of the error envelope.
func classify(k Kind, err error) Outcome {
	e := errs.From(err)
	switch {
	case e == nil:
		return OK
	case reads(k):
		return NotStarted
	case e.IsAnswer():
		return Failed
	case e.Reason == errs.ObjectNotFound && e.Details["uid"] != "":
		return Refused
	case e.Outcome != errs.NotStarted:
		return Unknown
	}
	for _, reason := range refusals {
		if e.Reason == reason {
			return Refused
		}
	}
	return NotStarted
}

// call makes the call of a record through a coordinator.
func (t *traffic) call(ctx context.Context, via int, r, answer *Record) error {
	ctx, cancel := context.WithTimeout(ctx, budget)
	defer cancel()
	c := t.world.user[via]
	switch r.Kind {
	case CreateVolume, Attach, Publish:
		var err error
		answer.UID, err = create(ctx, c, r, labels(r))
		return err
	case DeleteVolume:
		return c.Volume(r.TargetUID).Delete(ctx, r.Op)
	case Detach:
		return c.Sandbox(r.TargetUID).Delete(ctx, r.Op)
	case DeleteSnapshot:
		return c.Snapshot(r.TargetUID).Delete(ctx, r.Op)
	}
	var err error
	answer.Seen, err = read(ctx, c, r)
	if err != nil {
		answer.Seen = nil
	}
	if errs.Has(err, errs.ObjectNotFound) && errs.From(err).Details["uid"] == r.TargetUID {
		answer.Absent = true
		return nil
	}
	return err
}

func labels(r *Record) map[string]string {
	return map[string]string{labelOp: r.Op, labelCell: cellLabel(r.Cell)}
}

func cellLabel(cell int) string { return string(rune('A' + cell)) }

// inCell is a name within a cell.
func inCell(r *Record) string { return "cell-" + strings.ToLower(cellLabel(r.Cell)) + "-" + r.Name }

// create makes the object of the record and gives its uid.
func create(ctx context.Context, c *client.Client, r *Record, labels map[string]string) (string, error) {
	switch r.Kind {
	case CreateVolume:
		v, err := c.CreateVolume(ctx, &dormousev1.CreateVolumeRequest{OperationId: r.Op, Name: inCell(r), Labels: labels})
		if err != nil {
			return "", err
		}
		return v.UID, nil
	case Attach:
		s, err := c.CreateSandbox(ctx, &dormousev1.CreateSandboxRequest{OperationId: r.Op, Name: inCell(r), Labels: labels, Spec: &dormousev1.SandboxSpec{
			Image: "simulated.test/image:1", Volumes: []*dormousev1.VolumeMount{{VolumeUid: r.TargetUID, Path: "/data"}}}})
		if err != nil {
			return "", err
		}
		return s.UID, nil
	default:
		s, err := c.Sandbox(r.TargetUID).Checkpoint(ctx, &dormousev1.CheckpointSandboxRequest{OperationId: r.Op, Labels: labels})
		if err != nil {
			return "", err
		}
		return s.UID, nil
	}
}

// read makes the read of the record.
func read(ctx context.Context, c *client.Client, r *Record) ([]Seen, error) {
	switch r.Kind {
	case GetVolume:
		v := c.Volume(r.TargetUID)
		err := v.Refresh(ctx)
		return []Seen{seenVolume(v.Last)}, err
	case GetSandbox:
		s := c.Sandbox(r.TargetUID)
		err := s.Refresh(ctx)
		return []Seen{seenSandbox(s.Last)}, err
	case GetSnapshot:
		s := c.Snapshot(r.TargetUID)
		err := s.Refresh(ctx)
		return []Seen{seenSnapshot(s.Last)}, err
	case ListVolumes:
		all, err := client.Collect(c.ListVolumes(ctx, &dormousev1.ListVolumesRequest{Name: inCell(r)}))
		return each(all, seenVolume), err
	case ListSandboxes:
		all, err := client.Collect(c.ListSandboxes(ctx, &dormousev1.ListSandboxesRequest{Labels: []string{labelCell + "=" + cellLabel(r.Cell)}}))
		return each(all, seenSandbox), err
	default:
		all, err := client.Collect(c.ListSnapshots(ctx, &dormousev1.ListSnapshotsRequest{}))
		return each(all, seenSnapshot), err
	}
}

func each[T any](all []T, see func(T) Seen) []Seen {
	var out []Seen
	for _, one := range all {
		out = append(out, see(one))
	}
	return out
}

func seenMeta(m *dormousev1.ObjectMeta, phase, prefix string) Seen {
	return Seen{Op: m.GetLabels()[labelOp], UID: m.GetUid(), Phase: strings.TrimPrefix(phase, prefix)}
}

func seenVolume(v *dormousev1.Volume) Seen {
	s := seenMeta(v.GetMeta(), v.GetStatus().GetPhase().String(), "VOLUME_PHASE_")
	for _, a := range v.GetStatus().GetAttachments() {
		s.Sandboxes = append(s.Sandboxes, a.GetSandboxUid())
	}
	s.Snapshots = v.GetStatus().GetSnapshotUids()
	return s
}

func seenSandbox(v *dormousev1.Sandbox) Seen {
	return seenMeta(v.GetMeta(), v.GetStatus().GetPhase().String(), "SANDBOX_PHASE_")
}

func seenSnapshot(v *dormousev1.Snapshot) Seen {
	return seenMeta(v.GetMeta(), v.GetStatus().GetPhase().String(), "SNAPSHOT_PHASE_")
}

// again replays an operation that succeeded, with its own body or with another.
func (t *traffic) again(ctx context.Context, r *Record, via, pick int) Outcome {
	done := t.succeeded(r.Cell)
	if len(done) == 0 {
		return NotStarted
	}
	first := done[pick%len(done)]
	r.Target, r.TargetUID = first.Op, first.UID
	t.begin(r)
	callCtx, cancel := context.WithTimeout(ctx, budget)
	defer cancel()
	with := labels(&first)
	if r.Kind == ReplayOther {
		with["other"] = "body"
	}
	got, err := create(callCtx, t.world.user[via], &first, with)
	e := errs.From(err)
	t.end(r, func() {
		if r.Outcome = classify(first.Kind, err); r.Kind == ReplayOther && errs.Has(err, errs.OperationBodyMismatch) {
			r.Outcome = OK
		}
		if e != nil {
			r.Reason, r.Message, r.Details = string(e.Reason), e.Message, e.Details
		}
	})
	switch {
	case r.Kind == Replay && err == nil && got != first.UID:
		t.blame("operation %s gave %s, and asked again %s", first.Op, first.UID, got)
	case r.Kind == Replay && (r.Outcome == Refused || r.Outcome == Failed):
		t.blame("operation %s gave %s, and asked again it was refused: %v", first.Op, first.UID, err)
	case r.Kind == ReplayOther && (err == nil || r.Outcome == Refused || r.Outcome == Failed):
		t.blame("operation %s was asked again with another body, and answered: %s, %v", first.Op, got, err)
	}
	return r.Outcome
}

// sweep reads every object that is known, once the faults are over.
func (t *traffic) sweep(ctx context.Context) {
	var group sync.WaitGroup
	for cell := range cells {
		group.Go(func() {
			for kind, get := range []Kind{GetVolume, GetSandbox, GetSnapshot} {
				living, dead := t.targets(objectKind(kind), cell)
				for _, o := range append(living, dead...) {
					r := &Record{Worker: cell, Cell: cell, Kind: get, Op: uid.New(), Target: o.op, TargetUID: o.uid}
					t.begin(r)
					t.do(ctx, r, cell%coordinators, true)
				}
			}
			for n := range names {
				r := &Record{Worker: cell, Cell: cell, Kind: ListVolumes, Op: uid.New(), Name: t.name(n)}
				t.begin(r)
				t.do(ctx, r, 0, true)
			}
			r := &Record{Worker: cell, Cell: cell, Kind: ListSandboxes, Op: uid.New()}
			t.begin(r)
			t.do(ctx, r, 1, true)
		})
	}
	r := &Record{Worker: cells, Cell: -1, Kind: ListSnapshots, Op: uid.New()}
	t.begin(r)
	t.do(ctx, r, 0, true)
	group.Wait()
}
