// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package load

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/dormouse-run/dormouse/pkg/client"
	"github.com/dormouse-run/dormouse/pkg/errs"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// Machine tells how the machine is, where the harness can see it.
type Machine interface {
	Look() (Sample, error)
	// Parts gives the digests of the executables that run.
	Parts() (map[string]string, error)
}

// Sample is a look at the machine.
type Sample struct {
	At time.Time `json:"at"`
	// Resident bytes of each part: coordinator, redis, agentd1, and sandboxes1 for all that belongs to the sandboxes of a node.
	Resident map[string]int64 `json:"resident"`
	// Available is what the kernel could still give.
	Available int64 `json:"available"`
	// Tasks is how many threads there are, OOMKills how many processes the kernel killed for memory since it booted.
	Tasks    int     `json:"tasks"`
	OOMKills int64   `json:"oom_kills"`
	Load     float64 `json:"load"`
}

// looks is how often the machine is looked at and progress is shown.
const looks = time.Second

// Recorder keeps what happens in a run.
type Recorder struct {
	who  Identity
	opts Options

	mu        sync.Mutex
	events    *jsonl
	samples   *jsonl
	all       []PhaseSummary
	now       *gathering
	fails     []Event
	steps     []Event
	seen      string         // the sandbox that was made last
	boxes     map[int]string // of each subject, as far as the answers tell
	snaps     map[int]string
	lost      []string // what the catalog did not have
	tries     map[string]int
	looked    []Sample
	oomAt     int64
	parts     map[string]string
	debt      []string
	published Publications
	floor     []FloorRow
	disk      *DiskFloor
	written   error
}

// gathering is a phase that goes on.
type gathering struct {
	command
	began        time.Time
	calls, walls []float64
	freezes      []float64
	queues       []float64
	services     []float64
	aparts       []float64
	bytes        int64
	failed       int
	gets         []float64
}

// jsonl is a file of JSON lines.
type jsonl struct {
	file *os.File
	buf  *bufio.Writer
	enc  *json.Encoder
}

func newJSONL(path string) (*jsonl, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	buf := bufio.NewWriter(f)
	return &jsonl{file: f, buf: buf, enc: json.NewEncoder(buf)}, nil
}

func (j *jsonl) close() error { return errors.Join(j.buf.Flush(), j.file.Close()) }

func newRecorder(who Identity, opts Options) (*Recorder, error) {
	r := &Recorder{who: who, opts: opts, tries: map[string]int{}, boxes: map[int]string{}, snaps: map[int]string{}}
	var err error
	if r.events, err = newJSONL(filepath.Join(opts.Out, "events.jsonl")); err != nil {
		return nil, err
	}
	if r.samples, err = newJSONL(filepath.Join(opts.Out, "samples.jsonl")); err != nil {
		return nil, errors.Join(err, r.events.close())
	}
	return r, nil
}

func (r *Recorder) close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return errors.Join(r.written, r.events.close(), r.samples.close())
}

// Add takes an event.
func (r *Recorder) Add(e Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.events.enc.Encode(e); err != nil {
		r.written = err
	}
	if e.Error != "" && len(r.fails) < mostFailures {
		r.fails = append(r.fails, e)
	}
	if e.What == "attempt" {
		r.tries[fmt.Sprintf("%s %s", e.Phase, e.Reason)]++
		return
	}
	r.steps = append(r.steps, e)
	r.know(e)
	if r.now == nil {
		return
	}
	if e.Error != "" {
		r.now.failed++
		return
	}
	r.now.calls, r.now.walls = append(r.now.calls, e.Call), append(r.now.walls, e.Wall)
	if e.Service > 0 {
		r.now.queues, r.now.services, r.now.aparts = append(r.now.queues, e.Queued), append(r.now.services, e.Service), append(r.now.aparts, e.Call-e.Queued)
	}
	if e.Phase == Checkpoint {
		r.now.freezes = append(r.now.freezes, e.Freeze)
		r.now.bytes += e.Bytes
	}
}

// Plan of the run.
func (r *Recorder) Plan() Plan { return r.who.Plan }

// know keeps which objects the cluster has acknowledged. What failed may be or not be: it is not looked for.
func (r *Recorder) know(e Event) {
	switch {
	case e.Error != "":
		delete(r.boxes, e.Subject)
		delete(r.snaps, e.Subject)
	case e.Phase == Create || e.Phase == Restore:
		r.seen, r.boxes[e.Subject] = e.UID, e.UID
	case e.Phase == Delete:
		delete(r.boxes, e.Subject)
	case e.Phase == Checkpoint:
		r.snaps[e.Subject] = e.UID
	case e.Phase == Forget:
		delete(r.snaps, e.Subject)
	}
}

