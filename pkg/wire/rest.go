package wire

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"

	"github.com/grpc-ecosystem/grpc-gateway/v2/runtime"
	"github.com/grpc-ecosystem/grpc-gateway/v2/utilities"
	spb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/obs"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// MaxRESTBody is the size of the largest REST body that is read.
const MaxRESTBody = 4 << 20

// headerRequestID is RequestIDKey as an HTTP header.
const headerRequestID = "X-Request-Id"

// IfMatchKey is the metadata that carries REST's header If-Match: a revision, with or without quotes.
const IfMatchKey = "dormouse-if-match"

// NewGateway makes the REST multiplexer. Register the services on it with a client connection that
// has no wire interceptors, and serve it through RESTHandler.
func NewGateway() *runtime.ServeMux {
	return runtime.NewServeMux(
		runtime.WithMarshalerOption(runtime.MIMEWildcard, &restMarshaler{}),
		runtime.SetQueryParameterParser(strictQuery{}),
		runtime.WithErrorHandler(restError),
		runtime.WithStreamErrorHandler(restStreamError),
		runtime.WithRoutingErrorHandler(restRoutingError),
		runtime.WithIncomingHeaderMatcher(func(h string) (string, bool) {
			if strings.EqualFold(h, headerRequestID) {
				return RequestIDKey, true
			}
			if strings.EqualFold(h, "If-Match") {
				return IfMatchKey, true
			}
			return "", false // authorization and the timeout pass by themselves
		}),
		runtime.WithOutgoingHeaderMatcher(func(string) (string, bool) { return "", false }),
		runtime.WithDisableHTTPMethodOverride(),
		runtime.WithDisablePathLengthFallback(),
	)
}

// RESTHandler serves a gateway: it gives each request its id, bounds the body, and sees to it that
// an error's HTTP code and body are the envelope's.
func RESTHandler(gateway http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		id := r.Header.Get(headerRequestID)
		if !obs.ValidRequestID(id) {
			id = obs.NewRequestID()
		}
		x := &exchange{}
		r = r.WithContext(context.WithValue(obs.WithRequestID(r.Context(), id), exchangeKey{}, x))
		r.Header.Set(headerRequestID, id)
		w.Header().Set(headerRequestID, id)
		if r.Body != nil {
			r.Body = &restBody{ReadCloser: http.MaxBytesReader(w, r.Body, MaxRESTBody), x: x}
		}
		gateway.ServeHTTP(&restWriter{ResponseWriter: w, x: x}, r)
	})
}

// exchange carries a typed error around the gateway's code, which keeps only an error's text.
type exchange struct {
	err    *errs.Error
	stream bool // the error is of a stream
}

type exchangeKey struct{}

func exchangeOf(ctx context.Context) *exchange {
	if x, ok := ctx.Value(exchangeKey{}).(*exchange); ok {
		return x
	}
	return &exchange{}
}

type restBody struct {
	io.ReadCloser
	x *exchange
}

// restWriter answers an error that comes before a stream's first message as that of any other call: with its
// HTTP code and the envelope, where the gateway has a code of its own and a last line.
type restWriter struct {
	http.ResponseWriter
	x        *exchange
	answered bool
}

