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
// variable, prints the handle and waits for its end.
const agentEnv = "DORMOUSE_RUNSC_TEST_AGENT"

type agentOrder struct {
	Root   string
	Parent string
	Config runtime.Config
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
	select {}
}

// agent starts the other process.
func (n *node) agent(t *testing.T, cfg runtime.Config) (*exec.Cmd, *bufio.Reader) {
	t.Helper()
	order, err := json.Marshal(agentOrder{Root: filepath.Join(n.dir, "runtime"), Parent: filepath.Dir(cfg.Cgroup), Config: cfg})
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
	cmd, out := n.agent(t, cfg)
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
			cmd, _ := n.agent(t, cfg)
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
			if left := n.leftovers(t); len(left) > 0 {
				t.Fatalf("left behind: %v", left)
			}
		})
	}
}
