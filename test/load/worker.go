// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package load

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"sync"
	"time"

	"google.golang.org/grpc"

	"github.com/dormouse-run/dormouse/pkg/client"
	"github.com/dormouse-run/dormouse/pkg/wire"
	"github.com/dormouse-run/dormouse/test/load/probe"
)

// Share is what a worker is told first, over its standard input: which subjects are its own, and how to reach the cluster.
type Share struct {
	Run    string `json:"run"`
	Plan   Plan   `json:"plan"`
	Image  string `json:"image"`
	Worker int    `json:"worker"` // from 0
	Reach  Reach  `json:"reach"`
}

// Reach is how the cluster is reached; see client.Config. It goes to the workers, and into no file.
type Reach struct {
	Addr       string `json:"addr"`
	APIKey     string `json:"api_key"`
	APIKeyFile string `json:"api_key_file"`
	CA         string `json:"ca"`
	Cert       string `json:"cert"`
	Key        string `json:"key"`
}

// ReachOf takes what the environment or a file says.
func ReachOf(c client.Config) Reach {
	return Reach{Addr: c.Addr, APIKey: c.APIKey, APIKeyFile: c.APIKeyFile, CA: c.CA, Cert: c.Cert, Key: c.Key}
}

func (r Reach) dial(opts ...grpc.DialOption) (*client.Client, error) {
	return client.Dial(client.Config{Addr: r.Addr, APIKey: r.APIKey, APIKeyFile: r.APIKeyFile, CA: r.CA, Cert: r.Cert, Key: r.Key}, opts...)
}

// command begins a phase.
type command struct {
	Phase Phase `json:"phase"`
	Round int   `json:"round"`
}

// said is a line of a worker: an event, or the end of a phase.
type said struct {
	Event *Event `json:"event,omitempty"`
	Done  *Phase `json:"done,omitempty"`
}

// worker is a client process at work.
type worker struct {
	share    Share
	api      *client.Client
	subjects []*one

	mu  sync.Mutex
	out *json.Encoder
}

// Work is a client process: it takes its share and then phases from in, until in ends, and writes what happens to out.
func Work(ctx context.Context, in io.Reader, out io.Writer) error {
	dec := json.NewDecoder(bufio.NewReader(in))
	w := &worker{out: json.NewEncoder(out)}
	if err := dec.Decode(&w.share); err != nil {
		return fmt.Errorf("read the share: %w", err)
	}
	var err error
	if w.api, err = w.share.Reach.dial(probe.FailedCalls(w.failed)...); err != nil {
		return err
	}
	defer func() { _ = w.api.Close() }()
	plan := &w.share.Plan
	for i := w.share.Worker; i < plan.Subjects; i += plan.Clients {
		w.subjects = append(w.subjects, &one{index: i, plan: plan, run: w.share.Run, image: w.share.Image, api: w.api})
	}
	for {
		var c command
		err := dec.Decode(&c)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read a phase: %w", err)
		}
		w.phase(ctx, c)
		if err := w.say(said{Done: &c.Phase}); err != nil {
			return err
		}
	}
}

func (w *worker) say(s said) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.out.Encode(s)
}

// phase does a step with every subject that is whole.
func (w *worker) phase(ctx context.Context, c command) {
	began := time.Now()
	plan := w.share.Plan
	random := rand.New(rand.NewPCG(plan.Seed, uint64(w.share.Worker)<<32|uint64(c.Round))) //nolint:gosec // an order that can be repeated
	var wg sync.WaitGroup
	begun := 0
	for _, i := range random.Perm(len(w.subjects)) {
		o := w.subjects[i]
		if o.dead {
			continue
		}
		var at time.Time
		if plan.Pace > 0 {
			at = began.Add(time.Duration(float64(begun*plan.Clients+w.share.Worker) / plan.Pace * float64(time.Second)))
		}
		begun++
		wg.Go(func() { w.one(ctx, o, c, began, at) })
	}
	wg.Wait()
}

// one does the step of one subject, when its time has come.
func (w *worker) one(ctx context.Context, o *one, c command, began, at time.Time) {
	if wait := time.Until(at); wait > 0 {
		select {
		case <-time.After(wait):
		case <-ctx.Done():
		}
	}
	ctx, cancel := context.WithTimeout(ctx, time.Duration(w.share.Plan.StepTimeout))
	defer cancel()
	e := &Event{What: "step", Phase: c.Phase, Round: c.Round, Client: w.share.Worker, Subject: o.index}
	called := time.Now()
	err := o.step(context.WithValue(ctx, stepKey{}, e), c.Phase, c.Round, e)
	e.At = time.Now()
	e.Call, e.Wall = milliseconds(e.At.Sub(called)), milliseconds(e.At.Sub(began))
	e.fail(err)
	o.dead = err != nil
	_ = w.say(said{Event: e}) // whoever does not listen any more ends this process
}

type stepKey struct{}

// failed notes a call that failed, also one that the client library tries again.
func (w *worker) failed(ctx context.Context, method string, called time.Time, err error) {
	step, ok := ctx.Value(stepKey{}).(*Event)
	if !ok {
		return
	}
	e := &Event{What: "attempt", At: time.Now(), Phase: step.Phase, Round: step.Round, Client: step.Client, Subject: step.Subject, Method: method}
	e.Call = milliseconds(e.At.Sub(called))
	e.fail(wire.FromStatus(err))
	_ = w.say(said{Event: e})
}
