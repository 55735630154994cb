package api_test

import (
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	"github.com/dormouse-run/dormouse/coordinator/internal/api"
	"github.com/dormouse-run/dormouse/coordinator/internal/auth"
	"github.com/dormouse-run/dormouse/coordinator/internal/nodeclient"
	"github.com/dormouse-run/dormouse/coordinator/internal/operations"
	"github.com/dormouse-run/dormouse/coordinator/internal/placement"
	"github.com/dormouse-run/dormouse/coordinator/internal/publish"
	"github.com/dormouse-run/dormouse/coordinator/internal/records"
	"github.com/dormouse-run/dormouse/coordinator/internal/repair"
	"github.com/dormouse-run/dormouse/coordinator/internal/rest"
	"github.com/dormouse-run/dormouse/coordinator/internal/sessions"
	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/catalog/memory"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/fence"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
	"github.com/dormouse-run/dormouse/pkg/snapshot"
	"github.com/dormouse-run/dormouse/pkg/wire"
	nodev1 "github.com/dormouse-run/dormouse/proto/dormouse/node/v1"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// lifetime is how many requests one world answers before the next begins with an empty catalog.
const lifetime = 2000

// world is the public API on a memory store, with an engine and a node that does everything at once.
type world struct {
	methods  []method
	handler  http.Handler
	answered int
	close    func()
}

// method is one of the API's, with how to call it.
type method struct {
	name   string
	input  protoreflect.MessageType
	impl   any
	unary  *grpc.MethodDesc
	stream *grpc.StreamDesc
}

// registrar collects what a server would serve.
type registrar struct{ methods []method }

func (r *registrar) RegisterService(sd *grpc.ServiceDesc, impl any) {
	d, err := protoregistry.GlobalFiles.FindDescriptorByName(protoreflect.FullName(sd.ServiceName))
	if err != nil {
		panic(err)
	}
	input := func(name string) protoreflect.MessageType {
		in := d.(protoreflect.ServiceDescriptor).Methods().ByName(protoreflect.Name(name)).Input()
		t, err := protoregistry.GlobalTypes.FindMessageByName(in.FullName())
		if err != nil {
			panic(err)
		}
		return t
	}
	for i := range sd.Methods {
		r.methods = append(r.methods, method{name: sd.Methods[i].MethodName, input: input(sd.Methods[i].MethodName), impl: impl, unary: &sd.Methods[i]})
	}
	for i := range sd.Streams {
		r.methods = append(r.methods, method{name: sd.Streams[i].StreamName, input: input(sd.Streams[i].StreamName), impl: impl, stream: &sd.Streams[i]})
	}
}

func (*willing) Status(context.Context) (api.CatalogStatus, error) { return api.CatalogStatus{}, nil }

func (*willing) Verify(_ context.Context, found func(repair.Finding) error) (int, error) {
	return 1, found(repair.Finding{Difference: repair.Lost})
}

func (*willing) Repair(context.Context, bool, []string) ([]repair.Finding, error) { return nil, nil }

func (*willing) Compact(context.Context) (int, bool, error) { return 0, false, nil }

func (*willing) DropOrphan(context.Context, string, string, bool) (catalog.Key, bool, error) {
	return catalog.Key{}, true, nil
}

func (*willing) AdoptOrphan(context.Context, string, string) (catalog.Key, string, error) {
	return catalog.Key{}, "", nil
}

func (*willing) Backup(_ context.Context, begin func(*dormousev1.CatalogBackupHeader) error, emit func(*dormousev1.CatalogBackupEntry) error) (*dormousev1.CatalogBackupEnd, error) {
	if err := begin(&dormousev1.CatalogBackupHeader{}); err != nil {
		return nil, err
	}
	return &dormousev1.CatalogBackupEnd{Entries: 1}, emit(&dormousev1.CatalogBackupEntry{Record: &dormousev1.CatalogRecord{Uid: "u"}})
}

func (*willing) BeginRestore(context.Context, catalog.Restore, fence.Epoch) error { return nil }

func (*willing) RestoreRecords(context.Context, string, []catalog.Record) ([]int, error) {
	return []int{0}, nil
}

func (*willing) EndRestore(context.Context, string, int64, string) error { return nil }

func newWorld() *world {
	ctx, cancel := context.WithCancel(context.Background())
	fail := func(err error) {
		if err != nil {
			panic(err)
		}
	}
	store := memory.New(memory.Options{})
	lease, _, err := store.Lead(ctx, catalog.Claim{Holder: "fuzz", TTL: time.Hour})
	fail(err)
	session, err := store.OpenSession(ctx, lease.Epoch, "n1", 0)
	fail(err)
	queue := publish.New(publish.Options{Store: store})
	queue.Start()
	node := &willing{session: session}
	engine, err := operations.Start(ctx, operations.Config{Catalog: store, Queue: queue, Agents: node, Nodes: node, Epoch: lease.Epoch,
		PlacementWait: time.Millisecond, RetryMin: time.Millisecond, RetryMax: 2 * time.Millisecond})
	fail(err)
	server := api.New(api.Config{Store: store, Nodes: node, Agents: node, Streams: node, Catalog: node, Engine: func() (*operations.Engine, error) { return engine, nil }})
	var following sync.WaitGroup
	following.Go(func() { server.Run(ctx) })
	r := &registrar{}
	server.Register(r)

	bridge, err := rest.NewBridge()
	fail(err)
	around, err := wire.NewServer(slog.New(slog.DiscardHandler), nil)
	fail(err)
	who := func(context.Context) (auth.Identity, error) { return caller, nil }
	inner := grpc.NewServer(append(around.Options(), grpc.ChainUnaryInterceptor(auth.Unary(who)), grpc.ChainStreamInterceptor(auth.Stream(who)), grpc.MaxRecvMsgSize(api.MaxMessage))...)
	server.Register(inner)
	following.Go(func() { _ = inner.Serve(bridge.Listener()) }) // ends with Stop
	handler, err := bridge.Handler(ctx, rest.Options{PortIdle: time.Minute})
	fail(err)
	return &world{methods: r.methods, handler: handler, close: func() {
		engine.Stop(errors.New("the world ends"))
		inner.Stop()
		_ = bridge.Close()
		cancel()
		following.Wait()
		queue.Close(context.Background())
		_ = store.Close()
	}}
}

var caller = auth.Identity{Tenant: "acme", Subject: "fuzz", Roles: []auth.Role{auth.RoleUser, auth.RoleOperator}}

// worlds gives the world in force.
type worlds struct{ now *world }

func (w *worlds) get() *world {
	if w.now != nil && w.now.answered >= lifetime {
		w.end()
	}
	if w.now == nil {
		w.now = newWorld()
	}
	w.now.answered++
	return w.now
}

func (w *worlds) end() {
	if w.now != nil {
		w.now.close()
		w.now = nil
	}
}

const someUID = "01890a5d-ac96-774b-bcce-b302099a8057"

// FuzzRequests: every public method gets any bytes as its request, through its handler.
func FuzzRequests(f *testing.F) {
	ws := &worlds{}
	f.Cleanup(ws.end)
	for i, m := range ws.get().methods {
		for depth := range 3 {
			msg := m.input.New()
			if depth > 0 {
				fill(msg, depth)
			}
			data, err := proto.Marshal(msg.Interface())
			if err != nil {
				f.Fatal(err)
			}
			f.Add(uint8(i), data)
		}
	}
	f.Fuzz(func(t *testing.T, which uint8, data []byte) {
		w := ws.get()
		m := w.methods[int(which)%len(w.methods)]
		ctx, cancel := context.WithTimeout(auth.With(context.Background(), caller), time.Minute)
		defer cancel()
		err := m.call(ctx, cancel, data)
		if err == nil || errors.Is(err, errBadBytes) {
			return
		}
		e := wire.Envelope(err)
		if e.Code == errs.Internal && e.Reason == errs.InternalError || e.Reason == errs.DeadlineExpired {
			t.Fatalf("%s: %v", m.name, err)
		}
	})
}

var errBadBytes = errors.New("not a message")

func (m method) call(ctx context.Context, cancel func(), data []byte) error {
	decode := func(into any) error {
		if proto.Unmarshal(data, into.(proto.Message)) != nil {
			return errBadBytes
		}
		return nil
	}
	if m.unary != nil {
		_, err := m.unary.Handler(m.impl, ctx, decode, nil)
		return err
	}
	// A watch or a pull goes on as long as its caller: this one leaves at once.
	gone, leave := context.WithCancel(ctx)
	leave()
	err := m.stream.Handler(m.impl, &callerGone{ctx: gone, decode: decode})
	if errors.Is(err, context.Canceled) || errs.Has(err, errs.CallCancelled) {
		return nil
	}
	cancel()
	return err
}

// callerGone is a stream whose caller sent its request and left.
type callerGone struct {
	grpc.ServerStream
	ctx    context.Context //nolint:containedctx // the interface of gRPC asks for it
	decode func(any) error
}

func (s *callerGone) Context() context.Context     { return s.ctx }
func (s *callerGone) RecvMsg(m any) error          { return s.decode(m) }
func (s *callerGone) SendMsg(any) error            { return s.ctx.Err() }
func (s *callerGone) SetHeader(metadata.MD) error  { return nil }
func (s *callerGone) SendHeader(metadata.MD) error { return nil }
func (s *callerGone) SetTrailer(metadata.MD)       {}

// fill gives every field a value that may be good.
func fill(m protoreflect.Message, depth int) {
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		fd := fields.Get(i)
		if fd.IsMap() || fd.Kind() == protoreflect.MessageKind && depth == 0 {
			continue
		}
		var v protoreflect.Value
		switch fd.Kind() {
		case protoreflect.StringKind:
			v = protoreflect.ValueOfString(text(string(fd.Name())))
		case protoreflect.BytesKind:
			v = protoreflect.ValueOfBytes([]byte("x"))
		case protoreflect.BoolKind:
			v = protoreflect.ValueOfBool(true)
		case protoreflect.Int32Kind:
			v = protoreflect.ValueOfInt32(2)
		case protoreflect.Int64Kind:
			v = protoreflect.ValueOfInt64(1 << 28)
		case protoreflect.Uint64Kind:
			v = protoreflect.ValueOfUint64(3)
		case protoreflect.EnumKind:
			v = protoreflect.ValueOfEnum(1)
		case protoreflect.MessageKind:
			sub := m.NewField(fd)
			if fd.IsList() {
				sub = sub.List().NewElement()
			}
			fill(sub.Message(), depth-1)
			v = sub
		default:
			continue
		}
		if fd.IsList() {
			m.Mutable(fd).List().Append(v)
		} else {
			m.Set(fd, v)
		}
	}
}

