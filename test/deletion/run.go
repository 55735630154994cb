package deletion

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/dormouse-run/dormouse/pkg/catalog/redis"
	"github.com/dormouse-run/dormouse/pkg/client"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/uid"
	"github.com/dormouse-run/dormouse/pkg/wait"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
	"github.com/dormouse-run/dormouse/test/load/local"
)

// Options of a run.
type Options struct {
	// Snapshots that are published and deleted, and the nodes that they are on.
	Snapshots, Nodes int
	// Rounds of the other tenant before the deletion, to compare with.
	Rounds int
	Logf   func(string, ...any)
}

// Width is how many deletions the coordinator gives a node at a time by default.
const Width = 4

const (
	mine, other = "mine", "other"
	// sources of a node's snapshots.
	sources = 8
	// Callers that delete at a time. Every second does not come back once the coordinator was killed.
	Callers = 512
	// referred is how many snapshots are being restored while all are deleted.
	referred = 8
	// leftBehind is how many deletions a coordinator that is killed leaves behind at least.
	leftBehind = 100
	// patience is for what has to come in the end.
	patience = 10 * time.Minute
)

// Figures of a run.
type Figures struct {
	// Published and Took are of the snapshots, Deleted of those that went in Storm.
	Published, Deleted int
	Took, Storm        time.Duration
	// AtNode is how many removals a node was asked for at a time, at most; Checked how many were seen absent before their record went.
	AtNode, Checked int
	// Refused are deletions that were refused because of a reference, and named it.
	Refused int
	// Pending and Active are the most that the status showed. After is what the next coordinator found pending, Again how many had not been accepted when the
	// first died.
	Pending, Active, After, Again int
	// Seen is what an operator saw in the middle.
	Seen string
	// Before and During are of the other tenant's calls, by name.
	Before, During map[string]Times
	// Tombstones are those of the run.
	Tombstones int64
	// Coordinator and Redis are MiB before the deletion and after it.
	Coordinator, Redis [2]float64
}

// run is one at work.
type run struct {
	Options
	*local.Cluster
	store   *redis.Store
	api     *client.Client // of the tenant
	watch   *watch
	figures Figures
	sources []*client.Sandbox
	volume  *client.Volume // of the first source
	uids    []string
	deaths  struct {
		sync.Mutex
		from, to time.Time
	}
	deleted atomic.Int64
	// extra are tombstones of what is no snapshot of uids.
	extra atomic.Int64
}

// Run does it.
func Run(ctx context.Context, o Options) (_ Figures, err error) {
	r := &run{Options: o, watch: newWatch()}
	if r.Cluster, err = local.UpFleet(ctx, o.Nodes, r.watch.node, o.Logf); err != nil {
		return r.figures, err
	}
	r.SetLogf(func(string, ...any) {})
	defer func() { err = errors.Join(err, r.End(ctx)) }()
	if r.store, err = redis.Open(ctx, redis.Options{Address: r.RedisSocket()}); err != nil {
		return r.figures, err
	}
	defer func() { err = errors.Join(err, r.store.Close()) }()
	r.watch.look = r.look
	if r.api, err = r.Dial(mine); err != nil {
		return r.figures, err
	}
	defer func() { err = errors.Join(err, r.api.Close()) }()
	for _, step := range []func(context.Context) error{r.publish, r.storm, r.ended} {
		if err := step(ctx); err != nil {
			return r.figures, err
		}
	}
	return r.figures, r.watch.failed()
}

func (r *run) create(ctx context.Context, api *client.Client, volumes ...*client.Volume) (*client.Sandbox, error) {
	spec := &dormousev1.SandboxSpec{Image: r.Image, Resources: &dormousev1.Resources{CpuRequestMillis: 10, MemoryRequestBytes: 16 << 20}}
	for _, v := range volumes {
		spec.Volumes = append(spec.Volumes, &dormousev1.VolumeMount{VolumeUid: v.UID, Path: "/data"})
	}
	return api.CreateSandbox(ctx, &dormousev1.CreateSandboxRequest{Spec: spec})
}

