package integration

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"

	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/wire"
)

// answer is what REST gave.
type answer struct {
	status int
	body   []byte
	header http.Header
}

// envelope is an error as REST gives it.
type envelope struct {
	Code        string            `json:"code"`
	Reason      string            `json:"reason"`
	Message     string            `json:"message"`
	Retry       string            `json:"retry"`
	Outcome     string            `json:"outcome"`
	RequestID   string            `json:"request_id"`
	OperationID string            `json:"operation_id"`
	Details     map[string]string `json:"details"`
}

func (a answer) envelope(w *world) envelope {
	w.Helper()
	var e envelope
	if err := json.Unmarshal(a.body, &e); err != nil || e.Code == "" || e.Reason == "" || e.Message == "" || e.Retry == "" || e.Outcome == "" || e.RequestID == "" {
		w.Fatalf("%d %s is no envelope (%v)", a.status, a.body, err)
	}
	return e
}

// refusedREST checks an answer as refused does an error.
func (w *world) refusedREST(a answer, reason errs.Reason) envelope {
	w.Helper()
	e := a.envelope(w)
	want := errs.New(reason, "")
	if e.Reason != string(reason) || e.Code != string(want.Code) || e.Outcome != string(want.Outcome) || e.Retry != string(want.Retry) || a.status != wire.HTTPCode(want) {
		w.Fatalf("%d %+v; want %s with %d", a.status, e, reason, wire.HTTPCode(want))
	}
	return e
}

// rest calls the REST API over its socket with a key ("" for none).
func (w *world) rest(key, method, path, body string) answer {
	w.Helper()
	tr := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", w.RESTSocket())
	}}
	defer tr.CloseIdleConnections()
	a, err := w.restOver(tr, "http://dormouse", key, method, path, body)
	w.ok(err)
	return a
}

func (w *world) restOver(tr http.RoundTripper, base, key, method, path, body string) (answer, error) {
	req, err := http.NewRequestWithContext(w.ctx, method, base+path, bytes.NewReader([]byte(body)))
	if err != nil {
		return answer{}, err
	}
	if key != "" {
		req.Header.Set("Authorization", "Bearer "+key)
	}
	resp, err := (&http.Client{Transport: tr}).Do(req)
	if err != nil {
		return answer{}, err
	}
	defer func() { _ = resp.Body.Close() }()
	data, err := io.ReadAll(resp.Body)
	return answer{resp.StatusCode, data, resp.Header}, err
}

// raw is a connection to the public gRPC socket without the SDK: nothing is tried again.
func (w *world) raw(key string) *grpc.ClientConn {
	w.Helper()
	return w.dial("unix://"+w.GRPCSocket(), insecure.NewCredentials(), key)
}

func (w *world) dial(target string, creds credentials.TransportCredentials, key string, opts ...grpc.DialOption) *grpc.ClientConn {
	w.Helper()
	opts = append(append(wire.DialOptions(), opts...), grpc.WithTransportCredentials(creds), grpc.WithDisableServiceConfig())
	if key != "" {
		opts = append(opts, grpc.WithChainUnaryInterceptor(func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, o ...grpc.CallOption) error {
			return invoke(metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+key), method, req, reply, cc, o...)
		}), grpc.WithChainStreamInterceptor(func(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, open grpc.Streamer, o ...grpc.CallOption) (grpc.ClientStream, error) {
			return open(metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+key), desc, cc, method, o...)
		}))
	}
	cc, err := grpc.NewClient(target, opts...)
	w.ok(err)
	w.Cleanup(func() { _ = cc.Close() })
	return cc
}
