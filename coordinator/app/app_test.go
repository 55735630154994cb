package app_test

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"

	"github.com/dormouse-run/dormouse/coordinator/app"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/pki"
	"github.com/dormouse-run/dormouse/pkg/uid"
	nodev1 "github.com/dormouse-run/dormouse/proto/dormouse/node/v1"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

func TestSandboxLife(t *testing.T) {
	r := newRig(t)
	n := r.node("n1")
	ctx := context.Background()
	c := dormousev1.NewSandboxServiceClient(r.conn(r.user))
	list, err := c.ListSandboxes(ctx, &dormousev1.ListSandboxesRequest{})
	if err != nil {
		t.Fatal(err)
	}
	watchCtx, stopWatch := context.WithCancel(ctx)
	defer stopWatch()
	watch, err := c.WatchSandboxes(watchCtx, &dormousev1.WatchSandboxesRequest{AfterSequence: list.GetSequence()})
	if err != nil {
		t.Fatal(err)
	}
	created, err := c.CreateSandbox(ctx, box("one"))
	if err != nil {
		t.Fatal(err)
	}
	u := created.GetSandbox().GetMeta().GetUid()
	if st := created.GetSandbox().GetStatus(); st.GetPhase() != dormousev1.SandboxPhase_SANDBOX_PHASE_RUNNING || st.GetNode() != "n1" || st.GetImageDigest() != "sha256:abc" {
		t.Fatalf("%v", created)
	}
	got, err := c.GetSandbox(ctx, &dormousev1.GetSandboxRequest{Uid: u})
	if err != nil || got.GetSandbox().GetMeta().GetRevision() != created.GetSandbox().GetMeta().GetRevision() {
		t.Fatalf("%v, %v", got, err)
	}
	list, err = c.ListSandboxes(ctx, &dormousev1.ListSandboxesRequest{Name: "one", Phase: dormousev1.SandboxPhase_SANDBOX_PHASE_RUNNING, Node: "n1"})
	if err != nil || len(list.GetSandboxes()) != 1 {
		t.Fatalf("%v, %v", list, err)
	}
	snap, err := c.CheckpointSandbox(ctx, &dormousev1.CheckpointSandboxRequest{Uid: u})
	if err != nil || snap.GetSnapshot().GetStatus().GetPhase() != dormousev1.SnapshotPhase_SNAPSHOT_PHASE_READY {
		t.Fatalf("%v, %v", snap, err)
	}
	if _, err := c.DeleteSandbox(ctx, &dormousev1.DeleteSandboxRequest{Uid: u}); err != nil {
		t.Fatal(err)
	}
	restored, err := c.RestoreSandbox(ctx, &dormousev1.RestoreSandboxRequest{SnapshotUid: snap.GetSnapshot().GetMeta().GetUid(), Name: "one"})
	if err != nil || restored.GetSandbox().GetStatus().GetRestoredFrom() != snap.GetSnapshot().GetMeta().GetUid() || restored.GetSandbox().GetSpec().GetImage() != "registry.test/base:1" {
		t.Fatalf("%v, %v", restored, err)
	}
	fork, err := c.ForkSandbox(ctx, &dormousev1.ForkSandboxRequest{SandboxUid: restored.GetSandbox().GetMeta().GetUid(), Count: 8, NamePrefix: "copy"})
	if err != nil || len(fork.GetSandboxes()) != 8 {
		t.Fatalf("%v, %v", fork, err)
	}
	if len(n.sandboxes) != 9 || len(n.snapshots) != 2 {
		t.Fatalf("the node has %d sandboxes and %d snapshots", len(n.sandboxes), len(n.snapshots))
	}
	for {
		w, err := watch.Recv()
		if err != nil {
			t.Fatal(err)
		}
		if w.GetUid() == u && w.GetDeleted() {
			break
		}
	}
	op, err := dormousev1.NewOperationServiceClient(r.conn(r.user)).GetOperation(ctx, &dormousev1.GetOperationRequest{OperationId: created.GetOperationId()})
	if err != nil || op.GetOperation().GetState() != dormousev1.OperationState_OPERATION_STATE_SUCCEEDED {
		t.Fatalf("%v, %v", op, err)
	}
	events, err := dormousev1.NewEventServiceClient(r.conn(r.user)).ListEvents(ctx, &dormousev1.ListEventsRequest{ObjectUid: u})
	if err != nil || len(events.GetEvents()) != 3 {
		t.Fatalf("%v, %v", events, err)
	}
}