func text(field string) string {
	switch {
	case strings.Contains(field, "uid") || field == "operation_id":
		return someUID
	case strings.Contains(field, "path") || strings.Contains(field, "dir"):
		return "/data"
	case field == "image" || field == "reference":
		return "registry.example/app@sha256:" + strings.Repeat("a", 64)
	case field == "page_token":
		return base64.RawURLEncoding.EncodeToString([]byte(`{"v":1,"f":"","a":"x"}`))
	case field == "labels":
		return "a=b"
	case field == "node" || field == "name":
		return "n1"
	case field == "user":
		return "1000"
	}
	return ""
}

// FuzzREST: any path, query and body.
func FuzzREST(f *testing.F) {
	ws := &worlds{}
	f.Cleanup(ws.end)
	for _, path := range []string{"/v1/sandboxes", "/v1/sandboxes/" + someUID, "/v1/sandboxes/x:checkpoint", "/v1/snapshots", "/v1/volumes", "/v1/nodes", "/v1/images", "/v1/events",
		"/v1/operations/" + someUID, "/v1/sandboxes/" + someUID + "/processes", "/openapi.json", "//", "/v1/%2e%2e"} {
		for _, verb := range []string{"GET", "POST", "DELETE", "PATCH"} {
			f.Add(verb, path, "page_size=2&labels=a%3Db&labels=c", []byte(`{"name":"a","spec":{"image":"r.example/x","env":{"A":"b"},"resources":{"memory_limit_bytes":"268435456"}}}`))
		}
		f.Add("POST", path, "page_token=AAAA&page_size=-1&x=y", []byte(strings.Repeat(`{"spec":`, 200)))
		f.Add("POST", path, "", []byte(`{"name":"a","name":"b"}`))
		f.Add("POST", path, "a.b.c=1&page_size=99999999999999999999", []byte(`null`))
	}
	f.Fuzz(func(t *testing.T, verb, path, query string, body []byte) {
		if !strings.HasPrefix(path, "/") || strings.ContainsAny(path, " ?#\x00") || strings.ContainsFunc(verb+path+query, func(r rune) bool { return r < '!' || r > '~' }) || verb == "" {
			return
		}
		req, err := http.NewRequest(verb, "http://x"+path+"?"+query, bytes.NewReader(body)) //nolint:noctx // below
		if err != nil {
			return
		}
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if strings.Contains(path, ":watch") || strings.Contains(query, "watch") {
			cancel()
		}
		w := httptest.NewRecorder()
		ws.get().handler.ServeHTTP(w, req.WithContext(ctx))
		if w.Code == http.StatusInternalServerError {
			t.Fatalf("%s %s?%s: %d %s", verb, path, query, w.Code, w.Body)
		}
	})
}

