package wire

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"

	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/obs"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// failing answers every call with the error that the test set.
type failing struct {
	dormousev1.UnimplementedSandboxServiceServer
	err   error
	panic any
	seen  string
}

func (f *failing) GetSandbox(ctx context.Context, _ *dormousev1.GetSandboxRequest) (*dormousev1.GetSandboxResponse, error) {
	f.seen = obs.RequestID(ctx)
	if f.panic != nil {
		panic(f.panic)
	}
	return &dormousev1.GetSandboxResponse{}, f.err
}

func (f *failing) CreateSandbox(context.Context, *dormousev1.CreateSandboxRequest) (*dormousev1.CreateSandboxResponse, error) {
	return &dormousev1.CreateSandboxResponse{}, f.err
}

func (f *failing) ListSandboxes(context.Context, *dormousev1.ListSandboxesRequest) (*dormousev1.ListSandboxesResponse, error) {
	return &dormousev1.ListSandboxesResponse{Sequence: 7}, f.err
}

func (f *failing) WatchSandboxes(req *dormousev1.WatchSandboxesRequest, s grpc.ServerStreamingServer[dormousev1.WatchSandboxesResponse]) error {
	if f.panic != nil {
		panic(f.panic)
	}
	for range req.GetAfterSequence() {
		if err := s.Send(&dormousev1.WatchSandboxesResponse{Uid: "u"}); err != nil {
			return err
		}
	}
	return f.err
}

type bench struct {
	svc    *failing
	client dormousev1.SandboxServiceClient // with the interceptors
	raw    *grpc.ClientConn                // without
	rest   string
	reg    *prometheus.Registry
}

