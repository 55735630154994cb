// Package clock moves the wall clock of processes that a test starts, and of nothing else: the machine's own is
// not touched, and no process's monotonic clock is, as when a real clock is set.
//
// How far a process's clock is from the machine's is in a file of eight bytes, seconds, that the process has mapped, so that
// a step is there at once, in the middle of whatever goes on:
//
//   - The daemons are built with BuildFlags. Package fault then puts itself between the Go runtime and the kernel's
//     clock, and adds what the file says that is beside its own, "fault.clock".
//   - A C program (Redis) is started with the environment that BuildShim gives: a library that is loaded first and
//     adds what the file says to every answer of the C library's clocks.
//
// What the kernel itself stamps (files, packets, the guests' clocks) stays with the machine's clock.
package clock
