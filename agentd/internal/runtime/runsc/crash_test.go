package runsc

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/dormouse-run/dormouse/agentd/internal/cgroup"
	"github.com/dormouse-run/dormouse/agentd/internal/launcher"
	"github.com/dormouse-run/dormouse/agentd/internal/runtime"
	"github.com/dormouse-run/dormouse/agentd/internal/runtime/runtimetest"
)

// agentEnv makes the test binary play an agent that is killed: it starts the sandbox of the order in the
// variable, prints the handle, saves the sandbox if it is told where, and waits for its end.
const agentEnv = "DORMOUSE_RUNSC_TEST_AGENT"

type agentOrder struct {
	Root   string
	Parent string
	Config runtime.Config
	Save   string
}

func TestMain(m *testing.M) {
	if order := os.Getenv(agentEnv); order != "" {
		playAgent(order)
	}
	goleak.VerifyTestMain(m)
}

func playAgent(order string) {
	fail := func(err error) {
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	var o agentOrder
	fail(json.Unmarshal([]byte(order), &o))
	l, err := launcher.New(launcher.Options{})
	fail(err)
	cg, err := cgroup.Open(cgroup.Options{Parent: o.Parent})
	fail(err)
	d, err := New(Options{Root: o.Root, Launcher: l, Cgroups: cg})
	fail(err)
	h, err := d.Start(context.Background(), o.Config)
	fail(err)
	fmt.Println(string(h))
	if o.Save != "" {
		fail(d.Pause(context.Background(), o.Config.ID))
		fail(d.Save(context.Background(), o.Config.ID, runtime.SaveOptions{Dir: o.Save, Direct: true}))
	}
	select {}
}

// agent starts the other process.
func (n *node) agent(t *testing.T, cfg runtime.Config, saveDir string) (*exec.Cmd, *bufio.Reader) {
	t.Helper()
	order, err := json.Marshal(agentOrder{Root: filepath.Join(n.dir, "runtime"), Parent: filepath.Dir(cfg.Cgroup), Config: cfg, Save: saveDir})
	must(t, err)
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), agentEnv+"="+string(order))
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	return cmd, bufio.NewReader(out)
}

// B18: the agent is killed right after it started a sandbox. The sandbox goes on, the next agent finds it
// by its handle, and sees its exit code.
func TestB18_AgentKilledAfterStart(t *testing.T) {
	n := newNode(t)
	cfg := n.config(t, runtimetest.NewID(t), nil)
	n.deleteAtEnd(t, cfg.ID)
	cmd, out := n.agent(t, cfg, "")
	line, err := out.ReadString('\n')
	must(t, err)
	must(t, cmd.Process.Signal(unix.SIGKILL))
	if err := cmd.Wait(); err == nil {
		t.Fatal("the agent ended by itself")
	}
	before := n.count(t, cfg.ID)
	st, err := n.d.Recover(bounded(t), runtime.Handle(strings.TrimSpace(line)))
	must(t, err)
	if st.Phase != runtime.Running {
		t.Fatalf("recovered %+v", st)
	}
	n.save(t, cfg.ID, true)
	if after := n.count(t, cfg.ID); after.Nonce != before.Nonce || after.Counter != before.Counter+1 {
		t.Fatalf("the guest is %+v, was %+v", after, before)
	}
	_, err = n.guests[cfg.ID].in.WriteString("exit 11\n")
	must(t, err)
	exit, err := n.d.Wait(bounded(t), cfg.ID)
	must(t, err)
	if !exit.Known || exit.Code != 11 {
		t.Fatalf("exit %+v, want code 11", exit)
	}
}

// B18: the agent is killed at some point of a start. What it began is listed, and delete removes all of it.
func TestB18_AgentKilledDuringStart(t *testing.T) {
	points := map[string]func(n *node, id string) string{
		"record written": func(n *node, id string) string { return n.d.recordPath(id) },
		"group made":     func(n *node, id string) string { return filepath.Join(n.dir, "sandboxes", id, "config.json") },
		"state written":  func(n *node, id string) string { return n.d.stateBase(id) + ".state" },
	}
	for name, path := range points {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			cfg := n.config(t, runtimetest.NewID(t), nil)
			n.deleteAtEnd(t, cfg.ID)
			cmd, _ := n.agent(t, cfg, "")
			ctx := bounded(t)
			for {
				if _, err := os.Stat(path(n, cfg.ID)); err == nil {
					break
				}
				must(t, ctx.Err())
			}
			must(t, cmd.Process.Signal(unix.SIGKILL))
			_ = cmd.Wait() // killed
			list, err := n.d.List(ctx)
			must(t, err)
			if len(list) != 1 || list[0].ID != cfg.ID {
				t.Fatalf("list %+v, want %s", list, cfg.ID)
			}
			must(t, n.d.Delete(ctx, cfg.ID))
			n.reapCommand(t, "create", cfg.ID) // one that ended by itself before it could be killed
			if left := n.leftovers(t); len(left) > 0 {
				t.Fatalf("left behind: %v", left)
			}
		})
	}
}

// B18: the agent is killed while it saves a sandbox. The next one finds it paused and resumes it, however far
// the save is, and the sandbox has lost nothing.
func TestB18_AgentKilledDuringSave(t *testing.T) {
	n := newNode(t)
	cfg := n.config(t, runtimetest.NewID(t), nil)
	n.deleteAtEnd(t, cfg.ID)
	dir := t.TempDir()
	cmd, out := n.agent(t, cfg, dir)
	line, err := out.ReadString('\n')
	must(t, err)
	ctx := bounded(t)
	for entries, err := os.ReadDir(dir); len(entries) == 0; entries, err = os.ReadDir(dir) {
		must(t, err)
		must(t, ctx.Err())
	}
	must(t, cmd.Process.Signal(unix.SIGKILL))
	_ = cmd.Wait() // killed
	st, err := n.d.Recover(ctx, runtime.Handle(strings.TrimSpace(line)))
	must(t, err)
	if st.Phase != runtime.Paused {
		t.Fatalf("recovered %+v, want it paused", st)
	}
	must(t, n.d.Resume(ctx, cfg.ID))
	before := n.count(t, cfg.ID)
	n.save(t, cfg.ID, true)
	if after := n.count(t, cfg.ID); after.Nonce != before.Nonce || after.Counter != before.Counter+1 {
		t.Fatalf("the guest is %+v, was %+v", after, before)
	}
}

// reapCommand waits for the command that the killed agent left. Process 1 does it elsewhere; here this
// process is the nearer subreaper.
func (n *node) reapCommand(t *testing.T, what, id string) {
	t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/stat")
	must(t, err)
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			continue // it is gone
		}
		var pid, parent int
		var state string
		if _, err := fmt.Sscanf(string(data), "%d (runsc) %1s %d", &pid, &state, &parent); err != nil || parent != os.Getpid() {
			continue
		}
		if _, err := unix.Wait4(pid, nil, 0, nil); err != nil {
			t.Errorf("reap runsc %s of %s: %v", what, id, err)
		}
	}
}
