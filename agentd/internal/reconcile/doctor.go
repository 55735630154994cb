package reconcile

import (
	"bufio"
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/dormouse-run/dormouse/agentd/internal/checkpoint"
	"github.com/dormouse-run/dormouse/agentd/internal/network"
	"github.com/dormouse-run/dormouse/agentd/internal/nodestate"
	"github.com/dormouse-run/dormouse/agentd/internal/runtime"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/fault"
	"github.com/dormouse-run/dormouse/pkg/uid"
)

// Sources are where the two inventories come from.
type Sources struct {
	Store interface {
		Sandboxes() ([]nodestate.Sandbox, error)
		Snapshots() ([]nodestate.Snapshot, error)
	}
	Driver interface {
		List(ctx context.Context) ([]runtime.Status, error)
	}
	Groups interface {
		List() ([]string, error)
	}
	Artefacts interface {
		Observe() (checkpoint.Observed, error)
		Delete(uid string) error
	}
	// ImageHolds and VolumeHolds list what each holder of this node has.
	ImageHolds  func(ctx context.Context) (map[string][]string, error)
	VolumeHolds func(ctx context.Context) (map[string][]string, error)
	// Networks are the leases, and what is on the node that no lease explains. Purge removes the latter.
	Networks interface {
		Observe() (network.Inventory, error)
		Purge(address string) error
	}
	// Aside lists what agentd put aside because it could not be read.
	Aside func() ([]string, error)
	// SandboxRoot and SnapshotRoot are the folders.
	SandboxRoot, SnapshotRoot string
	// Mountinfo is the mount table to look at.
	Mountinfo string
}

// Purger removes what has no record.
type Purger interface {
	Remove(ctx context.Context, uid string) error
	FinishSnapshot(ctx context.Context, uid string) error
	// Purge removes whatever there is of a sandbox that no record names. An error when one does.
	Purge(ctx context.Context, uid string) error
}

// Records reads the records. Only after Observe.
func (s Sources) Records() (Records, error) {
	boxes, err := s.Store.Sandboxes()
	if err != nil {
		return Records{}, err
	}
	snaps, err := s.Store.Snapshots()
	return Records{boxes, snaps}, err
}

// Observe looks at the node: all of it, or an error.
func (s Sources) Observe(ctx context.Context) (Observed, error) {
	var o Observed
	var err error
	if o.Runtime, err = s.Driver.List(ctx); err != nil {
		return o, err
	}
	if o.Groups, err = s.Groups.List(); err != nil {
		return o, err
	}
	if o.Folders, err = folders(s.SandboxRoot); err != nil {
		return o, err
	}
	if o.Mounts, err = mountsBelow(s.Mountinfo, s.SandboxRoot); err != nil {
		return o, err
	}
	if o.Artefacts, err = s.Artefacts.Observe(); err != nil {
		return o, err
	}
	if o.ImageHolds, err = s.ImageHolds(ctx); err != nil {
		return o, err
	}
	if o.VolumeHolds, err = s.VolumeHolds(ctx); err != nil {
		return o, err
	}
	if o.Aside, err = s.Aside(); err != nil {
		return o, err
	}
	o.Network, err = s.Networks.Observe()
	return o, err
}

func folders(root string) ([]string, error) {
	entries, err := os.ReadDir(root)
	if err != nil {
		return nil, errs.Wrap(err, errs.InternalError, "list the sandboxes' folders: %v", err)
	}
	var out []string
	for _, e := range entries {
		out = append(out, e.Name())
	}
	return out, nil
}

func mountsBelow(mountinfo, root string) ([]string, error) {
	f, err := os.Open(mountinfo)
	if err != nil {
		return nil, errs.Wrap(err, errs.InternalError, "read the mount table: %v", err)
	}
	defer f.Close()
	var out []string
	scan := bufio.NewScanner(f)
	for scan.Scan() {
		fields := strings.Fields(scan.Text())
		if len(fields) > 4 && strings.HasPrefix(fields[4], filepath.Clean(root)+"/") {
			out = append(out, fields[4])
		}
	}
	slices.Sort(out)
	return out, scan.Err()
}

