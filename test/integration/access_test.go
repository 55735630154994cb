package integration

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"

	"github.com/dormouse-run/dormouse/pkg/client"
	"github.com/dormouse-run/dormouse/pkg/dataplane"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/pki"
	"github.com/dormouse-run/dormouse/pkg/ticket"
	"github.com/dormouse-run/dormouse/pkg/uid"
	nodev1 "github.com/dormouse-run/dormouse/proto/dormouse/node/v1"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
	"github.com/dormouse-run/dormouse/test/cluster"
	"github.com/dormouse-run/dormouse/test/fabric"
)

// clientTo makes a client of the tenant that dials nodes as the function says.
func (w *world) clientTo(cfg client.Config) *client.Client {
	w.Helper()
	if cfg.Addr == "" {
		cfg.Addr = "unix://" + w.GRPCSocket()
	}
	cfg.APIKey = w.key
	c, err := client.Dial(cfg)
	w.ok(err)
	w.Cleanup(func() { _ = c.Close() })
	return c
}

// TestAccessDirectAndThrough: the same calls give the same answers straight at the node and through the coordinator; the
// client goes straight where it can.
func TestAccessDirectAndThrough(t *testing.T) {
	w := enter(t)
	s := w.create(w.spec())
	dial := fabric.Dialer(w.HubNetns())
	nobody := func(context.Context, string, string) (net.Conn, error) { return nil, errors.New("no way there") }
	for name, c := range map[string]struct {
		cfg    client.Config
		dialed bool
	}{
		"straight": {client.Config{DialNode: dial}, true}, "told not to": {client.Config{DialNode: dial, Through: true}, false},
		"out of reach": {client.Config{DialNode: nobody}, true}, "a socket of this machine": {client.Config{}, false},
	} {
		var dialled atomic.Int64 // of its own: the clients before may still dial
		if way := c.cfg.DialNode; way != nil {
			c.cfg.DialNode = func(ctx context.Context, network, addr string) (net.Conn, error) {
				dialled.Add(1)
				return way(ctx, network, addr)
			}
		}
		box := w.clientTo(c.cfg).Sandbox(s.UID)
		for range 2 {
			var out bytes.Buffer
			_, exit, err := box.Run(w.ctx, &dormousev1.ProcessSpec{Argv: []string{"sh", "-c", "cat; exit 3"}}, bytes.NewReader([]byte("hello")), &client.Output{Stdout: &out}, nil)
			if err != nil || exit.GetCode() != 3 || out.String() != "hello" {
				t.Errorf("%s: %q, %v, %v", name, out.String(), exit, err)
			}
		}
		if _, err := box.Processes(w.ctx); err != nil {
			t.Errorf("%s: a call after streams: %v", name, err)
		}
		if got := dialled.Load() > 0; got != c.dialed {
			t.Errorf("%s: dialled %d times", name, dialled.Load())
		}
	}
	// What is not there is not there, whichever way.
	box := w.clientTo(client.Config{DialNode: dial}).Sandbox(s.UID)
	_, _, err := box.Run(w.ctx, &dormousev1.ProcessSpec{Argv: []string{"true"}}, nil, &client.Output{}, nil)
	w.ok(err)
	w.ok(s.Delete(w.ctx, ""))
	_, _, err = box.Run(w.ctx, &dormousev1.ProcessSpec{Argv: []string{"true"}}, nil, &client.Output{}, nil)
	w.refused(err, errs.ObjectNotFound)
}

// direct dials the direct listener of node i without any certificate.
func (w *world) direct(i int) *grpc.ClientConn {
	w.Helper()
	cfg, err := pki.ClientTLS(pki.Files{CA: w.CoordinatorTLS().CA}, nil, pki.RoleNode, "")
	w.ok(err)
	return w.dial("passthrough:///"+w.DirectAddr(i), credentials.NewTLS(cfg), "", w.inHub())
}

