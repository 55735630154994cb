package bulk

import (
	"context"
	"errors"
	"io"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/dormouse-run/dormouse/agentd/internal/bulkwire"
	"github.com/dormouse-run/dormouse/agentd/internal/runtime"
	"github.com/dormouse-run/dormouse/pkg/errs"
)

// maxComplaint is how much of a helper's standard error is kept, for the log.
const maxComplaint = 4 << 10

// Transfer is one helper at work. One goroutine may read from it while another writes.
type Transfer struct {
	m    *Manager
	uid  string
	proc runtime.Process
	pipe *pipes
	in   *bulkwire.Reader // from the helper

	sending sync.Mutex // held while a frame is sent
	out     *bulkwire.Writer

	mu    sync.Mutex
	cause error // why it was cut, nil while it is not
	stop  func() bool
	gone  chan struct{} // closed when the pipes are
	once  sync.Once

	rest  []byte // of a frame that Read did not take whole
	ended error  // io.EOF after End, or why it failed
	end   []byte // the End's text
}

func newTransfer(ctx context.Context, m *Manager, uid string, proc runtime.Process, p *pipes) *Transfer {
	t := &Transfer{m: m, uid: uid, proc: proc, pipe: p, in: bulkwire.NewReader(p.out), out: bulkwire.NewWriter(vectors{p.in}), gone: make(chan struct{})}
	stop := context.AfterFunc(ctx, func() { t.cut(errs.From(context.Cause(ctx))) })
	t.mu.Lock()
	t.stop = stop
	t.mu.Unlock()
	go t.attend()
	return t
}

// attend sees the helper end and then gives its place back.
func (t *Transfer) attend() {
	defer t.m.leave(t.uid, t)
	complaint := make(chan string, 1)
	go func() {
		said, _ := io.ReadAll(io.LimitReader(t.pipe.err, maxComplaint))
		complaint <- strings.ToValidUTF8(string(said), "?")
		_, _ = io.Copy(io.Discard, t.pipe.err)
	}()
	<-t.gone
	err := t.seeEnd()
	_ = t.pipe.err.Close()
	if said := <-complaint; said != "" || err != nil {
		t.m.opts.Log.Warn("a bulk helper did not end well", "sandbox", t.uid, "said", said, "error", err)
	}
}

// seeEnd waits for the helper's end, and sees to it when the helper takes too long. It does not wait when
// agentd is stopping: the pipes are closed.
func (t *Transfer) seeEnd() error {
	bound, cancel := context.WithTimeout(t.m.ctx, leaveTime)
	defer cancel()
	_, err := t.proc.Wait(bound)
	if bound.Err() != nil && t.m.ctx.Err() == nil {
		kill, cancel := context.WithTimeout(t.m.ctx, leaveTime)
		defer cancel()
		if err = t.proc.Kill(kill, syscall.SIGKILL); err == nil {
			_, err = t.proc.Wait(kill)
		}
	}
	if t.m.ctx.Err() != nil || errs.Has(err, errs.SandboxFailed) || errs.Has(err, errs.ShuttingDown) {
		return nil // it has ended with its sandbox, or will as soon as it runs
	}
	return err
}

// cut closes the pipes; the cause is what reading and writing then say.
func (t *Transfer) cut(cause error) {
	t.mu.Lock()
	if t.cause == nil {
		t.cause = cause
	}
	stop := t.stop
	t.mu.Unlock()
	t.once.Do(func() {
		if stop != nil {
			stop()
		}
		_ = t.pipe.in.Close()
		_ = t.pipe.out.Close()
		close(t.gone)
	})
}

var errClosed = errs.New(errs.CallCancelled, "the transfer was closed")

// Close ends the transfer, whatever state it is in. It does not wait for the helper.
func (t *Transfer) Close() error {
	t.cut(errClosed)
	return nil
}