// willing is a node that does everything at once.
type willing struct {
	session fence.Epoch

	mu     sync.Mutex
	number uint64
}

func (n *willing) Nodes() []placement.Node {
	return []placement.Node{{Name: "n1", Online: true, Allocatable: placement.Resources{CPUMillis: 1 << 30, MemoryBytes: 1 << 50, DiskBytes: 1 << 50}}}
}
func (n *willing) Changed() <-chan struct{}             { return nil }
func (n *willing) Cordon(string, bool)                  {}
func (n *willing) ForgetImage(string, string)           {}
func (n *willing) LearnImage(string, *dormousev1.Image) {}
func (n *willing) Images() []*dormousev1.Image          { return nil }
func (n *willing) Views() []sessions.View {
	return []sessions.View{{Node: records.Node{Name: "n1"}, Online: true}}
}

func (n *willing) observed(c operations.Command, uid string) operations.Observation {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.number++
	return operations.Observation{UID: uid, Tenant: c.Tenant, Phase: sandbox.Running, ImageDigest: "sha256:image", Number: n.number, Session: n.session}
}

func (n *willing) StartSandbox(_ context.Context, _ string, c operations.Command, sb *records.Sandbox, _ map[string]string) (operations.Observation, error) {
	return n.observed(c, sb.UID), nil
}

