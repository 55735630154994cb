package operations

import (
	"context"
	"strconv"

	"github.com/dormouse-run/dormouse/coordinator/internal/records"
	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
	"github.com/dormouse-run/dormouse/pkg/snapshot"
	"github.com/dormouse-run/dormouse/pkg/volume"
)

// RestoreSandbox makes a new sandbox with the processes of a snapshot.
func (e *Engine) RestoreSandbox(ctx context.Context, c Call, req RestoreSandbox) (*Operation, error) {
	if err := checkMeta(req.Name, req.Labels); err != nil {
		return nil, err
	}
	if err := checkBindings(req.Volumes, 1); err != nil {
		return nil, err
	}
	return e.submit(ctx, c, KindRestoreSandbox, req, nil, func(ctx context.Context, r catalog.Reader, op *Operation) (writes, error) {
		snap, err := e.readySnapshot(ctx, r, op.Tenant, "snapshot_uid", req.SnapshotUID)
		if err != nil {
			return writes{}, err
		}
		op.Plan.SnapshotUID = snap.UID
		return e.planCopies(ctx, r, op, snap, []string{req.Name}, req.Labels, req.Volumes, PolicySame)
	})
}

// ForkSandbox makes copies of a sandbox, which is checkpointed first, or of a snapshot. It makes all of
// them or leaves none.
func (e *Engine) ForkSandbox(ctx context.Context, c Call, req ForkSandbox) (*Operation, error) {
	if req.Count == 0 {
		req.Count = 1
	}
	if req.Count < 0 || req.Count > sandbox.MaxForkCount {
		return nil, errs.New(errs.LimitExceeded, "count: 1 to %d, got %d", sandbox.MaxForkCount, req.Count).
			With("field", "count").With("limit", strconv.Itoa(sandbox.MaxForkCount)).With("got", strconv.Itoa(req.Count))
	}
	if (req.SandboxUID == "") == (req.SnapshotUID == "") {
		return nil, errs.New(errs.InvalidField, "name either sandbox_uid or snapshot_uid").With("field", "sandbox_uid")
	}
	names := make([]string, req.Count)
	for i := range names {
		if req.NamePrefix != "" {
			names[i] = req.NamePrefix + "-" + strconv.Itoa(i)
		}
	}
	if err := checkMeta(names[req.Count-1], req.Labels); err != nil {
		return nil, err
	}
	if err := checkBindings(req.Volumes, req.Count); err != nil {
		return nil, err
	}
	return e.submit(ctx, c, KindForkSandbox, req, nil, func(ctx context.Context, r catalog.Reader, op *Operation) (writes, error) {
		snap, taken, err := e.forkSource(ctx, r, op, req)
		if err != nil {
			return writes{}, err
		}
		w, err := e.planCopies(ctx, r, op, snap, names, req.Labels, req.Volumes, PolicyClone)
		w.puts = append(taken, w.puts...)
		return w, err
	})
}

// forkSource gives the snapshot to make copies of: one that is Ready, or one that is reserved now.
func (e *Engine) forkSource(ctx context.Context, r catalog.Reader, op *Operation, req ForkSandbox) (*records.Snapshot, []catalog.Put, error) {
	if req.SnapshotUID != "" {
		snap, err := e.readySnapshot(ctx, r, op.Tenant, "snapshot_uid", req.SnapshotUID)
		if err == nil {
			op.Plan.SnapshotUID = snap.UID
		}
		return snap, nil, err
	}
	sb, err := e.source(ctx, r, op.Tenant, "sandbox_uid", req.SandboxUID)
	if err != nil {
		return nil, nil, err
	}
	w, err := e.reserveSnapshot(op, sb, "", nil)
	if err != nil {
		return nil, nil, err
	}
	snap := &records.Snapshot{SourceSpec: sb.Spec.Clone(), SourceNode: sb.Status.Node}
	snap.UID, snap.Tenant = op.Plan.SnapshotUID, op.Tenant
	for _, m := range sb.Spec.Volumes {
		snap.Status.Volumes = append(snap.Status.Volumes, snapshot.VolumeReference{VolumeUID: m.VolumeUID, Path: m.Path, ReadOnly: m.ReadOnly})
	}
	return snap, w.puts, nil
}

func (e *Engine) readySnapshot(ctx context.Context, r catalog.Reader, tenant, field, u string) (*records.Snapshot, error) {
	rec, err := e.find(ctx, r, field, records.SnapshotKey(tenant, u))
	if err != nil {
		return nil, err
	}
	snap, err := records.SnapshotOf(rec)
	if err == nil && snap.Status.Phase != snapshot.Ready {
		err = wrongPhase(rec.Key, rec.Phase, string(snapshot.Ready))
	}
	return snap, err
}

