package integration

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sync/errgroup"

	"github.com/dormouse-run/dormouse/pkg/client"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/uid"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// A watch from a list's sequence shows all that happens after it, in order, and can be resumed anywhere.
func TestWatchSandboxes(t *testing.T) {
	w := enter(t)
	sandboxes := dormousev1.NewSandboxServiceClient(w.raw(w.key))
	before := w.create(w.spec()) // not to be seen
	list, err := sandboxes.ListSandboxes(w.ctx, &dormousev1.ListSandboxesRequest{PageSize: 1})
	w.ok(err)
	other := w.ClientOf(t, "t-watch-other")
	noise, err := other.CreateSandbox(w.ctx, &dormousev1.CreateSandboxRequest{Spec: w.spec()})
	w.ok(err)
	w.ok(noise.Delete(w.ctx, ""))

	live, err := sandboxes.WatchSandboxes(w.ctx, &dormousev1.WatchSandboxesRequest{AfterSequence: list.GetSequence()})
	w.ok(err)
	// Each phase is waited for before the next is begun: changes that come faster than they are
	// read may show as one.
	s := w.create(w.spec("sleep", "100000"))
	first := w.watched(live, "RUNNING")
	main, err := s.Main(w.ctx)
	w.ok(err)
	w.ok(main.Signal(w.ctx, 15, false))
	first = append(first, w.watched(live, "STOPPED")...)
	w.ok(s.Delete(w.ctx, ""))
	first = append(first, w.watched(live, "deleted")...)
	var phases []string
	for _, ev := range first {
		phases = append(phases, phaseOf(ev))
	}
	// A subsequence that holds what was waited for, in the one order there is.
	order := []string{"PENDING", "STARTING", "RUNNING", "STOPPED", "DELETING", "deleted"}
	at := 0
	for _, p := range slices.Compact(phases) {
		i := slices.Index(order[at:], p)
		if i < 0 {
			t.Fatalf("phases %v", phases)
		}
		at += i
	}
	for i, ev := range first {
		if ev.GetUid() != s.UID || ev.GetUid() == before.UID {
			t.Errorf("event %v is of another sandbox", ev)
		}
		if i > 0 && ev.GetSequence() <= first[i-1].GetSequence() {
			t.Errorf("sequence %d after %d", ev.GetSequence(), first[i-1].GetSequence())
		}
	}
	// Again from the list, and from the middle: the end of the story is the same.
	for _, from := range []uint64{list.GetSequence(), first[len(first)/2].GetSequence()} {
		again, err := sandboxes.WatchSandboxes(w.ctx, &dormousev1.WatchSandboxesRequest{AfterSequence: from, Uid: s.UID})
		w.ok(err)
		events := w.watched(again, "deleted")
		last := events[len(events)-1]
		if !last.GetDeleted() || last.GetSequence() != first[len(first)-1].GetSequence() || events[0].GetSequence() <= from {
			t.Errorf("resumed after %d: %v", from, events)
		}
	}
	_, err = must(sandboxes.WatchSandboxes(w.ctx, &dormousev1.WatchSandboxesRequest{AfterSequence: 1 << 60})).Recv()
	if err == nil {
		t.Error("a watch from the future began")
	}
}

// must is for a call that cannot fail yet: a stream's errors come with its first message.
func must[V any](v V, err error) V {
	if err != nil {
		panic(err)
	}
	return v
}

// watched reads a watch until a phase shows.
func (w *world) watched(stream interface {
	Recv() (*dormousev1.WatchSandboxesResponse, error)
}, phase string) (all []*dormousev1.WatchSandboxesResponse) {
	w.Helper()
	for {
		ev, err := stream.Recv()
		w.ok(err)
		all = append(all, ev)
		if phaseOf(ev) == phase {
			return all
		}
	}
}

func phaseOf(ev *dormousev1.WatchSandboxesResponse) string {
	if ev.GetDeleted() {
		return "deleted"
	}
	return strings.TrimPrefix(ev.GetSandbox().GetStatus().GetPhase().String(), "SANDBOX_PHASE_")
}

