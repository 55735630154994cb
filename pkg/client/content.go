package client

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"hash"
	"io"
	"time"

	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/uid"
	"github.com/dormouse-run/dormouse/pkg/wait"
	"github.com/dormouse-run/dormouse/pkg/wire"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

const (
	// pieceBytes is how much of a file is sent in a message, and dataField the number of the field that it is in.
	pieceBytes = 124 << 10
	dataField  = 2
	// keptBytes is how much of what was sent is kept, to be sent again: more than can be on its way.
	keptBytes = 8 << 20
	// removeTime bounds tidying up after a write that was given up.
	removeTime = 5 * time.Second
)

type digester struct{ hash.Hash }

func newDigest() digester { return digester{sha256.New()} }

func (d digester) String() string { return "sha256:" + hex.EncodeToString(d.Sum(nil)) }

func (d digester) check(path, want string) error {
	if got := d.String(); got != want {
		return errs.New(errs.DigestMismatch, "what was transferred of %s is not what was sent; do it again", path).With("want", want).With("got", got)
	}
	return nil
}

// FileReader reads a file. A cut connection is taken up again where it was; FILE_CHANGED when the file is
// another one by then. io.EOF comes after the content's digest was checked.
type FileReader struct {
	// Info describes the file as it was when it was opened.
	Info *dormousev1.FileInfo

	f      *Files
	ctx    context.Context //nolint:containedctx // a reader has no other way to be told
	cancel context.CancelFunc
	stream dormousev1.FileService_ReadFileClient
	piece  wire.Incoming
	rest   [][]byte // of the piece
	digest digester
	offset int64
	err    error
}

// Open opens a file to read. Close the reader.
func (f *Files) Open(ctx context.Context, path string) (*FileReader, error) {
	ctx, cancel := context.WithCancel(ctx)
	r := &FileReader{f: f, ctx: ctx, cancel: cancel, digest: newDigest(), Info: &dormousev1.FileInfo{Path: path}}
	info, err := retry(ctx, func(context.Context) (*dormousev1.FileInfo, error) { return r.open("") })
	if err != nil {
		cancel()
		return nil, err
	}
	r.Info = info
	return r, nil
}

// open begins a stream where the reader is.
func (r *FileReader) open(version string) (*dormousev1.FileInfo, error) {
	stream, err := r.f.c.files.ReadFile(r.ctx, &dormousev1.ReadFileRequest{
		SandboxUid: r.f.Sandbox, Path: r.Info.GetPath(), Offset: r.offset, Version: version, DigestFromStart: true, User: r.f.User,
	})
	if err != nil {
		return nil, err
	}
	first, err := stream.Recv()
	if err != nil {
		return nil, ended(err)
	}
	r.stream = stream
	return first.GetHeader(), nil
}

// Read implements io.Reader.
func (r *FileReader) Read(p []byte) (int, error) {
	for len(r.rest) == 0 && r.err == nil {
		r.err = r.receive()
	}
	n := 0
	for n < len(p) && len(r.rest) > 0 {
		part := r.rest[0]
		m := copy(p[n:], part)
		n += m
		if m < len(part) {
			r.rest[0] = part[m:]
			break
		}
		r.rest = r.rest[1:]
	}
	if n > 0 {
		return n, nil
	}
	return 0, r.err
}

// receive gets the next piece; io.EOF at a checked end.
func (r *FileReader) receive() error {
	resp := &dormousev1.ReadFileResponse{}
	r.piece.Field, r.piece.Message = dataField, resp
	if err := r.stream.RecvMsg(&r.piece); err != nil {
		if err = ended(err); !again(r.ctx, err) {
			return err
		}
		return r.takeUp(err)
	}
	parts, size, ok := r.piece.Bytes()
	if ok {
		for _, part := range parts {
			r.digest.Write(part)
		}
		r.offset += int64(size)
		r.rest = parts
		return nil
	}
	if t := resp.GetTrailer(); t != nil {
		if err := r.digest.check(r.Info.GetPath(), t.GetDigest()); err != nil {
			return err
		}
		return io.EOF
	}
	return nil
}

// takeUp opens the stream again, for as long as a node may be away.
func (r *FileReader) takeUp(cause error) error {
	backoff := firstBackoff
	for range followAttempts {
		if wait.For(r.ctx, backoff) != nil {
			return cause
		}
		_, err := r.open(r.Info.GetVersion())
		if err == nil || !again(r.ctx, err) {
			return err
		}
		backoff = min(backoff*3, followBackoff)
	}
	return cause
}

// Close ends the reader.
func (r *FileReader) Close() error {
	r.cancel()
	if r.err == nil {
		r.err = errs.New(errs.CallCancelled, "the reader was closed")
	}
	return nil
}

