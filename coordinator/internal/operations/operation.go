package operations

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"time"

	"github.com/dormouse-run/dormouse/coordinator/internal/records"
	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/errs"
)

// State of an operation.
type State string

// The states.
const (
	Pending   State = "Pending"
	Succeeded State = "Succeeded"
	Failed    State = "Failed"
)

// Kind of an operation.
type Kind string

// The kinds.
const (
	KindCreateSandbox     Kind = "CreateSandbox"
	KindDeleteSandbox     Kind = "DeleteSandbox"
	KindCheckpointSandbox Kind = "CheckpointSandbox"
	KindRestoreSandbox    Kind = "RestoreSandbox"
	KindForkSandbox       Kind = "ForkSandbox"
	KindUpdateSandbox     Kind = "UpdateSandbox"
	KindPauseSandbox      Kind = "PauseSandbox"
	KindHibernateSandbox  Kind = "HibernateSandbox"
	KindResumeSandbox     Kind = "ResumeSandbox"
	KindDeleteSnapshot    Kind = "DeleteSnapshot"
	KindCreateVolume      Kind = "CreateVolume"
	KindDeleteVolume      Kind = "DeleteVolume"
	KindCordonNode        Kind = "CordonNode"
	KindUncordonNode      Kind = "UncordonNode"
	KindCreateTemplate    Kind = "CreateTemplate"
	KindDeleteTemplate    Kind = "DeleteTemplate"
	KindCreatePool        Kind = "CreatePool"
	KindUpdatePool        Kind = "UpdatePool"
	KindDeletePool        Kind = "DeletePool"
	KindFillPool          Kind = "FillPool"
	KindClaimSandbox      Kind = "ClaimSandbox"
)

// Copy is a sandbox that the operation makes, with the volumes it makes for it.
type Copy struct {
	SandboxUID string   `json:"sandbox_uid"`
	Clones     []string `json:"clones,omitempty"`
}

// Plan names what an operation makes and acts on. It is fixed by the accepting commit.
type Plan struct {
	// Target is the object that is deleted or changed.
	Target string `json:"target,omitempty"`
	// SnapshotUID is what is made from, and with MakesSnapshot what is made.
	SnapshotUID   string `json:"snapshot_uid,omitempty"`
	MakesSnapshot bool   `json:"makes_snapshot,omitempty"`
	VolumeUID     string `json:"volume_uid,omitempty"`
	Node          string `json:"node,omitempty"`
	Copies        []Copy `json:"copies,omitempty"`
	// Lost are the sandboxes that a claim was given and that could not be resumed, in order.
	Lost []Lost `json:"lost,omitempty"`
}

// Lost is a sandbox that a claim was given in vain, and why it could not be resumed.
type Lost struct {
	SandboxUID string      `json:"sandbox_uid"`
	Why        *errs.Error `json:"why"`
}

// uids lists what the operation makes or acts on.
func (p Plan) uids() []string {
	var all []string
	for _, u := range []string{p.Target, p.SnapshotUID, p.VolumeUID} {
		if u != "" {
			all = append(all, u)
		}
	}
	for _, c := range p.Copies {
		all = append(append(all, c.SandboxUID), c.Clones...)
	}
	for _, l := range p.Lost {
		all = append(all, l.SandboxUID)
	}
	return all
}

// Result is what a Succeeded operation made, as it was at that moment.
type Result struct {
	Sandboxes []*records.Sandbox `json:"sandboxes,omitempty"`
	Snapshot  *records.Snapshot  `json:"snapshot,omitempty"`
	Volume    *records.Volume    `json:"volume,omitempty"`
	Template  *records.Template  `json:"template,omitempty"`
	Pool      *records.Pool      `json:"pool,omitempty"`
	// Revisions are those of the sandboxes, or of the one object.
	Revisions []uint64 `json:"revisions,omitempty"`
}

