// Package runner runs the sandboxes of a node: one goroutine owns one sandbox, and everything that
// changes it goes through that goroutine's mailbox.
//
// # States
//
// The record (package nodestate) has an intent and a phase. The intent is written before the first
// effect and says what a later agentd has to do with what it finds:
//
//	intent start, restore   phase Starting           being made: undone after a crash
//	intent keep             phase Running            attached to again after a crash
//	intent keep             phase Paused             stands still, and stays so over a restart
//	intent keep             phase Paused, capture    about to stand still: paused again after a crash
//	intent keep             phase Resuming           about to run: resumed after a crash
//	intent keep             phase Resuming, claim not told   about to be given away: resumed after a crash, and its guest told who it is
//	intent keep             phase Hibernating        being captured: once the artefact is in place, Hibernated; before, as it was
//	intent keep             phase Hibernated         in its artefact; what else there is of it is let go
//	intent keep             phase Resuming, and hibernation not spent   being restored: Hibernated again after a crash
//	intent keep             phase Running, and hibernation spent        the artefact is to be removed
//	intent keep             phase Stopped, Failed    its processes are gone; kept until Delete
//	intent delete           phase Deleting           being removed: finished after a crash
//	no record               -                        nothing of it is on the node
//
// # Steps
//
// Start and Restore are one ordered list of steps (steps.go), each with what it does and how it is
// undone. Everything that a step makes is named by the sandbox's uid, so that undoing needs no more
// than the record of the intent: undo runs every step from the last to the first, whether it had been
// reached or not, also after a crash, and Delete is exactly that. Steps are undone even if another
// failed, but for those that would take something (its folder, volumes, image) from a runtime that
// may still be there.
//
// # Invariants
//
//   - Intent before effect; Running is durable, and the runtime's handle with it, before it is reported.
//     A crash before that undoes what was begun, by the uid alone: the handle is for a sandbox that is kept.
//   - A record is removed only after absence was observed: the driver knows the id no more, its control
//     group and folder are gone, its volumes are detached and its image is released.
//   - A teardown that failed leaves the record with intent delete, and is tried again: by the owner
//     after a pause, by the next Delete, and by the next agentd.
//   - Whatever happens in a capture, the sandbox runs afterwards: the record says that a capture is
//     going on, and who finds that says Resume.
//   - Secret environment is in memory only, from the call to guest init. A start that a crash
//     interrupted is therefore undone, never continued.
//   - Restore never starts a process: not init, not the command.
//   - Close ends goroutines, no sandbox.
//
// # Calls and their ends
//
// A call's work goes on when its caller goes away, within the caller's deadline (or ten minutes where
// there is none): the command's result is kept, and asking again with the same command id gives it. Close
// cancels it, and what was being made is then undone in a bounded time.
//
// # Turns
//
// Few are made, captured and ended at a time (gate.go): who waits has its intent recorded and nothing else done. What a capture leaves in a
// runtime's memory is given back when nobody has a turn, or when the memory is needed (trims.go).
//
// # Crash points
//
// Each step has a fault point before and after it ("start.image.before", ...), as have capture, delete
// and the writes of records. A test stops the owner dead there and gives records and driver to
// a new runner.
package runner
