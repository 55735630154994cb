// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

// Package subject is what the load harness asks of its subjects, and how it judges their answers.
//
// A subject is one process (test/cmd/loadsubject) with random bytes on its heap and in a private file, a file that it holds
// open at an offset, and a TCP stream to itself that carries frames. It reads questions from its standard input, one token to a
// line, and writes one line for each. Between two questions it does nothing at all: it has no timer, and no other process.
//
// What a copy of the program that was started anew could not know is the nonce, the heap and how far the stream and the offset
// have come; what a subject that lost something could not know is the rest.
package subject

import (
	"fmt"
	"strconv"
	"strings"
)

// Path is where images carry the program.
const Path = "/bin/loadsubject"

// Step is how far each answer moves the offset of the file that the subject holds open.
const Step = 128

// Answer is what a subject says of itself.
type Answer struct {
	Token   string // of the question
	PID     int
	Start   uint64 // in ticks since the sandbox booted
	Nonce   string // made when the process began
	Heap    string // digest of the heap, of HeapLen bytes
	HeapLen int64
	File    string // digest of the private file, of FileLen bytes
	FileLen int64
	Offset  int64  // of the file that is held open
	Frames  uint64 // that went through the stream
	Volume  string // digest of what it wrote to its volume; "-" without one
}

// String is the line that a subject writes.
func (a Answer) String() string {
	return strings.Join([]string{"answer", a.Token, strconv.Itoa(a.PID), strconv.FormatUint(a.Start, 10), a.Nonce, a.Heap, strconv.FormatInt(a.HeapLen, 10),
		a.File, strconv.FormatInt(a.FileLen, 10), strconv.FormatInt(a.Offset, 10), strconv.FormatUint(a.Frames, 10), a.Volume}, " ")
}

// Parse reads a line. What a subject could not do is an error, in its own words.
func Parse(line string) (a Answer, err error) {
	if text, failed := strings.CutPrefix(line, "failed "); failed {
		return a, fmt.Errorf("the subject failed: %s", text)
	}
	f := strings.Fields(line)
	if len(f) != 12 || f[0] != "answer" {
		return a, fmt.Errorf("the subject said %.200q, which is no answer", line)
	}
	a = Answer{Token: f[1], Nonce: f[4], Heap: f[5], File: f[7], Volume: f[11]}
	numbers := []struct {
		text string
		into any
	}{{f[2], &a.PID}, {f[3], &a.Start}, {f[6], &a.HeapLen}, {f[8], &a.FileLen}, {f[9], &a.Offset}, {f[10], &a.Frames}}
	for _, n := range numbers {
		switch into := n.into.(type) {
		case *int:
			*into, err = strconv.Atoi(n.text)
		case *int64:
			*into, err = strconv.ParseInt(n.text, 10, 64)
		case *uint64:
			*into, err = strconv.ParseUint(n.text, 10, 64)
		}
		if err != nil {
			return a, fmt.Errorf("the subject said %.200q: %w", line, err)
		}
	}
	return a, nil
}

// Want is what the harness asked for: how large the parts are, and whether there is a volume.
type Want struct {
	Heap, File int64
	Volume     bool
}

// First judges the first answer of a subject.
func First(a Answer, w Want) error {
	wrong := unlike{}
	wrong.check("heap bytes", w.Heap, a.HeapLen)
	wrong.check("file bytes", w.File, a.FileLen)
	wrong.check("volume", w.Volume, a.Volume != "-")
	wrong.check("offset", int64(Step), a.Offset)
	wrong.check("frames", uint64(1), a.Frames)
	return wrong.err()
}

// Same judges an answer by the one before it: it must come from the same process, which lost nothing.
func Same(before, after Answer) error {
	wrong := unlike{}
	wrong.check("pid", before.PID, after.PID)
	wrong.check("start time", before.Start, after.Start)
	wrong.check("nonce", before.Nonce, after.Nonce)
	wrong.check("heap digest", before.Heap, after.Heap)
	wrong.check("heap bytes", before.HeapLen, after.HeapLen)
	wrong.check("file digest", before.File, after.File)
	wrong.check("file bytes", before.FileLen, after.FileLen)
	wrong.check("offset", before.Offset+Step, after.Offset)
	wrong.check("frames", before.Frames+1, after.Frames)
	wrong.check("volume digest", before.Volume, after.Volume)
	return wrong.err()
}

// unlike gathers what is not as it should be.
type unlike []string

func (u *unlike) check(what string, want, got any) {
	if want != got {
		*u = append(*u, fmt.Sprintf("%s: want %v, got %v", what, want, got))
	}
}

func (u unlike) err() error {
	if len(u) == 0 {
		return nil
	}
	return fmt.Errorf("not the original process, or it lost something: %s", strings.Join(u, "; "))
}