// Operation is the record.
type Operation struct {
	ID         string          `json:"id"`
	Tenant     string          `json:"tenant"`
	Kind       Kind            `json:"kind"`
	Digest     string          `json:"digest"`
	Request    json.RawMessage `json:"request"`
	RequestID  string          `json:"request_id,omitempty"`
	HadSecrets bool            `json:"had_secrets,omitempty"`
	Plan       Plan            `json:"plan"`
	State      State           `json:"state"`
	// Error of a Failed operation, and of a Pending one that is undoing what it made.
	Error  *errs.Error `json:"error,omitempty"`
	Result *Result     `json:"result,omitempty"`
	// Node is where the first of what it makes or acts on is: it keeps a copy of the record.
	Node    string    `json:"node,omitempty"`
	Created time.Time `json:"created"`
	Done    time.Time `json:"done,omitzero"`

	revision uint64
	// fresh: it has just been accepted here, so that what is recorded is known.
	fresh bool
}

// UIDs lists what the operation makes or acts on.
func (o *Operation) UIDs() []string { return o.Plan.uids() }

// digest is the identity of a request: its kind and its body in canonical form (encoding/json of the
// request's own type: fields in their order, maps sorted).
func digest(kind Kind, request any) (string, json.RawMessage, error) {
	body, err := json.Marshal(request)
	if err != nil {
		return "", nil, fmt.Errorf("encode the request: %w", err)
	}
	h := sha256.New()
	h.Write([]byte(kind))
	h.Write([]byte{0})
	h.Write(body)
	return "sha256:" + hex.EncodeToString(h.Sum(nil)), body, nil
}

// maxBody is how large a record may become by its result; above it only uids are kept, and the
// objects are read when they are asked for.
const maxBody = catalog.MaxBody - 16<<10

func (o *Operation) put() (catalog.Put, error) {
	body, err := records.Encode(o)
	if err == nil && o.Result != nil && len(body) > maxBody {
		o.Result = nil
		body, err = records.Encode(o)
	}
	if err != nil {
		return catalog.Put{}, err
	}
	return catalog.Put{
		Record:         catalog.Record{Key: records.OperationKey(o.Tenant, o.ID), Phase: string(o.State), Node: o.Node, Body: body},
		ExpectRevision: o.revision,
	}, nil
}

// OperationOf reads an operation's record.
func OperationOf(r catalog.Record) (*Operation, error) {
	o := new(Operation)
	err := records.Decode(r.Body, o)
	o.revision = r.Revision
	if o.Result != nil {
		o.Result.restoreRevisions()
	}
	return o, err
}

// node is where the first of what was made is, "" where that is not known.
func (r *Result) node() string {
	switch {
	case len(r.Sandboxes) > 0:
		return r.Sandboxes[0].Status.Node
	case r.Volume != nil:
		return r.Volume.Status.Node
	}
	return ""
}

// keepRevisions saves what the bodies themselves do not hold.
func (r *Result) keepRevisions() {
	r.Revisions = nil
	for _, s := range r.Sandboxes {
		r.Revisions = append(r.Revisions, s.Revision)
	}
	switch {
	case r.Snapshot != nil && len(r.Sandboxes) == 0:
		r.Revisions = []uint64{r.Snapshot.Revision}
	case r.Volume != nil:
		r.Revisions = []uint64{r.Volume.Revision}
	case r.Template != nil:
		r.Revisions = []uint64{r.Template.Revision}
	case r.Pool != nil:
		r.Revisions = []uint64{r.Pool.Revision}
	}
}

func (r *Result) restoreRevisions() {
	for i, rev := range r.Revisions {
		switch {
		case i < len(r.Sandboxes):
			r.Sandboxes[i].Revision = rev
		case r.Snapshot != nil && len(r.Sandboxes) == 0:
			r.Snapshot.Revision = rev
		case r.Volume != nil:
			r.Volume.Revision = rev
		case r.Template != nil:
			r.Template.Revision = rev
		case r.Pool != nil:
			r.Pool.Revision = rev
		}
	}
}
