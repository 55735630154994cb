// Package records is how the coordinator writes the domain's objects into the catalog: the header
// fields that stores index and check (name, phase, node, references), and a JSON body.
//
// # What a record refers to
//
//   - A sandbox attaches its volumes (exclusive, or shared where the volume is) from its first
//     record until its absence on the node was observed, and refers to the snapshot that it is made
//     from until it runs.
//   - A snapshot refers to its volumes until it is gone, and to its source while it is Preparing.
//   - A volume that is a copy refers to its source while it is Creating.
//   - A template refers to its golden snapshot from the snapshot's first record on, a pool to its template, a sandbox that
//     is a pool's to the pool, and one that a template is made with to the template.
//
// So the catalog itself refuses a second attachment, the deletion of a volume that a snapshot needs,
// and the deletion of a snapshot that is being restored.
//
// Encode and Decode are exact inverses; a body of a newer format is refused, never guessed at.
package records

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
	"github.com/dormouse-run/dormouse/pkg/snapshot"
	"github.com/dormouse-run/dormouse/pkg/volume"
	"github.com/dormouse-run/dormouse/pkg/warm"
)

// Format is the version of the bodies.
const Format = 1

type envelope struct {
	Format int             `json:"format"`
	Body   json.RawMessage `json:"body"`
}

// Encode gives the body of an object.
func Encode(body any) ([]byte, error) {
	b, err := json.Marshal(body)
	if err != nil {
		return nil, fmt.Errorf("encode a record: %w", err)
	}
	return json.Marshal(envelope{Format: Format, Body: b})
}

// Decode reads a body.
func Decode(b []byte, into any) error {
	var e envelope
	if err := json.Unmarshal(b, &e); err != nil {
		return fmt.Errorf("decode a record: %w", err)
	}
	if e.Format != Format {
		return fmt.Errorf("a record has format %d, this coordinator knows %d; run the newer version", e.Format, Format)
	}
	return json.Unmarshal(e.Body, into)
}

// Meta is what the store adds to an object.
type Meta struct {
	Revision uint64
	Updated  time.Time
}

// Attachment is a volume that a sandbox holds.
type Attachment struct {
	VolumeUID string `json:"volume_uid"`
	Shared    bool   `json:"shared,omitempty"`
}

// Sandbox is the body of a sandbox's record.
type Sandbox struct {
	sandbox.Sandbox
	// Attachments are held until the node has let go of the sandbox.
	Attachments []Attachment `json:"attachments,omitempty"`
	// SourceSnapshot is what it is being made from, until it runs.
	SourceSnapshot string `json:"source_snapshot,omitempty"`
	// NodeGeneration is the generation of the last change that the node has to act on; the node that has observed it has observed
	// all. 0 where there was none.
	NodeGeneration int64 `json:"node_generation,omitempty"`
	// Captures are the snapshots that are being taken of it.
	Captures []string `json:"captures,omitempty"`
	// Pool is the pool that it is a member of, until it is claimed. Template is the template that it is the builder of. With either it
	// is nobody's to use: see Hidden.
	Pool     string `json:"pool,omitempty"`
	Template string `json:"template,omitempty"`
	// PoolReady: its fill has ended, so that a claim may take it while it is Paused. PoolTemplate is the template that it was made from.
	PoolReady    bool   `json:"pool_ready,omitempty"`
	PoolTemplate string `json:"pool_template,omitempty"`
	// ClaimedFrom is the pool that it was claimed from.
	ClaimedFrom string `json:"claimed_from,omitempty"`
	// LastNode is where it was when no node has it any more: that one's journal keeps the record, so that a catalog which came back
	// older learns what became of it.
	LastNode string `json:"last_node,omitempty"`
	// Unnamed gives up the name's uniqueness, but not the name: set when it never ran.
	Unnamed bool `json:"unnamed,omitempty"`

	Meta `json:"-"`
}

// Snapshot is the body of a snapshot's record.
type Snapshot struct {
	snapshot.Snapshot
	// SourceSpec is what the source was at the checkpoint: the spec of what is restored.
	SourceSpec sandbox.Spec `json:"source_spec"`
	// SourceNode is where it is taken.
	SourceNode string `json:"source_node"`

	Meta `json:"-"`
}

// Volume is the body of a volume's record.
type Volume struct {
	volume.Volume

	Meta `json:"-"`
}

// Node is the body of a node's record: what is intended and what it last said of itself.
type Node struct {
	Name           string            `json:"name"`
	Cordoned       bool              `json:"cordoned,omitempty"`
	Address        string            `json:"address"`
	DirectAddress  string            `json:"direct_address,omitempty"` // for clients with tickets
	Version        string            `json:"version"`
	Architecture   string            `json:"architecture"`
	Labels         map[string]string `json:"labels,omitempty"`
	Capacity       Resources         `json:"capacity"`
	Allocatable    Resources         `json:"allocatable"`
	RuntimeBundles []string          `json:"runtime_bundles,omitempty"`
	// Networks are the modes that it has; none: it did not say.
	Networks     []sandbox.NetworkMode `json:"networks,omitempty"`
	CPUFeatures  []string              `json:"cpu_features,omitempty"`
	SessionEpoch uint64                `json:"session_epoch"`
	SessionTime  time.Time             `json:"session_time,omitzero"`

	Meta `json:"-"`
}

