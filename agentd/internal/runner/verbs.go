package runner

import (
	"context"
	"errors"
	"io/fs"
	"maps"
	"os"
	"slices"
	"strings"

	"github.com/dormouse-run/dormouse/agentd/internal/checkpoint"
	"github.com/dormouse-run/dormouse/agentd/internal/nodestate"
	"github.com/dormouse-run/dormouse/agentd/internal/runtime"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
	"github.com/dormouse-run/dormouse/pkg/snapshot"
)

// StartRequest asks for a new sandbox. SecretEnv goes to guest init and nowhere else.
type StartRequest struct {
	UID, Tenant, Name string
	Generation        int64
	CommandID         string
	Spec              sandbox.Spec
	SecretEnv         map[string]string
}

// RestoreRequest asks for a sandbox with the processes of a snapshot. Volumes are all of the
// snapshot's, with what is to be attached at each path.
type RestoreRequest struct {
	UID, Tenant, Name string
	Generation        int64
	CommandID         string
	SnapshotUID       string
	Volumes           []snapshot.VolumeReference
	Hostname          string
	// Network is what it may reach; nil is what the snapshot says.
	Network *NetworkRequest
	// Parked: it is to stand still until it is claimed.
	Parked bool
}

// NetworkRequest is what a sandbox may reach.
type NetworkRequest struct{ Egress *sandbox.Egress }

// Start makes a sandbox and returns when it runs and that is durable. The same command id again
// gives the same sandbox. After an error nothing of the sandbox is left, or its removal is recorded and
// goes on.
func (n *Node) Start(ctx context.Context, req StartRequest) (nodestate.Sandbox, error) {
	return doFor(ctx, n, req.UID, true, func(ctx context.Context, o *owner) (nodestate.Sandbox, error) {
		if done, err := o.madeBefore(ctx, req.CommandID); done || err != nil {
			return o.rec, err
		}
		b := &build{verb: "start", bundle: n.Bundles.Current(), identity: Identity{SecretEnv: req.SecretEnv}}
		o.rec = nodestate.Sandbox{
			UID: req.UID, Tenant: req.Tenant, Name: req.Name, Generation: req.Generation, CommandID: req.CommandID, Spec: req.Spec.Clone(),
			Created: n.Now().UTC(), Intent: nodestate.IntentStart, Phase: sandbox.Starting, Bundle: b.bundle.Digest,
			Flags: slices.Clone(n.Flags), GuestGeneration: 1, Hostname: hostname(req.Spec.Hostname, req.Name, req.UID),
		}
		err := o.create(ctx, b)
		return o.rec, err
	})
}

// Restore is Start from an artefact. It is refused before anything is touched when the node or the
// request does not fit it. It never starts a process.
func (n *Node) Restore(ctx context.Context, req RestoreRequest) (nodestate.Sandbox, error) {
	return doFor(ctx, n, req.UID, true, func(ctx context.Context, o *owner) (nodestate.Sandbox, error) {
		if done, err := o.madeBefore(ctx, req.CommandID); done || err != nil {
			return o.rec, err
		}
		release, err := n.useSnapshot(req.SnapshotUID)
		if err != nil {
			return nodestate.Sandbox{}, err
		}
		defer release()
		m, b, err := n.fits(req)
		if err != nil {
			return nodestate.Sandbox{}, err
		}
		b.parked = req.Parked
		o.rec = restoredRecord(req, m)
		o.rec.Created = n.Now().UTC()
		err = o.create(ctx, b)
		return o.rec, err
	})
}

// fits checks a restore against the manifest, and touches nothing.
func (n *Node) fits(req RestoreRequest) (*checkpoint.Manifest, *build, error) {
	snap, err := n.Store.Snapshot(req.SnapshotUID)
	if err != nil {
		return nil, nil, err
	}
	if snap.State != nodestate.SnapshotReady || snap.Tenant != req.Tenant {
		return nil, nil, errs.New(errs.ObjectNotFound, "this node has no ready snapshot %s", req.SnapshotUID).With("kind", "snapshot").With("uid", req.SnapshotUID)
	}
	m, err := n.Snapshots.Load(req.SnapshotUID)
	if err != nil {
		return nil, nil, err
	}
	if err := m.CheckHost(n.Host); err != nil {
		return nil, nil, err
	}
	if err := m.CheckVolumes(req.Volumes); err != nil {
		return nil, nil, err
	}
	bundle, err := n.Bundles.ByDigest(m.Runtime.Bundle)
	if err != nil {
		return nil, nil, errs.From(err).With("want", m.Runtime.Version).With("has", n.Bundles.Current().Version)
	}
	b := &build{verb: "restore", bundle: bundle, from: m, fromDir: n.Snapshots.Path(req.SnapshotUID)}
	return m, b, nil
}

