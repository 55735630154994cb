// Package bulk moves bytes between agentd and a sandbox: files, archives and connections to ports
// inside. Each transfer has a helper process of its own in the sandbox (package bulkguest) and three pipes to
// it, so that a gigabyte delays no keystroke on the guest channel.
//
// # States of a transfer
//
//	start -> open -> ended        End or Failure was read, or Close was called, or ctx ended
//	               -> cut         the pipe ended first: the helper, or the sandbox, is gone
//
// A transfer holds one of its sandbox's and one of the node's places from before its helper is started until
// the helper has been seen to end; TOO_MANY where there is none.
//
// # Freezing
//
// Freeze comes before a sandbox is paused, Thaw after it runs again. In between no helper is started and
// nothing is sent to one; those that run stay as they are, frozen with the sandbox, and go on with
// it. A save reads what lies in a readable pipe, into the image and for the source alike, so bytes that a
// helper had not read are not lost, and a helper that waits for bytes has an empty pipe and misses
// no wake-up. What is restored has no helpers: the runtime ends what was started by Exec.
//
// # Invariants
//
//   - A helper ends when a pipe is closed at either end, so it cannot outlive the agentd that started it. One that
//     does not is killed.
//   - What a helper says is the sandbox's word: its lengths are bounded, its texts are checked, its reasons are of
//     a closed set, and what it says wrong ends its own transfer only.
//   - A transfer holds no more than one frame in memory, whatever it moves.
//   - Every goroutine ends with Close of the transfer, and Manager.Close waits for all.
package bulk
