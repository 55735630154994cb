package bench

import (
	"context"
	"fmt"
	"time"

	"github.com/dormouse-run/dormouse/pkg/client"
	"github.com/dormouse-run/dormouse/pkg/wait"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// asleepMiB is the heap of what is hibernated and woken.
const asleepMiB = 64

// benchLifecycle tells how long a sandbox takes to stand still and to go on, beside runsc alone on the same sandbox,
// and how long a hibernated one takes to run again.
func benchLifecycle(ctx context.Context, b *bench) ([]Row, error) {
	all, err := b.filled(ctx, 1, asleepMiB, 1)
	if err != nil {
		return nil, err
	}
	s := all[0]
	floor, err := b.newBare(s.UID)
	if err != nil {
		return nil, err
	}
	var pause, resume, barePause, bareResume, hibernate, wake, use Sample
	for i := range b.times(30) + 2 {
		if i == 2 { // what was before is for warming up
			pause, resume, barePause, bareResume = nil, nil, nil, nil
		}
		if err := timed(&pause, func() error { return s.Pause(ctx, "") }); err != nil {
			return nil, err
		}
		if err := timed(&resume, func() error { return s.Resume(ctx, "") }); err != nil {
			return nil, err
		}
		if err := timed(&barePause, func() error { return b.onOurs(ctx, floor, "pause", s.UID) }); err != nil {
			return nil, err
		}
		if err := timed(&bareResume, func() error { return b.onOurs(ctx, floor, "resume", s.UID) }); err != nil {
			return nil, err
		}
	}
	for i := range b.times(12) + 1 {
		if i == 1 {
			hibernate, wake, use = nil, nil, nil
		}
		if err := timed(&hibernate, func() error { return s.Hibernate(ctx, "") }); err != nil {
			return nil, err
		}
		if err := wait.For(ctx, breath); err != nil {
			return nil, err
		}
		if err := timed(&wake, func() error { return s.Resume(ctx, "") }); err != nil {
			return nil, err
		}
		if err := timed(&use, func() error { return check(ctx, s) }); err != nil {
			return nil, err
		}
	}
	what := fmt.Sprintf("%d MiB sandbox", asleepMiB)
	rows := []Row{
		{What: "pause of a " + what + "; bare `runsc pause`", Product: fine(pause), Bare: fine(barePause), Value: pause.Median(), Unit: "ms", AtMost: 30},
		{What: "its resume; bare `runsc resume`", Product: fine(resume), Bare: fine(bareResume), Value: resume.Median(), Unit: "ms", AtMost: 30},
		{What: "hibernation of a " + what, Product: times(hibernate), Value: hibernate.Median(), Unit: "ms"},
		{What: "wake of a hibernated " + what, Product: times(wake), Value: wake.Median(), Unit: "ms", AtMost: 250},
		{What: "the first process in it", Product: times(use), Value: use.Median(), Unit: "ms"},
	}
	return rows, deleteAll(ctx, all)
}

// timed adds the time of what is done.
func timed(into *Sample, do func() error) error {
	began := time.Now()
	err := do()
	into.add(time.Since(began))
	return err
}

// check looks, from inside, whether the subject has what it had filled.
func check(ctx context.Context, s *client.Sandbox) error {
	_, exit, err := s.Run(ctx, &dormousev1.ProcessSpec{Argv: []string{subjectPath, "check", "/var"}}, nil, nil, nil)
	if err == nil && exit.GetCode() != 0 {
		err = fmt.Errorf("the subject of sandbox %s has lost its file: %v", s.UID, exit)
	}
	return err
}