func restoredRecord(req RestoreRequest, m *checkpoint.Manifest) nodestate.Sandbox {
	spec := m.Sandbox.Clone()
	spec.Hostname, spec.Volumes = req.Hostname, nil
	if req.Network != nil {
		spec.Egress = req.Network.Egress.Clone()
	}
	for _, v := range req.Volumes {
		spec.Volumes = append(spec.Volumes, sandbox.VolumeMount{VolumeUID: v.VolumeUID, Path: v.Path, ReadOnly: v.ReadOnly})
	}
	return nodestate.Sandbox{
		UID: req.UID, Tenant: req.Tenant, Name: req.Name, Generation: req.Generation, CommandID: req.CommandID, Spec: spec,
		Intent: nodestate.IntentRestore, Phase: sandbox.Starting, Bundle: m.Runtime.Bundle, Flags: slices.Clone(m.Runtime.Flags),
		RestoredFrom: req.SnapshotUID, GuestGeneration: m.GuestGeneration + 1, Hostname: hostname(req.Hostname, req.Name, req.UID),
		HasMain: m.HasMain, Defaults: nodestate.Defaults(m.Defaults),
	}
}

// hostname is what was asked for, else the name, else the end of the uid (its beginning is the time, the
// same for forks).
func hostname(asked, name, uid string) string {
	switch {
	case asked != "":
		return asked
	case name != "":
		return strings.Map(func(r rune) rune {
			if r == '.' || r == '_' {
				return '-'
			}
			return r
		}, name)
	}
	return uid[max(0, len(uid)-12):]
}

// madeBefore tells whether the same command made the sandbox already. An error when another did, or when nobody
// waits for it any more.
func (o *owner) madeBefore(ctx context.Context, commandID string) (bool, error) {
	switch {
	case !o.exists:
		return false, left(ctx)
	case o.rec.Intent == nodestate.IntentKeep && o.rec.CommandID == commandID:
		return true, nil
	}
	return false, wrongPhase(o.rec, "its uid is in use; a uid is used once")
}

// create records the intent, runs the steps, and undoes them if one fails.
func (o *owner) create(ctx context.Context, b *build) error {
	b.identity.Hostname = o.rec.Hostname
	if b.parked {
		b.identity.Hook = HookAtClaim
	}
	last, err := o.n.Store.LastObservation()
	if err != nil {
		return err
	}
	o.rec.Observation = max(o.rec.Observation, last)
	if err := o.enter(ctx, b); err != nil {
		o.rec = nodestate.Sandbox{}
		return err
	}
	if err := o.n.fault(b.verb + ".intent.before"); err != nil {
		return err
	}
	if err := o.reserveNetwork(ctx); err != nil {
		o.n.Room.Leave(o.uid)
		o.rec = nodestate.Sandbox{}
		return err
	}
	err = o.observe(o.rec)
	if err == nil {
		err = o.n.fault(b.verb + ".intent.after")
	}
	if err == nil {
		err = o.make(ctx, b)
	}
	if err == nil || crashed(err) {
		return err
	}
	if o.rec.UID == "" {
		// The intent was not written: there is nothing to undo but what is in memory.
		if removeErr := o.n.Networks.Remove(o.uid); removeErr != nil {
			return errors.Join(err, removeErr)
		}
		o.n.Networks.Free(o.uid)
		o.n.Room.Leave(o.uid)
		return err
	}
	undoErr := o.undo(ctx)
	if crashed(undoErr) {
		return undoErr
	}
	if undoErr != nil {
		return errors.Join(err, undoErr)
	}
	e := errs.From(err)
	if e.Outcome == errs.Unknown {
		// Absence was observed: it is certain that nothing is left.
		e = e.WithOutcome(errs.NotStarted, errs.SameOperation)
	}
	return e
}

// undo removes what was made, in a bounded time of its own.
func (o *owner) undo(ctx context.Context) error {
	after, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	return o.remove(after)
}

// Delete removes a sandbox from any state and returns once its absence was observed. What is being made
// of it, or captured, is ended first. Deleting what is not there succeeds.
func (n *Node) Delete(ctx context.Context, uid string) error {
	cause := errs.New(errs.WrongPhase, "sandbox %s is being deleted", uid).With("uid", uid).With("phase", string(sandbox.Deleting))
	return n.submit(ctx, uid, &task{ends: cause, fn: func(ctx context.Context, o *owner) error {
		if !o.exists {
			_, err := n.Driver.State(ctx, uid)
			_, statErr := os.Lstat(n.Dir(uid))
			if errs.Has(err, errs.ObjectNotFound) && errors.Is(statErr, fs.ErrNotExist) {
				return nil
			}
			if err := o.unmake(ctx); err != nil {
				return err
			}
			n.Networks.Free(uid)
			return nil
		}
		return o.remove(ctx)
	}})
}

