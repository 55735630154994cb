package api

import (
	"context"
	"errors"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"

	"github.com/dormouse-run/dormouse/agentd/internal/bulk"
	"github.com/dormouse-run/dormouse/agentd/internal/bulkwire"
	"github.com/dormouse-run/dormouse/agentd/internal/runtime"
	"github.com/dormouse-run/dormouse/agentd/internal/runtime/fake"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/uid"
	"github.com/dormouse-run/dormouse/pkg/wire"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// fileNode has one sandbox, whose helper says what it is told to.
type fileNode struct {
	*bulk.Manager
	uid string
}

func (n *fileNode) Transfer(ctx context.Context, u string, order bulkwire.Order) (*bulk.Transfer, error) {
	return n.Start(ctx, u, order)
}

func (n *fileNode) Defaults(string) (Defaults, error) { return Defaults{User: "worker"}, nil }

// newFileNode gives a node whose helper runs fn; said is what it answers, after which it ends.
func newFileNode(t testing.TB, said []byte) (*fileNode, *Files) {
	t.Helper()
	host := fake.NewHost()
	host.SetProgram("/helper", func(_ context.Context, _ []string, in, out, _ *os.File) int {
		_, _ = out.Write(said)
		_ = out.Close()
		_, _ = io.Copy(io.Discard, in)
		return 0
	})
	d := host.Open()
	n := &fileNode{uid: uid.New(), Manager: bulk.New(bulk.Options{Driver: d, Helper: "/helper"})}
	if _, err := d.Start(t.Context(), runtime.Config{ID: n.uid}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		n.Close()
		if err := errors.Join(d.Delete(context.Background(), n.uid), d.Close()); err != nil {
			t.Error(err)
		}
	})
	return n, &Files{Sandboxes: n}
}

// down is a stream to a client that takes everything.
type down[T any] struct {
	grpc.ServerStream
	ctx  context.Context
	sent []*T
}

func (d *down[T]) Context() context.Context { return d.ctx }
func (d *down[T]) Send(m *T) error          { d.sent = append(d.sent, m); return nil }

// SendMsg sends what is encoded as it is.
func (d *down[T]) SendMsg(m any) error {
	msg := new(T)
	if err := coded(m, msg); err != nil {
		return err
	}
	return d.Send(msg)
}

// coded encodes from and decodes that into another.
func coded(from, into any) error {
	data, err := wire.Codec().Marshal(from)
	if err != nil {
		return err
	}
	defer data.Free()
	return wire.Codec().Unmarshal(data, into)
}

// both is a stream whose client sends what it is given.
type both[In, Out any] struct {
	down[Out]
	in []*In
}

func (b *both[In, Out]) Recv() (*In, error) {
	if len(b.in) == 0 {
		return nil, io.EOF
	}
	m := b.in[0]
	b.in = b.in[1:]
	return m, nil
}

// RecvMsg receives into whatever decodes itself.
func (b *both[In, Out]) RecvMsg(m any) error {
	msg, err := b.Recv()
	if err != nil {
		return err
	}
	return coded(msg, m)
}

// all makes each call of the service once, with valid requests.
func (n *fileNode) all(ctx context.Context, s *Files) map[string]error {
	out := map[string]error{}
	_, out["stat"] = s.StatFile(ctx, &dormousev1.StatFileRequest{SandboxUid: n.uid, Path: "/x"})
	_, out["list"] = s.ListFiles(ctx, &dormousev1.ListFilesRequest{SandboxUid: n.uid, Path: "/x"})
	_, out["make"] = s.MakeDirectory(ctx, &dormousev1.MakeDirectoryRequest{SandboxUid: n.uid, Path: "/x"})
	_, out["remove"] = s.RemoveFile(ctx, &dormousev1.RemoveFileRequest{SandboxUid: n.uid, Path: "/x"})
	_, out["move"] = s.MoveFile(ctx, &dormousev1.MoveFileRequest{SandboxUid: n.uid, Path: "/x", NewPath: "/y"})
	out["read"] = s.ReadFile(&dormousev1.ReadFileRequest{SandboxUid: n.uid, Path: "/x"}, &down[dormousev1.ReadFileResponse]{ctx: ctx})
	out["pack"] = s.ReadArchive(&dormousev1.ReadArchiveRequest{SandboxUid: n.uid, Path: "/x"}, &down[dormousev1.ReadArchiveResponse]{ctx: ctx})
	out["watch"] = s.WatchFiles(&dormousev1.WatchFilesRequest{SandboxUid: n.uid, Path: "/x"}, &down[dormousev1.WatchFilesResponse]{ctx: ctx})
	w := &both[dormousev1.WriteFileRequest, dormousev1.WriteFileResponse]{down: down[dormousev1.WriteFileResponse]{ctx: ctx}}
	w.in = []*dormousev1.WriteFileRequest{
		{Event: &dormousev1.WriteFileRequest_Open{Open: &dormousev1.WriteFileOpen{SandboxUid: n.uid, Path: "/x"}}},
		{Event: &dormousev1.WriteFileRequest_Data{Data: []byte("data")}},
	}
	out["write"] = s.WriteFile(w)
	u := &both[dormousev1.WriteArchiveRequest, dormousev1.WriteArchiveResponse]{down: down[dormousev1.WriteArchiveResponse]{ctx: ctx}}
	u.in = []*dormousev1.WriteArchiveRequest{
		{Event: &dormousev1.WriteArchiveRequest_Open{Open: &dormousev1.WriteArchiveOpen{SandboxUid: n.uid, Path: "/x"}}},
		{Event: &dormousev1.WriteArchiveRequest_Data{Data: []byte("data")}},
	}
	out["unpack"] = s.WriteArchive(u)
	return out
}

