package integration

import (
	"fmt"
	"testing"

	"github.com/dormouse-run/dormouse/pkg/client"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/uid"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
	"github.com/dormouse-run/dormouse/test/stack"
)

func binding(path string, policy dormousev1.VolumePolicy, with string) *dormousev1.VolumeBinding {
	return &dormousev1.VolumeBinding{Path: path, Policy: policy, ReplaceWith: with}
}

const (
	same    = dormousev1.VolumePolicy_VOLUME_POLICY_SAME
	clone   = dormousev1.VolumePolicy_VOLUME_POLICY_CLONE
	replace = dormousev1.VolumePolicy_VOLUME_POLICY_REPLACE
)

// A restore has to have exactly the mounts of the checkpoint. Whatever would give it one more, one less
// or one that cannot be there is refused with what is wrong, and leaves nothing.
func TestB07MountsAtRestore(t *testing.T) {
	w := enter(t)
	data, other, far, held := w.volume("node-1"), w.volume("node-1"), w.volume("node-2"), w.volume("node-1")
	spec := w.spec()
	spec.Volumes = []*dormousev1.VolumeMount{mount(data, "/data"), mount(other, "/other")}
	source := w.create(spec)
	w.sh(source, "echo kept > /data/file")
	snap := w.checkpoint(source)

	spec = w.spec()
	spec.Volumes = []*dormousev1.VolumeMount{mount(held, "/held")}
	holder := w.create(spec)
	lost := w.volume("node-1")
	w.ok(lost.Delete(w.ctx, ""))

	// The source still has its volumes.
	_, err := snap.Restore(w.ctx, &dormousev1.RestoreSandboxRequest{})
	if e := w.refusal(err, errs.AlreadyAttached); e.Details["holder"] != source.UID {
		t.Errorf("holder %q, want the source", e.Details["holder"])
	}
	w.ok(source.Delete(w.ctx, ""))

	missing := uid.New()
	for name, tc := range map[string]struct {
		bindings []*dormousev1.VolumeBinding
		reason   errs.Reason
		details  map[string]string
	}{
		"one mount more":          {[]*dormousev1.VolumeBinding{binding("/more", same, "")}, errs.InvalidField, map[string]string{"path": "/more"}},
		"a new volume more":       {[]*dormousev1.VolumeBinding{binding("/more", replace, held.UID)}, errs.InvalidField, map[string]string{"path": "/more"}},
		"the same path twice":     {[]*dormousev1.VolumeBinding{binding("/data", same, ""), binding("/data", clone, "")}, errs.DuplicatePath, map[string]string{"path": "/data"}},
		"a path with ..":          {[]*dormousev1.VolumeBinding{binding("/data/../data", same, "")}, errs.UnsafePath, nil},
		"a volume that never was": {[]*dormousev1.VolumeBinding{binding("/data", replace, missing)}, errs.ObjectNotFound, map[string]string{"uid": missing}},
		"a volume that is gone":   {[]*dormousev1.VolumeBinding{binding("/data", replace, lost.UID)}, errs.ObjectNotFound, map[string]string{"uid": lost.UID}},
		"not a uid":               {[]*dormousev1.VolumeBinding{binding("/data", replace, "data")}, errs.InvalidField, nil},
		"replaced by nothing":     {[]*dormousev1.VolumeBinding{binding("/data", replace, "")}, errs.InvalidField, nil},
		"held by another":         {[]*dormousev1.VolumeBinding{binding("/data", replace, held.UID)}, errs.AlreadyAttached, map[string]string{"holder": holder.UID}},
		"one volume at two paths": {[]*dormousev1.VolumeBinding{binding("/data", replace, other.UID)}, errs.InvalidField, nil},
		"on another node":         {[]*dormousev1.VolumeBinding{binding("/data", replace, far.UID)}, errs.IncompatibleNode, nil},
		"a policy that is none":   {[]*dormousev1.VolumeBinding{binding("/data", 77, "")}, errs.InvalidField, nil},
		"a name beside same":      {[]*dormousev1.VolumeBinding{binding("/data", same, other.UID)}, errs.InvalidField, nil},
	} {
		t.Run(name, func(t *testing.T) {
			w := w.sub(t)
			_, err := snap.Restore(w.ctx, &dormousev1.RestoreSandboxRequest{Volumes: tc.bindings})
			e := w.refusal(err, tc.reason)
			for k, v := range tc.details {
				if e.Details[k] != v {
					t.Errorf("%v: detail %s is %q, want %q", e, k, e.Details[k], v)
				}
			}
		})
	}
	// All of its volumes on another node, where the artefact is not.
	_, err = snap.Restore(w.ctx, &dormousev1.RestoreSandboxRequest{Volumes: []*dormousev1.VolumeBinding{
		binding("/data", replace, far.UID), binding("/other", replace, w.volume("node-2").UID)}})
	w.refused(err, errs.NoNodeFits)
	// A fork cannot give one exclusive volume to all.
	_, _, err = w.api.Fork(w.ctx, &dormousev1.ForkSandboxRequest{SnapshotUid: snap.UID, Count: 2, Volumes: []*dormousev1.VolumeBinding{binding("/data", same, "")}})
	w.refused(err, errs.AlreadyAttached)

	w.holdNothing(holder)
	for _, v := range []*client.Volume{data, other, far} {
		w.ok(v.Refresh(w.ctx))
		if a := v.Last.GetStatus().GetAttachments(); len(a) != 0 {
			t.Errorf("refused restores left volume %s attached: %v", v.UID, a)
		}
	}
	// And what fits is restored: a volume kept, another one replaced.
	w.ok(holder.Delete(w.ctx, ""))
	restored, err := snap.Restore(w.ctx, &dormousev1.RestoreSandboxRequest{Volumes: []*dormousev1.VolumeBinding{binding("/other", replace, held.UID)}})
	w.ok(err)
	if got := w.sh(restored, "cat /data/file"); got != "kept" {
		t.Errorf("the volume has %q", got)
	}
}

