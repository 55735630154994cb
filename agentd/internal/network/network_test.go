package network

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/dormouse-run/dormouse/pkg/errs"
)

const agentEnv = "DORMOUSE_NETWORK_TEST_AGENT"

func TestMain(m *testing.M) {
	if os.Getenv(ownEnv) == "" {
		os.Exit(inOwnNamespace())
	}
	if os.Getenv(agentEnv) != "" {
		playAgent()
	}
	goleak.VerifyTestMain(m)
}

// playAgent is an agent that leases a namespace, names it and waits to be killed.
func playAgent() {
	p := NewPool(Options{Size: 4})
	l, err := p.Acquire(context.Background(), "uid", ModeNone)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	inode, err := os.Readlink(l.Path())
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Println(inode)
	select {}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func acquire(t *testing.T, p *Pool) *Lease {
	t.Helper()
	l, err := p.Acquire(t.Context(), "uid", ModeNone)
	must(t, err)
	t.Cleanup(func() { must(t, l.Release()) })
	return l
}

func TestLeaseHasLoopbackOnly(t *testing.T) {
	for _, size := range []int{0, 2} {
		p := NewPool(Options{Size: size})
		l := acquire(t, p)
		h, err := netns.GetFromPath(l.Path())
		must(t, err)
		nl, err := netlink.NewHandleAt(h)
		must(t, err)
		links, err := nl.LinkList()
		must(t, err)
		nl.Close()
		must(t, h.Close())
		if len(links) != 1 || links[0].Attrs().Name != "lo" || links[0].Attrs().Flags&1 == 0 {
			t.Errorf("pool of %d: links %v, want loopback, up", size, links)
		}
		must(t, p.Close())
	}
}

func TestNeverTheSameTwice(t *testing.T) {
	p := NewPool(Options{Size: 3})
	defer p.Close()
	seen := make(map[string]bool)
	for range 20 {
		l := acquire(t, p)
		inode, err := os.Readlink(l.Path())
		must(t, err)
		if seen[inode] {
			t.Fatalf("%s was leased twice", inode)
		}
		seen[inode] = true
	}
}

// TestPoolIsFilled: at its beginning, at once while little is left, and once it is calm.
func TestPoolIsFilled(t *testing.T) {
	p := NewPool(Options{Size: 4})
	defer p.Close()
	full := func() {
		t.Helper()
		for p.Idle() < 4 {
			if t.Context().Err() != nil {
				t.Fatalf("%d are ready", p.Idle())
			}
			runtime.Gosched()
		}
	}
	full()
	acquire(t, p)
	if p.uncalm() <= 0 && time.Since(p.began)-time.Duration(p.last.Load()) < calm {
		t.Error("one was just taken, and three of four are enough for now")
	}
	full()
	for range 6 {
		acquire(t, p)
	}
	full()
}

func TestReleaseIsIdempotentAndModesAreRefused(t *testing.T) {
	p := NewPool(Options{Size: 1})
	defer p.Close()
	l := acquire(t, p)
	path := l.Path()
	for range 2 {
		must(t, l.Release())
	}
	if target, err := os.Readlink(path); err == nil && strings.HasPrefix(target, "net:") {
		// The number may have been given to a namespace of the pool since; it is not this one any more.
		t.Logf("%s is now %s", path, target)
	}
	if _, err := p.Acquire(t.Context(), "uid", "outbound"); !errs.Has(err, errs.NotSupported) {
		t.Fatalf("got %v, want NOT_SUPPORTED", err)
	}
}

func TestClosedPool(t *testing.T) {
	p := NewPool(Options{Size: 2})
	must(t, p.Close())
	must(t, p.Close())
	if p.Idle() != 0 {
		t.Fatalf("%d are held after Close", p.Idle())
	}
	if _, err := p.Acquire(t.Context(), "uid", ModeNone); !errs.Has(err, errs.ShuttingDown) {
		t.Fatalf("got %v, want SHUTTING_DOWN", err)
	}
}

// An agent that is killed leaves no namespace: the last holder was its process.
func TestKilledAgentLeavesNothing(t *testing.T) {
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), agentEnv+"=1")
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	buf := make([]byte, 64)
	n, err := out.Read(buf)
	must(t, err)
	inode := strings.TrimSpace(string(buf[:n]))
	must(t, cmd.Process.Signal(unix.SIGKILL))
	_ = cmd.Wait() // killed
	holders, err := exec.Command("sh", "-c", "ls -l /proc/[0-9]*/ns/net /proc/[0-9]*/fd/* 2>/dev/null | grep -F '"+inode+"'; grep -F '"+inode+"' /proc/self/mountinfo; true").Output()
	must(t, err)
	if len(holders) > 0 {
		t.Fatalf("%s is still held: %s", inode, holders)
	}
}