// WriteOptions say how a file is written.
type WriteOptions struct {
	// Mode are permission bits; nil keeps those of the file that is replaced, else takes 0644.
	Mode *uint32
	// Owner is user, uid, user:group or uid:gid; "" keeps, else takes the sandbox's user.
	Owner string
	// Parents makes missing directories on the way.
	Parents bool
	// Size is what is coming, 0 if it is not known: no room for it is said before it is sent.
	Size int64
}

// upload is a write that is taken up again when it is cut.
type upload struct {
	f      *Files
	open   *dormousev1.WriteFileOpen
	src    io.Reader
	digest digester
	kept   []*wire.Outgoing // the last of what was read
	held   int64            // bytes of kept
	read   int64            // from src
	eof    bool
	part   string
}

// Write replaces a file by what is read from r, or makes it: complete or not at all. A cut connection is taken up
// again where the server is. It returns once the file is in place, with a checked digest.
func (f *Files) Write(ctx context.Context, path string, r io.Reader, opts WriteOptions) (*dormousev1.WriteFileDone, error) {
	u := &upload{f: f, src: r, digest: newDigest(), open: &dormousev1.WriteFileOpen{
		SandboxUid: f.Sandbox, Path: path, Mode: opts.Mode, Owner: opts.Owner, CreateParents: opts.Parents, SizeHintBytes: opts.Size,
		UploadId: uid.New(), User: f.User,
	}}
	defer func() { u.forget(0) }()
	backoff, sent := firstBackoff, int64(-1)
	for attempt := 1; ; attempt++ {
		done, err := u.try(ctx)
		if err == nil {
			return done, u.digest.check(path, done.GetDigest())
		}
		if u.read > sent {
			attempt, sent, backoff = 1, u.read, firstBackoff
		}
		if !again(ctx, err) || attempt >= followAttempts || wait.For(ctx, backoff) != nil {
			u.giveUp(ctx)
			return nil, err
		}
		backoff = min(backoff*3, followBackoff)
		u.open.Resume = true
	}
}

// giveUp removes what an unfinished write left; what cannot be reached now stays.
func (u *upload) giveUp(ctx context.Context) {
	if u.part == "" {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), removeTime)
	defer cancel()
	_ = u.f.Remove(ctx, u.part, false)
}

// try sends from where the server is.
func (u *upload) try(ctx context.Context) (*dormousev1.WriteFileDone, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := u.f.c.files.WriteFile(ctx)
	if err != nil {
		return nil, err
	}
	err = stream.Send(&dormousev1.WriteFileRequest{Event: &dormousev1.WriteFileRequest_Open{Open: u.open}})
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	resp, err := stream.Recv()
	if err != nil {
		return nil, ended(err)
	}
	opened := resp.GetOpened()
	u.part = opened.GetPartPath()
	missing := u.read - opened.GetOffset()
	if missing < 0 || missing > u.held {
		return nil, errs.New(errs.TransferCut, "the sandbox has lost too much of what was sent; write the file again").WithOutcome(errs.NotStarted, errs.Never)
	}
	if err := u.sendAll(missing, func(piece *wire.Outgoing) error { return stream.SendMsg(piece) }); err != nil {
		return nil, err
	}
	if err := stream.CloseSend(); err != nil {
		return nil, err
	}
	resp, err = stream.Recv()
	if err != nil {
		return nil, ended(err)
	}
	return resp.GetDone(), nil
}

// sendAll sends again what is missing and then what the source has. A send that failed is no error here: what is
// received then says why.
func (u *upload) sendAll(missing int64, send func(*wire.Outgoing) error) error {
	over := u.held - missing
	for _, piece := range u.kept {
		skip := min(over, int64(piece.Len()))
		over -= skip
		if skip == int64(piece.Len()) {
			continue
		}
		rest := piece.After(int(skip))
		err := send(rest)
		rest.Free()
		if err != nil {
			return nil
		}
	}
	for !u.eof {
		room := wire.Room()
		n, err := io.ReadFull(u.src, room[:pieceBytes])
		u.eof = errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF)
		if n > 0 {
			piece := wire.NewOutgoing(dataField, room, n)
			u.keep(piece)
			if err == nil || u.eof {
				if send(piece) != nil {
					return nil
				}
			}
		}
		if err != nil && !u.eof {
			return err
		}
	}
	return nil
}

// keep remembers what was read.
func (u *upload) keep(piece *wire.Outgoing) {
	u.digest.Write(piece.Bytes())
	u.read += int64(piece.Len())
	u.held += int64(piece.Len())
	u.kept = append(u.kept, piece)
	u.forget(keptBytes)
}

// forget gives up what was read first, as long as so many bytes are kept.
func (u *upload) forget(bytes int64) {
	for len(u.kept) > 0 && u.held-int64(u.kept[0].Len()) >= bytes {
		u.held -= int64(u.kept[0].Len())
		u.kept[0].Free()
		u.kept[0] = nil
		u.kept = u.kept[1:]
	}
}