func newBench(t *testing.T) *bench {
	t.Helper()
	b := &bench{svc: &failing{}, reg: prometheus.NewRegistry()}
	server, err := NewServer(obs.Discard(), b.reg)
	if err != nil {
		t.Fatal(err)
	}
	gs := grpc.NewServer(server.Options()...)
	dormousev1.RegisterSandboxServiceServer(gs, b.svc)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- gs.Serve(l) }()
	dial := func(opts ...grpc.DialOption) *grpc.ClientConn {
		cc, err := grpc.NewClient(l.Addr().String(), append(opts, grpc.WithTransportCredentials(insecure.NewCredentials()))...)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { cc.Close() })
		return cc
	}
	b.client, b.raw = dormousev1.NewSandboxServiceClient(dial(DialOptions()...)), dial()
	mux := NewGateway()
	if err := dormousev1.RegisterSandboxServiceHandler(t.Context(), mux, b.raw); err != nil {
		t.Fatal(err)
	}
	hs := httptest.NewServer(RESTHandler(mux))
	b.rest = hs.URL
	t.Cleanup(func() {
		hs.Close()
		gs.Stop()
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
	return b
}

// get does one REST request and gives the code, the envelope, and the id in the header.
func (b *bench) do(t *testing.T, method, path, body string, header ...string) (int, *errs.Error, http.Header, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, b.rest+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	p := &dormousev1.Error{}
	if resp.StatusCode != http.StatusOK {
		if err := protojson.Unmarshal(data, p); err != nil {
			t.Fatalf("%s %s: the body is no envelope: %s", method, path, data)
		}
	}
	return resp.StatusCode, ErrorFromProto(p), resp.Header, string(data)
}

var same = cmp.Options{cmpopts.IgnoreUnexported(errs.Error{}), cmpopts.EquateEmpty()}

// The architecture's table, by reason for CONFLICT.
func wantCodes(e *errs.Error) (codes.Code, int) {
	table := map[errs.Code]struct {
		g codes.Code
		h int
	}{
		errs.InvalidArgument: {codes.InvalidArgument, 400}, errs.Unauthenticated: {codes.Unauthenticated, 401},
		errs.PermissionDenied: {codes.PermissionDenied, 403}, errs.NotFound: {codes.NotFound, 404},
		errs.Conflict: {codes.FailedPrecondition, 409}, errs.ResourceExhausted: {codes.ResourceExhausted, 429},
		errs.Unavailable: {codes.Unavailable, 503}, errs.DeadlineExceeded: {codes.DeadlineExceeded, 504},
		errs.Cancelled: {codes.Canceled, 499}, errs.OutcomeUnknown: {codes.Unavailable, 503},
		errs.DataLoss: {codes.DataLoss, 500}, errs.Unsupported: {codes.Unimplemented, 501}, errs.Internal: {codes.Internal, 500},
	}
	w := table[e.Code]
	switch e.Reason {
	case errs.StaleRevision, errs.AttemptVoid:
		w.g = codes.Aborted
	case errs.NameTaken, errs.OperationBodyMismatch:
		w.g = codes.AlreadyExists
	}
	return w.g, w.h
}

func TestEveryReasonRoundTripsThroughGRPCAndREST(t *testing.T) {
	b := newBench(t)
	for _, reason := range errs.Reasons() {
		t.Run(string(reason), func(t *testing.T) {
			want := errs.New(reason, "what is wrong with %s, and what to do", reason).
				With("uid", "0190").With("limit", "7").WithRequest("request-0001", "operation-0001")
			b.svc.err = fmt.Errorf("while doing something: %w", want)
			wantGRPC, wantHTTP := wantCodes(want)

			_, err := b.client.GetSandbox(t.Context(), &dormousev1.GetSandboxRequest{Uid: "x"})
			var got *errs.Error
			if !errors.As(err, &got) {
				t.Fatalf("the client's error is %T", err)
			}
			if d := cmp.Diff(want, got, same); d != "" {
				t.Errorf("over gRPC (-want +got):\n%s", d)
			}
			_, err = dormousev1.NewSandboxServiceClient(b.raw).GetSandbox(t.Context(), &dormousev1.GetSandboxRequest{Uid: "x"})
			if status.Code(err) != wantGRPC {
				t.Errorf("gRPC code %s, want %s", status.Code(err), wantGRPC)
			}

			stream, err := b.client.WatchSandboxes(t.Context(), &dormousev1.WatchSandboxesRequest{})
			if err == nil {
				_, err = stream.Recv()
			}
			if !errors.As(err, &got) || cmp.Diff(want, got, same) != "" {
				t.Errorf("over a stream: %v", cmp.Diff(want, got, same))
			}

			code, viaREST, header, body := b.do(t, "GET", "/v1/sandboxes/x", "", headerRequestID, "request-0001")
			if code != wantHTTP || header.Get(headerRequestID) != "request-0001" || header.Get("Content-Type") != "application/json" {
				t.Errorf("HTTP code %d, want %d; headers %v", code, wantHTTP, header)
			}
			if d := cmp.Diff(want, viaREST, same); d != "" {
				t.Errorf("over REST (-want +got):\n%s\n%s", d, body)
			}
			restStream(t, b, want, wantHTTP)
		})
	}
}

// restStream checks a stream that fails before its first message, which is answered as any other call, and
// one that fails after two, whose last line has the error.
func restStream(t *testing.T, b *bench, want *errs.Error, wantHTTP int) {
	t.Helper()
	for sent, url := range map[int]string{0: "/v1/sandboxes:watch", 2: "/v1/sandboxes:watch?after_sequence=2"} {
		resp, err := http.Get(b.rest + url)
		if err != nil {
			t.Fatal(err)
		}
		data, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if err != nil {
			t.Fatal(err)
		}
		lines := strings.Split(strings.TrimSpace(string(data)), "\n")
		if len(lines) != sent+1 {
			t.Fatalf("%d lines, want %d: %s", len(lines), sent+1, data)
		}
		if sent == 0 && resp.StatusCode != wantHTTP {
			t.Errorf("stream: HTTP code %d, want %d", resp.StatusCode, wantHTTP)
		}
		last := struct{ Error json.RawMessage }{json.RawMessage(lines[sent])}
		p := &dormousev1.Error{}
		if sent > 0 {
			last.Error = nil
			err = json.Unmarshal([]byte(lines[sent]), &last)
		}
		if err != nil || protojson.Unmarshal(last.Error, p) != nil {
			t.Fatalf("the last line is no envelope: %s", lines[sent])
		}
		if d := cmp.Diff(want, ErrorFromProto(p), same); d != "" {
			t.Errorf("stream over REST (-want +got):\n%s", d)
		}
	}
}

func TestForeignAndDomainErrors(t *testing.T) {
	b := newBench(t)
	for name, c := range map[string]struct {
		err    error
		reason errs.Reason
		inText string
	}{
		"foreign text stays in the log": {errors.New("password=hunter2"), errs.InternalError, "internal error"},
		"deadline":                      {context.DeadlineExceeded, errs.DeadlineExpired, "deadline"},
		"cancelled":                     {fmt.Errorf("x: %w", context.Canceled), errs.CallCancelled, "cancelled"},
		"problem":                       {sandbox.Spec{}.Validate(), errs.InvalidField, "spec.image"},
		"transition":                    {sandbox.Move(sandbox.Stopped, sandbox.Running), errs.WrongPhase, "Stopped"},
		"a status that is passed on":    {ToStatus(errs.New(errs.NoLeader, "ask later"), "r", "o").Err(), errs.NoLeader, "ask later"},
		"a status without an envelope":  {status.Error(codes.Unavailable, "connection refused"), errs.ReplyLost, "connection refused"},
		"invalid UTF-8":                 {errs.New(errs.InvalidField, "bad \xff byte").With("field", "\xfe"), errs.InvalidField, "bad ? byte"},
		"too long":                      {errs.New(errs.InvalidField, "%s", strings.Repeat("x", 1<<20)), errs.InvalidField, "xxx..."},
	} {
		t.Run(name, func(t *testing.T) {
			b.svc.err = c.err
			_, err := b.client.GetSandbox(t.Context(), &dormousev1.GetSandboxRequest{})
			e := errs.From(err)
			if e.Reason != c.reason || !strings.Contains(e.Message, c.inText) || strings.Contains(e.Message, "hunter2") {
				t.Errorf("got %v", e)
			}
			if e.RequestID == "" {
				t.Error("no request id")
			}
		})
	}
}

func TestTransportErrorIsUnknown(t *testing.T) {
	cc, err := grpc.NewClient("unix:"+t.TempDir()+"/nobody", append(DialOptions(), grpc.WithTransportCredentials(insecure.NewCredentials()))...)
	if err != nil {
		t.Fatal(err)
	}
	defer cc.Close()
	_, err = dormousev1.NewSandboxServiceClient(cc).GetSandbox(t.Context(), &dormousev1.GetSandboxRequest{})
	e := errs.From(err)
	if e.Code != errs.OutcomeUnknown || e.Outcome != errs.Unknown || e.Retry != errs.SameOperation {
		t.Errorf("got %+v", e)
	}
	if !strings.HasPrefix(e.Message, "the server cannot be reached (dial unix ") || strings.Contains(e.Message, `"`) {
		t.Errorf("what was dialled is not said plainly: %s", e.Message)
	}
}

func TestNoAnswer(t *testing.T) {
	for said, want := range map[string]string{
		`connection error: desc = "transport: Error while dialing: dial tcp 10.0.0.1:1: connect: connection refused"`:          "the server cannot be reached (dial tcp 10.0.0.1:1: connect: connection refused)",
		`connection error: desc = "transport: authentication handshake failed: x509: certificate signed by unknown authority"`: "the server was not trusted, or did not trust the caller (x509: certificate signed by unknown authority); check the address and the CA",
		`unexpected HTTP status code received from server: 404 (Not Found); transport: received unexpected content-type "a"`:   "what answers there does not speak gRPC; check the address and the port",
		"error reading from server: EOF": "no answer from the server (error reading from server: EOF)",
	} {
		if got := noAnswer(said); got != want {
			t.Errorf("%s: %s", said, got)
		}
	}
}

func TestPanicsAreInternalAndCounted(t *testing.T) {
	b := newBench(t)
	b.svc.panic = "secret in a panic"
	_, err := b.client.GetSandbox(t.Context(), &dormousev1.GetSandboxRequest{})
	if e := errs.From(err); e.Reason != errs.InternalError || strings.Contains(e.Message, "secret") {
		t.Errorf("got %v", err)
	}
	s, err := b.client.WatchSandboxes(t.Context(), &dormousev1.WatchSandboxesRequest{})
	if err == nil {
		_, err = s.Recv()
	}
	if !errs.Has(err, errs.InternalError) {
		t.Errorf("stream: got %v", err)
	}
	if n := testutil.CollectAndCount(b.reg, "dormouse_rpc_total"); n != 2 {
		t.Errorf("%d series, want 2", n)
	}
}

func TestRequestIDs(t *testing.T) {
	b := newBench(t)
	ctx := obs.WithRequestID(t.Context(), "caller.chose-1")
	if _, err := b.client.GetSandbox(ctx, &dormousev1.GetSandboxRequest{}); err != nil || b.svc.seen != "caller.chose-1" {
		t.Errorf("saw %q, err %v", b.svc.seen, err)
	}
	for _, bad := range []string{"short", "has space inside", "line\\nbreak-------", strings.Repeat("x", 65)} {
		ctx := metadata.AppendToOutgoingContext(t.Context(), RequestIDKey, bad)
		if _, err := dormousev1.NewSandboxServiceClient(b.raw).GetSandbox(ctx, &dormousev1.GetSandboxRequest{}); err != nil {
			t.Fatal(err)
		}
		if b.svc.seen == bad || !obs.ValidRequestID(b.svc.seen) {
			t.Errorf("%q was taken as %q", bad, b.svc.seen)
		}
	}
}

func TestUnknownMethodsDoNotGrowMetrics(t *testing.T) {
	b := newBench(t)
	for i := range 5 {
		err := b.raw.Invoke(t.Context(), fmt.Sprintf("/no.Such/Method%d", i), &dormousev1.GetSandboxRequest{}, &dormousev1.GetSandboxResponse{})
		if e := FromStatus(err); e.Reason != errs.NotSupported || e.Outcome != errs.NotStarted {
			t.Errorf("got %v", e)
		}
	}
	if n := testutil.CollectAndCount(b.reg, "dormouse_rpc_total"); n != 1 {
		t.Errorf("%d series, want 1", n)
	}
}

func TestRESTIsStrict(t *testing.T) {
	b := newBench(t)
	for name, c := range map[string]struct {
		method, path, body string
		code               int
		reason             errs.Reason
		field              string
	}{
		"unknown field":        {"POST", "/v1/sandboxes", `{"spec":{"image":"a","volumes":[{},{"pth":"/x"}]}}`, 400, errs.UnknownField, "spec.volumes[1].pth"},
		"unknown top field":    {"POST", "/v1/sandboxes", `{"nme":"a"}`, 400, errs.UnknownField, "nme"},
		"given twice":          {"POST", "/v1/sandboxes", `{"operation_id":"a","operationId":"b"}`, 400, errs.InvalidField, "operationId"},
		"wrong type":           {"POST", "/v1/sandboxes", `{"spec":{"image":7}}`, 400, errs.InvalidField, ""},
		"not JSON":             {"POST", "/v1/sandboxes", `{"spec":`, 400, errs.InvalidField, "spec"},
		"more after it":        {"POST", "/v1/sandboxes", `{}{}`, 400, errs.InvalidField, ""},
		"unknown enum":         {"POST", "/v1/sandboxes", `{"spec":{"network":"NETWORK_MODE_MAGIC"}}`, 400, errs.InvalidField, ""},
		"too large":            {"POST", "/v1/sandboxes", `{"name":"` + strings.Repeat("x", MaxRESTBody) + `"}`, 400, errs.LimitExceeded, "body"},
		"unknown query":        {"GET", "/v1/sandboxes?page_siz=3", "", 400, errs.UnknownField, "page_siz"},
		"unknown nested query": {"GET", "/v1/sandboxes?node.x=3", "", 400, errs.UnknownField, "node.x"},
		"bad query value":      {"GET", "/v1/sandboxes?page_size=many", "", 400, errs.InvalidField, ""},
		"no such path":         {"GET", "/v2/sandboxes", "", 404, errs.ObjectNotFound, ""},
		"no such method":       {"PATCH", "/v1/sandboxes", "", 501, errs.NotSupported, ""},
	} {
		t.Run(name, func(t *testing.T) {
			code, e, header, body := b.do(t, c.method, c.path, c.body)
			if code != c.code || e.Reason != c.reason || e.Details["field"] != c.field {
				t.Errorf("got %d %s", code, body)
			}
			if e.RequestID == "" || e.RequestID != header.Get(headerRequestID) || e.Outcome != errs.NotStarted && code != 404 || e.Retry != errs.Never {
				t.Errorf("envelope %s, header %v", body, header)
			}
		})
	}
	code, _, _, body := b.do(t, "GET", "/v1/sandboxes?page_size=3&labels=a%3Db", "")
	if code != 200 || body != `{"sequence":"7"}` {
		t.Errorf("a good request: %d %s", code, body)
	}
}

func FuzzUnmarshalJSON(f *testing.F) {
	f.Add([]byte(`{"name":"a","spec":{"image":"b","env":{"A":"1"},"volumes":[{"path":"/x"}],"resources":null}}`))
	f.Add([]byte(`{"spec":[]}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		strict, lax := &dormousev1.CreateSandboxRequest{}, &dormousev1.CreateSandboxRequest{}
		if err := UnmarshalJSON(data, strict); err == nil {
			if err := protojson.Unmarshal(data, lax); err != nil {
				t.Errorf("accepted what protojson refuses: %v", err)
			}
		} else if e := errs.From(err); e.Code != errs.InvalidArgument {
			t.Errorf("refused with %v", e)
		}
	})
}
