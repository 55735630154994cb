package rest

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/coder/websocket"
	"google.golang.org/grpc"

	"github.com/dormouse-run/dormouse/coordinator/internal/auth"
	"github.com/dormouse-run/dormouse/pkg/dataplane"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/ticket"
	"github.com/dormouse-run/dormouse/pkg/uid"
	"github.com/dormouse-run/dormouse/pkg/wire"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// Who has no gRPC is at a process over a WebSocket:
//
//	/v1/sandboxes/{uid}/attach     subprotocol dormouse.attach.v1
//
// It is AttachProcess, message by message: what has a structure is a text message, the JSON of AttachProcessRequest and AttachProcessResponse;
// output and input are binary messages, a byte that names the channel and then the bytes. The first message may start the process
// too. Nothing is kept here: a connection that is lost is made again with the offsets that were reached.
//
// Two windows bound what a connection holds: that of the stream, and maxAhead of input that the process has not taken.
const (
	socketPath = "/v1/sandboxes/{uid}/attach"
	socketName = "dormouse.attach.v1"

	maxOpening = 1 << 20  // of the first message, which may hold an environment
	maxMessage = 64 << 10 // of a later one, its channel not counted
	maxAhead   = 256 << 10
	openWait   = 10 * time.Second
	// patience is how long a client may take nothing before it is taken for gone.
	patience = time.Minute
)

// Channels of binary messages.
const (
	stdin  = 0
	stdout = 1
	stderr = 2
)

// socketRoute serves attachments.
type socketRoute struct {
	bridge    *Bridge
	opts      Options
	processes dormousev1.ProcessServiceClient
	sandboxes dormousev1.SandboxServiceClient
}

func newSocketRoute(b *Bridge, o Options) *socketRoute {
	return &socketRoute{bridge: b, opts: o, processes: dormousev1.NewProcessServiceClient(b.conn), sandboxes: dormousev1.NewSandboxServiceClient(b.conn)}
}

// serve upgrades a request and serves it until either side ends.
func (s *socketRoute) serve(w http.ResponseWriter, r *http.Request) {
	s.bridge.routes.Add(1)
	defer s.bridge.routes.Done()
	r = began(w, r)
	r, err := s.admit(r)
	if err != nil {
		refuse(w, r, err)
		return
	}
	out := patient(w, patience, &s.bridge.taken)
	// Origins were looked at. Whoever is refused by the library is answered by it.
	conn, err := websocket.Accept(out, r, &websocket.AcceptOptions{Subprotocols: []string{socketName}, InsecureSkipVerify: true})
	if err != nil {
		return
	}
	defer func() { _ = conn.CloseNow() }() // it was closed in order, or cannot be
	a := &socket{conn: conn, opened: make(chan struct{}), acked: make(chan struct{}, 1)}
	err = a.serve(outgoing(r), s, r.PathValue("uid"))
	a.farewell(r.Context(), err)
	a.wait.Wait()
}

// admit tells whether a connection may be made, and in whose name.
func (s *socketRoute) admit(r *http.Request) (*http.Request, error) {
	offered := subprotocols(r)
	switch {
	case !strings.EqualFold(r.Header.Get("Upgrade"), "websocket"):
		return r, errs.New(errs.InvalidField, "upgrade: this is for WebSockets, over HTTP/1.1").With("field", "upgrade")
	case !slices.Contains(offered, socketName):
		return r, errs.New(errs.InvalidField, "sec-websocket-protocol: offer %s", socketName).With("field", "sec-websocket-protocol")
	case !s.allowed(r):
		return r, errs.New(errs.NotAllowed, "pages of the origin %q may not connect here (websocket.origins)", clip(r.Header.Get("Origin")))
	}
	i := slices.IndexFunc(offered, func(p string) bool { return strings.HasPrefix(p, ticket.Form) })
	if i >= 0 {
		id, err := s.holder(offered[i], r.PathValue("uid"))
		if err != nil {
			return r, err
		}
		if r.Header.Get("Authorization") != "" {
			return r, errs.New(errs.CredentialsInvalid, "show a ticket or an API key, not both")
		}
		r = r.WithContext(auth.With(r.Context(), id))
	}
	_, err := s.sandboxes.GetSandbox(outgoing(r), &dormousev1.GetSandboxRequest{Uid: r.PathValue("uid")})
	return r, err
}