// TestTicketMatrix: a ticket opens the sandbox, the verbs, the node and the time that it was given for, and
// nothing else on the listener for clients is answered.
func TestTicketMatrix(t *testing.T) {
	w := enter(t)
	s, other := w.create(w.spec()), w.create(w.spec())
	i := w.nodeOf(s)
	node := s.Last.GetStatus().GetNode()
	keys, err := ticket.OpenKeys(w.TicketKeys(), nil)
	w.ok(err)
	strange, err := ticket.OpenKeys(w.TempDir()+"/keys.yaml", nil)
	w.ok(err)
	sign := func(k *ticket.Keys, tenant, sandbox, node string, life time.Duration, verbs ...dataplane.Verb) string {
		text, err := k.Issue(tenant, sandbox, node, verbs, life)
		w.ok(err)
		return ticket.Scheme + text
	}
	issued, err := dormousev1.NewTicketServiceClient(w.raw(w.key)).IssueTicket(w.ctx, &dormousev1.IssueTicketRequest{SandboxUid: s.UID})
	w.ok(err)
	if issued.GetAddress() != w.DirectAddr(i) || issued.GetNode() != node || issued.GetLife().AsDuration() <= 0 {
		t.Fatalf("%v", issued)
	}
	stranger, err := w.NewAPIKey(w.tenant + "-other")
	w.ok(err)
	_, err = dormousev1.NewTicketServiceClient(w.raw(stranger)).IssueTicket(w.ctx, &dormousev1.IssueTicketRequest{SandboxUid: s.UID})
	w.refused(err, errs.ObjectNotFound)

	gone := w.create(w.spec())
	w.ok(gone.Delete(w.ctx, ""))
	p := dataplane.Process
	good := ticket.Scheme + issued.GetTicket()
	for name, c := range map[string]struct {
		node   int
		uid    string
		header []string
		reason errs.Reason // "": it is answered
	}{
		"good": {i, s.UID, []string{good}, ""}, "made here": {i, s.UID, []string{sign(keys, w.tenant, s.UID, node, time.Minute, p)}, ""},
		"none":                {i, s.UID, nil, errs.CredentialsMissing},
		"an API key":          {i, s.UID, []string{"Bearer " + w.key}, errs.CredentialsInvalid},
		"two":                 {i, s.UID, []string{good, good}, errs.CredentialsInvalid},
		"garbage":             {i, s.UID, []string{ticket.Scheme + "dt1.x.y"}, errs.TicketInvalid},
		"changed":             {i, s.UID, []string{good[:len(good)-4] + "AAAA"}, errs.TicketInvalid},
		"another's key":       {i, s.UID, []string{sign(strange, w.tenant, s.UID, node, time.Minute, p)}, errs.TicketInvalid},
		"expired":             {i, s.UID, []string{sign(keys, w.tenant, s.UID, node, -time.Second, p)}, errs.TicketInvalid},
		"at another node":     {3 - i, s.UID, []string{good}, errs.TicketInvalid},
		"for another node":    {i, s.UID, []string{sign(keys, w.tenant, s.UID, "node-9", time.Minute, p)}, errs.TicketInvalid},
		"for another sandbox": {i, other.UID, []string{good}, errs.NotAllowed},
		"another tenant's":    {i, s.UID, []string{sign(keys, "somebody", s.UID, node, time.Minute, p)}, errs.ObjectNotFound},
		"another verb":        {i, s.UID, []string{sign(keys, w.tenant, s.UID, node, time.Minute, dataplane.File)}, errs.NotAllowed},
		"no verb":             {i, s.UID, []string{sign(keys, w.tenant, s.UID, node, time.Minute)}, errs.NotAllowed},
		"deleted":             {i, gone.UID, []string{sign(keys, w.tenant, gone.UID, node, time.Minute, p)}, errs.ObjectNotFound},
		"never there":         {i, uid.New(), []string{good}, errs.NotAllowed},
		"no sandbox":          {i, "", []string{good}, errs.NotAllowed},
	} {
		t.Run(name, func(t *testing.T) {
			w := w.sub(t)
			ctx := w.ctx
			for _, h := range c.header {
				ctx = metadata.AppendToOutgoingContext(ctx, "authorization", h)
			}
			calls := dormousev1.NewProcessServiceClient(w.direct(c.node))
			_, err := calls.ListProcesses(ctx, &dormousev1.ListProcessesRequest{SandboxUid: c.uid})
			stream, serr := calls.RunProcess(ctx, &dormousev1.RunProcessRequest{SandboxUid: c.uid, Spec: &dormousev1.ProcessSpec{Argv: []string{"true"}}})
			if serr == nil {
				_, serr = stream.Recv()
			}
			if c.reason == "" {
				w.ok(errors.Join(err, serr))
				return
			}
			w.refused(err, c.reason)
			w.refused(serr, c.reason)
		})
	}
	ctx := metadata.AppendToOutgoingContext(w.ctx, "authorization", good)
	for _, m := range append(methods(nodev1.File_dormouse_node_v1_node_proto, nodev1.File_dormouse_node_v1_debug_proto), methods(dormousev1.File_dormouse_v1_sandbox_proto)...) {
		if err := call(ctx, w.direct(i), m); err == nil {
			t.Errorf("%s is on the listener for clients", m.FullName())
		}
	}
}

