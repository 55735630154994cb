// Package fault names the points at which a daemon that is built for tests (build tag faults) can be killed,
// as if from outside. In a release build there is nothing of it: At is empty and Open does nothing.
//
// A point lies before or after a step that changes what outlives the process: a file, a record, a mount, a
// control group, a process, a commit. Its name is area.step.before or area.step.after, and is in the list of
// its daemon, Agentd or Coordinator; test/crash checks that lists, code and matrix say the same.
//
// A test writes the file that the daemon was given by Open. Each line is a point, and the first is armed:
//
//	start.runtime.after      the process kills itself the next time it gets there
//	commit.send.after#3      the third time
//	start.runtime.after!     the goroutine that gets there stays there; the process lives
//
// The line is removed durably before the kill. So what follows it meets the next process, and a process that
// finds no file goes on as if there were no points.
//
// In a build with the tag wallclock too (amd64, linked with -checklinkname=0), the file "fault.clock" beside moves the
// process's wall clock: see test/clock.
//
// A goroutine that stays makes a file beside, with ".held" at its end, that holds the point's name, and goes on
// once that file is gone. The others pass their points meanwhile.
package fault