// Result is a finding and what became of it.
type Result struct {
	Finding
	Fixed bool
	Err   error
}

// MaxFindings is the most of one page.
const MaxFindings = 1000

// Request is what an examination is to do.
type Request struct {
	// Fix removes what may be removed of the page.
	Fix bool
	// After is the Key of the last finding of the page before; "" is the first page.
	After string
	// Limit is 1..MaxFindings; 0 is MaxFindings.
	Limit int
}

// Key is a finding's place in the order of pages.
func (f Finding) Key() string { return string(f.Kind) + " " + f.Name }

// page cuts a page out of what was found, which is in order. What has one key stays together. The rest goes on after next.
func (r Request) page(found []Finding) (page []Finding, next string) {
	first := slices.IndexFunc(found, func(f Finding) bool { return f.Key() > r.After })
	if first < 0 {
		return nil, ""
	}
	found = found[first:]
	last := r.Limit
	if last <= 0 {
		last = MaxFindings
	}
	for last < len(found) && found[last].Key() == found[last-1].Key() {
		last++
	}
	if last >= len(found) {
		return found, ""
	}
	return found[:last], found[last-1].Key()
}

// Examine finds every difference, and gives a page of them; with Fix it removes what may be removed of these. What was
// fixed is looked at again: Fixed means that it is not seen any more.
func Examine(ctx context.Context, s Sources, p Purger, req Request) (_ []Result, counts map[string]int, next string, err error) {
	seen, found, err := s.examine(ctx)
	if err != nil {
		return nil, nil, "", err
	}
	fix := req.Fix
	found, next = req.page(found)
	results := make([]Result, len(found))
	tried := make(map[string]error)
	for i, f := range found {
		results[i].Finding = f
		if !fix || !f.Fixable {
			continue
		}
		err, done := tried[f.Name]
		if !done || f.Kind == OrphanStaging {
			fault.At("doctor.fix.before")
			err = s.fix(ctx, p, f)
			fault.At("doctor.fix.after")
			tried[f.Name] = err
		}
		results[i].Err = err
	}
	if fix && len(tried) > 0 {
		_, left, err := s.examine(ctx)
		if err != nil {
			return nil, nil, "", err
		}
		for i := range results {
			r := &results[i]
			r.Fixed = r.Fixable && r.Err == nil && !slices.ContainsFunc(left, func(f Finding) bool { return f.Kind == r.Kind && f.Name == r.Name })
			if r.Fixable && r.Err == nil && !r.Fixed {
				r.Err = errs.New(errs.InternalError, "it is still there")
			}
		}
	}
	return results, seen.Counts(), next, nil
}

func (s Sources) examine(ctx context.Context) (Observed, []Finding, error) {
	seen, err := s.Observe(ctx)
	if err != nil {
		return seen, nil, err
	}
	rec, err := s.Records()
	if err != nil {
		return seen, nil, err
	}
	return seen, Diff(rec, seen, s.SandboxRoot, s.SnapshotRoot), nil
}

func (s Sources) fix(ctx context.Context, p Purger, f Finding) error {
	if f.Kind == OrphanNetwork {
		return s.Networks.Purge(f.Name)
	}
	if err := uid.Check(f.Name); err != nil {
		return errs.New(errs.InvalidField, "%q is no uid, so it was not made by this node; look at it by hand", f.Name).With("field", "name")
	}
	switch f.Kind {
	case StuckDelete:
		return p.Remove(ctx, f.Name)
	case StuckSnapshot:
		return p.FinishSnapshot(ctx, f.Name)
	case OrphanStaging:
		return s.Artefacts.Delete(f.Name)
	}
	return p.Purge(ctx, f.Name)
}