// TestAccessStreamOutlivesItsTicket: what runs goes on when its ticket has ended, and a new call does not begin.
func TestAccessStreamOutlivesItsTicket(t *testing.T) {
	w := enter(t)
	s := w.create(w.spec())
	keys, err := ticket.OpenKeys(w.TicketKeys(), nil)
	w.ok(err)
	calls := dormousev1.NewProcessServiceClient(w.direct(w.nodeOf(s)))
	var ctx context.Context
	var stream dormousev1.ProcessService_RunProcessClient
	var first *dormousev1.RunProcessResponse
	for life := 3 * time.Second; ; life *= 2 { // until there was the time to begin
		text, err := keys.Issue(w.tenant, s.UID, s.Last.GetStatus().GetNode(), dataplane.Verbs(), life)
		w.ok(err)
		ctx = metadata.AppendToOutgoingContext(w.ctx, "authorization", ticket.Scheme+text)
		stream, err = calls.RunProcess(ctx, &dormousev1.RunProcessRequest{SandboxUid: s.UID, Spec: &dormousev1.ProcessSpec{Argv: []string{"sh", "-c", "read line; echo $line"}, Stdin: true}})
		w.ok(err)
		if first, err = stream.Recv(); !errs.Has(err, errs.TicketInvalid) {
			w.ok(err)
			break
		}
	}
	w.await("the ticket ends", func() error {
		_, err := calls.ListProcesses(ctx, &dormousev1.ListProcessesRequest{SandboxUid: s.UID})
		if errs.Has(err, errs.TicketInvalid) {
			return nil
		}
		return errors.Join(errors.New("not yet"), err)
	})
	w.ok(w.api.Sandbox(s.UID).Process(first.GetStarted().GetProcessId()).Write(w.ctx, []byte("later\n"), true))
	out := ""
	for out != "later\n" {
		ev, err := stream.Recv()
		w.ok(err)
		out += string(ev.GetOutput().GetData())
	}
}

// TestAccessFailover: output streams go on while the leader dies and another leads, and calls that need a leader wait for
// the next one.
func TestAccessFailover(t *testing.T) {
	w := enter(t)
	w.ok(w.StartStandbyReady(w.ctx))
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), bound)
		defer cancel()
		if err := w.StopStandby(ctx); err != nil {
			t.Error(err)
		}
		if err := w.StartCoordinatorReady(ctx); err != nil && !w.Running("coordinator") {
			t.Error(err)
		}
		w.ctx = ctx
		w.nodesOnline()
	})
	s := w.create(w.spec())
	spec := &dormousev1.ProcessSpec{Argv: []string{"sh", "-c", "while read line; do echo $line; done"}, Stdin: true}
	p, err := s.Start(w.ctx, spec, "")
	w.ok(err)
	standby := w.clientTo(client.Config{Addr: "unix://" + w.StandbySocket()})
	follow := func(sock string) func(want string) {
		cc := w.dial("unix://"+sock, insecure.NewCredentials(), w.key)
		stream, err := dormousev1.NewProcessServiceClient(cc).ReadOutput(w.ctx, &dormousev1.ReadOutputRequest{SandboxUid: s.UID, ProcessId: p.ID, Follow: true})
		w.ok(err)
		return func(want string) {
			w.Helper()
			for got := ""; got != want; {
				ev, err := stream.Recv()
				w.ok(err)
				got += string(ev.GetOutput().GetData())
			}
		}
	}
	leader, other := follow(w.GRPCSocket()), follow(w.StandbySocket())
	say := func(word string, hear ...func(string)) {
		w.Helper()
		w.ok(standby.Sandbox(s.UID).Process(p.ID).Write(w.ctx, []byte(word+"\n"), false))
		for _, h := range hear {
			h(word + "\n")
		}
	}
	say("one", leader, other)

	w.ok(w.KillCoordinator(w.ctx))
	say("two", other) // nobody leads
	w.ok(w.EndLease(w.ctx))
	both := w.clientTo(client.Config{Addr: "unix://" + w.GRPCSocket() + ",unix://" + w.StandbySocket()})
	made, err := both.CreateSandbox(w.ctx, &dormousev1.CreateSandboxRequest{Spec: w.spec()}) // it waits for the next leader, and for the nodes
	w.ok(err)
	say("three", other)

	w.ok(w.StartCoordinatorReady(w.ctx)) // it does not lead, and answers all the same
	back := follow(w.GRPCSocket())
	back("one\ntwo\nthree\n")
	w.ok(w.StopStandby(w.ctx)) // the leader
	w.ok(w.api.Sandbox(s.UID).Process(p.ID).Write(w.ctx, []byte("four\n"), false))
	back("four\n")
	w.ok(w.api.Sandbox(made.UID).Delete(w.ctx, "")) // by the one that leads again
}