func (n *willing) RestoreSandbox(_ context.Context, _ string, c operations.Command, sb *records.Sandbox) (operations.Observation, error) {
	return n.observed(c, sb.UID), nil
}

func (n *willing) DeleteSandbox(context.Context, string, operations.Command, string) (fence.Epoch, error) {
	return n.session, nil
}

func (n *willing) CheckpointSandbox(context.Context, string, operations.Command, string, string) (snapshot.Status, fence.Epoch, error) {
	return snapshot.Status{SizeBytes: 1}, n.session, nil
}

func (n *willing) UpdateSandbox(_ context.Context, _ string, c operations.Command, sb *records.Sandbox) (operations.Observation, error) {
	o := n.observed(c, sb.UID)
	o.ObservedGeneration = sb.NodeGeneration
	return o, nil
}

func (n *willing) PauseSandbox(_ context.Context, _ string, c operations.Command, u string, _ time.Duration) (operations.Observation, error) {
	o := n.observed(c, u)
	o.Phase = sandbox.Paused
	return o, nil
}

func (n *willing) HibernateSandbox(_ context.Context, _ string, c operations.Command, u string, _ time.Duration) (operations.Observation, error) {
	o := n.observed(c, u)
	o.Phase = sandbox.Hibernated
	return o, nil
}

func (n *willing) ResumeSandbox(_ context.Context, _ string, c operations.Command, u string) (operations.Observation, error) {
	return n.observed(c, u), nil
}

func (n *willing) ClaimSandbox(_ context.Context, _ string, c operations.Command, sb *records.Sandbox, _ map[string]string) (operations.Observation, error) {
	return n.observed(c, sb.UID), nil
}

func (n *willing) RunProcess(context.Context, string, operations.Command, string, operations.Process) (operations.ProcessEnd, error) {
	return operations.ProcessEnd{}, nil
}

func (n *willing) DeleteSnapshot(context.Context, string, operations.Command, string) (fence.Epoch, error) {
	return n.session, nil
}

func (n *willing) CreateVolume(context.Context, string, operations.Command, string, int64, string, string) (int64, fence.Epoch, error) {
	return 1, n.session, nil
}

func (n *willing) DeleteVolume(context.Context, string, operations.Command, string) (fence.Epoch, error) {
	return n.session, nil
}

func (n *willing) PullImage(context.Context, string, operations.Command, string, func(*dormousev1.PullProgress) error) (*dormousev1.Image, error) {
	return &dormousev1.Image{}, nil
}

func (n *willing) RemoveImage(context.Context, string, operations.Command, string) error { return nil }

func (n *willing) Conn(context.Context, nodeclient.Place, bool) (*grpc.ClientConn, error) {
	return nil, errs.New(errs.NodeAway, "no node is here").With("node", "n1")
}

func (n *willing) Inventory(context.Context, string, string) (*nodev1.GetInventoryResponse, fence.Epoch, error) {
	return &nodev1.GetInventoryResponse{}, n.session, nil
}
