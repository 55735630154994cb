package robustness

import (
	"fmt"
	"maps"
	"sync"
	"time"
)

// Kind of an operation.
type Kind string

// The kinds. A sandbox attaches the volume of its cell from its creation until its deletion; a checkpoint publishes a snapshot.
const (
	CreateVolume   Kind = "create volume"
	Attach         Kind = "attach" // create a sandbox with a volume
	Publish        Kind = "publish"
	DeleteVolume   Kind = "delete volume"
	Detach         Kind = "detach" // delete the sandbox
	DeleteSnapshot Kind = "delete snapshot"
	GetVolume      Kind = "get volume"
	GetSandbox     Kind = "get sandbox"
	GetSnapshot    Kind = "get snapshot"
	ListVolumes    Kind = "list volumes"
	ListSandboxes  Kind = "list sandboxes"
	ListSnapshots  Kind = "list snapshots"
	Replay         Kind = "replay"            // an operation id that has succeeded, with the same body
	ReplayOther    Kind = "replay other body" // and with another
	word           Kind = "operator's word"   // given by a fault
)

// Outcome of an operation, as the model takes it.
type Outcome string

// The outcomes.
const (
	// OK: applied, and the answer is the result.
	OK Outcome = "ok"
	// Refused: not applied, for a reason that the model checks.
	Refused Outcome = "refused"
	// Failed: accepted, and what it came to is a failure for good.
	Failed Outcome = "failed"
	// NotStarted: not applied; the system was not able to. Whoever finds it applied has caught a lie.
	NotStarted Outcome = "not started"
	// Unknown: maybe applied, now or at any later time.
	Unknown Outcome = "unknown"
)

// objectKind is what an object is.
type objectKind byte

const (
	volumeKind objectKind = iota
	sandboxKind
	snapshotKind
)

func (k objectKind) String() string { return [...]string{"volume", "sandbox", "snapshot"}[k] }

// Seen is an object as a read found it.
type Seen struct {
	Op    string // the operation that made it, by its label
	UID   string
	Phase string
	// Of a volume that was got: who refers to it.
	Sandboxes, Snapshots []string
}

// Record is one operation of the history.
type Record struct {
	Number int
	Worker int
	Cell   int
	Kind   Kind
	// Op is the operation id, of reads too.
	Op string
	// Name of the object that is created.
	Name string
	// Target is the operation that made the object which this one is about.
	Target string
	// TargetUID is that object's uid.
	TargetUID    string
	Call, Return time.Duration
	Outcome      Outcome
	// Attempts counts the calls of pkg/client: more than one where an unknown outcome was asked for again.
	Attempts int
	Reason   string            // of an error
	Message  string            // of an error
	Details  map[string]string // of an error
	UID      string            // of what was created
	Seen     []Seen            // by a read that succeeded
	Absent   bool              // a get found nothing
}

func (r *Record) String() string {
	seen := r.Seen
	if len(seen) > 1 {
		seen = nil // a list is long
	}
	return fmt.Sprintf("#%d worker %d cell %d %s op=%s target=%s uid=%s [%s, %s] %s %s %v seen=%v absent=%v", r.Number, r.Worker, r.Cell, r.Kind, r.Op, r.Target,
		r.UID, r.Call, r.Return, r.Outcome, r.Reason, r.Details, seen, r.Absent)
}

// object is one that was to be created, by the operation that is to create it.
type object struct {
	kind   objectKind
	cell   int
	op     string
	name   string
	target string // the volume of a sandbox, the sandbox of a snapshot
	uid    string // "" until it is known
	gone   bool   // its deletion succeeded, as far as the traffic knows
	lost   bool   // the catalog lost it, or something of it, as was reported; its operation may be forgotten
	// shunned is what a node may have something of that no record names: that is left alone, and may be in the way of what is asked.
	shunned bool
}

// history is what was done and what is known of the objects. It is safe for concurrent use.
type history struct {
	began time.Time

	mu      sync.Mutex
	records []*Record
	objects map[string]*object // by operation
	byUID   map[string]string  // operation
	wrong   []string           // what is wrong whatever the model says
}

func newHistory() *history {
	return &history{began: time.Now(), objects: make(map[string]*object), byUID: make(map[string]string)}
}

func (h *history) now() time.Duration { return time.Since(h.began) }

func (h *history) blame(format string, args ...any) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.wrong = append(h.wrong, fmt.Sprintf(format, args...))
}

// hopeless tells that something is wrong already.
func (h *history) hopeless() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.wrong) > 0
}

// begin enters an operation, and the object that it creates.
func (h *history) begin(r *Record) {
	h.mu.Lock()
	defer h.mu.Unlock()
	r.Number, r.Call, r.Outcome = len(h.records), h.now(), Unknown
	h.records = append(h.records, r)
	if kind, creates := created(r.Kind); creates {
		h.objects[r.Op] = &object{kind: kind, cell: r.Cell, op: r.Op, name: r.Name, target: r.Target}
	}
}

func created(k Kind) (objectKind, bool) {
	switch k {
	case CreateVolume:
		return volumeKind, true
	case Attach:
		return sandboxKind, true
	case Publish:
		return snapshotKind, true
	}
	return 0, false
}

// end enters how the operation ended. fill sets the record's fields.
func (h *history) end(r *Record, fill func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	fill()
	r.Return = h.now()
	if r.UID != "" {
		if _, creates := created(r.Kind); creates {
			h.found(r.Op, r.UID)
		}
	}
	for _, s := range r.Seen {
		h.found(s.Op, s.UID)
	}
	switch r.Kind {
	case DeleteVolume, Detach, DeleteSnapshot:
		if o := h.objects[r.Target]; o != nil && r.Outcome == OK {
			o.gone = true
		}
	}
}

// found learns the uid of what an operation made. One operation makes one object. It wants the lock.
func (h *history) found(op, uid string) {
	o := h.objects[op]
	switch {
	case o == nil:
		h.wrong = append(h.wrong, fmt.Sprintf("object %s was made by operation %q, which nobody asked for", uid, op))
	case o.uid == "":
		o.uid, h.byUID[uid] = uid, op
	case o.uid != uid && o.lost: // it was made again
		o.uid, h.byUID[uid] = uid, op
	case o.uid != uid:
		h.wrong = append(h.wrong, fmt.Sprintf("operation %s made two objects, %s and %s: it was applied twice", op, o.uid, uid))
	}
}

// targets gives the objects of a kind in a cell whose uids are known, the newest first.
func (h *history) targets(kind objectKind, cell int) (living, dead []object) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for i := len(h.records) - 1; i >= 0; i-- {
		o := h.objects[h.records[i].Op]
		if o == nil || o.op != h.records[i].Op || o.kind != kind || o.cell != cell || o.uid == "" {
			continue
		}
		if _, creates := created(h.records[i].Kind); !creates {
			continue
		}
		if o.gone {
			dead = append(dead, *o)
		} else {
			living = append(living, *o)
		}
	}
	return living, dead
}

// succeeded gives the operations with results.
func (h *history) succeeded(cell int) []Record {
	h.mu.Lock()
	defer h.mu.Unlock()
	var all []Record
	for _, r := range h.records {
		if _, creates := created(r.Kind); creates && r.Cell == cell && r.Outcome == OK && !h.objects[r.Op].lost {
			all = append(all, *r)
		}
	}
	return all
}

// snapshot gives the history as it is, for the checker.
func (h *history) snapshot() (records []*Record, objects map[string]*object, byUID map[string]string, wrong []string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return append(records, h.records...), maps.Clone(h.objects), maps.Clone(h.byUID), append(wrong, h.wrong...)
}