func (w *restWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

func (w *restWriter) WriteHeader(code int) {
	if code >= http.StatusBadRequest && w.x.stream {
		w.answered = true
		writeError(w.ResponseWriter, w.x.err)
		return
	}
	w.ResponseWriter.WriteHeader(code)
}

func (w *restWriter) Write(b []byte) (int, error) {
	if w.answered {
		return len(b), nil
	}
	return w.ResponseWriter.Write(b)
}

func restError(ctx context.Context, _ *runtime.ServeMux, _ runtime.Marshaler, w http.ResponseWriter, r *http.Request, err error) {
	e := exchangeOf(r.Context()).err
	if e == nil && r.Form != nil {
		e = queryError(r.Form)
	}
	if e == nil {
		e = gatewayError(err)
	}
	writeError(w, e.WithRequest(ownID(e, obs.RequestID(r.Context())), ""))
}

func ownID(e *errs.Error, id string) string {
	if e.RequestID != "" {
		return ""
	}
	return id
}

// gatewayError gives the envelope of an error that the gateway returned: one from the server has
// an envelope, the gateway's own refusals of a malformed request have a code only.
func gatewayError(err error) *errs.Error {
	e := FromStatus(err)
	if st, ok := status.FromError(err); ok && e.Reason == errs.ReplyLost && st.Code() == codes.InvalidArgument {
		return errs.New(errs.InvalidField, "the request is malformed: %s", clip(st.Message(), maxDetail))
	}
	return e
}

func restStreamError(ctx context.Context, err error) *status.Status {
	e := gatewayError(err)
	e = e.WithRequest(ownID(e, obs.RequestID(ctx)), "")
	x := exchangeOf(ctx)
	x.err, x.stream = e, true
	return ToStatus(e, "", "")
}

func restRoutingError(_ context.Context, _ *runtime.ServeMux, _ runtime.Marshaler, w http.ResponseWriter, r *http.Request, code int) {
	var e *errs.Error
	switch code {
	case http.StatusMethodNotAllowed:
		e = errs.New(errs.NotSupported, "%s is not possible on %s", r.Method, clip(r.URL.Path, maxDetail)).With("feature", "method")
	case http.StatusBadRequest:
		e = errs.New(errs.InvalidField, "the path %s is malformed", clip(r.URL.Path, maxDetail)).With("field", "path")
	default:
		e = errs.New(errs.ObjectNotFound, "there is nothing at %s; the API is below /v1", clip(r.URL.Path, maxDetail)).With("kind", "path")
	}
	writeError(w, e.WithRequest(obs.RequestID(r.Context()), ""))
}

// Answered is an error as it is told to who made the request of the context: with its id.
func Answered(ctx context.Context, err error) *errs.Error {
	e := answered(err)
	return e.WithRequest(ownID(e, obs.RequestID(ctx)), "")
}

// WriteRESTError answers a plain HTTP request with the envelope of an error, for handlers beside the gateway.
func WriteRESTError(w http.ResponseWriter, r *http.Request, err error) {
	writeError(w, Answered(r.Context(), err))
}

func writeError(w http.ResponseWriter, e *errs.Error) {
	body, err := MarshalJSON(ErrorToProto(e))
	if err != nil {
		body = []byte(`{"code":"INTERNAL","reason":"INTERNAL_ERROR"}`)
	}
	w.Header().Del("Trailer")
	w.Header().Del("Transfer-Encoding")
	w.Header().Set("Content-Type", "application/json")
	if e.Code == errs.Unauthenticated {
		w.Header().Set("WWW-Authenticate", "Bearer")
	}
	w.WriteHeader(HTTPCode(e))
	_, _ = w.Write(body) // the caller went away
}

// restMarshaler is strict JSON with proto field names.
type restMarshaler struct{}

func (m *restMarshaler) ContentType(any) string { return "application/json" }

func (m *restMarshaler) Delimiter() []byte { return []byte("\n") }

func (m *restMarshaler) StreamContentType(any) string { return "application/x-ndjson" }

func (m *restMarshaler) Marshal(v any) ([]byte, error) {
	switch v := v.(type) {
	case proto.Message:
		return protojson.MarshalOptions{UseProtoNames: true, EmitUnpopulated: false}.Marshal(v)
	case map[string]proto.Message:
		return m.marshalChunk(v)
	case map[string]any:
		out := make(map[string]json.RawMessage, len(v))
		for k, inner := range v {
			b, err := m.Marshal(inner)
			if err != nil {
				return nil, err
			}
			out[k] = b
		}
		return json.Marshal(out)
	}
	return json.Marshal(v)
}

// marshalChunk writes the last line of a stream that failed: its error is the envelope too.
func (m *restMarshaler) marshalChunk(v map[string]proto.Message) ([]byte, error) {
	out := make(map[string]json.RawMessage, len(v))
	for k, inner := range v {
		if st, ok := inner.(*spb.Status); ok {
			inner = ErrorToProto(gatewayError(status.FromProto(st).Err()))
		}
		b, err := m.Marshal(inner)
		if err != nil {
			return nil, err
		}
		out[k] = b
	}
	return json.Marshal(out)
}

func (m *restMarshaler) Unmarshal(data []byte, v any) error {
	msg, ok := v.(proto.Message)
	if !ok {
		return json.Unmarshal(data, v)
	}
	return UnmarshalJSON(data, msg)
}

func (m *restMarshaler) NewEncoder(w io.Writer) runtime.Encoder {
	return runtime.EncoderFunc(func(v any) error {
		b, err := m.Marshal(v)
		if err != nil {
			return err
		}
		_, err = w.Write(b)
		return err
	})
}

func (m *restMarshaler) NewDecoder(r io.Reader) runtime.Decoder {
	return runtime.DecoderFunc(func(v any) error {
		err := m.decode(r, v)
		if b, ok := r.(*restBody); ok && err != nil {
			b.x.err = Envelope(err)
		}
		return err
	})
}

func (m *restMarshaler) decode(r io.Reader, v any) error {
	data, err := io.ReadAll(io.LimitReader(r, MaxRESTBody+1))
	if err != nil || len(data) > MaxRESTBody {
		return errs.Wrap(err, errs.LimitExceeded, "the body could not be read whole; at most %d bytes", MaxRESTBody).
			With("field", "body").With("limit", fmt.Sprint(MaxRESTBody))
	}
	if len(data) == 0 {
		return nil // an empty body is an empty request
	}
	return m.Unmarshal(data, v)
}

// strictQuery refuses query parameters that the request does not have.
type strictQuery struct{}

// queryErrorKey holds an envelope in the form that the gateway's code was given: the parser has no
// other way back to the request, and a caller cannot send this key without it being an unknown field.
const queryErrorKey = "\x00error"

func (strictQuery) Parse(msg proto.Message, values url.Values, filter *utilities.DoubleArray) error {
	for key := range values {
		if !queryField(msg.ProtoReflect().Descriptor(), key) {
			e := errs.New(errs.UnknownField, "%s: there is no such query parameter", clip(key, maxDetail)).With("field", clip(key, maxDetail))
			return markQuery(values, e)
		}
	}
	if err := (&runtime.DefaultQueryParser{}).Parse(msg, values, filter); err != nil {
		return markQuery(values, errs.Wrap(err, errs.InvalidField, "the query is malformed: %s", clip(err.Error(), maxDetail)))
	}
	return nil
}

func markQuery(values url.Values, e *errs.Error) error {
	b, err := MarshalJSON(ErrorToProto(e))
	if err != nil {
		return err
	}
	values[queryErrorKey] = []string{string(b)}
	return e
}

func queryError(values url.Values) *errs.Error {
	v := values[queryErrorKey]
	if len(v) != 1 {
		return nil
	}
	p := &dormousev1.Error{}
	if protojson.Unmarshal([]byte(v[0]), p) != nil {
		return nil
	}
	return ErrorFromProto(p)
}

// queryField tells whether a query key like a.b or a[k] names a field.
func queryField(d protoreflect.MessageDescriptor, key string) bool {
	key, _, _ = strings.Cut(key, "[")
	for _, part := range strings.Split(key, ".") {
		if d == nil {
			return false
		}
		f := d.Fields().ByJSONName(part)
		if f == nil {
			f = d.Fields().ByName(protoreflect.Name(part))
		}
		if f == nil {
			return false
		}
		d = f.Message()
	}
	return true
}
