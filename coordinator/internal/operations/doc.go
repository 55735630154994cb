// Package operations is the coordinator's engine: every mutation that a client asks for is an
// operation, recorded in the catalog and driven to its end.
//
// # States
//
// An operation is Pending from the commit that accepts it, and ends Succeeded or Failed. It never
// leaves those two. Its record holds the digest of its request, the request without secrets, the
// plan (the uids of all that it will make, chosen before anything is made), and at the end the
// result or the error.
//
// # Invariants
//
//   - The record is made in the same commit as the first record of every object in its plan. So an
//     operation that exists owns what it will touch, and one that was refused left nothing.
//   - That commit carries the operation id and the digest as its receipt: the same id and request join
//     the operation or get its stored result; the same id with another request is refused with
//     OPERATION_BODY_MISMATCH. A refusal at the door leaves no receipt and may be asked again.
//   - What comes next is decided by the phases of the objects alone, never by what a goroutine
//     remembers. Every step commits what it is about to do, does it, and commits what was observed.
//   - Commands to a node have the id <operation>/<step>:<object>, the same for every retry, so that
//     a node that did it already answers with what it did.
//   - An error of a node is final only if the node said so. A lost reply, a node that is away and a
//     fenced session are retried with a growing delay; they never become "absent".
//   - Before an operation undoes what it made, its error is in its record: a restart goes on undoing.
//   - No node is called and no process is waited for inside a commit.
//
// # Crash points
//
// After the accepting commit: the next leader loads all Pending operations and drives them.
// That commit places a new sandbox too, where a node fits at once, so that it begins in Starting; the
// ledger of what is placed is made anew from the records by each term.
// Between a commit and the command it announces: the phase says so (Starting, Preparing, Creating,
// Deleting), and the command is sent, again or for the first time.
// Between a command's effect and the commit that records it: the command is sent again under its
// id, and answers as before.
// While undoing: the recorded error sends the next leader straight back to undoing.
// A secret environment lives in memory only. An operation that needs one and was resumed without
// it fails with SECRETS_LOST, unless its sandbox runs already.
//
// # Deletion and what it overtakes
//
// DeleteSandbox commits the phase Deleting first. A start or restore in flight is then cancelled
// and waited for before the node is told to delete, and its operation fails with WRONG_PHASE. A
// checkpoint in flight keeps the record until it ends, by its reference to the source.
//
// # Turns
//
// Deletions of snapshots and volumes wait for a turn at their node before anything is read or asked for them: a few at a
// time, the tenants one after the other (turns). A turn is not recorded; the line is made anew by each term from what is Pending. They fill no
// more than a half of what may be pending, those of one tenant a quarter. Why, and what a crash leaves: docs/adr/0044-deletion.md.
//
// # Order
//
// A first artefact (a snapshot with its references to volumes) and whatever is published of a volume
// (attachment, deletion) are prepared and committed in one order of locks, outermost first:
//
//  1. the flight of a sandbox that is being started; deletion waits for it, it for no deletion;
//  2. the commit queue: all that decides is read in the build function of the commit that it decides;
//  3. the store's script, which checks each new reference (its target lives, is not sealed and not
//     attached otherwise) and each absence of references, and maintains both sides in one step;
//  4. the engine's mutex, which guards maps and is held over no call, commit or wait.
//
// So whichever of two publications commits first wins, and the other is refused by the script,
// whatever it read. Waits between operations go one way too: the deletion of a sandbox waits for
// a checkpoint that refers to it, the removal of a copy's volume for that of the copy; a checkpoint and a
// deletion of a snapshot or volume wait for no other operation. Therefore none waits in a circle.
package operations
