// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"runtime"
	"syscall"
	"testing"
	"time"
)

var sink []byte

// garbage leaves some in the heap: more than a trim is worth.
func garbage() {
	for range 64 {
		sink = make([]byte, 256<<10)
	}
	sink = nil
}

func TestTrims(t *testing.T) {
	freed := make(chan struct{})
	tr := newTrimmer()
	tr.settle, tr.quietFor = time.Nanosecond, time.Nanosecond
	tr.free = func() { freed <- struct{}{} }
	go tr.run() // for as long as the process, as it does in a sandbox
	await := func(what string, poke func()) {
		t.Helper()
		timeout := time.After(time.Minute)
		for {
			poke()
			select {
			case <-freed:
				return
			case <-timeout:
				t.Fatalf("no trim %s", what)
			case <-time.After(10 * time.Millisecond):
			}
		}
	}
	await("after the start", func() {})
	await("when asked", func() {
		garbage()
		if err := syscall.Kill(syscall.Getpid(), trimSignal); err != nil {
			t.Fatal(err)
		}
	})
	await("after a collection", func() {
		garbage()
		runtime.GC()
	})
}

func TestWorthATrim(t *testing.T) {
	const mib = 1 << 20
	for name, tc := range map[string]struct {
		objects, live, idle uint64
		want                bool
	}{
		"what a save leaves":      {8 * mib, 3 * mib, 0, true},
		"pages without objects":   {3 * mib, 3 * mib, 4 * mib, true},
		"trimmed a moment ago":    {3*mib + 1000, 3 * mib, 64 << 10, false},
		"little beside much":      {104 * mib, 100 * mib, 0, false},
		"fewer than at the count": {3 * mib, 4 * mib, 0, false},
	} {
		t.Run(name, func(t *testing.T) {
			if got := worthwhile(tc.objects, tc.live, tc.idle); got != tc.want {
				t.Errorf("worthwhile = %v", got)
			}
		})
	}
}
