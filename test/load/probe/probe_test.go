// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package probe

import "testing"

func TestLinesFindTheAnswer(t *testing.T) {
	l := &lines{token: "t2", found: make(chan struct{})}
	for _, part := range []string{"answer t1 1\nans", "wer t2", " 7 8", "\nanswer t3 9\n"} {
		if _, err := l.Write([]byte(part)); err != nil {
			t.Fatal(err)
		}
	}
	select {
	case <-l.found:
	default:
		t.Fatal("the answer was not found")
	}
	if line, ok := l.answer(); !ok || line != "answer t2 7 8" {
		t.Errorf("got %q", line)
	}
	l = &lines{token: "t2", found: make(chan struct{})}
	_, _ = l.Write([]byte("answer t22 1\nfailed no memory\n"))
	if line, ok := l.answer(); !ok || line != "failed no memory" {
		t.Errorf("a failure: %q", line)
	}
}
