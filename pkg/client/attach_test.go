package client

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"testing"

	"google.golang.org/grpc"

	"github.com/dormouse-run/dormouse/pkg/errs"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

type attachServer = grpc.BidiStreamingServer[dormousev1.AttachProcessRequest, dormousev1.AttachProcessResponse]

func opened(ss attachServer, input uint64) error {
	return ss.Send(&dormousev1.AttachProcessResponse{Event: &dormousev1.AttachProcessResponse_Opened{
		Opened: &dormousev1.AttachOpened{Process: &dormousev1.Process{}, InputOffset: input}}})
}

func exited(ss attachServer, code int32) error {
	return ss.Send(&dormousev1.AttachProcessResponse{Event: &dormousev1.AttachProcessResponse_Exit{Exit: &dormousev1.ProcessExit{Code: code}}})
}

// echo is a process that says what it reads, at the far end of streams that break.
type echo struct {
	t       *testing.T
	taken   []byte
	ended   bool
	writer  string
	cuts    int
	resizes int
}

var errCut = errs.New(errs.NodeAway, "cut")

func (e *echo) serve(o *dormousev1.AttachOpen, ss attachServer) error {
	if o.GetResume() != (e.writer != "") || e.writer != "" && o.GetWriter() != e.writer {
		e.t.Errorf("opened %v, the writer is %q", o, e.writer)
	}
	e.writer = o.GetWriter()
	if err := opened(ss, uint64(len(e.taken))); err != nil {
		return err
	}
	// All that was said since the reader's offset.
	if err := e.say(ss, int(o.GetStdoutOffset())); err != nil {
		return err
	}
	next := uint64(len(e.taken))
	for !e.ended {
		m, err := ss.Recv()
		if err != nil {
			return err
		}
		if m.GetResize() != nil {
			e.resizes++
			continue
		}
		in := m.GetInput()
		if in.GetOffset() != next {
			e.t.Errorf("input at %d, want %d", in.GetOffset(), next)
		}
		from := len(e.taken)
		cut := e.cuts > 0 && (from == 0 || rand.IntN(2) == 0)
		data := in.GetData()
		if cut {
			e.cuts--
			data = data[:rand.IntN(len(data)+1)] // the rest, and the acknowledgement, are lost
		}
		e.taken = append(e.taken, data...)
		next += uint64(len(data))
		if cut {
			return errCut
		}
		e.ended = in.GetEof()
		if err := e.say(ss, from); err != nil {
			return err
		}
		ack := &dormousev1.InputState{AcceptedOffset: next, Closed: e.ended}
		if err := ss.Send(&dormousev1.AttachProcessResponse{Event: &dormousev1.AttachProcessResponse_Input{Input: ack}}); err != nil {
			return err
		}
	}
	return exited(ss, 4)
}

func (e *echo) say(ss attachServer, from int) error {
	return ss.Send(&dormousev1.AttachProcessResponse{Event: &dormousev1.AttachProcessResponse_Output{Output: &dormousev1.OutputChunk{
		Stream: dormousev1.OutputStream_OUTPUT_STREAM_STDOUT, Offset: uint64(from), Data: e.taken[from:]}}})
}

// Over streams that break at any place, each byte of input arrives once and each byte of output is written once.
func TestAttachOverCuts(t *testing.T) {
	s, c := local(t)
	e := &echo{t: t, cuts: 8}
	s.attach = e.serve
	var out bytes.Buffer
	a, err := c.Sandbox("u").Process("p").Attach(t.Context(), AttachOptions{Output: &Output{Stdout: &out}, Input: true})
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	a.Resize(10, 20)
	var want bytes.Buffer
	for i := range 20000 {
		fmt.Fprintf(&want, "line %d\n", i)
	}
	for rest := want.Bytes(); len(rest) > 0; {
		n := min(len(rest), 1+rand.IntN(2000))
		if _, err := a.Write(rest[:n]); err != nil {
			t.Fatal(err)
		}
		rest = rest[n:]
	}
	a.CloseInput()
	if err := a.Flush(t.Context()); err != nil {
		t.Error(err)
	}
	exit, err := a.Wait()
	if err != nil || exit.GetCode() != 4 {
		t.Fatalf("%v %v", exit, err)
	}
	if !bytes.Equal(e.taken, want.Bytes()) || !bytes.Equal(out.Bytes(), want.Bytes()) {
		t.Errorf("%d bytes of input and %d of output, want %d", len(e.taken), out.Len(), want.Len())
	}
	if e.resizes == 0 || s.count("Attach") < 2 {
		t.Errorf("%d resizes over %d streams", e.resizes, s.count("Attach"))
	}
	if _, err := a.Write([]byte("x")); !errs.Has(err, errs.WrongPhase) {
		t.Errorf("input after the end: %v", err)
	}
}

