// Package guestinit is guest init: PID 1 of a sandbox, which starts every process in it, keeps
// what they write and how they end, and answers agentd over a pair of FIFOs.
//
// # Shape
//
// One goroutine, locked to the process's first thread, owns all state and runs an epoll loop over
// the FIFOs and the pipes of the processes. A second one waits for children that have ended and
// only says so; the loop itself reaps, so that a pid is never signalled, and an exit never
// looked up, after the pid was free for another process. Programs that close their outputs are looked for
// at once, before the second goroutine says so. There are no timers: the loop's
// own wait ends at the nearest process timeout. What a start does is counted in system calls (docs/adr/0045). Nothing here imports os, fmt, time or net; an idle
// init must be small, for there are thousands.
//
// # States of the channel
//
//	closed    --Hello-->            open      nothing is written before the first hello
//	open      --Quiesce-->          quiesced  everything read, everything flushed, Quiesced is the last frame
//	quiesced  --Resume or Hello-->  open
//	open      --Hello-->            open      calls and streams of the earlier hello are dropped
//
// # Invariants
//
//   - A process never blocks for ever because nobody reads it: rings overwrite their oldest bytes,
//     and a reader is told how many it missed.
//     Only a reader that asks to be waited for is, and only while it gets on (holdLimit).
//   - A frame of another generation or key than the channel's has no effect.
//   - What leaves is bounded: replies wait in one buffer, and while it is long no request is
//     read; output is made into frames only when that buffer is empty.
//   - An exit is announced after everything the process itself wrote is in its rings.
//   - A process's input has one writer, the last that opened it; init remembers which, so that one that
//     comes back learns whether what it sent is still all that was sent.
//   - A process id is started at most once. Its exit is kept until Forget or until many later
//     processes have ended.
//
// # Terminals
//
// A process that asks for a terminal leads a session on one. Init holds its master twice, for what
// comes out, which is the process's stdout, and for what is typed. The end of the input is typed
// too: a terminal cannot be closed from one side.
//
// # Checkpoint and restore
//
// Memory, processes and rings are in the image. After a restore the FIFOs are others; init needs
// not know: the next Hello brings a higher generation and perhaps another sandbox uid.
package guestinit
