// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

// Package soak does to many sandboxes at once what users do, at random and for as long as one likes, while
// daemons are killed, and compares everything with a model that knows what must hold.
//
// # The model
//
// A subject is a sandbox with a small program that keeps a nonce and a counter in its memory and a line in a
// private file for each question. One worker holds a subject at a time, so the model knows its counter; only
// a question whose answer was lost leaves room (lo to hi). A capture knows the counter at which it was taken:
// what is restored from it must have the nonce, and go on from there.
//
// # What must hold
//
//   - Every operation ends, under its one operation id, however often daemons die meanwhile; it is asked until
//     its answer is final, and only the answers that the model allows are right.
//   - A subject answers with its own nonce and a counter that the model allows; a paused or hibernated
//     one goes on where it stood.
//   - What was deleted is gone; in the end nothing is in the catalog, and the doctor of every node finds
//     nothing.
package soak

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/dormouse-run/dormouse/pkg/client"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
	"github.com/dormouse-run/dormouse/test/cluster"
	"github.com/dormouse-run/dormouse/test/images"
	"github.com/dormouse-run/dormouse/test/stack"
)

// PushImage pushes busybox to the cluster's registry and gives its reference by digest.
func PushImage(ctx context.Context, c *cluster.Cluster) (string, error) {
	image, err := images.ReadLayout(images.CachedDir("busybox"))
	if err != nil {
		return "", err
	}
	registry, err := c.Registry()
	if err != nil {
		return "", err
	}
	digest, err := registry.Push(ctx, "busybox", image)
	return registry.Ref("busybox") + "@" + digest, err
}

// Options of a run.
type Options struct {
	// Duration of the random part. It goes on until each of the moves Least was made, which on a slow machine may be later.
	Duration time.Duration
	Least    []string
	// Sandboxes is how many there are at most.
	Sandboxes int
	// Workers is how many operations are asked for at once.
	Workers int
	// KillEvery is the mean time between two kills of a daemon; 0: none.
	KillEvery time.Duration
	// Seed of all choices; which operation meets which kill is still up to the machine.
	Seed uint64
	// Image has a shell (busybox).
	Image string
	// Logf is told of failures as they are found, and of progress.
	Logf func(format string, args ...any)
}

// Report is what came of a run.
type Report struct {
	Seed     uint64         `json:"seed"`
	Took     time.Duration  `json:"took_ns"`
	Moves    map[string]int `json:"moves"`
	Kills    map[string]int `json:"kills"`
	Failures []string       `json:"failures"`
}

// String is the report for people.
func (r Report) String() string {
	out := fmt.Sprintf("seed %d, %s\n", r.Seed, r.Took.Round(time.Second))
	for _, part := range []struct {
		name   string
		counts map[string]int
	}{{"moves", r.Moves}, {"kills", r.Kills}} {
		out += part.name + ":"
		for _, k := range slices.Sorted(maps.Keys(part.counts)) {
			out += fmt.Sprintf("  %s %d", k, part.counts[k])
		}
		out += "\n"
	}
	if len(r.Failures) == 0 {
		return out + "everything held\n"
	}
	for _, f := range r.Failures {
		out += "FAILED: " + f + "\n"
	}
	return out
}

// soak is one run.
type soak struct {
	Options
	c   *cluster.Cluster
	api *client.Client

	// failed ends the random part: what comes after a failure says little.
	failed context.CancelFunc

	mu       sync.Mutex
	rand     *rand.Rand
	subjects []*subject // that no worker holds
	captures []*capture // likewise
	loose    []*client.Volume
	count    int // of subjects, held ones too
	report   Report
}