// Resources are a node's, or a sum of requests.
type Resources struct {
	CPUMillis   int64 `json:"cpu_millis"`
	MemoryBytes int64 `json:"memory_bytes"`
	DiskBytes   int64 `json:"disk_bytes"`
	Sandboxes   int64 `json:"sandboxes"`
}

// Event says what happened to an object, and why.
type Event struct {
	UID        string    `json:"uid"`
	ObjectKind string    `json:"object_kind"`
	ObjectUID  string    `json:"object_uid"`
	Reason     string    `json:"reason"`
	Message    string    `json:"message,omitempty"`
	Warning    bool      `json:"warning,omitempty"`
	Time       time.Time `json:"time"`
}

// Template is the body of a template's record.
type Template struct {
	warm.Template
	// Builder is the sandbox that is captured, Golden the snapshot: known from the beginning, made later.
	Builder string `json:"builder"`
	Golden  string `json:"golden"`

	Meta `json:"-"`
}

// Pool is the body of a pool's record.
type Pool struct {
	warm.Pool
	// Node is where the golden snapshot is: its journal has the record.
	Node string `json:"node,omitempty"`

	Meta `json:"-"`
}

// Hidden tells that the sandbox is the coordinator's own: in no list, and found by no caller.
func (s *Sandbox) Hidden() bool { return s.Pool != "" || s.Template != "" }

// TemplateKey names a template's record.
func TemplateKey(tenant, uid string) catalog.Key { return key(tenant, catalog.KindTemplate, uid) }

// PoolKey names a pool's record.
func PoolKey(tenant, uid string) catalog.Key { return key(tenant, catalog.KindPool, uid) }

// SandboxKey names a sandbox's record.
func SandboxKey(tenant, uid string) catalog.Key { return key(tenant, catalog.KindSandbox, uid) }

// SnapshotKey names a snapshot's record.
func SnapshotKey(tenant, uid string) catalog.Key { return key(tenant, catalog.KindSnapshot, uid) }

// VolumeKey names a volume's record.
func VolumeKey(tenant, uid string) catalog.Key { return key(tenant, catalog.KindVolume, uid) }

// OperationKey names an operation's record.
func OperationKey(tenant, id string) catalog.Key { return key(tenant, catalog.KindOperation, id) }

// NodeKey names a node's record.
func NodeKey(name string) catalog.Key { return key(catalog.SystemTenant, catalog.KindNode, name) }

func key(tenant string, kind catalog.Kind, uid string) catalog.Key {
	return catalog.Key{Tenant: tenant, Kind: kind, UID: uid}
}

// CatchUp notes that the present generation is observed once the last one that concerns the node is: the others are the
// coordinator's own to act on.
func (s *Sandbox) CatchUp() {
	if s.Status.ObservedGeneration > 0 && s.Status.ObservedGeneration >= s.NodeGeneration {
		s.Status.ObservedGeneration = max(s.Status.ObservedGeneration, s.Generation)
	}
}

// Put makes the write that replaces the revision the sandbox was read at, or creates it.
func (s *Sandbox) Put() (catalog.Put, error) {
	r := catalog.Record{Key: SandboxKey(s.Tenant, s.UID), Name: s.Name, Phase: string(s.Status.Phase), Node: cmp.Or(s.Status.Node, s.LastNode)}
	if s.Unnamed {
		r.Name = ""
	}
	for _, a := range s.Attachments {
		mode := catalog.Exclusive
		if a.Shared {
			mode = catalog.Shared
		}
		r.Refs = append(r.Refs, catalog.Ref{Target: VolumeKey(s.Tenant, a.VolumeUID), Mode: mode})
	}
	if s.SourceSnapshot != "" {
		r.Refs = append(r.Refs, catalog.Ref{Target: SnapshotKey(s.Tenant, s.SourceSnapshot), Mode: catalog.Reference})
	}
	if s.Pool != "" {
		r.Refs = append(r.Refs, catalog.Ref{Target: PoolKey(s.Tenant, s.Pool), Mode: catalog.Reference})
	}
	if s.Template != "" {
		r.Refs = append(r.Refs, catalog.Ref{Target: TemplateKey(s.Tenant, s.Template), Mode: catalog.Reference})
	}
	return put(r, s, s.Revision)
}

// Put makes the write of a snapshot.
func (s *Snapshot) Put() (catalog.Put, error) {
	r := catalog.Record{Key: SnapshotKey(s.Tenant, s.UID), Name: s.Name, Phase: string(s.Status.Phase), Node: s.SourceNode,
		Sealed: s.Status.Phase == snapshot.Deleting || s.Status.Phase == snapshot.Failed}
	if s.Status.Phase == snapshot.Ready || s.Status.Phase == snapshot.Deleting {
		r.Identity = s.identity()
	}
	if s.Status.Phase == snapshot.Failed {
		r.Name = ""
	}
	for _, v := range s.Status.Volumes {
		ref := catalog.Ref{Target: VolumeKey(s.Tenant, v.VolumeUID), Mode: catalog.Reference}
		if !slices.Contains(r.Refs, ref) {
			r.Refs = append(r.Refs, ref)
		}
	}
	if s.Status.Phase == snapshot.Preparing {
		r.Refs = append(r.Refs, catalog.Ref{Target: SandboxKey(s.Tenant, s.SourceSandboxUID), Mode: catalog.Reference})
	}
	return put(r, s, s.Revision)
}

