package operations

import (
	"context"
	"strconv"
	"strings"

	"github.com/dormouse-run/dormouse/coordinator/internal/records"
	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
	"github.com/dormouse-run/dormouse/pkg/uid"
	"github.com/dormouse-run/dormouse/pkg/volume"
)

// problem makes the domain's problem an error of the closed set.
func problem(p *sandbox.Problem) error {
	if p == nil {
		return nil
	}
	e := errs.New(errs.Reason(p.Reason), "%s", p.Message).With("field", p.Field)
	for k, v := range p.Details {
		e = e.With(k, v)
	}
	return e
}

func checkMeta(name string, labels map[string]string) error {
	if p := sandbox.ValidateName("name", name); p != nil {
		return problem(p)
	}
	return problem(sandbox.ValidateLabels("labels", labels))
}

func checkUID(field, u string) error {
	if err := uid.Check(u); err != nil {
		return errs.New(errs.InvalidField, "%s: %v; look a name up first", field, err).With("field", field)
	}
	return nil
}

// find reads what a request names by uid. One that is gone is NOT_FOUND, and STALE_UID where its
// name now belongs to another.
func (e *Engine) find(ctx context.Context, r catalog.Reader, field string, key catalog.Key) (catalog.Record, error) {
	if err := checkUID(field, key.UID); err != nil {
		return catalog.Record{}, err
	}
	rec, err := r.Get(ctx, key)
	if !errs.Has(err, errs.ObjectNotFound) {
		return rec, err
	}
	absent := errs.New(errs.ObjectNotFound, "there is no %s %s", key.Kind, key.UID).With("kind", string(key.Kind)).With("uid", key.UID)
	tomb, terr := e.cfg.Catalog.Tombstone(ctx, key)
	if errs.Has(terr, errs.ObjectNotFound) {
		return rec, absent
	}
	if terr != nil {
		return rec, terr
	}
	trace, err := records.DecodeTrace(tomb.Body)
	if err != nil || trace.Name == "" {
		return rec, absent
	}
	heir, err := r.GetByName(ctx, key.Tenant, key.Kind, trace.Name)
	switch {
	case errs.Has(err, errs.ObjectNotFound):
		return rec, absent
	case err != nil:
		return rec, err
	}
	return rec, errs.New(errs.StaleUID, "%s %s was deleted; its name %q now belongs to %s", key.Kind, key.UID, trace.Name, heir.UID).
		With("uid", key.UID).With("current_uid", heir.UID).With("name", trace.Name)
}

// findSandbox is find for a sandbox that is the caller's to use: what a pool or a template has is not.
func (e *Engine) findSandbox(ctx context.Context, r catalog.Reader, field, tenant, u string) (*records.Sandbox, catalog.Record, error) {
	rec, err := e.find(ctx, r, field, records.SandboxKey(tenant, u))
	if err != nil {
		return nil, rec, err
	}
	sb, err := records.SandboxOf(rec)
	if err == nil && sb.Hidden() {
		err = errs.New(errs.ObjectNotFound, "there is no %s %s", rec.Kind, u).With("kind", string(rec.Kind)).With("uid", u)
	}
	return sb, rec, err
}

// wrongPhase says what an object's phase does not allow.
func wrongPhase(key catalog.Key, phase, want string) error {
	return errs.New(errs.WrongPhase, "%s %s is %s; it must be %s", key.Kind, key.UID, phase, want).
		With("uid", key.UID).With("phase", phase)
}

// volumeFor reads a volume that a sandbox is to attach.
func (e *Engine) volumeFor(ctx context.Context, r catalog.Reader, tenant, field, u string) (*records.Volume, error) {
	rec, err := e.find(ctx, r, field, records.VolumeKey(tenant, u))
	if err != nil {
		return nil, err
	}
	v, err := records.VolumeOf(rec)
	if err == nil && v.Status.Phase != volume.Ready {
		err = wrongPhase(rec.Key, rec.Phase, string(volume.Ready))
	}
	return v, err
}

// attach decides how the mounts are held, and that they are on one node.
func (e *Engine) attach(ctx context.Context, r catalog.Reader, tenant string, mounts []sandbox.VolumeMount) ([]records.Attachment, error) {
	var held []records.Attachment
	nodes := make(map[string]bool)
	for _, m := range mounts {
		v, err := e.volumeFor(ctx, r, tenant, "volume_uid", m.VolumeUID)
		if err != nil {
			return nil, err
		}
		a, err := attachment(v, m)
		if err != nil {
			return nil, err
		}
		held = append(held, a)
		nodes[v.Status.Node] = true
	}
	return held, oneNode(nodes)
}

func attachment(v *records.Volume, m sandbox.VolumeMount) (records.Attachment, error) {
	shared := v.Spec.Access == volume.SharedReadOnly
	if shared && !m.ReadOnly {
		return records.Attachment{}, errs.New(errs.InvalidField, "volume %s is shared and read only; mount it read only", v.UID).With("field", "read_only").With("volume", v.UID)
	}
	return records.Attachment{VolumeUID: v.UID, Shared: shared}, nil
}

func oneNode(nodes map[string]bool) error {
	if len(nodes) < 2 {
		return nil
	}
	var names []string
	for n := range nodes {
		names = append(names, n)
	}
	return errs.New(errs.IncompatibleNode, "the volumes are on different nodes (%s); a sandbox can only use those of one", strings.Join(names, ", "))
}

// maxObject bounds what a request may put into one record: what is observed later needs room too.
const maxObject = catalog.MaxBody - 64<<10

// fits refuses a first record that leaves no room to grow.
func fits(p catalog.Put, err error) (catalog.Put, error) {
	if n := len(p.Record.Body); err == nil && n > maxObject {
		err = errs.New(errs.LimitExceeded, "the request makes a record of %d bytes, the limit is %d; use a shorter command and environment", n, maxObject).
			With("field", "spec").With("limit", strconv.Itoa(maxObject)).With("got", strconv.Itoa(n))
	}
	return p, err
}

// puts collects writes and their first error.
type puts struct {
	all []catalog.Put
	err error
}

func (p *puts) add(put catalog.Put, err error) {
	if p.err == nil {
		p.err = err
	}
	p.all = append(p.all, put)
}
