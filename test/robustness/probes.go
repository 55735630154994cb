package robustness

import (
	"context"
	"fmt"
	"slices"

	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/uid"
)

// What a fault is to meet is not left to what clients happen to do meanwhile: the fault makes objects of its own, which no client changes, and waits until
// what has to be known of them is known. They are in the history like all others.

// probe does an operation until it has succeeded, each time as another one.
func (f *faults) probe(ctx context.Context, r Record) (*Record, error) {
	var done *Record
	err := until(ctx, fmt.Sprintf("%s %q succeeds", r.Kind, r.Name), func() error {
		if done = f.ask(ctx, r); done.Outcome != OK {
			return fmt.Errorf("%s: %s %s", done.Outcome, done.Reason, done.Message)
		}
		return nil
	})
	return done, err
}

// ask does an operation once.
func (f *faults) ask(ctx context.Context, r Record) *Record {
	r.Worker, r.Op, r.Outcome = workers, uid.New(), Unknown
	t := f.traffic
	t.begin(&r)
	t.shun(r.Op)
	f.asked++
	t.do(ctx, &r, f.asked%coordinators, true)
	return &r
}

// shun has clients ask for nothing but reads of what the operation makes.
func (h *history) shun(op string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if o := h.objects[op]; o != nil {
		o.shunned = true
	}
}

// named gives a name and a cell that nothing else of the run has.
func (f *faults) named(k Kind, what string) Record {
	f.lost++
	return Record{Kind: k, Cell: f.lost % cells, Name: fmt.Sprintf("%s-%d", what, f.lost)}
}

// volume makes one.
func (f *faults) volume(ctx context.Context, what string) (*Record, error) {
	return f.probe(ctx, f.named(CreateVolume, what))
}

// attached makes a sandbox with a volume of its own.
func (f *faults) attached(ctx context.Context, what string) (box, volume *Record, err error) {
	if volume, err = f.volume(ctx, what); err != nil {
		return nil, nil, err
	}
	r := f.named(Attach, what)
	r.Cell, r.Target, r.TargetUID = volume.Cell, volume.Op, volume.UID
	box, err = f.probe(ctx, r)
	return box, volume, err
}

// on makes a sandbox on the node, which of all nodes is left to the coordinator to choose: the others are kept until then, so that each is chosen in the end.
func (f *faults) on(ctx context.Context, node int, what string) (box *Record, err error) {
	var elsewhere []*Record
	for box == nil {
		made, _, err := f.attached(ctx, what)
		if err != nil {
			return nil, err
		}
		s := f.world.user[0].Sandbox(made.UID)
		if err := until(ctx, "the sandbox is read", func() error { return s.Refresh(ctx) }); err != nil {
			return nil, err
		}
		if s.Last.GetStatus().GetNode() == nodeName(node) {
			box = made
		} else {
			elsewhere = append(elsewhere, made)
		}
	}
	for _, made := range elsewhere {
		if err := f.delete(ctx, Detach, made); err != nil {
			return nil, err
		}
	}
	return box, nil
}

func nodeName(n int) string { return fmt.Sprintf("n%d", n) }

// delete deletes what the record made.
func (f *faults) delete(ctx context.Context, k Kind, made *Record) error {
	_, err := f.probe(ctx, Record{Kind: k, Cell: made.Cell, Target: made.Op, TargetUID: made.UID})
	return err
}

// journaled waits until the journal of the node has all that is committed now.
func (f *faults) journaled(ctx context.Context, node int) error {
	var now catalogState
	if err := until(ctx, "the server is read", func() (err error) { now, err = f.state(ctx); return err }); err != nil {
		return err
	}
	return until(ctx, "the journal of node "+nodeName(node)+" has everything until now", func() error {
		st, err := f.world.operator[0].CatalogStatus(ctx)
		if err != nil {
			return err
		}
		for _, j := range st.GetJournals() {
			if p := j.GetPoint(); j.GetNode() == nodeName(node) && p.GetSeq() >= now.seq && p.GetIncarnation() == now.incarnation {
				return nil
			}
		}
		return fmt.Errorf("%d of %s is not in %v", now.seq, now.incarnation, st.GetJournals())
	})
}

// renameVolume gives the name of a deleted volume to another. Who asks for the first is told of that.
func (f *faults) renameVolume(ctx context.Context, _ planned) error {
	ctx, cancel := context.WithTimeout(ctx, f.patience)
	defer cancel()
	first, err := f.volume(ctx, "again")
	if err != nil {
		return err
	}
	if err := f.delete(ctx, DeleteVolume, first); err != nil {
		return err
	}
	second, err := f.probe(ctx, Record{Kind: CreateVolume, Cell: first.Cell, Name: first.Name})
	if err != nil {
		return err
	}
	return until(ctx, "the deletion of what is deleted is refused", func() error {
		r := f.ask(ctx, Record{Kind: DeleteVolume, Cell: first.Cell, Target: first.Op, TargetUID: first.UID})
		if r.Outcome == NotStarted || r.Outcome == Unknown {
			return fmt.Errorf("%s %s", r.Outcome, r.Reason)
		}
		if r.Reason != string(errs.StaleUID) || r.Details["current_uid"] != second.UID {
			f.traffic.blame("volume %s was deleted and its name given to %s, and who asks for it is told: %s", first.UID, second.UID, r)
		}
		return nil
	})
}

// loseCommits has each first attempt of the commits of a sandbox lost on its way, so that each of them is built again. Its volume is attached to it nevertheless.
func (f *faults) loseCommits(ctx context.Context, _ planned) error {
	ctx, cancel := context.WithTimeout(ctx, f.patience)
	defer cancel()
	for range 3 {
		volume, err := f.volume(ctx, "twice")
		if err != nil {
			return err
		}
		r := f.named(Attach, "twice")
		r.Cell, r.Target, r.TargetUID = volume.Cell, volume.Op, volume.UID
		lost := firstsOf(inCell(&r))
		f.links(func(l *link) { l.losing = lost })
		box, err := f.probe(ctx, r)
		f.links(func(l *link) { l.losing = nil })
		if err != nil {
			return err
		}
		v := f.world.user[0].Volume(volume.UID)
		if err := until(ctx, "the volume is read", func() error { return v.Refresh(ctx) }); err != nil {
			return err
		}
		if lost.count() < 2 {
			return fmt.Errorf("of the commits of sandbox %s only %d were lost", box.UID, lost.count())
		}
		if holders := seenVolume(v.Last).Sandboxes; !slices.Equal(holders, []string{box.UID}) {
			f.traffic.blame("volume %s is attached to sandbox %s, and said to be attached to %v", volume.UID, box.UID, holders)
		}
	}
	return nil
}
