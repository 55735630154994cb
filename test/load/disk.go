// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package load

import "fmt"

// beside is what a snapshot has besides the subject's heap and file: the sentry's own state and the program's memory. 1.7 MiB were seen.
const beside = 3 * mib

// DiskPeak is how many bytes a run of the plan has on the disks of its nodes at its peak, all together. A subject has its file in its private layer and in its
// volume. Its snapshot is replaced in each round, and the one before is deleted when the new one is there: with more than one round there may be two of each. The
// floor of the disk has the images of as many bare sandboxes, and a file of dd's as large as all of them.
func (p Plan) DiskPeak() int64 {
	if p.Simulated {
		return 0
	}
	heap, file, kept := int64(p.HeapMiB)*mib, int64(p.FileMiB)*mib, int64(1)
	if p.Rounds > 1 || p.Floor == "disk" {
		kept = 2
	}
	each := kept*(heap+file+beside) + file
	if p.Volume {
		each += file
	}
	return int64(p.Subjects) * each
}

// CheckDisk tells whether what is free on the disk is enough for the run, besides what nodes leave free there. The error is a *DiskShort.
func (p Plan) CheckDisk(free, reserved int64) error {
	if needs := p.DiskPeak(); needs > 0 && needs+reserved > free {
		return &DiskShort{Subjects: p.Subjects, Needs: needs, Reserved: reserved, Free: free}
	}
	return nil
}

// DiskShort is a plan that would fill the disk. All but the subjects are bytes.
type DiskShort struct {
	Subjects              int
	Needs, Reserved, Free int64
}

func (e *DiskShort) Error() string {
	return fmt.Sprintf("the plan writes up to %d MiB at its peak (%d subjects), and the nodes leave %d MiB free; the disk has %d MiB. Make room, or take fewer or smaller subjects (--subjects, --heap, --file), or one round (--rounds 1)",
		e.Needs/mib, e.Subjects, e.Reserved/mib, e.Free/mib)
}