// holder gives the identity of who holds a ticket, for calls of one sandbox's processes.
func (s *socketRoute) holder(text, sandboxUID string) (auth.Identity, error) {
	if s.opts.Tickets == nil {
		return auth.Identity{}, errs.New(errs.NotSupported, "this coordinator has no key for tickets (tickets.keys_file)").With("feature", "tickets")
	}
	c, err := s.opts.Tickets(text)
	if err != nil {
		return auth.Identity{}, err
	}
	if c.SandboxUID != sandboxUID {
		return auth.Identity{}, errs.New(errs.NotAllowed, "the ticket is for another sandbox")
	}
	if !c.May(dataplane.Process) {
		return auth.Identity{}, errs.New(errs.NotAllowed, "the ticket is not for the verb %s", dataplane.Process)
	}
	return auth.Identity{Tenant: c.Tenant, Subject: "ticket:" + c.Key, Roles: []auth.Role{auth.RoleUser}}, nil
}

func subprotocols(r *http.Request) []string {
	var all []string
	for _, v := range r.Header.Values("Sec-Websocket-Protocol") {
		for _, p := range strings.Split(v, ",") {
			all = append(all, strings.TrimSpace(p))
		}
	}
	return all
}

// allowed tells whether a page of the request's origin may connect. Who is no browser says no origin.
func (s *socketRoute) allowed(r *http.Request) bool {
	origin := r.Header.Get("Origin")
	if origin == "" || slices.ContainsFunc(s.opts.Origins, func(o string) bool { return strings.EqualFold(o, origin) }) {
		return true
	}
	u, err := url.Parse(origin)
	return err == nil && u.Host != "" && strings.EqualFold(u.Host, r.Host)
}

func clip(s string) string { return s[:min(len(s), 200)] }

// socket is one connection. Three goroutines share it: serve, which owns the others, sends what the stream gives; upward reads
// what the client says; and watch sees whether the client is there.
type socket struct {
	conn   *websocket.Conn
	stream grpc.BidiStreamingClient[dormousev1.AttachProcessRequest, dormousev1.AttachProcessResponse]
	input  bool

	opened chan struct{} // closed when the process's answer to open is there
	next   uint64        // where the next piece of input begins; of upward, once opened
	taken  atomic.Uint64 // how much input the process has
	acked  chan struct{} // it has more
	closed atomic.Bool   // it takes no more

	signs   atomic.Int64 // of life of the client
	busy    atomic.Bool  // the client waits for the process, so that nothing of it is read
	writing atomic.Bool  // something is being written, which has a bound of its own
	wait    sync.WaitGroup
}

// opening is the first message.
type opening struct {
	Start json.RawMessage `json:"start"`
	Open  json.RawMessage `json:"open"`
}

// serve opens the stream and passes on what either side says, until the process has ended. Its error is for the client to
// know, or errGone.
func (a *socket) serve(ctx context.Context, s *socketRoute, sandboxUID string) error {
	a.conn.SetReadLimit(maxOpening)
	start, open, err := a.first(ctx, sandboxUID)
	if err != nil {
		return err
	}
	if start != nil {
		resp, err := s.processes.StartProcess(ctx, start)
		if err != nil {
			return err
		}
		open.ProcessId = resp.GetProcess().GetProcessId()
	}
	// The stream's context is not the connection's: what ends the stream is to be said on the connection.
	up, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	if a.stream, err = s.processes.AttachProcess(up); err != nil {
		return err
	}
	a.input = open.GetInput()
	// A failed send has its reason in what is received.
	if a.stream.Send(&dormousev1.AttachProcessRequest{Event: &dormousev1.AttachProcessRequest_Open{Open: open}}) == nil {
		a.conn.SetReadLimit(maxMessage + 1)
		a.wait.Go(func() { cancel(a.upward(ctx, up)) })
		a.wait.Go(func() { cancel(a.watch(ctx, up, s.opts.Ping)) })
	}
	err = a.downward(ctx)
	if cause := context.Cause(up); err != nil && cause != nil {
		err = cause
	}
	return err
}

// errGone is why a connection ends whose client is not there.
var errGone = errors.New("the client has gone")

