package app

import (
	"os"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/uid"
	nodev1 "github.com/dormouse-run/dormouse/proto/dormouse/node/v1"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

func TestMain(m *testing.M) {
	code := m.Run()
	if built.dir != "" {
		if err := os.RemoveAll(built.dir); err != nil {
			code = 1
		}
	}
	if err := goleak.Find(); err != nil {
		println(err.Error())
		code = 1
	}
	os.Exit(code)
}

// insecureLocal is for the debug socket, where the kernel says who the peer is.
func insecureLocal() credentials.TransportCredentials { return insecure.NewCredentials() }

func wantReason(t *testing.T, err error, want errs.Reason) {
	t.Helper()
	if errs.ReasonOf(err) != want {
		t.Fatalf("got %v, want reason %s", err, want)
	}
}

// counting is a main command that counts in its memory and says so when it gets a line.
const counting = `n=0; while read line; do n=$((n+1)); echo "$$ $n"; done < /tmp/ask`

// TestRealSandbox goes the whole way on one node with the real parts: pull, start, processes, checkpoint,
// delete, restore under a new identity, and the same process goes on.
func TestRealSandbox(t *testing.T) {
	b := newBench(t)
	vol := uid.New()
	_, err := b.agent.CreateVolume(ctx(t), &nodev1.CreateVolumeRequest{Command: b.cmd(), Uid: vol})
	must(t, err)
	req := &nodev1.StartSandboxRequest{Command: b.cmd(), Uid: uid.New(), Name: "first", Generation: 1, SecretEnv: map[string]string{"TOKEN": "hush-hush"},
		Spec: &dormousev1.SandboxSpec{Image: b.image, Command: []string{"/bin/sh", "-c", "mkfifo /tmp/ask; exec 3<>/tmp/ask; " + counting},
			Env: map[string]string{"COLOUR": "blue"}, Volumes: []*dormousev1.VolumeMount{{VolumeUid: vol, Path: "/data"}}}}
	began := time.Now()
	resp, err := b.agent.StartSandbox(ctx(t), req)
	must(t, err)
	t.Logf("pulled, converted and started in %s", time.Since(began).Round(time.Millisecond))
	box := resp.GetSandbox()
	again, err := b.agent.StartSandbox(ctx(t), req)
	must(t, err)
	if box.GetPhase() != dormousev1.SandboxPhase_SANDBOX_PHASE_RUNNING || again.GetSandbox().GetObservation() != box.GetObservation() {
		t.Fatalf("%v, again %v", box, again)
	}
	if out, code := b.sh(box.GetUid(), "echo $COLOUR; hostname; cat /etc/hostname; echo here > /data/file; exit 7"); out != "blue\nfirst\nfirst\n" || code != 7 {
		t.Fatalf("%q %d", out, code)
	}
	ask := func(sandbox, want string) string {
		t.Helper()
		if out, code := b.sh(sandbox, "until [ -p /tmp/ask ]; do sleep 0.01; done; echo > /tmp/ask"); code != 0 {
			t.Fatalf("ask: %q %d", out, code)
		}
		var last string
		eventually(t, "it counts to "+want, func() bool {
			out := b.output(sandbox, "main")
			lines := strings.Split(strings.TrimSpace(out), "\n")
			last = lines[len(lines)-1]
			return strings.HasSuffix(last, " "+want)
		})
		return strings.Fields(last)[0]
	}
	pid := ask(box.GetUid(), "1")
	ask(box.GetUid(), "2")

	snap := uid.New()
	saved, err := b.agent.CheckpointSandbox(ctx(t), &nodev1.CheckpointSandboxRequest{Command: b.cmd(), Uid: box.GetUid(), SnapshotUid: snap})
	must(t, err)
	t.Logf("frozen for %s, %d bytes", saved.GetSnapshot().GetFreeze().AsDuration(), saved.GetSnapshot().GetSizeBytes())
	ask(box.GetUid(), "3") // the source goes on

	// A copy of the volume while the sandbox writes needs it to stand still.
	copied := uid.New()
	_, err = b.agent.CreateVolume(ctx(t), &nodev1.CreateVolumeRequest{Command: b.cmd(), Uid: copied, SourceUid: vol})
	wantReason(t, err, errs.AlreadyAttached)
	_, err = b.agent.CreateVolume(ctx(t), &nodev1.CreateVolumeRequest{Command: b.cmd(), Uid: copied, SourceUid: vol, FreezeSandboxUid: box.GetUid()})
	must(t, err)
	ask(box.GetUid(), "4")

	_, err = b.agent.DeleteVolume(ctx(t), &nodev1.DeleteVolumeRequest{Command: b.cmd(), Uid: vol})
	if err == nil {
		t.Fatal("an attached volume was deleted")
	}
	b.delete(box.GetUid())
	b.doctor()

	for _, c := range []struct{ name, volume string }{{"back", vol}, {"copy", copied}} {
		began := time.Now()
		restored, err := b.agent.RestoreSandbox(ctx(t), &nodev1.RestoreSandboxRequest{Command: b.cmd(), Uid: uid.New(), Name: c.name, Generation: 1, SnapshotUid: snap,
			Volumes: []*nodev1.RestoreVolume{{Path: "/data", VolumeUid: c.volume}}})
		must(t, err)
		t.Logf("restored in %s", time.Since(began).Round(time.Millisecond))
		id := restored.GetSandbox().GetUid()
		if got := ask(id, "3"); got != pid {
			t.Fatalf("the command has pid %s, had %s", got, pid)
		}
		if out, code := b.sh(id, "hostname; cat /data/file; echo $COLOUR"); out != c.name+"\nhere\nblue\n" || code != 0 {
			t.Fatalf("%q %d", out, code)
		}
		defer b.doctor()
		defer b.delete(id)
	}
	_, err = b.agent.RestoreSandbox(ctx(t), &nodev1.RestoreSandboxRequest{Command: b.cmd(), Uid: uid.New(), SnapshotUid: snap})
	wantReason(t, err, errs.InvalidField)
}

// output reads what is there of a process's standard output.
func (b *bench) output(sandbox, process string) string {
	b.t.Helper()
	stream, err := b.process.ReadOutput(ctx(b.t), &dormousev1.ReadOutputRequest{SandboxUid: sandbox, ProcessId: process})
	must(b.t, err)
	var out []byte
	for {
		msg, err := stream.Recv()
		if err != nil {
			return string(out)
		}
		out = append(out, msg.GetOutput().GetData()...)
	}
}

// TestB18AgentdKilledKeepsSandboxes kills agentd with SIGKILL right after a start was acknowledged, and
// starts it again.
func TestB18AgentdKilledKeepsSandboxes(t *testing.T) {
	b := newBench(t)
	box := b.start()
	must(t, b.stack.KillAgentd(ctx(t), 1))
	b.startAgentd()
	if out, code := b.sh(box.GetUid(), "echo $$ > /tmp/f; echo alive"); out != "alive\n" || code != 0 {
		t.Fatalf("%q %d", out, code)
	}
	if inv := b.inventory(); inv.GetSandboxes()[0].GetUid() != box.GetUid() {
		t.Fatalf("the inventory: %v", inv)
	}
	// In order, too.
	must(t, b.stack.StopAgentd(ctx(t), 1))
	b.startAgentd()
	if out, code := b.sh(box.GetUid(), "cat /tmp/f | wc -l"); strings.TrimSpace(out) != "1" || code != 0 {
		t.Fatalf("%q %d", out, code)
	}
	b.delete(box.GetUid())
	b.doctor()
}

// TestRealEnds: a command that ends stops its sandbox with its code, and its output can be read afterwards;
// one that runs out of memory is OOMKilled.
func TestRealEnds(t *testing.T) {
	b := newBench(t)
	box := b.start(func(r *nodev1.StartSandboxRequest) {
		r.Spec.Command = []string{"/bin/sh", "-c", "echo last words; exit 3"}
	})
	eventually(t, "the end is reported", func() bool {
		o := b.coord.reported(box.GetUid())
		return o.GetPhase() == dormousev1.SandboxPhase_SANDBOX_PHASE_STOPPED && o.GetExitCode() == 3
	})
	if out := b.output(box.GetUid(), "main"); out != "last words\n" {
		t.Fatalf("%q", out)
	}
	got, err := b.process.WaitProcess(ctx(t), &dormousev1.WaitProcessRequest{SandboxUid: box.GetUid(), ProcessId: "main"})
	must(t, err)
	if got.GetProcess().GetExit().GetCode() != 3 || !got.GetProcess().GetMain() {
		t.Fatalf("%v", got)
	}
	_, err = b.process.StartProcess(ctx(t), &dormousev1.StartProcessRequest{SandboxUid: box.GetUid(), Spec: &dormousev1.ProcessSpec{Argv: []string{"true"}}})
	wantReason(t, err, errs.WrongPhase)
	b.delete(box.GetUid())

	_, err = b.agent.StartSandbox(ctx(t), &nodev1.StartSandboxRequest{Command: b.cmd(), Uid: uid.New(), Spec: &dormousev1.SandboxSpec{Image: b.image, Command: []string{"/no/such"}}})
	wantReason(t, err, errs.CommandNotFound)

	greedy := b.start(func(r *nodev1.StartSandboxRequest) {
		r.Spec.Resources = &dormousev1.Resources{MemoryLimitBytes: 32 << 20, DiskLimitBytes: 1 << 20}
		r.Spec.Command = []string{"/bin/sh", "-c", "mkfifo /tmp/go; read word </tmp/go; exec dd if=/dev/zero of=/dev/null bs=300M count=1"} // its start is answered before it ends
	})
	stream, err := b.process.RunProcess(ctx(t), &dormousev1.RunProcessRequest{SandboxUid: greedy.GetUid(), Spec: &dormousev1.ProcessSpec{
		Argv: []string{"/bin/sh", "-c", "until [ -p /tmp/go ]; do sleep 0.01; done; echo go >/tmp/go"}}})
	for must(t, err); err == nil; _, err = stream.Recv() { // it may end with the sandbox
		continue
	}
	eventually(t, "it is OOMKilled", func() bool { return b.coord.reported(greedy.GetUid()).GetReason() == "OOMKilled" })
	b.delete(greedy.GetUid())
	b.doctor()
}

func TestOverviewAndInspect(t *testing.T) {
	b := newBench(t)
	box := b.start()
	view, err := b.debug.Overview(ctx(t), &nodev1.OverviewRequest{})
	must(t, err)
	if !view.GetConnected() || view.GetSandboxes() != 1 || view.GetImages() != 1 || !strings.HasPrefix(view.GetRuntimeBundle(), "sha256:") {
		t.Fatalf("%v", view)
	}
	got, err := b.debug.Inspect(ctx(t), &nodev1.InspectRequest{Kind: nodev1.DebugKind_DEBUG_KIND_SANDBOX, Uid: box.GetUid()[:30]})
	must(t, err)
	for _, want := range []string{box.GetUid(), `"observed"`, `"stats"`, `"running"`} {
		if !strings.Contains(got.GetJson(), want) {
			t.Errorf("no %s in %s", want, got.GetJson())
		}
	}
	// A command of an earlier coordinator or session is refused.
	stale := b.cmd()
	stale.SessionEpoch--
	_, err = b.agent.DeleteSandbox(ctx(t), &nodev1.DeleteSandboxRequest{Command: stale, Uid: box.GetUid()})
	wantReason(t, err, errs.Fenced)
	b.delete(box.GetUid())
}
