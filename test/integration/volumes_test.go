package integration

import (
	"bytes"
	"strings"
	"sync"
	"testing"

	"github.com/dormouse-run/dormouse/pkg/client"
	"github.com/dormouse-run/dormouse/pkg/errs"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
	"github.com/dormouse-run/dormouse/test/stack"
)

// A volume that is shared read-only is attached to many, and written by none.
func TestVolumeSharedReadOnly(t *testing.T) {
	w := enter(t)
	source := w.volume("node-2")
	spec := w.spec()
	spec.Volumes = []*dormousev1.VolumeMount{mount(source, "/data")}
	writer := w.create(spec)
	w.sh(writer, "echo shared > /data/file")
	shared := &dormousev1.VolumeSpec{Access: dormousev1.VolumeAccess_VOLUME_ACCESS_SHARED_READ_ONLY, SourceVolumeUid: source.UID}
	_, err := w.api.CreateVolume(w.ctx, &dormousev1.CreateVolumeRequest{Spec: shared})
	if e := w.refusal(err, errs.AlreadyAttached); e.Details["holder"] != writer.UID {
		t.Errorf("details %v", e.Details)
	}
	w.ok(writer.Delete(w.ctx, ""))
	v, err := w.api.CreateVolume(w.ctx, &dormousev1.CreateVolumeRequest{Spec: shared})
	w.ok(err)

	spec.Volumes = []*dormousev1.VolumeMount{{VolumeUid: v.UID, Path: "/data", ReadOnly: true}}
	readers := []*client.Sandbox{w.create(spec), w.create(spec)}
	for _, r := range readers {
		if got := w.sh(r, "cat /data/file; echo x > /data/file 2>/dev/null || echo refused"); got != "shared\nrefused" {
			t.Errorf("a reader: %q", got)
		}
	}
	w.ok(v.Refresh(w.ctx))
	if n := len(v.Last.GetStatus().GetAttachments()); n != 2 {
		t.Errorf("%d attachments: %v", n, v.Last)
	}
	// For writing it is not to be had.
	spec.Volumes[0].ReadOnly = false
	_, err = w.api.CreateSandbox(w.ctx, &dormousev1.CreateSandboxRequest{Spec: spec})
	if err == nil {
		t.Error("a shared volume was attached for writing")
	} else if e := errs.From(err); e.Code != errs.InvalidArgument && e.Code != errs.Conflict {
		t.Errorf("a shared volume for writing: %v", err)
	}
	w.refused(v.Delete(w.ctx, ""), errs.AlreadyAttached)
	// A copy is the holder's own.
	source.Last = nil
	spec.Volumes = []*dormousev1.VolumeMount{mount(source, "/data")}
	again := w.create(spec)
	if got := w.sh(again, "echo changed > /data/file; cat /data/file"); got != "changed" {
		t.Errorf("%q", got)
	}
	if got := w.sh(readers[0], "cat /data/file"); got != "shared" {
		t.Errorf("the copy has %q", got)
	}
}

// One of many who want a name gets it; the others are told who has it.
func TestB15OneNameOneWinner(t *testing.T) {
	w := enter(t)
	var mu sync.Mutex
	var winner string
	var losers []error
	w.ok(each(make([]struct{}, 40), func(struct{}) error {
		v, err := w.api.CreateVolume(w.ctx, &dormousev1.CreateVolumeRequest{Name: "wanted"})
		mu.Lock()
		defer mu.Unlock()
		if err != nil {
			losers = append(losers, err)
		} else if winner != "" {
			t.Errorf("both %s and %s have it", winner, v.UID)
		} else {
			winner = v.UID
		}
		return nil
	}))
	for _, err := range losers {
		if e := w.refusal(err, errs.NameTaken); e.Details["uid"] != winner {
			t.Errorf("the name is %q's, not %s's", e.Details["uid"], winner)
		}
	}
	if len(losers) != 39 {
		t.Errorf("%d lost", len(losers))
	}
}

// A cordoned node gets no new work, and keeps what it has.
func TestCordon(t *testing.T) {
	w := enter(t)
	spec := w.spec()
	spec.NodeSelector = map[string]string{"zone": "z1"}
	s := w.create(spec)
	_, err := w.Client.Cordon(w.ctx, stack.NodeName(1), true, "")
	w.ok(err)
	defer func() {
		_, err := w.Client.Cordon(w.ctx, stack.NodeName(1), false, "")
		w.ok(err)
	}()
	_, err = w.api.CreateSandbox(w.ctx, &dormousev1.CreateSandboxRequest{Spec: spec})
	if e := w.refusal(err, errs.NoNodeFits); !strings.Contains(e.Message, "cordon") {
		t.Errorf("%v", e)
	}
	if other := w.create(w.spec()); w.nodeOf(other) != 2 {
		t.Errorf("placed on %s", other.Last.GetStatus().GetNode())
	}
	w.sh(s, "true")
	w.restartAgentd(1) // it comes back cordoned
	n, err := w.Client.GetNode(w.ctx, stack.NodeName(1))
	w.ok(err)
	if !n.GetCordoned() {
		t.Error("a restart undid the cordon")
	}
}

// Input and output of a process pass unchanged, in both directions and to the last byte.
func TestProcessInputAndOutput(t *testing.T) {
	w := enter(t)
	s := w.create(w.spec())
	var input bytes.Buffer
	for _, e := range ballast(3 * mib) {
		input.Write(e.Body)
	}
	want := bytes.Clone(input.Bytes())
	var out, errOut bytes.Buffer
	_, exit, err := s.Run(w.ctx, &dormousev1.ProcessSpec{Argv: []string{"sh", "-c", "tee /tmp/copy; echo done >&2; exit 3"}}, &input,
		&client.Output{Stdout: &out, Stderr: &errOut, Gap: func(_ dormousev1.OutputStream, n uint64) { t.Errorf("a gap of %d bytes", n) }}, nil)
	w.ok(err)
	if exit.GetCode() != 3 || errOut.String() != "done\n" || !bytes.Equal(out.Bytes(), want) {
		t.Errorf("exit %v, %q, %d bytes of %d, the same: %v", exit, errOut.String(), out.Len(), len(want), bytes.Equal(out.Bytes(), want))
	}
	if got := w.sh(s, "wc -c < /tmp/copy"); got != "3145728" {
		t.Errorf("the copy has %s bytes", got)
	}
}
