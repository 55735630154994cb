package rest

import (
	"context"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc/metadata"

	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/obs"
	"github.com/dormouse-run/dormouse/pkg/wire"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// A file's bytes go over REST as they are, not as JSON:
//
//	GET /v1/sandboxes/{uid}/files/content?path=   the content; its digest is a trailer
//	PUT /v1/sandboxes/{uid}/files/content?path=   replaces the file as a whole
//
// They are the calls ReadFile and WriteFile, message by message, so that a slow client slows the node and
// not this process's memory.
const (
	contentPath  = "/v1/sandboxes/{uid}/files/content"
	contentPiece = 124 << 10
	digestHeader = "Repr-Digest" // of RFC 9530
)

// contentHandler serves a file's bytes.
func (b *Bridge) contentHandler(do func(ctx context.Context, w http.ResponseWriter, r *http.Request, q url.Values) error, known ...string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		r = began(w, r)
		ctx := outgoing(r)
		// As long as the file takes, whatever the server allows for other requests.
		control := http.NewResponseController(w)
		_, _ = control.SetReadDeadline(time.Time{}), control.SetWriteDeadline(time.Time{}) // a writer without deadlines has none to lift
		q, err := query(r, known)
		if err == nil {
			err = do(ctx, w, r, q)
		}
		if err != nil {
			var typed *errs.Error
			if !errors.As(err, &typed) {
				err = wire.FromStatus(err)
			}
			wire.WriteRESTError(w, r, err)
		}
	}
}

// began gives a request its id.
func began(w http.ResponseWriter, r *http.Request) *http.Request {
	id := r.Header.Get(wire.RequestIDKey)
	if !obs.ValidRequestID(id) {
		id = obs.NewRequestID()
		r.Header.Set(wire.RequestIDKey, id)
	}
	w.Header().Set(wire.RequestIDKey, id)
	return r.WithContext(obs.WithRequestID(r.Context(), id))
}

// outgoing is the context of the calls that a request becomes, in the caller's name.
func outgoing(r *http.Request) context.Context {
	ctx := metadata.AppendToOutgoingContext(r.Context(), wire.RequestIDKey, obs.RequestID(r.Context()))
	for _, key := range r.Header.Values("Authorization") {
		ctx = metadata.AppendToOutgoingContext(ctx, "authorization", key)
	}
	return ctx
}

// query reads the parameters, each known and given once at most.
func query(r *http.Request, known []string) (url.Values, error) {
	q, err := url.ParseQuery(r.URL.RawQuery)
	if err != nil {
		return nil, errs.New(errs.InvalidField, "the query cannot be read: %v", err).With("field", "query")
	}
	for name, values := range q {
		if !slices.Contains(known, name) {
			return nil, errs.New(errs.UnknownField, "%s: there is no such parameter; there are %s", name, strings.Join(known, ", ")).With("field", name)
		}
		if len(values) != 1 {
			return nil, errs.New(errs.InvalidField, "%s: give it once", name).With("field", name)
		}
	}
	return q, nil
}

func (b *Bridge) readContent(ctx context.Context, w http.ResponseWriter, r *http.Request, q url.Values) error {
	offset := int64(0)
	if text := q.Get("offset"); text != "" {
		n, err := strconv.ParseInt(text, 10, 64)
		if err != nil {
			return errs.New(errs.InvalidField, "offset: %q is no number", text).With("field", "offset")
		}
		offset = n
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := dormousev1.NewFileServiceClient(b.conn).ReadFile(ctx, &dormousev1.ReadFileRequest{
		SandboxUid: r.PathValue("uid"), Path: q.Get("path"), Offset: offset, Version: q.Get("version"), User: q.Get("user"),
	})
	if err != nil {
		return err
	}
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	w.Header().Set("Content-Type", "application/octet-stream")
	w.Header().Set("Etag", strconv.Quote(first.GetHeader().GetVersion()))
	w.Header().Set("Trailer", digestHeader)
	w.WriteHeader(http.StatusOK)
	for {
		resp, err := stream.Recv()
		if err != nil {
			// The code is sent; only an end that is none says that the rest is missing.
			panic(http.ErrAbortHandler)
		}
		if t := resp.GetTrailer(); t != nil {
			w.Header().Set(digestHeader, reprDigest(t.GetDigest()))
			return nil
		}
		if _, err := w.Write(resp.GetData()); err != nil {
			return nil //nolint:nilerr // the client went away
		}
	}
}

// reprDigest writes a digest as the header has it.
func reprDigest(digest string) string {
	raw, err := hex.DecodeString(strings.TrimPrefix(digest, "sha256:"))
	if err != nil {
		return ""
	}
	return "sha-256=:" + base64.StdEncoding.EncodeToString(raw) + ":"
}

func (b *Bridge) writeContent(ctx context.Context, w http.ResponseWriter, r *http.Request, q url.Values) error {
	open := &dormousev1.WriteFileOpen{
		SandboxUid: r.PathValue("uid"), Path: q.Get("path"), Owner: q.Get("owner"), User: q.Get("user"), ExpectedDigest: q.Get("digest"),
		SizeHintBytes: max(r.ContentLength, 0),
	}
	if text := q.Get("mode"); text != "" {
		n, err := strconv.ParseUint(text, 8, 32)
		if err != nil {
			return errs.New(errs.InvalidField, "mode: %q is no octal number", text).With("field", "mode")
		}
		mode := uint32(n)
		open.Mode = &mode
	}
	if text := q.Get("parents"); text != "" {
		yes, err := strconv.ParseBool(text)
		if err != nil {
			return errs.New(errs.InvalidField, "parents: %q is neither true nor false", text).With("field", "parents")
		}
		open.CreateParents = yes
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := dormousev1.NewFileServiceClient(b.conn).WriteFile(ctx)
	if err != nil {
		return err
	}
	// What a failed send means is what is received then.
	if err := stream.Send(&dormousev1.WriteFileRequest{Event: &dormousev1.WriteFileRequest_Open{Open: open}}); err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	if _, err := stream.Recv(); err != nil {
		return err
	}
	buf := make([]byte, contentPiece)
	for {
		// Not io.ReadFull: it calls a body that was cut short and one that ends here the same.
		n, err := r.Body.Read(buf)
		if n > 0 && stream.Send(&dormousev1.WriteFileRequest{Event: &dormousev1.WriteFileRequest_Data{Data: buf[:n]}}) != nil {
			break
		}
		if errors.Is(err, io.EOF) {
			if err := stream.CloseSend(); err != nil {
				return err
			}
			break
		}
		if err != nil {
			return errs.Wrap(err, errs.CallCancelled, "the body ended before it was complete; the file is as it was").WithOutcome(errs.NotStarted, errs.SameOperation)
		}
	}
	resp, err := stream.Recv()
	if err != nil {
		return err
	}
	body, err := wire.MarshalJSON(resp.GetDone())
	if err != nil {
		return err
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(body) // the client went away
	return nil
}