// What no other attempt would change ends it, with the reason; the first stream's does so at once.
func TestAttachEnds(t *testing.T) {
	s, c := local(t)
	p := c.Sandbox("u").Process("p")
	s.answers = map[string][]error{"Attach": {errs.New(errs.ProcessNotFound, "none")}}
	if _, err := p.Attach(t.Context(), AttachOptions{}); !errs.Has(err, errs.ProcessNotFound) {
		t.Errorf("%v", err)
	}
	streams := 0
	s.attach = func(_ *dormousev1.AttachOpen, ss attachServer) error {
		if streams++; streams > 1 {
			return errs.New(errs.SandboxMoved, "gone").With("new_uid", "v")
		}
		if err := opened(ss, 0); err != nil {
			return err
		}
		return errCut
	}
	a, err := p.Attach(t.Context(), AttachOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	_, err = a.Wait()
	var e *errs.Error
	if !errors.As(err, &e) || e.Reason != errs.SandboxMoved || e.Details["new_uid"] != "v" {
		t.Errorf("%v", err)
	}
	if _, err := a.Write([]byte("x")); !errs.Has(err, errs.InvalidField) {
		t.Errorf("input that was not asked for: %v", err)
	}

	// Another wrote meanwhile: what the process has cannot be this one's.
	streams = 0
	s.attach = func(o *dormousev1.AttachOpen, ss attachServer) error {
		streams++
		if err := opened(ss, uint64(streams*100)); err != nil {
			return err
		}
		return errCut
	}
	b, err := p.Attach(t.Context(), AttachOptions{Input: true})
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	if _, err := b.Wait(); !errs.Has(err, errs.InputTaken) {
		t.Errorf("%v", err)
	}
}

// Closing, a context that ends and an output that fails end it, and nothing is left.
func TestAttachIsLeft(t *testing.T) {
	s, c := local(t)
	p := c.Sandbox("u").Process("p")
	s.attach = func(_ *dormousev1.AttachOpen, ss attachServer) error {
		if err := opened(ss, 0); err != nil {
			return err
		}
		if err := (&echo{taken: []byte("abc")}).say(ss, 0); err != nil {
			return err
		}
		<-ss.Context().Done()
		return nil
	}
	a, err := p.Attach(t.Context(), AttachOptions{Input: true})
	if err != nil {
		t.Fatal(err)
	}
	fed := make(chan struct{})
	r, w := io.Pipe()
	go func() {
		defer close(fed)
		a.Feed(r)
	}()
	a.Close()
	_ = w.Close()
	<-fed
	ctx, cancel := context.WithCancel(t.Context())
	if a, err = p.Attach(ctx, AttachOptions{}); err != nil {
		t.Fatal(err)
	}
	cancel()
	if _, err := a.Wait(); err == nil {
		t.Error("it has ended well")
	}
	broken, pw := io.Pipe()
	_ = broken.Close()
	if a, err = p.Attach(t.Context(), AttachOptions{Output: &Output{Stdout: pw}}); err != nil {
		t.Fatal(err)
	}
	if _, err := a.Wait(); !errors.Is(err, io.ErrClosedPipe) {
		t.Errorf("%v", err)
	}
}