// A restore attaches to what ran; it never runs a command again (I08).
func TestI08NoCommandRunsAgain(t *testing.T) {
	w := enter(t)
	v := w.volume(stack.NodeName(2))
	spec := w.spec("sh", "-c", "echo main >> /data/begun; echo main >> /tmp/begun; exec sleep 100000")
	spec.Volumes = []*dormousev1.VolumeMount{mount(v, "/data")}
	s := w.create(spec)
	p, err := s.Start(w.ctx, &dormousev1.ProcessSpec{Argv: []string{"sh", "-c", "echo process >> /data/begun; echo process >> /tmp/begun; exec sleep 100000"}}, "")
	w.ok(err)
	const once = "main 1 process 1"
	counted := `for f in main process; do echo -n "$f $(grep -c $f %s) "; done`
	check := func(s *client.Sandbox) {
		t.Helper()
		for _, file := range []string{"/data/begun", "/tmp/begun"} {
			w.await("both commands have begun once", func() error {
				if got := w.sh(s, fmt.Sprintf(counted, file)); got != once+" " {
					return fmt.Errorf("%s: %s", file, got)
				}
				return nil
			})
		}
	}
	check(s)
	before, err := s.Processes(w.ctx)
	w.ok(err)
	snap := w.checkpoint(s)
	w.ok(s.Delete(w.ctx, ""))
	restored, err := snap.Restore(w.ctx, &dormousev1.RestoreSandboxRequest{})
	w.ok(err)
	copies, _, err := w.api.Fork(w.ctx, &dormousev1.ForkSandboxRequest{SandboxUid: restored.UID, Count: 2})
	w.ok(err)
	for _, s := range append(copies, restored) {
		check(s)
		after, err := s.Processes(w.ctx)
		w.ok(err)
		running := map[string]int32{}
		for _, p := range after {
			if p.GetExit() == nil {
				running[p.GetProcessId()] = p.GetPid()
			}
		}
		for _, b := range before {
			if b.GetExit() == nil && running[b.GetProcessId()] != b.GetPid() {
				t.Errorf("process %s was pid %d and is %d", b.GetProcessId(), b.GetPid(), running[b.GetProcessId()])
			}
		}
		h := s.Process(p.ID)
		w.ok(h.Refresh(w.ctx))
		if h.Last.GetExit() != nil {
			t.Errorf("the started process has ended: %v", h.Last)
		}
	}
}