// settled tells whether the helper has read what was sent.
func (t *Transfer) settled() bool {
	if !t.sending.TryLock() {
		return false
	}
	defer t.sending.Unlock()
	select {
	case <-t.gone:
		return true
	default:
		return unread(t.pipe.in) == 0
	}
}

// send sends one frame, when the sandbox is not frozen.
func (t *Transfer) send(write func() error) error {
	for {
		t.sending.Lock()
		thawed := t.m.frozen(t.uid)
		if thawed == nil {
			break
		}
		t.sending.Unlock()
		select {
		case <-thawed:
		case <-t.gone:
			return t.broken(io.ErrClosedPipe)
		}
	}
	defer t.sending.Unlock()
	if err := write(); err != nil {
		return t.broken(err)
	}
	return nil
}

// broken says why the transfer does not go on.
func (t *Transfer) broken(err error) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.cause != nil {
		return t.cause
	}
	if errors.Is(err, io.EOF) {
		// io.EOF is the end that the helper said, and nothing else.
		err = io.ErrUnexpectedEOF
	}
	if errors.Is(err, bulkwire.ErrGarbage) {
		return errs.Wrap(err, errs.TransferCut, "the bulk helper of sandbox %s said what it may not: %v", t.uid, err).With("uid", t.uid)
	}
	return errs.Wrap(err, errs.TransferCut, "the bulk helper of sandbox %s ended before the transfer; go on from the offset reached", t.uid).With("uid", t.uid)
}

// Garbled ends the transfer as one whose helper said what it may not, and gives the error.
func (t *Transfer) Garbled() error {
	t.ended = t.broken(bulkwire.ErrGarbage)
	return t.ended
}

// Write sends bytes. When it fails, what the helper said of it may still be read.
func (t *Transfer) Write(p []byte) (int, error) {
	n := 0
	for n < len(p) {
		part := p[n:min(len(p), n+bulkwire.MaxData)]
		if err := t.send(func() error { return t.out.WriteData(part) }); err != nil {
			return n, err
		}
		n += len(part)
	}
	return n, nil
}

// WriteParts sends size bytes in as few frames as they need. The parts are not copied.
func (t *Transfer) WriteParts(parts [][]byte, size int) error {
	for size > bulkwire.MaxData {
		var frame [][]byte
		frame, parts = split(parts, bulkwire.MaxData)
		if err := t.send(func() error { return t.out.WriteParts(frame, bulkwire.MaxData) }); err != nil {
			return err
		}
		size -= bulkwire.MaxData
	}
	return t.send(func() error { return t.out.WriteParts(parts, size) })
}

// split gives the first n bytes of the parts and what is left of them.
func split(parts [][]byte, n int) (first, rest [][]byte) {
	for i, part := range parts {
		if n < len(part) {
			first = append(slices.Clone(parts[:i]), part[:n])
			rest = append([][]byte{part[n:]}, parts[i+1:]...)
			return first, rest
		}
		n -= len(part)
	}
	return parts, nil
}

// CloseWrite says that no more bytes are sent.
func (t *Transfer) CloseWrite() error {
	return t.send(func() error { return t.out.WriteText(bulkwire.End, nil) })
}

// next reads a frame that is data or an answer; io.EOF after the helper's End.
func (t *Transfer) next() (bulkwire.Kind, []byte, error) {
	if t.ended != nil {
		return 0, nil, t.ended
	}
	kind, data, err := t.in.Next()
	switch {
	case err != nil:
		t.ended = t.broken(err)
	case kind == bulkwire.Failure:
		t.ended = t.refused(data)
	case kind == bulkwire.End:
		t.end, t.ended = append([]byte{}, data...), io.EOF
	case kind == bulkwire.Request:
		t.ended = t.broken(bulkwire.ErrGarbage)
	default:
		return kind, data, nil
	}
	return 0, nil, t.ended
}