// first reads the first message: what is to be started, if anything, and how it is to be attached to.
func (a *socket) first(ctx context.Context, sandboxUID string) (*dormousev1.StartProcessRequest, *dormousev1.AttachOpen, error) {
	// The library ends a connection whose read is given up, so this one is not: a client that says nothing is cut.
	late := time.AfterFunc(openWait, func() { _ = a.conn.CloseNow() })
	defer late.Stop()
	kind, data, err := a.conn.Read(ctx)
	if err != nil {
		return nil, nil, errGone
	}
	var m opening
	if kind != websocket.MessageText || strict(data, &m) != nil || m.Start == nil && m.Open == nil {
		return nil, nil, errs.New(errs.InvalidField, `open: the first message is {"open": {...}}, {"start": {...}} or both, as text`).With("field", "open")
	}
	open := &dormousev1.AttachOpen{}
	if m.Open != nil {
		if err := wire.UnmarshalJSON(m.Open, open); err != nil {
			return nil, nil, err
		}
	}
	var start *dormousev1.StartProcessRequest
	if m.Start != nil {
		start = &dormousev1.StartProcessRequest{}
		if err := wire.UnmarshalJSON(m.Start, start); err != nil {
			return nil, nil, err
		}
		if open.GetProcessId() != "" {
			return nil, nil, errs.New(errs.InvalidField, "open.process_id: start names the process").With("field", "open.process_id")
		}
		start.HoldOutput = true
		if m.Open == nil {
			takes := start.GetSpec().GetStdin() || start.GetSpec().GetTerminal() != nil
			open.Hold, open.Input = true, takes
		}
	}
	if open.GetInput() && open.GetWriter() == "" && !open.GetResume() {
		open.Writer = uid.New()
	}
	for _, said := range []string{open.GetSandboxUid(), start.GetSandboxUid()} {
		if said != "" && said != sandboxUID {
			return nil, nil, errs.New(errs.InvalidField, "sandbox_uid: the path names the sandbox").With("field", "sandbox_uid")
		}
	}
	open.SandboxUid = sandboxUID
	if start != nil {
		start.SandboxUid = sandboxUID
	}
	return start, open, nil
}

// strict reads an object that has nothing else.
func strict(data []byte, into any) error {
	d := json.NewDecoder(strings.NewReader(string(data)))
	d.DisallowUnknownFields()
	if err := d.Decode(into); err != nil {
		return err
	}
	if d.More() {
		return errors.New("more than one object")
	}
	return nil
}

// downward sends what the stream gives, until the process has ended.
func (a *socket) downward(ctx context.Context) error {
	for {
		m, err := a.stream.Recv()
		if err != nil {
			return err
		}
		switch {
		case m.GetOpened() != nil:
			a.next = m.GetOpened().GetInputOffset()
			a.taken.Store(a.next)
			a.closed.Store(m.GetOpened().GetInputClosed())
			close(a.opened)
		case m.GetInput() != nil:
			a.taken.Store(m.GetInput().GetAcceptedOffset())
			a.closed.Store(m.GetInput().GetClosed())
			select {
			case a.acked <- struct{}{}:
			default:
			}
		case m.GetOutput() != nil:
			if err := a.output(ctx, m.GetOutput()); err != nil {
				return err
			}
			continue
		}
		if err := a.say(ctx, m); err != nil {
			return err
		}
		if m.GetExit() != nil {
			return nil
		}
	}
}

// say sends a message as text.
func (a *socket) say(ctx context.Context, m *dormousev1.AttachProcessResponse) error {
	text, err := wire.MarshalJSON(m)
	if err != nil {
		return err
	}
	return a.write(ctx, websocket.MessageText, text)
}

func (a *socket) write(ctx context.Context, kind websocket.MessageType, data []byte) error {
	a.writing.Store(true)
	defer a.writing.Store(false)
	if err := a.conn.Write(ctx, kind, data); err != nil {
		return errGone
	}
	a.signs.Add(1)
	return nil
}

// output sends a piece of output, and before it what is missing.
func (a *socket) output(ctx context.Context, c *dormousev1.OutputChunk) error {
	if c.GetGapBytes() > 0 {
		gap := &dormousev1.OutputChunk{Stream: c.GetStream(), Offset: c.GetOffset(), GapBytes: c.GetGapBytes()}
		if err := a.say(ctx, &dormousev1.AttachProcessResponse{Event: &dormousev1.AttachProcessResponse_Output{Output: gap}}); err != nil {
			return err
		}
	}
	if len(c.GetData()) == 0 {
		return nil
	}
	channel := byte(stdout)
	if c.GetStream() == dormousev1.OutputStream_OUTPUT_STREAM_STDERR {
		channel = stderr
	}
	return a.write(ctx, websocket.MessageBinary, append([]byte{channel}, c.GetData()...))
}

