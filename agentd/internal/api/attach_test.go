package api

import (
	"context"
	"testing"

	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/uid"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

func input(offset uint64, size int, eof bool) *dormousev1.InputChunk {
	return &dormousev1.InputChunk{Offset: offset, Data: make([]byte, size), Eof: eof}
}

// Input is bounded and goes on where it ended; what does not is refused.
func TestAttachInputBounds(t *testing.T) {
	fresh := func() *attachment {
		return &attachment{open: &dormousev1.AttachOpen{Input: true}, input: make(chan *dormousev1.InputChunk, maxInputChunks), end: 100}
	}
	a := fresh()
	for i, c := range []*dormousev1.InputChunk{input(100, 10, false), input(110, 0, false), input(110, maxInputChunk, true)} {
		if err := a.queue(c); err != nil {
			t.Fatalf("piece %d: %v", i, err)
		}
	}
	wantReason(t, a.queue(input(110+maxInputChunk, 1, false)), errs.InvalidField) // after the end
	wantReason(t, fresh().queue(input(99, 1, false)), errs.InvalidField)
	wantReason(t, fresh().queue(input(101, 1, false)), errs.InvalidField)
	wantReason(t, fresh().queue(input(100, maxInputChunk+1, false)), errs.LimitExceeded)
	without := fresh()
	without.open.Input = false
	wantReason(t, without.queue(input(100, 1, false)), errs.InvalidField)

	full := fresh()
	at := uint64(100)
	for range maxInputAhead / maxInputChunk {
		if err := full.queue(input(at, maxInputChunk, false)); err != nil {
			t.Fatal(err)
		}
		at += maxInputChunk
	}
	wantReason(t, full.queue(input(at, 1, false)), errs.LimitExceeded)
	many := fresh()
	for range maxInputChunks {
		if err := many.queue(input(100, 0, false)); err != nil {
			t.Fatal(err)
		}
	}
	wantReason(t, many.queue(input(100, 0, false)), errs.LimitExceeded)
}

func TestAttachOpenIsChecked(t *testing.T) {
	good := func() *dormousev1.AttachOpen {
		return &dormousev1.AttachOpen{SandboxUid: uid.New(), ProcessId: "p", Input: true, Writer: "w"}
	}
	for name, change := range map[string]func(*dormousev1.AttachOpen){
		"sandbox":      func(o *dormousev1.AttachOpen) { o.SandboxUid = "x" },
		"no process":   func(o *dormousev1.AttachOpen) { o.ProcessId = "" },
		"process":      func(o *dormousev1.AttachOpen) { o.ProcessId = "a b" },
		"no writer":    func(o *dormousev1.AttachOpen) { o.Writer = "" },
		"a bad writer": func(o *dormousev1.AttachOpen) { o.Writer = "\n" },
	} {
		o := good()
		change(o)
		err := (&attachment{open: o}).check()
		if errs.ReasonOf(err) != errs.InvalidField {
			t.Errorf("%s: %v", name, err)
		}
	}
	wantReason(t, (&attachment{}).check(), errs.InvalidField)
	a := &attachment{open: good()}
	if err := a.check(); err != nil || a.writer == 0 {
		t.Errorf("%v, writer %d", err, a.writer)
	}
}

// The newest writer ends the one before it, one that comes back ends its own old stream only.
func TestWritersEndEachOther(t *testing.T) {
	var w writers
	take := func(writer uint64, resume bool) (context.Context, func(), error) {
		ctx, cancel := context.WithCancelCause(context.Background())
		release, err := w.claim("s", "p", writer, resume, cancel)
		return ctx, release, err
	}
	first, releaseFirst, err := take(1, false)
	if err != nil {
		t.Fatal(err)
	}
	again, releaseAgain, err := take(1, true)
	if err != nil || !errs.Has(context.Cause(first), errs.InputTaken) {
		t.Fatalf("%v, the old stream: %v", err, context.Cause(first))
	}
	releaseFirst() // of a stream that is the writer no more: nothing happens
	if _, _, err := take(2, true); !errs.Has(err, errs.InputTaken) || again.Err() != nil {
		t.Fatalf("another goes on: %v, %v", err, again.Err())
	}
	second, _, err := take(2, false)
	if err != nil || again.Err() == nil {
		t.Fatalf("%v, %v", err, again.Err())
	}
	releaseAgain()
	w.displace("s", "other")
	if second.Err() != nil {
		t.Fatal("another process's writer was ended")
	}
	w.displace("s", "p")
	if !errs.Has(context.Cause(second), errs.InputTaken) {
		t.Fatal(context.Cause(second))
	}
}
