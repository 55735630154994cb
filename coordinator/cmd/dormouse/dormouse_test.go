package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/dormouse-run/dormouse/pkg/command"
	"github.com/dormouse-run/dormouse/pkg/errs"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// ok runs a command that must succeed and compares its standard output.
func ok(t *testing.T, want string, args ...string) {
	t.Helper()
	r := dormouse(t, args...)
	if r.code != 0 {
		t.Fatalf("%v: exit code %d: %s", args, r.code, r.err)
	}
	if d := cmp.Diff(want, r.out); d != "" {
		t.Fatalf("%v (-want +got):\n%s", args, d)
	}
}

func TestWhatIdentifiesGoesToStandardOutputAlone(t *testing.T) {
	f := serve(t)
	ok(t, uidAt(1)+"\n", "create", "--name", "box", "reg.example/a:1")
	ok(t, uidAt(2)+"\n", "checkpoint", "box", "--name", "snap")
	ok(t, uidAt(3)+"\n", "restore", "snap", "--name", "again")
	ok(t, uidAt(4)+"\n"+uidAt(5)+"\n"+uidAt(6)+"\n", "fork", "box", "-n", "3")
	ok(t, uidAt(7)+"\n", "volume", "create", "--name", "vol", "--size", "1Gi")
	ok(t, "n1\n", "node", "cordon", "n1")
	ok(t, f.image().GetDigest()+"\n", "image", "pull", "reg.example/a:1")
	ok(t, f.image().GetDigest()+"\n", "image", "rm", "reg.example/a:1")
	ok(t, uidAt(1)+"\n"+uidAt(3)+"\n", "pause", "box", "again")
	ok(t, uidAt(1)+"\n", "update", "box", "-l", "team=blue", "--lifetime", "1h", "--wake-on-use")
	if got := asked[*dormousev1.UpdateSandboxRequest](t, f); got.GetLabels()["team"] != "blue" || got.GetIfRevision() != 1 || !got.GetWakeOnUse() ||
		strings.Join(got.GetUpdateMask().GetPaths(), " ") != "labels lifetime wake_on_use" {
		t.Errorf("update asked %v", got)
	}
	policy := filepath.Join(t.TempDir(), "egress.yaml")
	if err := os.WriteFile(policy, []byte("defaultAction: EGRESS_ACTION_DENY\nallow:\n- cidrs: [192.0.2.0/24]\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	ok(t, uidAt(1)+"\n", "update", "box", "--egress", policy)
	if got := asked[*dormousev1.UpdateSandboxRequest](t, f); got.GetEgress().GetAllow()[0].GetCidrs()[0] != "192.0.2.0/24" || strings.Join(got.GetUpdateMask().GetPaths(), " ") != "egress" {
		t.Errorf("update asked %v", got)
	}
	ok(t, uidAt(1)+"\n", "update", "box", "--no-egress-policy")
	if got := asked[*dormousev1.UpdateSandboxRequest](t, f); got.GetEgress() != nil || strings.Join(got.GetUpdateMask().GetPaths(), " ") != "egress" {
		t.Errorf("update asked %v", got)
	}
	for _, args := range [][]string{{"--egress", policy, "--no-egress-policy"}, {"--egress", ""}, {}} {
		if r := dormouse(t, append([]string{"update", "box"}, args...)...); r.code != 2 {
			t.Errorf("update %v: exit code %d: %s", args, r.code, r.err)
		}
	}
	ok(t, uidAt(1)+"\n", "hibernate", "box")
	ok(t, uidAt(1)+"\n", "resume", "box")
	ok(t, uidAt(3)+"\n", "resume", "again", "-o", "name")
	ok(t, uidAt(3)+"\n", "rm", "again")
	ok(t, uidAt(2)+"\n", "snapshot", "rm", "snap")
	ok(t, uidAt(7)+"\n", "volume", "rm", "vol")
	ok(t, uidAt(1)+"\n"+uidAt(4)+"\n"+uidAt(5)+"\n"+uidAt(6)+"\n", "ls", "-q")
	ok(t, "7\n", "wait", "box")
	if got := asked[*dormousev1.ForkSandboxRequest](t, f); got.GetSandboxUid() != uidAt(1) || got.GetCount() != 3 || got.GetOperationId() == "" {
		t.Errorf("fork asked %v", got)
	}
}

func TestTables(t *testing.T) {
	f := serve(t)
	f.add("box", nil, &dormousev1.SandboxSpec{Image: "reg.example/a:1"})
	ok(t, "UID                                   NAME  PHASE    NODE  IMAGE            AGE\n"+
		uidAt(1)+"  box   Running  n1    reg.example/a:1  60s\n", "ls")
	f.sandboxes[0].Status.Conditions = []*dormousev1.Condition{{Type: "Capturing", Reason: "Done"}} // no reason to be Running
	ok(t, "UID                                   NAME  PHASE    NODE  IMAGE            AGE  EXIT  REASON  RESTORED-FROM\n"+
		uidAt(1)+"  box   Running  n1    reg.example/a:1  60s  -     -       -\n", "get", "box", "-o", "wide")
	ok(t, "PROCESS                               PID  STATE              AGE  COMMAND\n"+
		uidAt(100)+"  2    running            60s  python3 -m?[2J\n"+
		uidAt(101)+"  3    killed by SIGKILL  -    sh\n", "ps", "box")
	ok(t, "NAME  STATE          SANDBOXES  CPU    MEMORY    HEARTBEAT\n"+
		"n1    online         3/1000     1.5/2  1Gi/20Gi  2s\n"+
		"n2    away,cordoned  0/0        0/0    0/0       -\n", "node", "ls")
	ok(t, "MODE      ADDRESS    SENT  RECEIVED  REFUSED  REFUSED-NAMES\n"+
		"outbound  10.89.0.7  2Ki   3Mi       4        1\n", "network", "box")
	if r := dormouse(t, "node", "ls", "-o", "wide"); r.code != 0 || !strings.Contains(r.out, "NETWORKS") || !strings.Contains(r.out, "none,outbound") {
		t.Errorf("node ls -o wide says\n%s%s", r.out, r.err)
	}
	ok(t, "REFERENCE        DIGEST               SIZE  NODES  AGE\nreg.example/a:1  sha256:abababababab  5Mi   n1,n2  60s\n", "image", "ls")
	ok(t, "AGE  TYPE    REASON   OBJECT                                        MESSAGE\n"+
		"60s  normal  Started  sandbox/"+uidAt(1)+"  it runs\n", "event", "ls", "--object", "box")
	ok(t, "OPERATION                             KIND           STATE   OBJECTS  ERROR         AGE\n"+
		uidAt(9)+"  CreateSandbox  Failed  -        NO_NODE_FITS  60s\n", "operation", "get", uidAt(9))
	ok(t, "{\n  \"items\": []\n}\n", "volume", "ls", "-o", "json")
	ok(t, "items: []\n", "snapshot", "ls", "-o", "yaml")
	if d := cmp.Diff(dormouse(t, "inspect", "box").out, dormouse(t, "get", "box", "-o", "json").out); d != "" {
		t.Errorf("inspect is not get -o json:\n%s", d)
	}
	var shown struct {
		Meta struct{ Uid, Name, CreateTime string }
	}
	if err := json.Unmarshal([]byte(dormouse(t, "inspect", "box").out), &shown); err != nil || shown.Meta.Uid != uidAt(1) {
		t.Errorf("inspect: %+v %v", shown, err)
	}
}

func TestSnapshotsAreRemovedBySelection(t *testing.T) {
	f := serve(t)
	add := func(i int, source string, age time.Duration, phase dormousev1.SnapshotPhase) {
		f.snapshots = append(f.snapshots, &dormousev1.Snapshot{Meta: &dormousev1.ObjectMeta{Uid: uidAt(i), CreateTime: timestamppb.New(now().Add(-age))},
			SourceSandboxUid: source, Status: &dormousev1.SnapshotStatus{Phase: phase}})
	}
	const ready = dormousev1.SnapshotPhase_SNAPSHOT_PHASE_READY
	add(1, uidAt(100), 100*time.Hour, ready)
	add(2, uidAt(101), 100*time.Hour, ready)
	add(3, uidAt(101), time.Hour, ready)
	add(4, uidAt(101), 100*time.Hour, dormousev1.SnapshotPhase_SNAPSHOT_PHASE_PREPARING)
	add(5, uidAt(101), 100*time.Hour, dormousev1.SnapshotPhase_SNAPSHOT_PHASE_DELETING)
	f.busy = 3
	for _, c := range []struct {
		args []string
		want []string
	}{
		{[]string{"--all"}, []string{uidAt(1), uidAt(2), uidAt(3)}},
		{[]string{"--source", uidAt(101), "--parallel", "1"}, []string{uidAt(2), uidAt(3)}},
		{[]string{"--older-than", "72h"}, []string{uidAt(1), uidAt(2)}},
		{[]string{"--older-than", "72h", "--source", uidAt(101)}, []string{uidAt(2)}},
		{[]string{uidAt(4), uidAt(3)}, []string{uidAt(3), uidAt(4)}},
		{[]string{"--older-than", "720h"}, nil},
	} {
		r := dormouse(t, append([]string{"snapshot", "rm"}, c.args...)...)
		got := strings.Fields(r.out)
		slices.Sort(got)
		if r.code != 0 || !slices.Equal(got, c.want) {
			t.Errorf("%v: %+v, want %v", c.args, r, c.want)
		}
	}
	for _, args := range [][]string{{}, {"--all", uidAt(1)}, {"--older-than", "-1h"}, {"--all", "--parallel", "0"}, {"--all", "--parallel", "65"}, {"--all", "--operation-id", uidAt(9)}} {
		if r := dormouse(t, append([]string{"snapshot", "rm"}, args...)...); r.code != 2 || r.out != "" {
			t.Errorf("%v: %+v", args, r)
		}
	}
}

func TestExitCodesByClass(t *testing.T) {
	f := serve(t)
	f.add("box", nil, nil)
	for _, reason := range errs.Reasons() {
		e := errs.New(reason, "what to do about %s", reason).With("holder", "somebody")
		f.fail["GetSandbox"] = e
		want := 1
		switch e.Code {
		case errs.InvalidArgument:
			want = 2
		case errs.NotFound:
			want = 3
		case errs.Conflict:
			want = 4
		case errs.Unavailable, errs.OutcomeUnknown, errs.Cancelled:
			want = 5
		case errs.DeadlineExceeded:
			want = 124
		case errs.Internal:
			if e.Outcome == errs.Unknown {
				want = 5
			}
		}
		if e.Retry != errs.Never {
			continue // tried again by the client; below
		}
		r := dormouse(t, "get", uidAt(1))
		if r.code != want || r.out != "" || !strings.Contains(r.err, "what to do about "+string(reason)) || !strings.Contains(r.err, "holder=somebody") || !strings.Contains(r.err, "request ") {
			t.Errorf("%s: want %d, got %+v", reason, want, r)
		}
	}
	r := dormouse(t, "get", uidAt(1), "-o", "json")
	var env struct{ Code, Reason string }
	if err := json.Unmarshal([]byte(r.err), &env); err != nil || env.Reason == "" {
		t.Errorf("-o json: %q %v", r.err, err)
	}
}

func TestTryingAgain(t *testing.T) {
	f := serve(t)
	f.once["CreateSandbox"] = errs.New(errs.ReplyLost, "lost")
	ok(t, uidAt(1)+"\n", "create", "a")
	var ids []string
	for _, r := range f.requests {
		if c, isCreate := r.(*dormousev1.CreateSandboxRequest); isCreate {
			ids = append(ids, c.GetOperationId())
		}
	}
	if len(ids) != 2 || ids[0] != ids[1] || ids[0] == "" {
		t.Errorf("operation ids %v", ids)
	}
	f.fail["CreateSandbox"] = errs.New(errs.NoNodeFits, "no node has 64 cores")
	before := len(f.requests)
	if r := dormouse(t, "create", "a"); r.code != 1 || len(f.requests) != before+1 {
		t.Errorf("what is exhausted is asked once: %+v", r)
	}
	f.fail["CreateSandbox"] = errs.New(errs.InternalError, "internal error")
	r := dormouse(t, "--context", "", "create", "a")
	if r.code != 5 || !strings.Contains(r.err, "--operation-id "+asked[*dormousev1.CreateSandboxRequest](t, f).GetOperationId()) {
		t.Errorf("unknown: %+v", r)
	}
	f.fail["ListSandboxes"] = errs.New(errs.NoLeader, "no leader")
	if r := dormouse(t, "ls", "--timeout", "150ms"); r.code != 5 && r.code != 124 {
		t.Errorf("no leader: %+v", r)
	}
}

func TestNames(t *testing.T) {
	f := serve(t)
	f.add("twin", nil, nil)
	f.add("twin", nil, nil)
	if r := dormouse(t, "rm", "twin"); r.code != 2 || !strings.Contains(r.err, uidAt(1)) || len(f.sandboxes) != 2 {
		t.Errorf("ambiguous: %+v", r)
	}
	f.add("both", nil, nil)
	f.snapshots = []*dormousev1.Snapshot{{Meta: &dormousev1.ObjectMeta{Uid: uidAt(60), Name: "both"}}}
	if r := dormouse(t, "fork", "both"); r.code != 2 || !strings.Contains(r.err, "AMBIGUOUS_NAME") {
		t.Errorf("sandbox and snapshot: %+v", r)
	}
	if r := dormouse(t, "fork", uidAt(60)); r.code != 0 || asked[*dormousev1.ForkSandboxRequest](t, f).GetSnapshotUid() != uidAt(60) {
		t.Errorf("by uid: %+v", r)
	}
	if r := dormouse(t, "rm", "nobody"); r.code != 3 {
		t.Errorf("absent: %+v", r)
	}
	if r := dormouse(t, "rm", "-f", "nobody", uidAt(1)); r.code != 0 || r.out != uidAt(1)+"\n" {
		t.Errorf("forced: %+v", r)
	}
	if r := dormouse(t, "rm", "nobody", uidAt(2)); r.code != 3 || r.out != uidAt(2)+"\n" {
		t.Errorf("one of two: %+v", r)
	}
	f.sandboxes = nil
	f.add("help", nil, nil)
	if r := dormouse(t, "get", "help", "-q"); r.code != 0 || r.out != f.sandboxes[0].GetMeta().GetUid()+"\n" {
		t.Errorf("a sandbox named help: %+v", r)
	}
	if r := dormouse(t, "restore", "both", "--volume", "/a=same", "-v", "/b=clone"); r.code != 0 {
		t.Errorf("restore: %+v", r)
	}
	want := []*dormousev1.VolumeBinding{{Path: "/a", Policy: dormousev1.VolumePolicy_VOLUME_POLICY_SAME}, {Path: "/b", Policy: dormousev1.VolumePolicy_VOLUME_POLICY_CLONE}}
	for i, b := range asked[*dormousev1.RestoreSandboxRequest](t, f).GetVolumes() {
		if !proto.Equal(b, want[i]) {
			t.Errorf("binding %v", b)
		}
	}
}

func TestCompletionKnowsTheNames(t *testing.T) {
	f := serve(t)
	f.add("box", nil, nil)
	f.add("", nil, nil)
	ok(t, "box\n"+uidAt(2)+"\n", "exec", command.CompletionFlag)
	ok(t, "n1\nn2\n", "node", "cordon", command.CompletionFlag)
	t.Setenv("DORMOUSE_ADDR", "unix:"+t.TempDir()+"/nobody")
	ok(t, "", "rm", command.CompletionFlag)
}

func TestFailedSandboxIsAnError(t *testing.T) {
	f := serve(t)
	f.add("box", nil, nil).Status = &dormousev1.SandboxStatus{Phase: dormousev1.SandboxPhase_SANDBOX_PHASE_FAILED, Reason: "StartFailed", Message: "no room"}
	if r := dormouse(t, "wait", "box"); r.code != 1 || !strings.Contains(r.err, "StartFailed") {
		t.Errorf("got %+v", r)
	}
}

func TestWaitSaysWhatItSaw(t *testing.T) {
	f := serve(t)
	f.add("box", nil, nil)
	f.fail["WatchSandboxes"] = errs.New(errs.NoLeader, "no leader")
	var r result
	for patience := 300 * time.Millisecond; patience < time.Minute; patience *= 2 { // until it was enough to see something
		if r = dormouse(t, "wait", "box", "--timeout", patience.String()); r.code != 124 || strings.Contains(r.err, "is still running") {
			break
		}
	}
	if r.code != 124 || !strings.Contains(r.err, "is still running") {
		t.Errorf("got %+v", r)
	}
}