func TestC24C25OverTheWire(t *testing.T) {
	r := newRig(t)
	n := r.node("n1")
	ctx := context.Background()
	c := dormousev1.NewSandboxServiceClient(r.conn(r.user))
	made, err := c.CreateSandbox(ctx, box(""))
	if err != nil {
		t.Fatal(err)
	}
	req := &dormousev1.CheckpointSandboxRequest{OperationId: uid.New(), Uid: made.GetSandbox().GetMeta().GetUid(), Name: "snap"}
	first, err := c.CheckpointSandbox(ctx, req)
	if err != nil {
		t.Fatal(err)
	}
	n.hangUp()
	r.app.Stop()
	r.start() // C24: also after the coordinator was restarted, and with no node there
	c = dormousev1.NewSandboxServiceClient(r.conn(r.user))
	again, err := c.CheckpointSandbox(ctx, req)
	if err != nil || first.String() != again.String() {
		t.Fatalf("first %v\nagain %v, %v", first, again, err)
	}
	req.Name = "other"
	_, err = c.CheckpointSandbox(ctx, req)
	if env := wantEnvelope(t, err, errs.OperationBodyMismatch); env.Code != errs.Conflict || env.Outcome != errs.NotStarted || env.OperationID != req.GetOperationId() || env.RequestID == "" {
		t.Fatalf("%+v", env)
	}
}

func TestTenantsDoNotSeeEachOther(t *testing.T) {
	r := newRig(t)
	r.node("n1")
	ctx := context.Background()
	mine := dormousev1.NewSandboxServiceClient(r.conn(r.user))
	theirs := dormousev1.NewSandboxServiceClient(r.conn(r.other))
	made, err := mine.CreateSandbox(ctx, box("one"))
	if err != nil {
		t.Fatal(err)
	}
	u := made.GetSandbox().GetMeta().GetUid()
	_, err = theirs.GetSandbox(ctx, &dormousev1.GetSandboxRequest{Uid: u})
	seen := wantEnvelope(t, err, errs.ObjectNotFound)
	never := uid.New()
	_, err = theirs.GetSandbox(ctx, &dormousev1.GetSandboxRequest{Uid: never})
	unseen := wantEnvelope(t, err, errs.ObjectNotFound)
	if strings.ReplaceAll(seen.Message, u, never) != unseen.Message || len(seen.Details) != len(unseen.Details) {
		t.Fatalf("%v differs from %v", seen, unseen)
	}
	_, err = theirs.DeleteSandbox(ctx, &dormousev1.DeleteSandboxRequest{Uid: u})
	wantReason(t, err, errs.ObjectNotFound)
	list, err := theirs.ListSandboxes(ctx, &dormousev1.ListSandboxesRequest{})
	if err != nil || len(list.GetSandboxes()) != 0 {
		t.Fatalf("%v, %v", list, err)
	}
	if _, err := theirs.CreateSandbox(ctx, box("one")); err != nil {
		t.Fatalf("the name is free in the other tenant: %v", err)
	}
}

func TestEveryListenerRefusesTheUnauthenticated(t *testing.T) {
	r := newRig(t)
	ctx := context.Background()
	_, err := dormousev1.NewSandboxServiceClient(r.conn("")).ListSandboxes(ctx, &dormousev1.ListSandboxesRequest{})
	wantReason(t, err, errs.CredentialsMissing)
	_, err = dormousev1.NewSandboxServiceClient(r.conn(r.user+"x")).ListSandboxes(ctx, &dormousev1.ListSandboxesRequest{})
	wantReason(t, err, errs.CredentialsInvalid)
	_, err = dormousev1.NewNodeServiceClient(r.conn(r.user)).ListNodes(ctx, &dormousev1.ListNodesRequest{})
	wantReason(t, err, errs.NotAllowed)
	watch, err := dormousev1.NewSandboxServiceClient(r.conn("")).WatchSandboxes(ctx, &dormousev1.WatchSandboxesRequest{})
	if err == nil {
		_, err = watch.Recv()
	}
	wantReason(t, err, errs.CredentialsMissing)
	forged := metadata.AppendToOutgoingContext(ctx, "dormouse-rest-peer", `x.eyJUZW5hbnQiOiJhY21lIn0`)
	_, err = dormousev1.NewSandboxServiceClient(r.conn("")).ListSandboxes(forged, &dormousev1.ListSandboxesRequest{})
	wantReason(t, err, errs.CredentialsMissing)

	// Certificates: a client's is as good as a key, a node's is not for this API, and the other way round.
	client := r.pki.source(t, pki.Identity{Role: pki.RoleClient, Name: "ci", Tenant: "acme"})
	if _, err := dormousev1.NewSandboxServiceClient(r.connTLS(client.Client(pki.RoleCoordinator, ""))).ListSandboxes(ctx, &dormousev1.ListSandboxesRequest{}); err != nil {
		t.Fatal(err)
	}
	node := r.pki.source(t, pki.Identity{Role: pki.RoleNode, Name: "n1"})
	if _, err := dormousev1.NewSandboxServiceClient(r.connTLS(node.Client(pki.RoleCoordinator, ""))).ListSandboxes(ctx, &dormousev1.ListSandboxesRequest{}); err == nil {
		t.Fatal("a node's certificate opened the public API")
	}
	for _, src := range []*pki.Source{client, mustOpen(t, pki.Files{CA: r.cfg.TLS.CA})} {
		cc, err := grpc.NewClient("passthrough:///"+r.app.Addresses("node")[0], grpc.WithTransportCredentials(credentials.NewTLS(src.Client(pki.RoleCoordinator, ""))))
		if err != nil {
			t.Fatal(err)
		}
		stream, err := nodev1.NewSessionServiceClient(cc).Session(ctx)
		if err == nil {
			_, err = stream.Recv()
		}
		if err == nil {
			t.Fatal("the node listener let in what is no node")
		}
		_ = cc.Close()
	}
	liar := newFakeNode(t, r.pki, "n1")
	liar.name = "n2"
	wantReason(t, liar.dial(r.app.Addresses("node")[0], time.Second), errs.NotAllowed)
}

