package app

import (
	"context"
	"errors"
	"time"

	"github.com/dormouse-run/dormouse/agentd/internal/api"
	"github.com/dormouse-run/dormouse/agentd/internal/nodestate"
	"github.com/dormouse-run/dormouse/agentd/internal/runner"
	"github.com/dormouse-run/dormouse/agentd/internal/volumes"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/fault"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
	"github.com/dormouse-run/dormouse/pkg/volume"
)

// volumeParts is the volumes store as the runner and the API see it. The store keeps the folders, the
// node's records whose they are.
type volumeParts struct {
	store *volumes.Store
	state *nodestate.Store
	// freeze runs fn while a sandbox stands still.
	freeze func(ctx context.Context, sandboxUID string, fn func(ctx context.Context) error) error
}

var (
	_ runner.Volumes = (*volumeParts)(nil)
	_ api.Volumes    = (*volumeParts)(nil)
)

func (v *volumeParts) Attach(ctx context.Context, volumeUID, holder string, readOnly bool) (string, error) {
	vol, err := v.store.Attach(ctx, volumeUID, holder, readOnly)
	if err != nil {
		return "", err
	}
	return vol.Path, nil
}

func (v *volumeParts) Detach(ctx context.Context, uids []string, holder string) error {
	if uids == nil {
		held, err := v.holds(ctx)
		if err != nil {
			return err
		}
		uids = held[holder]
	}
	var all []error
	for _, uid := range uids {
		all = append(all, v.store.Detach(ctx, uid, holder))
	}
	return errors.Join(all...)
}

// holds lists the volumes that each holder has.
func (v *volumeParts) holds(ctx context.Context) (map[string][]string, error) {
	attached, err := v.store.Attachments(ctx)
	if err != nil {
		return nil, err
	}
	out := make(map[string][]string)
	for uid, holders := range attached {
		for _, h := range holders {
			out[h.Name] = append(out[h.Name], uid)
		}
	}
	return out, nil
}

// CreateVolume makes a volume or a copy. The record of whose it is comes first.
func (v *volumeParts) CreateVolume(ctx context.Context, req api.VolumeRequest) (volume.Volume, error) {
	rec, err := v.state.Volume(req.UID)
	switch {
	case errs.Has(err, errs.ObjectNotFound):
		rec = nodestate.Volume{UID: req.UID, Tenant: req.Tenant, Created: time.Now().UTC()}
		if err := v.state.PutVolume(rec); err != nil {
			return volume.Volume{}, err
		}
		fault.At("volume.record.after")
	case err != nil:
		return volume.Volume{}, err
	case rec.Tenant != req.Tenant:
		return volume.Volume{}, errs.New(errs.NameTaken, "the volume uid %s is in use", req.UID).With("uid", req.UID)
	}
	made, err := v.make(ctx, req)
	if err != nil {
		// Nothing of it is left unless it was there before, which Get tells.
		if _, getErr := v.store.Get(ctx, req.UID); errs.Has(getErr, errs.ObjectNotFound) {
			err = errors.Join(err, v.state.RemoveVolume(req.UID))
		}
		return volume.Volume{}, err
	}
	return v.domain(rec, made), nil
}

func (v *volumeParts) make(ctx context.Context, req api.VolumeRequest) (volumes.Volume, error) {
	opts := volumes.Options{SizeLimit: req.SizeLimitBytes}
	if req.SourceUID == "" {
		return v.store.Create(ctx, req.UID, opts)
	}
	if src, err := v.state.Volume(req.SourceUID); err != nil || src.Tenant != req.Tenant {
		return volumes.Volume{}, errors.Join(err, errs.New(errs.ObjectNotFound, "this node has no volume %s", req.SourceUID).With("kind", "volume").With("uid", req.SourceUID))
	}
	writer, err := v.writer(ctx, req.SourceUID)
	if err != nil {
		return volumes.Volume{}, err
	}
	if writer == "" {
		return v.store.Clone(ctx, req.SourceUID, req.UID, opts)
	}
	if writer != req.FreezeSandboxUID {
		return volumes.Volume{}, errs.New(errs.AlreadyAttached, "the volume %s is written to by %s: a copy of it needs that sandbox to stand still", req.SourceUID, writer).
			With("volume", req.SourceUID).With("holder", writer)
	}
	var made volumes.Volume
	err = v.freeze(ctx, writer, func(ctx context.Context) error {
		var err error
		made, err = v.store.Clone(ctx, req.SourceUID, req.UID, opts)
		return err
	})
	return made, err
}

// writer is the sandbox that may be writing to the volume, "" for none: one that has ended does not, nor one
// that is hibernated.
func (v *volumeParts) writer(ctx context.Context, uid string) (string, error) {
	holders, err := v.store.Holders(ctx, uid)
	if err != nil {
		return "", err
	}
	for _, h := range holders {
		if h.ReadOnly {
			continue
		}
		rec, err := v.state.Sandbox(h.Name)
		if err == nil && rec.Intent == nodestate.IntentKeep && (rec.Phase == sandbox.Stopped || rec.Phase == sandbox.Failed || rec.Phase == sandbox.Hibernated) {
			continue
		}
		return h.Name, nil
	}
	return "", nil
}

// DeleteVolume removes a volume and then the record of whose it was.
func (v *volumeParts) DeleteVolume(ctx context.Context, uid string) error {
	if err := v.store.Delete(ctx, uid); err != nil {
		return err
	}
	if err := v.state.RemoveVolume(uid); err != nil {
		return err
	}
	fault.At("volume.forget.after")
	return nil
}

func (v *volumeParts) domain(rec nodestate.Volume, has volumes.Volume) volume.Volume {
	return volume.Volume{UID: rec.UID, Tenant: rec.Tenant, Created: rec.Created,
		Spec: volume.Spec{SizeLimitBytes: has.SizeLimit, SourceVolumeUID: has.Source}, Status: volume.Status{Phase: volume.Ready}}
}

// list gives the volumes that are there, with whose they are.
func (v *volumeParts) list(ctx context.Context) ([]volume.Volume, error) {
	there, err := v.store.List(ctx)
	if err != nil {
		return nil, err
	}
	var out []volume.Volume
	for _, has := range there {
		rec, err := v.state.Volume(has.UID)
		if errs.Has(err, errs.ObjectNotFound) {
			rec = nodestate.Volume{UID: has.UID, Created: has.Created} // of a state file that was lost
		} else if err != nil {
			return nil, err
		}
		out = append(out, v.domain(rec, has))
	}
	return out, nil
}