// TestForward: a port that listens on loopback only is reached from outside, straight and through the coordinator: with every
// byte, with half-closes, several at a time, and with a type when nothing listens.
func TestForward(t *testing.T) {
	w := enter(t)
	s := w.create(w.spec())
	_, err := s.Start(w.ctx, &dormousev1.ProcessSpec{Argv: []string{"nc", "-ll", "-p", "7000", "-e", "cat"}}, "")
	w.ok(err)
	_, err = s.Start(w.ctx, &dormousev1.ProcessSpec{Argv: []string{"sh", "-c", "echo hello > /tmp/index.html; exec httpd -f -p 127.0.0.1:8080 -h /tmp"}}, "")
	w.ok(err)
	for name, cfg := range map[string]client.Config{"straight": {DialNode: fabric.Dialer(w.HubNetns())}, "through": {}} {
		box := w.clientTo(cfg).Sandbox(s.UID)
		var first *client.PortConn
		w.await("the server listens", func() (err error) {
			first, err = box.Dial(w.ctx, 7000)
			return err
		})
		payload := bytes.Repeat([]byte("dormouse"), 128<<10) // 1 MiB
		echo := func(conn *client.PortConn) error {
			defer conn.Close()
			sent := make(chan error, 1)
			go func() {
				_, err := conn.Write(payload)
				sent <- errors.Join(err, conn.CloseWrite())
			}()
			got, err := io.ReadAll(conn)
			if err = errors.Join(err, <-sent); err == nil && !bytes.Equal(got, payload) {
				err = fmt.Errorf("%d bytes came back of %d", len(got), len(payload))
			}
			return err
		}
		w.ok(each([]int{0, 1, 2}, func(i int) error {
			conn, err := first, error(nil)
			if i > 0 {
				conn, err = box.Dial(w.ctx, 7000)
			}
			if err != nil {
				return err
			}
			return echo(conn)
		}))
		page := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) { return box.Dial(ctx, 8080) }}}
		w.await("a page of a server on loopback alone", func() error {
			resp, err := page.Get("http://inside/")
			if err != nil {
				return err
			}
			defer resp.Body.Close()
			body, err := io.ReadAll(resp.Body)
			if err == nil && string(body) != "hello\n" {
				err = fmt.Errorf("%d %q", resp.StatusCode, body)
			}
			return err
		})
		_, err := box.Dial(w.ctx, 7001)
		w.refused(err, errs.PortClosed)
		_, err = box.Dial(w.ctx, 0)
		if !errs.Has(err, errs.InvalidField) {
			t.Errorf("%s: port 0: %v", name, err)
		}
		// A read that waits ends with its deadline, and the connection goes on.
		conn, err := box.Dial(w.ctx, 7000)
		w.ok(err)
		w.ok(conn.SetReadDeadline(time.Now().Add(10 * time.Millisecond)))
		if _, err := conn.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("%s: %v", name, err)
		}
		w.ok(conn.SetReadDeadline(time.Time{}))
		w.ok(echo(conn))
	}
}