// Pages show each object once, whatever is made and deleted meanwhile; what is no page is refused.
func TestListPaging(t *testing.T) {
	w := enter(t)
	volumes := dormousev1.NewVolumeServiceClient(w.raw(w.key))
	made := make([]*client.Volume, 9)
	var g errgroup.Group
	for i := range made {
		g.Go(func() (err error) {
			made[i], err = w.api.CreateVolume(w.ctx, &dormousev1.CreateVolumeRequest{Name: fmt.Sprintf("v%d", i)})
			return err
		})
	}
	w.ok(g.Wait())
	page := func(size int32, token string) *dormousev1.ListVolumesResponse {
		t.Helper()
		resp, err := volumes.ListVolumes(w.ctx, &dormousev1.ListVolumesRequest{PageSize: size, PageToken: token})
		w.ok(err)
		return resp
	}
	seen, token := map[string]int{}, ""
	var deleted, added string
	for n := 0; ; n++ {
		resp := page(2, token)
		if len(resp.GetVolumes()) > 2 {
			t.Errorf("a page of %d", len(resp.GetVolumes()))
		}
		for _, v := range resp.GetVolumes() {
			seen[v.GetMeta().GetUid()]++
		}
		if token = resp.GetNextPageToken(); token == "" {
			break
		}
		if n == 1 { // in the middle: one that was seen goes, another comes
			deleted = resp.GetVolumes()[0].GetMeta().GetUid()
			w.ok(w.api.Volume(deleted).Delete(w.ctx, ""))
			added = w.volume("").UID
		}
	}
	for _, v := range made {
		if seen[v.UID] != 1 {
			t.Errorf("volume %s was shown %d times", v.UID, seen[v.UID])
		}
	}
	if seen[added] > 1 {
		t.Error("the new one was shown twice")
	}
	if n := len(page(500, "").GetVolumes()); n != len(made) {
		t.Errorf("one large page has %d of %d", n, len(made))
	}
	first := page(2, "").GetNextPageToken()
	for name, tc := range map[string]struct {
		req    *dormousev1.ListVolumesRequest
		reason errs.Reason
	}{
		"too large":             {&dormousev1.ListVolumesRequest{PageSize: 501}, errs.InvalidField},
		"negative":              {&dormousev1.ListVolumesRequest{PageSize: -1}, errs.InvalidField},
		"no token":              {&dormousev1.ListVolumesRequest{PageToken: "something"}, errs.InvalidField},
		"a cut token":           {&dormousev1.ListVolumesRequest{PageToken: first[:len(first)-3]}, errs.InvalidField},
		"another filter":        {&dormousev1.ListVolumesRequest{PageToken: first, Name: "v1"}, errs.InvalidField},
		"a node that cannot be": {&dormousev1.ListVolumesRequest{Node: "../x"}, errs.InvalidField},
	} {
		t.Run(name, func(t *testing.T) {
			w := w.sub(t)
			_, err := volumes.ListVolumes(w.ctx, tc.req)
			w.refused(err, tc.reason)
		})
	}
	_, err := dormousev1.NewSandboxServiceClient(w.raw(w.key)).ListSandboxes(w.ctx, &dormousev1.ListSandboxesRequest{PageToken: first})
	w.refused(err, errs.InvalidField) // a token of another list
	_, err = dormousev1.NewSandboxServiceClient(w.raw(w.key)).ListSandboxes(w.ctx, &dormousev1.ListSandboxesRequest{Labels: []string{"nothing"}})
	w.refused(err, errs.InvalidField)
}