// remove is the whole teardown: the intent, every step's undo, the record. After an error it is tried
// again later.
func (o *owner) remove(ctx context.Context) error {
	err := o.removeOnce(ctx)
	if err != nil && !crashed(err) {
		o.again(o.removeOnce)
	}
	if err == nil {
		o.noRetry()
	}
	return err
}

func (o *owner) removeOnce(ctx context.Context) error {
	if err := o.n.fault("delete.intent.before"); err != nil {
		return err
	}
	rec := o.rec
	rec.Intent, rec.Phase, rec.Capture = nodestate.IntentDelete, sandbox.Deleting, nil
	if err := o.observe(rec); err != nil {
		return err
	}
	if err := o.n.fault("delete.intent.after"); err != nil {
		return err
	}
	if err := o.unmake(ctx); err != nil {
		return err
	}
	if o.rec.Hibernation != nil {
		if err := o.n.Snapshots.Delete(o.uid); err != nil {
			return err
		}
		if err := o.n.fault("delete.artefact.after"); err != nil {
			return err
		}
	}
	if err := o.n.Store.RemoveSandbox(o.uid); err != nil {
		return err
	}
	o.rec, o.exists = nodestate.Sandbox{}, false
	o.n.Networks.Free(o.uid)
	o.n.Room.Leave(o.uid)
	return o.n.fault("delete.record.after")
}

// Freeze runs fn while the sandbox stands still (and leaves one that is paused so), for a copy of a volume that it writes to.
func (n *Node) Freeze(ctx context.Context, uid string, fn func(ctx context.Context) error) error {
	return n.do(ctx, uid, true, func(ctx context.Context, o *owner) error {
		if err := o.mustLive(); err != nil {
			return err
		}
		return because(ctx, o.frozen(ctx, "", func(ctx context.Context, s checkpoint.Subject) (checkpoint.Frozen, error) {
			return checkpoint.Freeze(ctx, s, fn)
		}))
	})
}

func (o *owner) mustRun() error {
	if !o.exists {
		return noSandbox(o.uid)
	}
	if o.rec.Phase != sandbox.Running {
		return wrongPhase(o.rec, "only a running sandbox can be frozen")
	}
	return nil
}

// mustLive is mustRun that lets a paused sandbox pass.
func (o *owner) mustLive() error {
	if o.exists && o.rec.Phase == sandbox.Paused && o.stands() {
		return nil
	}
	return o.mustRun()
}

// mainOf says which command the sandbox runs, if any, and the defaults of its processes.
func mainOf(spec sandbox.Spec, img ImageConfig) (*Main, nodestate.Defaults) {
	d := nodestate.Defaults{Env: MergeEnv(img.Env, spec.Env), User: img.User, Dir: img.WorkingDir}
	if spec.User != "" {
		d.User = spec.User
	}
	if spec.WorkingDir != "" {
		d.Dir = spec.WorkingDir
	}
	argv := slices.Clone(spec.Command)
	if len(argv) == 0 && spec.RunImageCommand {
		argv = append(slices.Clone(img.Entrypoint), img.Cmd...)
	}
	if len(argv) == 0 {
		return nil, d
	}
	return &Main{Argv: argv, Env: d.Env, User: d.User, Dir: d.Dir}, d
}

const defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// MergeEnv puts the overrides into the base, in the base's order, then by name; PATH is always set.
func MergeEnv(base []string, over map[string]string) []string {
	left := maps.Clone(over)
	out := make([]string, 0, len(base)+len(over)+1)
	hasPath := false
	for _, kv := range base {
		k, _, ok := strings.Cut(kv, "=")
		if !ok || k == "" {
			continue
		}
		if v, replaced := left[k]; replaced {
			kv = k + "=" + v
			delete(left, k)
		}
		hasPath = hasPath || k == "PATH"
		out = append(out, kv)
	}
	for _, k := range slices.Sorted(maps.Keys(left)) {
		hasPath = hasPath || k == "PATH"
		out = append(out, k+"="+left[k])
	}
	if !hasPath {
		out = append(out, "PATH="+defaultPath)
	}
	return out
}

var _ checkpoint.Machine = runtime.Driver(nil)