// publish makes the sources and their snapshots. The first source, which has a volume, is deleted then.
func (r *run) publish(ctx context.Context) (err error) {
	began := time.Now()
	if r.volume, err = r.api.CreateVolume(ctx, &dormousev1.CreateVolumeRequest{Spec: &dormousev1.VolumeSpec{}}); err != nil {
		return err
	}
	r.sources = make([]*client.Sandbox, r.Nodes*sources)
	group, gctx := errgroup.WithContext(ctx)
	for i := range r.sources {
		group.Go(func() (err error) {
			if i == 0 {
				r.sources[i], err = r.create(gctx, r.api, r.volume)
			} else {
				r.sources[i], err = r.create(gctx, r.api)
			}
			return err
		})
	}
	if err := group.Wait(); err != nil {
		return err
	}
	r.uids = make([]string, r.Snapshots)
	group, gctx = errgroup.WithContext(ctx)
	for k, s := range r.sources {
		group.Go(func() error {
			for i := k; i < len(r.uids); i += len(r.sources) {
				snap, err := s.Checkpoint(gctx, &dormousev1.CheckpointSandboxRequest{})
				if err != nil {
					return err
				}
				r.uids[i] = snap.UID
			}
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		return err
	}
	r.figures.Published, r.figures.Took = len(r.uids), time.Since(began)
	r.Logf("%d snapshots were published in %.1f s", len(r.uids), r.figures.Took.Seconds())
	r.extra.Add(1)
	if err := r.sources[0].Delete(ctx, ""); err != nil {
		return err
	}
	return r.refused(r.volume.Delete(ctx, ""), errs.StillReferenced)
}

// refused checks that a deletion was refused because of a reference that it names.
func (r *run) refused(err error, reason errs.Reason) error {
	e := errs.From(err)
	if err == nil || e.Reason != reason || e.Outcome != errs.NotStarted || e.Details["references"] == "" {
		return fmt.Errorf("what is referred to was to be refused with %s and the references, not %w", reason, err)
	}
	r.figures.Refused++
	return nil
}

// storm deletes them all, and kills the coordinator when half are gone.
func (r *run) storm(ctx context.Context) (err error) {
	probe, err := r.newProbe(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, probe.api.Close()) }()
	for range r.Rounds {
		if err := probe.round(ctx); err != nil {
			return err
		}
	}
	r.figures.Before = probe.times()
	if r.figures.Coordinator[0], r.figures.Redis[0], err = r.memory(); err != nil {
		return err
	}
	// Some are being restored: the nodes keep those calls. Not those of the source with the volume, which only one could have.
	var held, rest []string
	for i, u := range r.uids {
		if len(held) < referred && i%len(r.sources) != 0 {
			held = append(held, u)
		} else {
			rest = append(rest, u)
		}
	}
	restores := make(chan error, len(held))
	r.watch.hold()
	for _, u := range held {
		go func() { restores <- r.restored(ctx, u) }()
	}
	if err := r.poll(ctx, "the nodes have the restores", func() error { return r.watch.held(len(held)) }); err != nil {
		return err
	}
	for _, u := range held {
		if err := r.refused(r.api.Snapshot(u).Delete(ctx, ""), errs.StillReferenced); err != nil {
			return err
		}
	}
	began := time.Now()
	if err := r.all(ctx, rest, probe); err != nil {
		return err
	}
	r.figures.Storm = time.Since(began)
	r.figures.During = probe.times()
	// Still protected, also by the next coordinator; and deleted once nothing refers to them.
	for _, u := range held {
		if err := r.refused(r.api.Snapshot(u).Delete(ctx, ""), errs.StillReferenced); err != nil {
			return err
		}
	}
	r.watch.release()
	for range held {
		if err := <-restores; err != nil {
			return err
		}
	}
	for _, u := range held {
		if err := r.remove(ctx, u); err != nil {
			return err
		}
	}
	return probe.end(ctx)
}

// all has the callers delete, the other tenant go on, and the coordinator die in the middle.
func (r *run) all(ctx context.Context, uids []string, probe *probe) error {
	fickle, leave := context.WithCancel(ctx)
	defer leave()
	next := make(chan string)
	group, gctx := errgroup.WithContext(ctx)
	var left sync.WaitGroup
	left.Add(Callers)
	for i := range Callers {
		group.Go(func() error {
			defer left.Done()
			for u := range next {
				call := gctx
				if i%2 == 1 {
					call = fickle
				}
				if err := r.remove(call, u); err != nil {
					if call.Err() != nil {
						err = nil // it left
					}
					return err
				}
				if int(r.deleted.Add(1)) == len(uids)/2 {
					// The nodes stand still until many are accepted and none ends, so that there is something to leave behind.
					r.watch.stall()
				}
			}
			return nil
		})
	}
	group.Go(func() error {
		defer close(next)
		for _, u := range uids {
			select {
			case next <- u:
			case <-gctx.Done():
				return nil
			}
		}
		return nil
	})
	over := make(chan struct{})
	group.Go(func() error { return probe.until(gctx, over) })
	group.Go(func() error { return r.progress(gctx, over) })
	group.Go(func() error {
		defer close(over)
		if err := r.poll(gctx, "half are deleted", func() error {
			if n := int(r.deleted.Load()); n < len(uids)/2 {
				return fmt.Errorf("%d are", n)
			}
			return nil
		}); err != nil {
			return err
		}
		if err := r.die(gctx, leave); err != nil {
			return err
		}
		left.Wait()
		return r.finish(gctx, uids)
	})
	return group.Wait()
}

// remove deletes one, with the same operation until that says how it ended.
func (r *run) remove(ctx context.Context, u string) error {
	op := uid.New()
	return insist(ctx, func() error { return r.api.Snapshot(u).Delete(ctx, op) })
}

// insist makes the same call until it says how it ended.
func insist(ctx context.Context, call func() error) error {
	for {
		err := call()
		if err == nil || ctx.Err() != nil || errs.From(err).Retry == errs.Never || errs.From(err).IsAnswer() {
			return err
		}
		if err := wait.For(ctx, 50*time.Millisecond); err != nil {
			return err
		}
	}
}

// die kills the coordinator, while the nodes stand still, and starts another, which leads at once. Half of the callers leave.
func (r *run) die(ctx context.Context, leave func()) error {
	r.deaths.Lock()
	r.deaths.from = time.Now()
	r.deaths.Unlock()
	err := r.poll(ctx, "deletions are pending", func() error {
		st, err := r.Client.CatalogStatus(ctx)
		if n := pending(st).GetPending(); err == nil && n < leftBehind {
			err = fmt.Errorf("%d are", n)
		}
		return err
	})
	if err == nil {
		err = r.seen(ctx)
	}
	if err != nil {
		return err
	}
	if err := r.KillCoordinator(ctx); err != nil {
		return err
	}
	leave()
	// What the dead one asked for is not the next one's.
	if err := r.poll(ctx, "the nodes notice", r.watch.idle); err != nil {
		return err
	}
	if err := r.StartCoordinatorReady(ctx); err != nil {
		return err
	}
	st, err := r.Client.CatalogStatus(ctx)
	if err != nil {
		return err
	}
	if r.figures.After = int(pending(st).GetPending()); r.figures.After < leftBehind {
		return fmt.Errorf("the next coordinator has %d pending deletions", r.figures.After)
	}
	r.watch.goOn()
	err = r.poll(ctx, "the next coordinator has its nodes", func() error {
		st, err := r.Client.CatalogStatus(ctx)
		if err != nil {
			return err
		}
		for _, n := range st.GetJournals() {
			if !n.GetOnline() {
				return fmt.Errorf("node %s is away", n.GetNode())
			}
		}
		return nil
	})
	r.deaths.Lock()
	defer r.deaths.Unlock()
	r.deaths.to = time.Now()
	return err
}

// interrupted tells whether the coordinator was dead, or had no nodes, at some time since.
func (r *run) interrupted(since time.Time) bool {
	r.deaths.Lock()
	defer r.deaths.Unlock()
	return !r.deaths.from.IsZero() && (r.deaths.to.IsZero() || since.Before(r.deaths.to))
}