// TestHostileHelperThroughTheAPI: garbage from a helper is a typed error of its own call.
func TestHostileHelperThroughTheAPI(t *testing.T) {
	for name, said := range map[string]string{
		"nothing":                "",
		"another kind":           "Z\x00\x00\x00",
		"a huge frame":           "D\xff\xff\xff",
		"a torn frame":           "A\x09\x00\x00{",
		"no JSON":                "A\x01\x00\x00{E\x01\x00\x00{",
		"a reason of its own":    "F\x13\x00\x00{\"reason\":\"GOT_YA\"}",
		"an answer that is data": "D\x01\x00\x00xE\x00\x00\x00",
	} {
		n, s := newFileNode(t, []byte(said))
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		for call, err := range n.all(ctx, s) {
			if errs.ReasonOf(err) != errs.TransferCut {
				t.Errorf("%s, %s: got %v, want %s", name, call, err, errs.TransferCut)
			}
		}
		cancel()
	}
}

// FuzzHelper: whatever a helper says, each call ends, with an error that is one, or an answer of a size
// that was asked for.
func FuzzHelper(f *testing.F) {
	f.Add([]byte("A\x02\x00\x00{}E\x02\x00\x00{}"))
	f.Add([]byte("A\x02\x00\x00{}D\x01\x00\x00xE\x12\x00\x00{\"bytes\":1,\"info\":{}}"))
	f.Add([]byte("A\x1e\x00\x00{\"entries\":[{\"name\":\"\\ud800\"}]}E\x00\x00\x00"))
	f.Add([]byte("F\x1b\x00\x00{\"reason\":\"FILE_NOT_FOUND\"}"))
	f.Fuzz(func(t *testing.T, said []byte) {
		if len(said) > 32<<10 {
			return // a pipe's worth
		}
		n, s := newFileNode(t, said)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		for call, err := range n.all(ctx, s) {
			var e *errs.Error
			if err != nil && (!errors.As(err, &e) || e.Reason == errs.DeadlineExpired) {
				t.Errorf("%s: %v", call, err)
			}
		}
	})
}

// TestFileRequestsAreChecked: before a helper is started.
func TestFileRequestsAreChecked(t *testing.T) {
	n, s := newFileNode(t, nil)
	ctx := t.Context()
	stat := func(r *dormousev1.StatFileRequest) error {
		_, err := s.StatFile(ctx, r)
		return err
	}
	list := func(r *dormousev1.ListFilesRequest) error {
		r.SandboxUid, r.Path = n.uid, "/x"
		_, err := s.ListFiles(ctx, r)
		return err
	}
	write := func(messages ...*dormousev1.WriteFileRequest) error {
		b := &both[dormousev1.WriteFileRequest, dormousev1.WriteFileResponse]{down: down[dormousev1.WriteFileResponse]{ctx: ctx}, in: messages}
		return s.WriteFile(b)
	}
	open := func(o *dormousev1.WriteFileOpen) *dormousev1.WriteFileRequest {
		o.SandboxUid, o.Path = n.uid, "/x"
		return &dormousev1.WriteFileRequest{Event: &dormousev1.WriteFileRequest_Open{Open: o}}
	}
	mode := uint32(0o10000)
	for name, c := range map[string]struct {
		err  error
		want errs.Reason
	}{
		"no sandbox":           {stat(&dormousev1.StatFileRequest{Path: "/x"}), errs.InvalidField},
		"no path":              {stat(&dormousev1.StatFileRequest{SandboxUid: n.uid}), errs.InvalidField},
		"a relative path":      {stat(&dormousev1.StatFileRequest{SandboxUid: n.uid, Path: "x"}), errs.InvalidField},
		"a zero byte":          {stat(&dormousev1.StatFileRequest{SandboxUid: n.uid, Path: "/x\x00"}), errs.InvalidField},
		"a long path":          {stat(&dormousev1.StatFileRequest{SandboxUid: n.uid, Path: "/" + strings.Repeat("x", maxFilePath)}), errs.LimitExceeded},
		"a page too large":     {list(&dormousev1.ListFilesRequest{PageSize: maxPage + 1}), errs.InvalidField},
		"a negative page":      {list(&dormousev1.ListFilesRequest{PageSize: -1}), errs.InvalidField},
		"a token of nobody":    {list(&dormousev1.ListFilesRequest{PageToken: "?"}), errs.InvalidField},
		"nothing opened":       {write(), errs.InvalidField},
		"data first":           {write(&dormousev1.WriteFileRequest{Event: &dormousev1.WriteFileRequest_Data{}}), errs.InvalidField},
		"a mode with a type":   {write(open(&dormousev1.WriteFileOpen{Mode: &mode})), errs.InvalidField},
		"a short digest":       {write(open(&dormousev1.WriteFileOpen{ExpectedDigest: "sha256:00"})), errs.InvalidField},
		"a digest in capitals": {write(open(&dormousev1.WriteFileOpen{ExpectedDigest: "sha256:" + strings.Repeat("A", 64)})), errs.InvalidField},
		"a negative size":      {write(open(&dormousev1.WriteFileOpen{SizeHintBytes: -1})), errs.InvalidField},
		"a path as an id":      {write(open(&dormousev1.WriteFileOpen{UploadId: "../x"})), errs.InvalidField},
		"a long id":            {write(open(&dormousev1.WriteFileOpen{UploadId: strings.Repeat("x", maxUploadID+1)})), errs.LimitExceeded},
		"taking up nothing":    {write(open(&dormousev1.WriteFileOpen{Resume: true})), errs.InvalidField},
	} {
		wantReason(t, c.err, c.want)
		if t.Failed() {
			t.Fatal(name)
		}
	}
	if n.Active(n.uid) != 0 {
		t.Error("a helper was started")
	}
}