// identity is what never changes once the snapshot was Ready.
func (s *Snapshot) identity() string {
	if s.Status.ReadyTime.IsZero() {
		return "" // deleted before it was Ready
	}
	return s.UID + "@" + s.Status.ReadyTime.UTC().Format(time.RFC3339Nano)
}

// Put makes the write of a volume.
func (v *Volume) Put() (catalog.Put, error) {
	r := catalog.Record{Key: VolumeKey(v.Tenant, v.UID), Name: v.Name, Phase: string(v.Status.Phase), Node: v.Status.Node,
		Sealed: v.Status.Phase == volume.Deleting || v.Status.Phase == volume.Failed}
	if v.Status.Phase == volume.Failed {
		r.Name = ""
	}
	if v.Status.Phase == volume.Creating && v.Spec.SourceVolumeUID != "" {
		r.Refs = []catalog.Ref{{Target: VolumeKey(v.Tenant, v.Spec.SourceVolumeUID), Mode: catalog.Reference}}
	}
	return put(r, v, v.Revision)
}

// Put makes the write of a template.
func (t *Template) Put() (catalog.Put, error) {
	r := catalog.Record{Key: TemplateKey(t.Tenant, t.UID), Name: t.Name, Phase: string(t.Status.Phase), Node: t.Status.Node,
		Sealed: t.Status.Phase == warm.Deleting || t.Status.Phase == warm.Failed}
	if t.Status.Phase == warm.Failed {
		r.Name = ""
	}
	if t.Status.SnapshotUID != "" {
		r.Refs = []catalog.Ref{{Target: SnapshotKey(t.Tenant, t.Status.SnapshotUID), Mode: catalog.Reference}}
	}
	return put(r, t, t.Revision)
}

// Put makes the write of a pool.
func (p *Pool) Put() (catalog.Put, error) {
	r := catalog.Record{Key: PoolKey(p.Tenant, p.UID), Name: p.Name, Phase: string(p.Status.Phase), Node: p.Node, Sealed: p.Status.Phase == warm.PoolDeleting,
		Refs: []catalog.Ref{{Target: TemplateKey(p.Tenant, p.Spec.TemplateUID), Mode: catalog.Reference}}}
	return put(r, p, p.Revision)
}

// Put makes the write of a node.
func (n *Node) Put() (catalog.Put, error) {
	return put(catalog.Record{Key: NodeKey(n.Name), Name: n.Name, Node: n.Name}, n, n.Revision)
}

// Put makes the write of an event. Events are never changed.
func (e *Event) Put(tenant string) (catalog.Put, error) {
	return put(catalog.Record{Key: key(tenant, catalog.KindEvent, e.UID)}, e, 0)
}

func put(r catalog.Record, body any, revision uint64) (catalog.Put, error) {
	b, err := Encode(body)
	if err != nil {
		return catalog.Put{}, err
	}
	r.Body = b
	return catalog.Put{Record: r, ExpectRevision: revision}, nil
}

// SandboxOf reads a sandbox's record.
func SandboxOf(r catalog.Record) (*Sandbox, error) {
	s := new(Sandbox)
	err := Decode(r.Body, s)
	s.Meta = Meta{r.Revision, r.Updated}
	return s, err
}

// SnapshotOf reads a snapshot's record.
func SnapshotOf(r catalog.Record) (*Snapshot, error) {
	s := new(Snapshot)
	err := Decode(r.Body, s)
	s.Meta = Meta{r.Revision, r.Updated}
	return s, err
}

// VolumeOf reads a volume's record.
func VolumeOf(r catalog.Record) (*Volume, error) {
	v := new(Volume)
	err := Decode(r.Body, v)
	v.Meta = Meta{r.Revision, r.Updated}
	return v, err
}

// TemplateOf reads a template's record.
func TemplateOf(r catalog.Record) (*Template, error) {
	t := new(Template)
	err := Decode(r.Body, t)
	t.Meta = Meta{r.Revision, r.Updated}
	return t, err
}

// PoolOf reads a pool's record.
func PoolOf(r catalog.Record) (*Pool, error) {
	p := new(Pool)
	err := Decode(r.Body, p)
	p.Meta = Meta{r.Revision, r.Updated}
	return p, err
}

// NodeOf reads a node's record.
func NodeOf(r catalog.Record) (*Node, error) {
	n := new(Node)
	err := Decode(r.Body, n)
	n.Meta = Meta{r.Revision, r.Updated}
	return n, err
}

// EventOf reads an event's record.
func EventOf(r catalog.Record) (*Event, error) {
	e := new(Event)
	return e, Decode(r.Body, e)
}