// audit compares what the cluster has acknowledged with what it lists: an object that is not there, or not in the phase that it was
// acknowledged in, is a lost update.
func (r *Recorder) audit(ctx context.Context, api *client.Client) error {
	boxes, snaps := map[string]bool{}, map[string]bool{}
	for p, err := range api.ListSandboxes(ctx, &dormousev1.ListSandboxesRequest{PageSize: 500, Labels: []string{runLabel + "=" + r.who.ID}}) {
		if err != nil {
			return err
		}
		boxes[p.GetMeta().GetUid()] = p.GetStatus().GetPhase() == dormousev1.SandboxPhase_SANDBOX_PHASE_RUNNING
	}
	for p, err := range api.ListSnapshots(ctx, &dormousev1.ListSnapshotsRequest{PageSize: 500}) {
		if err != nil {
			return err
		}
		snaps[p.GetMeta().GetUid()] = p.GetStatus().GetPhase() == dormousev1.SnapshotPhase_SNAPSHOT_PHASE_READY
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, kind := range []struct {
		name  string
		known map[int]string
		has   map[string]bool
	}{{"sandbox", r.boxes, boxes}, {"snapshot", r.snaps, snaps}} {
		for subject, uid := range kind.known {
			if !kind.has[uid] {
				r.lost = append(r.lost, fmt.Sprintf("%s %s of subject %d was acknowledged, and is not there as it was", kind.name, uid, subject))
			}
		}
	}
	return nil
}

// AddFloor puts the rate of bare runsc at its best width beside that of all rounds of a phase.
func (r *Recorder) AddFloor(p Phase, bare float64, width int, target float64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var done int
	var took float64
	for _, x := range r.all {
		if x.Phase == p {
			done, took = done+x.Done, took+x.TookMS/1000
		}
	}
	row := FloorRow{What: string(p), Product: float64(done) / took, Bare: bare, Width: width, Target: target}
	r.floor = append(r.floor, row)
	if r.opts.Logf != nil {
		r.opts.Logf("%s", row)
	}
}

// AddDisk keeps what checkpoints are compared with.
func (r *Recorder) AddDisk(d DiskFloor) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.disk = &d
}

// mostFailures is how many the summary shows; events.jsonl has all.
const mostFailures = 50

func (r *Recorder) begin(c command) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.now = &gathering{command: c, began: time.Now()}
}

func (r *Recorder) end(command) {
	r.mu.Lock()
	defer r.mu.Unlock()
	g := r.now
	r.now = nil
	took := time.Since(g.began)
	p := PhaseSummary{
		Phase: g.Phase, Round: g.Round, Began: g.began.UTC(), TookMS: milliseconds(took), Done: len(g.calls), Failed: g.failed,
		Rate: float64(len(g.calls)) / took.Seconds(), Call: distribution(g.calls), Wall: distribution(g.walls), Freeze: distribution(g.freezes), Bytes: g.bytes,
		Queue: distribution(g.queues), Service: distribution(g.services), Apart: distribution(g.aparts), Get: distribution(g.gets),
	}
	r.all = append(r.all, p)
	if r.opts.Logf != nil {
		r.opts.Logf("%s", p)
	}
}

// gets is how often a sandbox is read while a phase goes on: what a saturated cluster takes for a small answer.
const gets = 50 * time.Millisecond

// get reads a sandbox now and then, until ctx ends.
func (r *Recorder) get(ctx context.Context, api *client.Client) {
	tick := time.NewTicker(gets)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		r.mu.Lock()
		uid, phase := r.seen, r.now
		r.mu.Unlock()
		if uid == "" || phase == nil {
			continue
		}
		called := time.Now()
		err := api.Sandbox(uid).Refresh(ctx)
		took := milliseconds(time.Since(called))
		r.mu.Lock()
		if err == nil || errs.Has(err, errs.ObjectNotFound) {
			phase.gets = append(phase.gets, took)
		}
		r.mu.Unlock()
	}
}

// watch looks at the machine and shows progress until stop is called.
func (r *Recorder) watch(m Machine) (stop func()) {
	done := make(chan struct{})
	var wg sync.WaitGroup
	if m != nil {
		parts, err := m.Parts()
		r.note(err)
		r.mu.Lock()
		r.parts = parts
		r.mu.Unlock()
	}
	wg.Go(func() {
		tick := time.NewTicker(looks)
		defer tick.Stop()
		for {
			r.look(m)
			select {
			case <-tick.C:
			case <-done:
				return
			}
		}
	})
	return func() { close(done); wg.Wait() }
}

func (r *Recorder) note(err error) {
	if err == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.written = errors.Join(r.written, err)
}

func (r *Recorder) look(m Machine) {
	var s Sample
	if m != nil {
		var err error
		if s, err = m.Look(); err != nil {
			r.note(err)
			return
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if m != nil {
		if len(r.looked) == 0 {
			r.oomAt = s.OOMKills
		}
		r.looked = append(r.looked, s)
		if err := r.samples.enc.Encode(s); err != nil {
			r.written = err
		}
	}
	if g := r.now; g != nil && r.opts.Logf != nil {
		took := time.Since(g.began)
		d := distribution(g.calls)
		line := fmt.Sprintf("  %-10s round %d  %5d of %d  %6.1f/s  p50 %s  p95 %s  failed %d", g.Phase, g.Round, len(g.calls)+g.failed, r.who.Plan.Subjects,
			float64(len(g.calls))/took.Seconds(), ms(d.P50), ms(d.P95), g.failed)
		if m != nil {
			line += "  memory " + memory(s)
		}
		r.opts.Logf("%s", line)
	}
}

func memory(s Sample) string {
	var all []string
	for _, name := range slices.Sorted(maps.Keys(s.Resident)) {
		all = append(all, fmt.Sprintf("%s %s", name, size(s.Resident[name])))
	}
	return strings.Join(append(all, "free "+size(s.Available)), ", ")
}

func size(n int64) string {
	if n >= 10<<30 {
		return fmt.Sprintf("%.1f GiB", float64(n)/(1<<30))
	}
	return fmt.Sprintf("%d MiB", n/mib)
}