// A sandbox can be deleted in every phase (B12), and the call that was making it hears of it.
func TestB12DeleteInEveryPhase(t *testing.T) {
	w := enter(t)
	t.Run("stopped", func(t *testing.T) {
		w := w.sub(t)
		s := w.create(w.spec("true"))
		w.ok(s.Await(w.ctx, func(s *dormousev1.Sandbox) bool {
			return s.GetStatus().GetPhase() == dormousev1.SandboxPhase_SANDBOX_PHASE_STOPPED
		}))
		w.deleteNow(s.UID)
	})
	t.Run("failed", func(t *testing.T) {
		w := w.sub(t)
		_, err := w.api.CreateSandbox(w.ctx, &dormousev1.CreateSandboxRequest{Spec: w.spec("nothing-like-it")})
		w.refused(err, errs.CommandNotFound)
		w.deleteNow(w.only(dormousev1.SandboxPhase_SANDBOX_PHASE_FAILED))
	})
	t.Run("running, by several at once", func(t *testing.T) {
		w := w.sub(t)
		s := w.create(w.spec())
		w.ok(each(make([]struct{}, 4), func(struct{}) error { return gone(w.api.Sandbox(s.UID).Delete(w.ctx, "")) }))
		w.deleteNow(s.UID)
	})
	t.Run("starting, with an image that does not come", func(t *testing.T) {
		w := w.sub(t)
		spec, release := w.stuck("b12")
		u := w.whileMaking(dormousev1.SandboxPhase_SANDBOX_PHASE_STARTING, func(ctx context.Context) error {
			_, err := w.api.CreateSandbox(ctx, &dormousev1.CreateSandboxRequest{Spec: spec})
			return err
		})
		w.deleteNow(u) // the registry still stands
		release()
	})
	t.Run("restoring", func(t *testing.T) {
		w := w.sub(t)
		s := w.create(w.spec())
		snap := w.checkpoint(s)
		w.ok(s.Delete(w.ctx, ""))
		made := make(chan error, 1)
		go func() {
			_, err := snap.Restore(w.ctx, &dormousev1.RestoreSandboxRequest{Name: "restored"})
			made <- err
		}()
		w.await("a record", func() error {
			return some(client.Collect(w.api.ListSandboxes(w.ctx, &dormousev1.ListSandboxesRequest{Name: "restored"})))
		})
		all, err := client.Collect(w.api.ListSandboxes(w.ctx, &dormousev1.ListSandboxesRequest{Name: "restored"}))
		w.ok(err)
		w.deleteNow(all[0].GetMeta().GetUid())
		if err := <-made; err != nil && errs.From(err).Retry != errs.Never {
			t.Errorf("the restore said %v", err)
		}
		w.ok(snap.Delete(w.ctx, ""))
	})
	t.Run("being checkpointed", func(t *testing.T) {
		w := w.sub(t)
		s := w.create(w.spec())
		taken := make(chan error, 1)
		go func() {
			_, err := s.Checkpoint(w.ctx, &dormousev1.CheckpointSandboxRequest{})
			taken <- err
		}()
		w.await("a snapshot", func() error {
			return some(client.Collect(w.api.ListSnapshots(w.ctx, &dormousev1.ListSnapshotsRequest{SourceSandboxUid: s.UID})))
		})
		w.deleteNow(s.UID)
		if err := <-taken; err != nil {
			t.Logf("the checkpoint said %v", err)
		}
	})
	t.Run("on a node that is away", func(t *testing.T) {
		w := w.sub(t)
		spec := w.spec()
		spec.NodeSelector = map[string]string{"zone": "z2"}
		s := w.create(spec)
		w.ok(w.KillAgentd(w.ctx, 2))
		done := make(chan error, 1)
		go func() { done <- s.Delete(w.ctx, uid.New()) }()
		w.await("the deletion is recorded", func() error {
			return some(client.Collect(w.api.ListSandboxes(w.ctx, &dormousev1.ListSandboxesRequest{Phase: dormousev1.SandboxPhase_SANDBOX_PHASE_DELETING})))
		})
		w.ok(w.StartAgentdReady(w.ctx, 2))
		w.ok(<-done)
		w.deleteNow(s.UID)
	})
	t.Run("pending, for nodes are away", func(t *testing.T) {
		w := w.sub(t)
		spec := w.spec()
		spec.NodeSelector = map[string]string{"zone": "z2"}
		w.ok(w.KillAgentd(w.ctx, 2))
		w.away(2)
		u := w.whileMaking(dormousev1.SandboxPhase_SANDBOX_PHASE_PENDING, func(ctx context.Context) error {
			_, err := w.api.CreateSandbox(ctx, &dormousev1.CreateSandboxRequest{Spec: spec})
			return err
		})
		w.deleteNow(u)
		w.ok(w.StartAgentdReady(w.ctx, 2))
	})
}

// deleteNow deletes a sandbox, unless that was done, and sees that it is gone.
func (w *world) deleteNow(u string) {
	w.Helper()
	w.ok(gone(w.api.Sandbox(u).Delete(w.ctx, "")))
	if err := w.api.Sandbox(u).Refresh(w.ctx); !errs.Has(err, errs.ObjectNotFound) {
		w.Errorf("after its deletion: %v", err)
	}
}

// only gives the one sandbox of a phase.
func (w *world) only(phase dormousev1.SandboxPhase) string {
	w.Helper()
	all, err := client.Collect(w.api.ListSandboxes(w.ctx, &dormousev1.ListSandboxesRequest{Phase: phase}))
	w.ok(err)
	if len(all) != 1 {
		w.Fatalf("%d sandboxes are %s", len(all), phase)
	}
	return all[0].GetMeta().GetUid()
}

// whileMaking starts a call, waits until its sandbox is in the phase, deletes that, and sees to it that the
// call ends with an error that is final. It gives the sandbox.
func (w *world) whileMaking(phase dormousev1.SandboxPhase, call func(context.Context) error) string {
	w.Helper()
	made := make(chan error, 1)
	go func() { made <- call(w.ctx) }()
	w.await("a sandbox that is "+phase.String(), func() error {
		return some(client.Collect(w.api.ListSandboxes(w.ctx, &dormousev1.ListSandboxesRequest{Phase: phase})))
	})
	u := w.only(phase)
	w.deleteNow(u)
	select {
	case err := <-made:
		if err == nil || errs.From(err).Retry != errs.Never {
			w.Errorf("the call said: %v", err)
		}
	case <-w.ctx.Done():
		w.Fatal(errors.New("the call that made the sandbox goes on although it was deleted"))
	}
	return u
}