func mustOpen(t *testing.T, f pki.Files) *pki.Source {
	t.Helper()
	s, err := pki.Open(f, nil)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestStrictAtTheDoor(t *testing.T) {
	r := newRig(t)
	r.node("n1")
	ctx := context.Background()
	c := dormousev1.NewSandboxServiceClient(r.conn(r.user))
	for range 3 {
		if _, err := c.CreateSandbox(ctx, box("")); err != nil {
			t.Fatal(err)
		}
	}
	page, err := c.ListSandboxes(ctx, &dormousev1.ListSandboxesRequest{PageSize: 2})
	if err != nil || len(page.GetSandboxes()) != 2 || page.GetNextPageToken() == "" {
		t.Fatalf("%v, %v", page, err)
	}
	rest, err := c.ListSandboxes(ctx, &dormousev1.ListSandboxesRequest{PageSize: 2, PageToken: page.GetNextPageToken()})
	if err != nil || len(rest.GetSandboxes()) != 1 || rest.GetNextPageToken() != "" {
		t.Fatalf("%v, %v", rest, err)
	}
	for name, req := range map[string]*dormousev1.ListSandboxesRequest{
		"page size":           {PageSize: 501},
		"negative page size":  {PageSize: -1},
		"unknown token":       {PageToken: "abc"},
		"token of other list": {PageToken: page.GetNextPageToken(), Name: "x"},
		"unknown phase":       {Phase: 99},
		"label":               {Labels: []string{"novalue"}},
		"node":                {Node: "a b"},
	} {
		if _, err := c.ListSandboxes(ctx, req); errs.From(err) == nil || errs.From(err).Code != errs.InvalidArgument {
			t.Errorf("%s: %v", name, err)
		}
	}
	for name, want := range map[string]struct {
		spec   *dormousev1.SandboxSpec
		reason errs.Reason
	}{
		"no image":      {&dormousev1.SandboxSpec{}, errs.InvalidField},
		"below floor":   {&dormousev1.SandboxSpec{Image: "x", Resources: &dormousev1.Resources{MemoryLimitBytes: 1}}, errs.BelowFloor},
		"above all":     {&dormousev1.SandboxSpec{Image: "x", Resources: &dormousev1.Resources{MemoryRequestBytes: 1 << 50}}, errs.AboveEveryNode},
		"egress alone":  {&dormousev1.SandboxSpec{Image: "x", Egress: &dormousev1.EgressPolicy{}}, errs.InvalidField},
		"volume absent": {&dormousev1.SandboxSpec{Image: "x", Volumes: []*dormousev1.VolumeMount{{VolumeUid: uid.New(), Path: "/d"}}}, errs.ObjectNotFound},
		"unsafe path":   {&dormousev1.SandboxSpec{Image: "x", Volumes: []*dormousev1.VolumeMount{{VolumeUid: uid.New(), Path: "/d/../e"}}}, errs.UnsafePath},
	} {
		_, err := c.CreateSandbox(ctx, &dormousev1.CreateSandboxRequest{Spec: want.spec})
		if !errs.Has(err, want.reason) {
			t.Errorf("%s: %v, want %s", name, err, want.reason)
		}
	}
	_, err = c.CreateSandbox(ctx, &dormousev1.CreateSandboxRequest{Name: "gone", Spec: &dormousev1.SandboxSpec{Image: "registry.test/missing:1"}})
	wantReason(t, err, errs.ImageNotFound)
	if _, err := c.CreateSandbox(ctx, box("gone")); err != nil {
		t.Fatalf("a sandbox that never ran keeps its name: %v", err)
	}
}

func TestProcessesPassThrough(t *testing.T) {
	r := newRig(t)
	r.node("n1")
	ctx := context.Background()
	made, err := dormousev1.NewSandboxServiceClient(r.conn(r.user)).CreateSandbox(ctx, box(""))
	if err != nil {
		t.Fatal(err)
	}
	u := made.GetSandbox().GetMeta().GetUid()
	run := func(key string, argv ...string) (out string, code int32, err error) {
		s, err := dormousev1.NewProcessServiceClient(r.conn(key)).RunProcess(ctx, &dormousev1.RunProcessRequest{SandboxUid: u, Spec: &dormousev1.ProcessSpec{Argv: argv}})
		for err == nil {
			var msg *dormousev1.RunProcessResponse
			if msg, err = s.Recv(); err == nil {
				out += string(msg.GetOutput().GetData())
				if e := msg.GetExit(); e != nil {
					code = e.GetCode()
				}
			}
		}
		if errors.Is(err, io.EOF) {
			err = nil
		}
		return out, code, err
	}
	if out, code, err := run(r.user, "hello"); err != nil || out != "hello" || code != 3 {
		t.Fatalf("%q, %d, %v", out, code, err)
	}
	_, _, err = run(r.user)
	wantReason(t, err, errs.CommandNotFound)
	_, _, err = run(r.other, "hello")
	wantReason(t, err, errs.ObjectNotFound)
}

func TestREST(t *testing.T) {
	r := newRig(t)
	r.node("n1")
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: mustOpen(t, pki.Files{CA: r.cfg.TLS.CA}).Client(pki.RoleCoordinator, "")}}
	defer client.CloseIdleConnections()
	do := func(method, path, key, body string) (int, map[string]any, http.Header) {
		t.Helper()
		req, err := http.NewRequest(method, "https://"+r.app.Addresses("rest")[0]+path, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		if key != "" {
			req.Header.Set("Authorization", "Bearer "+key)
		}
		req.Header.Set("X-Request-Id", "request-0001")
		resp, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		var out map[string]any
		if err := json.NewDecoder(resp.Body).Decode(&out); err != nil {
			t.Fatal(err)
		}
		return resp.StatusCode, out, resp.Header
	}
	code, body, header := do("POST", "/v1/sandboxes", r.user, `{"name": "one", "spec": {"image": "registry.test/base:1"}}`)
	if code != 200 || header.Get("X-Request-Id") != "request-0001" {
		t.Fatalf("%d %v", code, body)
	}
	for name, c := range map[string]struct {
		method, path, key, body string
		code                    int
		reason                  string
	}{
		"no key":        {"GET", "/v1/sandboxes", "", "", 401, "CREDENTIALS_MISSING"},
		"unknown field": {"POST", "/v1/sandboxes", r.user, `{"nam": "x"}`, 400, "UNKNOWN_FIELD"},
		"name taken":    {"POST", "/v1/sandboxes", r.user, `{"name": "one", "spec": {"image": "registry.test/base:1"}}`, 409, "NAME_TAKEN"},
		"absent":        {"GET", "/v1/sandboxes/" + uid.New(), r.user, "", 404, "OBJECT_NOT_FOUND"},
		"operator only": {"GET", "/v1/nodes", r.user, "", 403, "NOT_ALLOWED"},
	} {
		code, body, _ := do(c.method, c.path, c.key, c.body)
		if code != c.code || body["reason"] != c.reason || body["request_id"] != "request-0001" && body["requestId"] != "request-0001" {
			t.Errorf("%s: %d %v", name, code, body)
		}
	}
	cert := &http.Client{Transport: &http.Transport{TLSClientConfig: r.pki.source(t, pki.Identity{Role: pki.RoleClient, Name: "ci", Tenant: "acme"}).Client(pki.RoleCoordinator, "")}}
	defer cert.CloseIdleConnections()
	other := client
	client = cert
	if code, body, _ := do("GET", "/v1/sandboxes", "", ""); code != 200 || len(body["sandboxes"].([]any)) != 1 {
		t.Fatalf("with a certificate: %d %v", code, body)
	}
	client = other
	if code, body, _ := do("GET", "/openapi.json", "", ""); code != 200 || body["swagger"] == nil {
		t.Fatalf("%d %v", code, body)
	}
	if code, body, _ := do("GET", "/v1/nodes", r.root, ""); code != 200 || len(body["nodes"].([]any)) != 1 {
		t.Fatalf("%d %v", code, body)
	}
}

// startStandby starts a second coordinator on the same catalog.
func startStandby(t *testing.T, r *rig, cfg app.Config) *app.App {
	t.Helper()
	b, err := app.Start(context.Background(), cfg, app.WithStore(r.store), app.WithLog(io.Discard))
	if err != nil {
		t.Fatal(err)
	}
	return b // the rig stops it
}