// TestForwardCommand: dormouse forward, as its documentation shows it.
func TestForwardCommand(t *testing.T) {
	w := enter(t)
	s := w.create(w.spec())
	_, err := s.Start(w.ctx, &dormousev1.ProcessSpec{Argv: []string{"sh", "-c", "echo hello > /tmp/index.html; exec httpd -f -p 127.0.0.1:80 -h /tmp"}}, "")
	w.ok(err)
	ctx, stop := context.WithCancel(w.ctx)
	defer stop()
	cmd := exec.CommandContext(ctx, filepath.Join(w.Bin, "dormouse"), "forward", "0:80", s.UID)
	cmd.Env = append(os.Environ(), "DORMOUSE_ADDR=unix://"+w.GRPCSocket(), "DORMOUSE_API_KEY="+w.key)
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) } // an interrupt may be ignored by all that a background job starts
	cmd.WaitDelay = time.Minute
	out, err := cmd.StdoutPipe()
	w.ok(err)
	w.ok(cmd.Start())
	line, err := bufio.NewReader(out).ReadString('\n')
	w.ok(err)
	addr, port, ok := strings.Cut(strings.TrimSpace(line), " -> ")
	if !ok || port != "80" {
		t.Fatalf("it says %q", line)
	}
	w.await("the page", func() error {
		transport := &http.Transport{DisableKeepAlives: true}
		resp, err := (&http.Client{Transport: transport}).Get("http://" + addr + "/")
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		body, err := io.ReadAll(resp.Body)
		if err == nil && string(body) != "hello\n" {
			err = fmt.Errorf("%q", body)
		}
		return err
	})
	stop()
	_ = cmd.Wait() // it was interrupted
	if _, err := net.DialTimeout("tcp", addr, time.Second); err == nil {
		t.Error("it still listens")
	}
}

// TestPortRoute: a server inside is reached over the REST API, as the documentation shows it, in a copy of the sandbox too.
func TestPortRoute(t *testing.T) {
	w := enter(t)
	spec := w.spec("sh", "-c", "mkdir /www; echo hello > /www/index.html; exec httpd -f -p 127.0.0.1:8080 -h /www")
	spec.ExposedPorts = []uint32{8080, 9090}
	s := w.create(spec)
	base := "/v1/sandboxes/" + s.UID + "/ports/"
	w.await("the page", func() error {
		if a := w.rest(w.key, "GET", base+"8080/index.html", ""); a.status != 200 || string(a.body) != "hello\n" {
			return fmt.Errorf("%d %s", a.status, a.body)
		}
		return nil
	})
	if a := w.rest(w.key, "GET", base+"8080/absent", ""); a.status != 404 || a.header.Get("Dormouse-Error") != "" {
		t.Errorf("what the guest does not have: %d %v %s", a.status, a.header, a.body)
	}
	w.refusedREST(w.rest(w.key, "GET", base+"9090/", ""), errs.PortClosed)
	w.refusedREST(w.rest(w.key, "GET", base+"22/", ""), errs.PortNotExposed)
	w.refusedREST(w.rest("", "GET", base+"8080/", ""), errs.CredentialsMissing)
	// A copy has the same ports.
	copies, _, err := w.api.Fork(w.ctx, &dormousev1.ForkSandboxRequest{SandboxUid: s.UID})
	w.ok(err)
	if a := w.rest(w.key, "GET", "/v1/sandboxes/"+copies[0].UID+"/ports/8080/", ""); a.status != 200 || string(a.body) != "hello\n" {
		t.Errorf("a fork: %d %s", a.status, a.body)
	}
}

// TestWakeThroughAStandby: use of a hibernated sandbox through a coordinator that does not lead wakes it, whatever kind of stream
// it is.
func TestWakeThroughAStandby(t *testing.T) {
	w := enter(t)
	w.ok(w.StartStandbyReady(w.ctx))
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), bound)
		defer cancel()
		if err := w.StopStandby(ctx); err != nil {
			t.Error(err)
		}
	})
	spec := w.spec()
	spec.WakeOnUse = true
	s := w.create(spec)
	seen := w.clientTo(client.Config{Addr: "unix://" + w.StandbySocket()}).Sandbox(s.UID)
	for name, use := range map[string]func() error{
		"run": func() error { _, err := cluster.Exec(w.ctx, seen, "true"); return err },
		"run with input": func() error {
			_, _, err := seen.Run(w.ctx, &dormousev1.ProcessSpec{Argv: []string{"cat"}}, strings.NewReader("in"), &client.Output{}, nil)
			return err
		},
		"write": func() error {
			_, err := seen.Files().Write(w.ctx, "/root/file", strings.NewReader("content"), client.WriteOptions{})
			return err
		},
		"a port": func() error {
			if _, err := seen.Dial(w.ctx, 7); !errs.Has(err, errs.PortClosed) { // as the sandbox says
				return fmt.Errorf("nothing listens there: %w", err)
			}
			return nil
		},
	} {
		w.ok(s.Hibernate(w.ctx, ""))
		if err := use(); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if got := w.phase(s); got != running {
			t.Fatalf("%s: it is %s", name, got)
		}
	}
}