// upward passes on what the client says while the stream is up. Its error ends the connection.
func (a *socket) upward(ctx, up context.Context) error {
	for {
		kind, data, err := a.conn.Read(ctx)
		if err != nil {
			return errGone
		}
		a.signs.Add(1)
		a.busy.Store(true)
		m := &dormousev1.AttachProcessRequest{}
		if kind == websocket.MessageText {
			if err := wire.UnmarshalJSON(data, m); err != nil {
				return err
			}
		} else {
			if len(data) == 0 || data[0] != stdin {
				return errs.New(errs.InvalidField, "channel: a binary message begins with the channel, %d for input", stdin).With("field", "channel")
			}
			m.Event = &dormousev1.AttachProcessRequest_Input{Input: &dormousev1.InputChunk{Data: data[1:]}}
		}
		if err := a.pass(up, m); err != nil {
			return err
		}
		a.busy.Store(false)
	}
}

// pass sends a message up, input when the process is ready for it.
func (a *socket) pass(up context.Context, m *dormousev1.AttachProcessRequest) error {
	select {
	case <-a.opened:
	case <-up.Done():
		return errGone
	}
	switch in := m.GetInput(); {
	case m.GetOpen() != nil:
		return errs.New(errs.InvalidField, "open: it was the first message").With("field", "open")
	case m.Event == nil:
		return errs.New(errs.InvalidField, "a message has one of input, resize and signal").With("field", "input")
	case in != nil && !a.input:
		return errs.New(errs.InvalidField, "open.input: it was not asked to write").With("field", "open.input")
	case in != nil && in.GetOffset() != 0:
		return errs.New(errs.InvalidField, "input.offset: it is counted for you, from opened.input_offset on").With("field", "input.offset")
	case in != nil:
		for !a.closed.Load() && a.next-a.taken.Load()+uint64(len(in.GetData())) > maxAhead {
			select {
			case <-a.acked:
			case <-up.Done():
				return errGone
			}
		}
		in.Offset = a.next
		a.next += uint64(len(in.GetData()))
	}
	if a.stream.Send(m) != nil {
		<-up.Done() // what is received has the reason
		return errGone
	}
	return nil
}

// watch waits for the end of the stream, or for that of a client which answers no ping and gives no other sign of life.
func (a *socket) watch(ctx, up context.Context, every time.Duration) error {
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-up.Done():
			return errGone
		}
		before := a.signs.Load()
		if a.busy.Load() || a.writing.Load() {
			continue
		}
		// Not under up: a write that is given up closes the connection, which still has to say why.
		asking, done := context.WithTimeout(ctx, every)
		err := a.conn.Ping(asking)
		if err != nil && up.Err() == nil {
			select {
			case <-asking.Done():
			case <-up.Done():
			}
			if up.Err() == nil && a.signs.Load() == before && !a.busy.Load() && !a.writing.Load() {
				done()
				_ = a.conn.CloseNow() // there is nobody to take leave of
				return errGone
			}
		}
		done()
	}
}

// farewell says why a connection ends, and ends it: 1000 when the process has, else 4000 and the HTTP code of the envelope.
func (a *socket) farewell(ctx context.Context, err error) {
	if errors.Is(err, errGone) {
		_ = a.conn.CloseNow() // there is nobody to take leave of
		return
	}
	if err == nil {
		_ = a.conn.Close(websocket.StatusNormalClosure, "") // nobody is there to be told
		return
	}
	typed := wire.Answered(ctx, err)
	if envelope, err := wire.MarshalJSON(wire.ErrorToProto(typed)); err == nil {
		text, _ := json.Marshal(map[string]json.RawMessage{"error": envelope}) // it is JSON already
		_ = a.conn.Write(ctx, websocket.MessageText, text)                     // the close has the reason, too
	}
	_ = a.conn.Close(websocket.StatusCode(4000+wire.HTTPCode(typed)), string(typed.Reason)) // nobody is there to be told
}
