// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package subject_test

import (
	"strings"
	"testing"

	"github.com/dormouse-run/dormouse/test/load/subject"
)

var first = subject.Answer{Token: "t1", PID: 7, Start: 12, Nonce: "abc", Heap: "h", HeapLen: 1 << 20, File: "f", FileLen: 4096, Offset: subject.Step, Frames: 1, Volume: "-"}

func next(change func(*subject.Answer)) subject.Answer {
	a := first
	a.Token, a.Offset, a.Frames = "t2", a.Offset+subject.Step, a.Frames+1
	if change != nil {
		change(&a)
	}
	return a
}

func TestParseGivesWhatWasSaid(t *testing.T) {
	got, err := subject.Parse(first.String())
	if err != nil || got != first {
		t.Fatalf("Parse(%q) = %+v, %v", first, got, err)
	}
	for _, line := range []string{"", "answer", "hello " + strings.Repeat("1 ", 11), strings.Replace(first.String(), " 7 ", " x ", 1), "failed no memory"} {
		if _, err := subject.Parse(line); err == nil {
			t.Errorf("Parse(%q) takes it", line)
		}
	}
	if _, err := subject.Parse("failed no memory"); err == nil || !strings.Contains(err.Error(), "no memory") {
		t.Errorf("a failure's own words are lost: %v", err)
	}
}

func TestL04ProofSeesWhatWasLost(t *testing.T) {
	if err := subject.First(first, subject.Want{Heap: 1 << 20, File: 4096}); err != nil {
		t.Error(err)
	}
	if err := subject.First(first, subject.Want{Heap: 1 << 20, File: 4096, Volume: true}); err == nil {
		t.Error("a volume that is not there passes")
	}
	if err := subject.Same(first, next(nil)); err != nil {
		t.Error(err)
	}
	for what, change := range map[string]func(*subject.Answer){
		"pid":           func(a *subject.Answer) { a.PID++ },
		"start time":    func(a *subject.Answer) { a.Start++ },
		"nonce":         func(a *subject.Answer) { a.Nonce = "other" },
		"heap digest":   func(a *subject.Answer) { a.Heap = "other" },
		"heap bytes":    func(a *subject.Answer) { a.HeapLen-- },
		"file digest":   func(a *subject.Answer) { a.File = "other" },
		"file bytes":    func(a *subject.Answer) { a.FileLen-- },
		"offset":        func(a *subject.Answer) { a.Offset = 0 },
		"frames":        func(a *subject.Answer) { a.Frames = 1 },
		"volume digest": func(a *subject.Answer) { a.Volume = "other" },
	} {
		if err := subject.Same(first, next(change)); err == nil || !strings.Contains(err.Error(), what) {
			t.Errorf("another %s: %v", what, err)
		}
	}
}