// Run soaks a cluster, for a tenant of its own whose objects are all deleted in the end. The error is of the
// run itself; what did not hold is in the report.
func Run(ctx context.Context, c *cluster.Cluster, api *client.Client, opts Options) (Report, error) {
	s := &soak{
		Options: opts, c: c, api: api,
		rand:   rand.New(rand.NewPCG(opts.Seed, 0)), //nolint:gosec // it is to be repeated, not to be secret
		report: Report{Seed: opts.Seed, Moves: map[string]int{}, Kills: map[string]int{}},
	}
	began := time.Now()
	random, cancel := context.WithCancel(ctx)
	defer cancel()
	s.failed = cancel
	var workers, killer sync.WaitGroup
	for range opts.Workers {
		workers.Go(func() {
			for random.Err() == nil && (time.Since(began) < opts.Duration || !s.made(opts.Least)) {
				s.move(ctx)
			}
		})
	}
	if opts.KillEvery > 0 {
		killer.Go(func() { s.kill(ctx, random) })
	}
	workers.Wait()
	cancel()
	killer.Wait()
	err := s.end(ctx)
	s.report.Took = time.Since(began)
	return s.report, err
}

// healthy waits until the doctor of a node finds nothing: what is being removed is no leftover yet.
func (s *soak) healthy(ctx context.Context, node int) error {
	for {
		found, err := s.c.Doctor(ctx, node)
		if err == nil && len(found) == 0 {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("the doctor of %s finds %v (%w)", stack.NodeName(node), found, err)
		case <-time.After(200 * time.Millisecond):
		}
	}
}

// made tells whether each of the moves was made.
func (s *soak) made(moves []string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return !slices.ContainsFunc(moves, func(m string) bool { return s.report.Moves[m] == 0 })
}

// intn is a choice.
func (s *soak) intn(n int) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.rand.IntN(n)
}

func (s *soak) fail(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	s.mu.Lock()
	s.report.Failures = append(s.report.Failures, text)
	s.mu.Unlock()
	s.Logf("FAILED: %s", text)
	s.failed()
}

// patience is for one operation, kills and recoveries included.
const patience = 3 * time.Minute

// kill kills a daemon now and then and starts it again.
func (s *soak) kill(ctx, random context.Context) {
	for {
		wait := time.Duration((0.5 + float64(s.intn(1000))/1000) * float64(s.KillEvery))
		select {
		case <-random.Done():
			return
		case <-time.After(wait):
		}
		// Agentd more often than the others: there are more of them.
		which := s.intn(s.c.Nodes + 2)
		name, kill, start := "coordinator", s.c.KillCoordinator, s.c.StartCoordinatorReady
		switch {
		case which > s.c.Nodes:
			name, kill, start = "redis", s.c.KillRedis, s.c.StartRedis
		case which > 0:
			name = "agentd"
			kill = func(ctx context.Context) error { return s.c.KillAgentd(ctx, which) }
			start = func(ctx context.Context) error { return s.c.StartAgentdReady(ctx, which) }
		}
		bounded, cancel := context.WithTimeout(ctx, patience)
		err := kill(bounded)
		if err == nil {
			err = start(bounded)
		}
		cancel()
		if err != nil {
			s.fail("kill and start the %s: %v", name, err)
			return
		}
		s.mu.Lock()
		s.report.Kills[name]++
		s.mu.Unlock()
	}
}

// end checks every subject once more, deletes all, and looks for what is left.
func (s *soak) end(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 2*patience)
	defer cancel()
	sound := len(s.report.Failures) == 0
	for _, sub := range s.subjects {
		if sound {
			s.wake(ctx, sub)
			s.ask(ctx, sub)
		}
		s.remove(ctx, sub)
	}
	for _, c := range s.captures {
		s.forget(ctx, c)
	}
	if !sound {
		// What failed may have left anything; the cluster's end takes it away.
		return nil
	}
	boxes, err := client.Collect(s.api.ListSandboxes(ctx, &dormousev1.ListSandboxesRequest{}))
	snaps, err2 := client.Collect(s.api.ListSnapshots(ctx, &dormousev1.ListSnapshotsRequest{}))
	volumes, err3 := client.Collect(s.api.ListVolumes(ctx, &dormousev1.ListVolumesRequest{}))
	if err := errors.Join(err, err2, err3); err != nil {
		return err
	}
	if len(boxes)+len(snaps)+len(volumes) > 0 {
		s.fail("left in the catalog: %v %v %v", boxes, snaps, volumes)
	}
	for i := 1; i <= s.c.Nodes; i++ {
		if err := s.healthy(ctx, i); err != nil {
			s.fail("%v", err)
		}
	}
	return nil
}