func checkBindings(bindings []Binding, copies int) error {
	seen := make(map[string]bool)
	for _, b := range bindings {
		if p := sandbox.ValidatePath("volumes.path", b.Path); p != nil {
			return problem(p)
		}
		if seen[b.Path] {
			return errs.New(errs.DuplicatePath, "two bindings for %s", b.Path).With("path", b.Path)
		}
		seen[b.Path] = true
		switch b.Policy {
		case "", PolicySame, PolicyClone:
			if b.ReplaceWith != "" {
				return errs.New(errs.InvalidField, "volumes.replace_with: only with the policy replace").With("field", "volumes.replace_with")
			}
		case PolicyReplace:
			if err := checkUID("volumes.replace_with", b.ReplaceWith); err != nil {
				return err
			}
		default:
			return errs.New(errs.InvalidField, "volumes.policy: same, clone or replace").With("field", "volumes.policy")
		}
	}
	return nil
}

// maxPlan bounds the records of one operation, below what one commit may write.
const maxPlan = catalog.MaxWrites - 16

// planCopies reserves all that copies of the snapshot need: their records, and those of the clones.
func (e *Engine) planCopies(ctx context.Context, r catalog.Reader, op *Operation, snap *records.Snapshot, names []string, labels map[string]string, bindings []Binding, def Policy) (writes, error) {
	if err := e.possible(snap.SourceSpec); err != nil {
		return writes{}, err
	}
	chosen, err := e.chooseVolumes(ctx, r, op.Tenant, snap, bindings, def)
	if err != nil {
		return writes{}, err
	}
	clones := 0
	for _, c := range chosen {
		if c.clone {
			clones++
		}
	}
	if n := len(names) * (1 + clones); n > maxPlan {
		return writes{}, errs.New(errs.LimitExceeded, "the copies and their volumes are %d objects; at most %d at once", n, maxPlan).
			With("field", "count").With("limit", strconv.Itoa(maxPlan)).With("got", strconv.Itoa(n))
	}
	if len(names) > 1 {
		if err := noneExclusive(chosen); err != nil {
			return writes{}, err
		}
	}
	var p puts
	for _, name := range names {
		spec := snap.SourceSpec.Clone()
		spec.Hostname = ""
		spec.Volumes = nil
		var held []records.Attachment
		var cp Copy
		for _, c := range chosen {
			v := c.volume
			if c.clone {
				if v, err = newVolume(op, "", nil, volume.Spec{SizeLimitBytes: c.volume.Spec.SizeLimitBytes, Access: c.volume.Spec.Access, SourceVolumeUID: c.volume.UID}); err != nil {
					return writes{}, err
				}
				v.Status.Node = c.volume.Status.Node
				cp.Clones = append(cp.Clones, v.UID)
				p.add(v.Put())
			}
			mount := sandbox.VolumeMount{VolumeUID: v.UID, Path: c.path, ReadOnly: c.readOnly}
			a, err := attachment(v, mount)
			if err != nil {
				return writes{}, err
			}
			spec.Volumes, held = append(spec.Volumes, mount), append(held, a)
		}
		sb, err := newSandbox(op, name, labels, spec, held)
		if err != nil {
			return writes{}, err
		}
		sb.SourceSnapshot, sb.Status.RestoredFrom = snap.UID, snap.UID
		cp.SandboxUID = sb.UID
		op.Plan.Copies = append(op.Plan.Copies, cp)
		p.add(fits(sb.Put()))
	}
	return writes{puts: p.all}, p.err
}

// choice is what is attached at a path.
type choice struct {
	path     string
	readOnly bool
	volume   *records.Volume
	clone    bool
}

// chooseVolumes decides for each volume of the snapshot. A binding for a path that the snapshot does not
// have is refused.
func (e *Engine) chooseVolumes(ctx context.Context, r catalog.Reader, tenant string, snap *records.Snapshot, bindings []Binding, def Policy) ([]choice, error) {
	byPath := make(map[string]Binding, len(bindings))
	for _, b := range bindings {
		byPath[b.Path] = b
	}
	var all []choice
	nodes := make(map[string]bool)
	for _, ref := range snap.Status.Volumes {
		b := byPath[ref.Path]
		delete(byPath, ref.Path)
		u, field := ref.VolumeUID, "volumes"
		if b.Policy == PolicyReplace {
			u, field = b.ReplaceWith, "volumes.replace_with"
		}
		v, err := e.volumeFor(ctx, r, tenant, field, u)
		if err != nil {
			return nil, err
		}
		clone := b.Policy == PolicyClone || b.Policy == "" && def == PolicyClone && v.Spec.Access != volume.SharedReadOnly
		all = append(all, choice{path: ref.Path, readOnly: ref.ReadOnly, volume: v, clone: clone})
		nodes[v.Status.Node] = true
	}
	for path := range byPath {
		return nil, errs.New(errs.InvalidField, "volumes.path: the snapshot has no volume at %s", path).With("field", "volumes.path").With("path", path)
	}
	return all, oneNode(nodes)
}

// noneExclusive refuses to attach one exclusive volume to several copies.
func noneExclusive(chosen []choice) error {
	for _, c := range chosen {
		if !c.clone && c.volume.Spec.Access != volume.SharedReadOnly {
			return errs.New(errs.AlreadyAttached, "volume %s can be attached to one sandbox only, not to each copy; use clone", c.volume.UID).
				With("volume", c.volume.UID).With("path", c.path)
		}
	}
	return nil
}
