package integration

import (
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/metadata"

	"github.com/dormouse-run/dormouse/pkg/client"
	"github.com/dormouse-run/dormouse/pkg/dataplane"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/ticket"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
	"github.com/dormouse-run/dormouse/test/fabric"
)

// ways gives a client that goes straight to the nodes, and one that goes through the coordinator.
func (w *world) ways() map[string]*client.Client {
	return map[string]*client.Client{"straight": w.clientTo(client.Config{DialNode: fabric.Dialer(w.HubNetns())}), "through": w.clientTo(client.Config{})}
}

// echoing makes a sandbox that echoes at port 7000, and waits until it does.
func (w *world) echoing(change func(*dormousev1.SandboxSpec)) *client.Sandbox {
	w.Helper()
	spec := w.spec("nc", "-ll", "-p", "7000", "-e", "cat")
	if change != nil {
		change(spec)
	}
	s := w.create(spec)
	w.await("it listens", func() error {
		conn, err := s.Dial(w.ctx, 7000)
		if err != nil {
			return err
		}
		return conn.Close()
	})
	return s
}

// echoes says a word and hears it.
func (w *world) echoes(conn net.Conn, word string) {
	w.Helper()
	_, err := io.WriteString(conn, word)
	w.ok(err)
	w.heard(conn, word)
}

func (w *world) heard(conn net.Conn, word string) {
	w.Helper()
	got := make([]byte, len(word))
	if _, err := io.ReadFull(conn, got); err != nil || string(got) != word {
		w.Fatalf("heard %q, %v; want %q", got, err, word)
	}
}

// TestPortAcrossFreezes: a connection goes on through a pause, with what was said meanwhile, and through a checkpoint, straight and
// through the coordinator; the copy has a server of its own and none of the connections; a hibernation ends them with a type, and nothing
// is left of them that the wake or the next checkpoint would trip over.
func TestPortAcrossFreezes(t *testing.T) {
	w := enter(t)
	s := w.echoing(nil)
	conns := map[string]*client.PortConn{}
	for name, c := range w.ways() {
		conn, err := c.Sandbox(s.UID).Dial(w.ctx, 7000)
		w.ok(err)
		t.Cleanup(func() { _ = conn.Close() })
		w.echoes(conn, "before")
		conns[name] = conn
	}
	w.ok(s.Pause(w.ctx, ""))
	for _, conn := range conns {
		_, err := io.WriteString(conn, "while it is paused")
		w.ok(err)
	}
	w.ok(s.Resume(w.ctx, ""))
	for _, conn := range conns {
		w.heard(conn, "while it is paused")
	}
	snap := w.checkpoint(s)
	for _, conn := range conns {
		w.echoes(conn, "after the checkpoint")
	}
	copied, err := snap.Restore(w.ctx, &dormousev1.RestoreSandboxRequest{})
	w.ok(err)
	conn, err := copied.Dial(w.ctx, 7000)
	w.ok(err)
	w.echoes(conn, "in the copy")
	w.ok(conn.Close())

	w.ok(s.Hibernate(w.ctx, ""))
	for name, conn := range conns {
		if _, err := conn.Read(make([]byte, 1)); err == nil || errors.Is(err, io.EOF) || errs.ReasonOf(err) == "" {
			t.Errorf("%s: a connection to what is on the disk: %v", name, err)
		}
	}
	w.ok(s.Resume(w.ctx, ""))
	conn, err = s.Dial(w.ctx, 7000)
	w.ok(err)
	w.echoes(conn, "awake again")
	w.checkpoint(s)
	w.echoes(conn, "and again")
	w.ok(conn.Close())
}

