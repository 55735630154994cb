//go:build faults && wallclock

package fault

import (
	"fmt"
	"os"
	"syscall"
	"unsafe"
)

// The runtime asks for the time through this pointer to a function of the kernel's, in C's convention. The linker
// lets another package at it only with -checklinkname=0.
//
//go:linkname askKernel runtime.vdsoClockgettimeSym
var askKernel uintptr

// movedClock, in assembly, is the address of a function that asks kernel and adds ahead to the wall clock.
var movedClock uintptr

var (
	kernel uintptr // what askKernel was
	ahead  *int64  // seconds, in a page that is shared with the test
)

// mapClock has the process's wall clock follow a file, which a test writes (test/clock).
func mapClock(file string) {
	if err := mapAhead(file); err != nil {
		panic(fmt.Sprintf("map the clock: %v", err))
	}
	if askKernel == 0 {
		panic("the kernel gives no clock without a system call, so that the wall clock cannot be moved")
	}
	if kernel == 0 {
		kernel = askKernel
		askKernel = movedClock
	}
}

func mapAhead(file string) error {
	f, err := os.OpenFile(file, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	const size = int(unsafe.Sizeof(*ahead))
	if err := f.Truncate(int64(size)); err != nil {
		return err
	}
	page, err := syscall.Mmap(int(f.Fd()), 0, size, syscall.PROT_READ, syscall.MAP_SHARED)
	if err != nil {
		return err
	}
	ahead = (*int64)(unsafe.Pointer(&page[0])) // for as long as the process lives
	return nil
}
