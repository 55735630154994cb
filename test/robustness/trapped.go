package robustness

import (
	"context"
	"errors"
	"fmt"
	"strconv"

	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/uid"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// Two faults are of one commit, which the link to the leader recognises: what they do to it leaves nothing to chance.

// labelled is how a label is written in the records of a commit. No read has it.
func labelled(key, value string) string { return fmt.Sprintf("%q:%q", key, value) }

// loseReply has a commit of the leader applied and its reply lost: the volume's creation has to be answered truly.
func (f *faults) loseReply(ctx context.Context, p planned) error {
	ctx, cancel := context.WithTimeout(ctx, f.patience)
	defer cancel()
	return until(ctx, "the reply to a commit is lost", func() error {
		i, err := f.coordinator(ctx, true)
		if err != nil {
			return err
		}
		f.lost++
		r := &Record{Worker: workers, Cell: f.lost % cells, Kind: CreateVolume, Op: uid.New(), Name: "lost-" + strconv.Itoa(f.lost)}
		t := f.world.link[i].lay(labelled(labelOp, r.Op), false)
		close(t.deliver)
		f.traffic.begin(r)
		f.traffic.do(ctx, r, i, true)
		if r.Reason == string(errs.NameTaken) {
			f.traffic.blame("nobody else was given that name: %s", r)
		}
		if !f.world.link[i].lift(t) {
			return errors.New("it was no commit of this leader")
		}
		return nil
	})
}

// delayCommit has a commit of the leader arrive at the server when another coordinator leads and has committed. Nothing
// else of the leader arrives meanwhile.
func (f *faults) delayCommit(ctx context.Context, p planned) error {
	ctx, cancel := context.WithTimeout(ctx, f.patience)
	defer cancel()
	var leader int
	var t *trap
	err := until(ctx, "a commit is on its way", func() (err error) {
		if leader, err = f.coordinator(ctx, true); err == nil {
			t, err = f.catch(ctx, leader)
		}
		return err
	})
	if err != nil {
		return err
	}
	l, other := f.world.link[leader], 1-leader
	err = until(ctx, "another leads and has committed", func() error {
		if now, err := f.coordinator(ctx, true); err != nil || now == leader {
			return fmt.Errorf("coordinator %d leads: %w", now, err)
		}
		call, cancel := context.WithTimeout(ctx, budget)
		defer cancel()
		_, err := f.world.user[other].CreateVolume(call, &dormousev1.CreateVolumeRequest{})
		return err
	})
	close(t.deliver)
	if err != nil {
		return err
	}
	select {
	case <-t.replied:
	case <-ctx.Done():
		return fmt.Errorf("the late commit was not answered: %w", ctx.Err())
	}
	l.set(func(l *link) { l.refuse = false })
	return nil
}

// catch holds up a commit of the coordinator, one that no client waits for any more or asks for again.
func (f *faults) catch(ctx context.Context, coordinator int) (*trap, error) {
	const label = "late"
	l, id := f.world.link[coordinator], uid.New()
	t := l.lay(labelled(label, id), true)
	call, cancel := context.WithTimeout(ctx, budget)
	defer cancel()
	var err error
	done := make(chan struct{})
	go func() { // ends with the call
		defer close(done)
		_, err = f.world.user[coordinator].CreateVolume(call, &dormousev1.CreateVolumeRequest{Labels: map[string]string{label: id}})
	}()
	select {
	case <-t.caught:
		cancel()
		<-done
		return t, nil
	case <-done:
	}
	if l.lift(t) {
		return t, nil
	}
	close(t.deliver)
	if err == nil {
		err = errors.New("another made it")
	}
	return nil, fmt.Errorf("no commit of coordinator %d: %w", coordinator, err)
}