// TestWakeOnUseStraight: a stream that would go straight to the node wakes its sandbox, where the spec says so, and is refused where it
// does not; with the ticket alone the node says what is to be done.
func TestWakeOnUseStraight(t *testing.T) {
	w := enter(t)
	s := w.echoing(func(spec *dormousev1.SandboxSpec) { spec.WakeOnUse = true })
	lazy := w.echoing(nil)
	keys, err := ticket.OpenKeys(w.TicketKeys(), nil)
	w.ok(err)
	text, err := keys.Issue(w.tenant, lazy.UID, lazy.Last.GetStatus().GetNode(), dataplane.Verbs(), time.Minute)
	w.ok(err)
	c := w.ways()["straight"]
	use := func(s *client.Sandbox) error {
		conn, err := c.Sandbox(s.UID).Dial(w.ctx, 7000)
		if err != nil {
			return err
		}
		defer conn.Close()
		w.echoes(conn, "hello")
		return nil
	}
	w.ok(use(s)) // and has a ticket from now on
	w.ok(use(lazy))
	for name, sleep := range map[string]func(*client.Sandbox) error{
		"paused":     func(s *client.Sandbox) error { return s.Pause(w.ctx, "") },
		"hibernated": func(s *client.Sandbox) error { return s.Hibernate(w.ctx, "") },
	} {
		w.ok(sleep(s))
		if err := use(s); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		w.ok(s.Refresh(w.ctx))
		w.is(s, running)
		w.ok(sleep(lazy))
		w.refused(use(lazy), errs.SandboxPaused)
		ctx := metadata.AppendToOutgoingContext(w.ctx, "authorization", ticket.Scheme+text)
		_, err := dormousev1.NewProcessServiceClient(w.direct(w.nodeOf(lazy))).ListProcesses(ctx, &dormousev1.ListProcessesRequest{SandboxUid: lazy.UID})
		w.refused(err, errs.SandboxPaused)
		w.ok(lazy.Resume(w.ctx, ""))
	}
}

// TestTicketOfAnEarlierSandbox: a ticket is worth nothing for a sandbox that was made again under the same name, nor for
// one that was restored from the ticket's, at the same node.
func TestTicketOfAnEarlierSandbox(t *testing.T) {
	w := enter(t)
	create := func() *client.Sandbox {
		t.Helper()
		spec := w.spec()
		spec.NodeSelector = map[string]string{"zone": "z1"}
		s, err := w.api.CreateSandbox(w.ctx, &dormousev1.CreateSandboxRequest{Name: "box", Spec: spec})
		w.ok(err)
		return s
	}
	first := create()
	issued, err := dormousev1.NewTicketServiceClient(w.raw(w.key)).IssueTicket(w.ctx, &dormousev1.IssueTicketRequest{SandboxUid: first.UID})
	w.ok(err)
	ctx := metadata.AppendToOutgoingContext(w.ctx, "authorization", ticket.Scheme+issued.GetTicket())
	calls := dormousev1.NewProcessServiceClient(w.direct(1))
	ask := func(uid string) error {
		_, err := calls.ListProcesses(ctx, &dormousev1.ListProcessesRequest{SandboxUid: uid})
		return err
	}
	w.ok(ask(first.UID))
	snap := w.checkpoint(first)
	w.ok(first.Delete(w.ctx, ""))
	second := create()
	if w.nodeOf(second) != 1 {
		t.Fatal("it is elsewhere")
	}
	w.refused(ask(first.UID), errs.ObjectNotFound)
	w.refused(ask(second.UID), errs.NotAllowed)
	restored, err := snap.Restore(w.ctx, &dormousev1.RestoreSandboxRequest{})
	w.ok(err)
	w.refused(ask(restored.UID), errs.NotAllowed)
	// Nor does a coordinator take it for another than its own.
	for uid, reason := range map[string]errs.Reason{first.UID: errs.ObjectNotFound, second.UID: errs.NotAllowed} {
		_, resp, err := w.dialSocket(uid, nil, issued.GetTicket()) //nolint:bodyclose // it needs no closing, by its contract
		if err == nil || resp.Header.Get("Dormouse-Error") != string(reason) {
			t.Errorf("at a coordinator: %v, %v; want %s", resp, err, reason)
		}
	}
}

// TestExposeCommand: a port is exposed and asked for as the documentation shows it.
func TestExposeCommand(t *testing.T) {
	w := enter(t)
	out, code := w.dormouse("create", "--expose", "8080", "--memory", "64Mi", w.busybox(), "--",
		"sh", "-c", "mkdir /www; echo hello > /www/index.html; exec httpd -f -p 127.0.0.1:8080 -h /www")
	uid := strings.TrimSpace(out)
	if code != 0 || uid == "" {
		t.Fatalf("create: %d %q", code, out)
	}
	w.await("the page", func() error {
		if a := w.rest(w.key, "GET", "/v1/sandboxes/"+uid+"/ports/8080/index.html", ""); a.status != 200 || string(a.body) != "hello\n" {
			return fmt.Errorf("%d %s", a.status, a.body)
		}
		return nil
	})
}
