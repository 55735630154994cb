package deletion

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"google.golang.org/protobuf/types/known/fieldmaskpb"

	"github.com/dormouse-run/dormouse/pkg/client"
	"github.com/dormouse-run/dormouse/pkg/uid"
	"github.com/dormouse-run/dormouse/pkg/wait"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// Times of one kind of call.
type Times struct {
	Calls    int
	P50, P99 time.Duration
}

// The other tenant's calls: a commit and nothing else; a publication; a deletion, which takes its turn among the others.
const (
	Update     = "update"
	Checkpoint = "checkpoint"
	Delete     = "delete"
)

// probe is the other tenant, who goes on as before.
type probe struct {
	*run
	api  *client.Client
	box  *client.Sandbox
	took map[string][]time.Duration
	n    int
}

func (r *run) newProbe(ctx context.Context) (p *probe, err error) {
	p = &probe{run: r, took: make(map[string][]time.Duration)}
	if p.api, err = r.Dial(other); err != nil {
		return nil, err
	}
	if p.box, err = r.create(ctx, p.api); err != nil {
		return nil, errors.Join(err, p.api.Close())
	}
	return p, nil
}

// end deletes its sandbox.
func (p *probe) end(ctx context.Context) error {
	p.extra.Add(1)
	return p.box.Delete(ctx, "")
}

// round makes each call once. One that met the coordinator's death is not timed.
func (p *probe) round(ctx context.Context) error {
	var snap *client.Snapshot
	p.n++
	for _, call := range []struct {
		name string
		do   func(op string) error
	}{
		{Update, func(op string) error {
			return p.box.Update(ctx, &dormousev1.UpdateSandboxRequest{OperationId: op, Labels: map[string]string{"round": strconv.Itoa(p.n)},
				UpdateMask: &fieldmaskpb.FieldMask{Paths: []string{"labels"}}})
		}},
		{Checkpoint, func(op string) (err error) {
			snap, err = p.box.Checkpoint(ctx, &dormousev1.CheckpointSandboxRequest{OperationId: op})
			return err
		}},
		{Delete, func(op string) error { return snap.Delete(ctx, op) }},
	} {
		began, op := time.Now(), uid.New()
		if err := insist(ctx, func() error { return call.do(op) }); err != nil {
			return fmt.Errorf("%s of another tenant: %w", call.name, err)
		}
		if took := time.Since(began); !p.interrupted(began) {
			p.took[call.name] = append(p.took[call.name], took)
		}
	}
	p.extra.Add(1) // the snapshot's tombstone
	return wait.For(ctx, 5*time.Millisecond)
}

// until goes on until it is over.
func (p *probe) until(ctx context.Context, over <-chan struct{}) error {
	for {
		select {
		case <-over:
			return nil
		default:
		}
		if err := p.round(ctx); err != nil {
			return err
		}
	}
}

// times gives what was timed since it was asked last.
func (p *probe) times() map[string]Times {
	all := make(map[string]Times)
	for name, took := range p.took {
		slices.Sort(took)
		all[name] = Times{Calls: len(took), P50: took[len(took)/2], P99: took[len(took)*99/100]}
	}
	clear(p.took)
	return all
}