// Answer reads an answer into v; io.EOF when the helper ended instead.
func (t *Transfer) Answer(v any) error {
	kind, data, err := t.next()
	if err == nil && kind != bulkwire.Answer {
		err = bulkwire.ErrGarbage
	}
	if err == nil && v != nil {
		err = bulkwire.Decode(data, v)
	}
	if errors.Is(err, bulkwire.ErrGarbage) {
		t.ended = t.broken(err)
		return t.ended
	}
	return err
}

// Next gives the next bytes, which are good until the next call; io.EOF at the end that the helper said.
func (t *Transfer) Next() ([]byte, error) {
	if len(t.rest) > 0 {
		data := t.rest
		t.rest = nil
		return data, nil
	}
	for {
		kind, data, err := t.next()
		if err != nil {
			return nil, err
		}
		if kind != bulkwire.Data {
			t.ended = t.broken(bulkwire.ErrGarbage)
			return nil, t.ended
		}
		if len(data) > 0 {
			return data, nil
		}
	}
}

// Swap gives the memory of which what Next gave is the beginning, and takes other for what comes next: at least
// bulkwire.MaxData and a header. It may be called once after each Next.
func (t *Transfer) Swap(other []byte) []byte { return t.in.Swap(other) }

// Read implements io.Reader; io.EOF only at the end that the helper said.
func (t *Transfer) Read(p []byte) (int, error) {
	data, err := t.Next()
	if err != nil {
		return 0, err
	}
	n := copy(p, data)
	t.rest = data[n:]
	return n, nil
}

// Result reads up to the helper's End and decodes it into v, which may be nil. Data before it is wrong.
func (t *Transfer) Result(v any) error {
	_, _, err := t.next()
	switch {
	case err == nil:
		t.ended = t.broken(bulkwire.ErrGarbage)
		return t.ended
	case !errors.Is(err, io.EOF):
		return err
	case v == nil:
		return nil
	}
	if err := bulkwire.Decode(t.end, v); err != nil {
		return t.broken(err)
	}
	return nil
}

// Verdict is why the helper gave up where it did, else err: a failed write says less than the helper does.
// It reads what the helper may still send for a bounded time.
func (t *Transfer) Verdict(err error) error {
	if err == nil {
		return nil
	}
	if deadlineErr := t.pipe.out.SetReadDeadline(time.Now().Add(leaveTime)); deadlineErr != nil {
		return err
	}
	for {
		_, _, said := t.next()
		var typed *errs.Error
		switch {
		case said == nil:
			continue
		case errors.As(said, &typed) && typed.Reason != errs.TransferCut && typed.Reason != errs.CallCancelled:
			return said
		}
		return err
	}
}

// allowed are the reasons that a helper may give.
var allowed = map[errs.Reason]bool{
	errs.FileNotFound: true, errs.NotADirectory: true, errs.IsADirectory: true, errs.NotAFile: true, errs.FileExists: true,
	errs.DirectoryNotEmpty: true, errs.CrossDevice: true, errs.FileBusy: true, errs.FileChanged: true, errs.FileDenied: true,
	errs.ReadOnlyPath: true, errs.SandboxDiskFull: true, errs.PortClosed: true, errs.InvalidField: true, errs.UnsafePath: true,
	errs.UserNotFound: true, errs.DigestMismatch: true, errs.TooMany: true, errs.NotSupported: true, errs.InternalError: true,
	errs.LimitExceeded: true,
}

// refused makes an error of what the helper said.
func (t *Transfer) refused(text []byte) error {
	var r bulkwire.Refusal
	if err := bulkwire.Decode(text, &r); err != nil {
		return t.broken(err)
	}
	reason := errs.Reason(r.Reason)
	if !allowed[reason] {
		return t.broken(bulkwire.ErrGarbage)
	}
	e := errs.New(reason, "%s", bounded(r.Message))
	if r.Key != "" {
		e = e.With(bounded(r.Key), bounded(r.Value))
	}
	return e
}

func bounded(s string) string {
	s = strings.ToValidUTF8(s, "?")
	return strings.ToValidUTF8(s[:min(len(s), 1200)], "")
}
