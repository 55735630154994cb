// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package load

import (
	"errors"
	"strings"
	"testing"
)

func TestDiskPeak(t *testing.T) {
	for name, c := range map[string]struct {
		plan Plan
		want int64
	}{
		"one round":       {Plan{Subjects: 10, HeapMiB: 64, FileMiB: 32, Rounds: 1}, 10 * (64 + 32 + 3 + 32)},
		"two rounds":      {Plan{Subjects: 10, HeapMiB: 64, FileMiB: 32, Rounds: 2}, 10 * (2*(64+32+3) + 32)},
		"many rounds":     {Plan{Subjects: 10, HeapMiB: 64, FileMiB: 32, Rounds: 50}, 10 * (2*(64+32+3) + 32)},
		"a volume":        {Plan{Subjects: 10, HeapMiB: 64, FileMiB: 32, Rounds: 1, Volume: true}, 10 * (64 + 32 + 3 + 2*32)},
		"beside the disk": {Plan{Subjects: 10, HeapMiB: 64, FileMiB: 32, Rounds: 1, Floor: "disk"}, 10 * (2*(64+32+3) + 32)},
		"no disk at all":  {Plan{Subjects: 10, HeapMiB: 64, FileMiB: 32, Rounds: 2, Simulated: true}, 0},
		"the largest":     {Plan{Subjects: 4096, HeapMiB: 4096, FileMiB: 4096, Rounds: 2, Volume: true}, 4096 * (2*(4096+4096+3) + 2*4096)},
	} {
		if got := c.plan.DiskPeak(); got != c.want*mib {
			t.Errorf("%s: %d MiB, want %d", name, got/mib, c.want)
		}
	}
}

func TestAPlanThatFillsTheDiskIsRefused(t *testing.T) {
	p := Plan{Subjects: 10, HeapMiB: 64, FileMiB: 32, Rounds: 1} // 1,310 MiB
	if err := p.CheckDisk(2334*mib, 1024*mib); err != nil {
		t.Error(err)
	}
	err := p.CheckDisk(2333*mib, 1024*mib)
	var short *DiskShort
	if !errors.As(err, &short) || *short != (DiskShort{Subjects: 10, Needs: 1310 * mib, Reserved: 1024 * mib, Free: 2333 * mib}) {
		t.Fatalf("%#v", err)
	}
	for _, number := range []string{"1310 MiB", "10 subjects", "1024 MiB", "2333 MiB"} {
		if !strings.Contains(err.Error(), number) {
			t.Errorf("%q does not tell %s", err, number)
		}
	}
	p.Simulated = true
	if err := p.CheckDisk(0, 1024*mib); err != nil {
		t.Errorf("nothing is written to the disk: %v", err)
	}
}
