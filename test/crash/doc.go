// Package crash holds the crash matrix: both daemons, built with fault points, are killed at each of them
// while an operation goes on through the public API, and started again. Then
//
//   - the same operation id gives the truth, and the operation's record says the same;
//   - the sandbox beside it, the survivor, answers as the process that it was;
//   - the doctor of the node finds nothing, and once the operation's objects are deleted the node has
//     exactly what it had before.
//
// What has no record meets the same: a node that came back with an older disk has what was deleted since, and a daemon dies while that is suspected, proven and
// removed (orphans_test.go).
//
// A deletion is also made to meet each step of a start, a restore and a checkpoint: the daemon stands still at the
// point until the deletion was accepted.
//
// go test runs a sample of the matrix. CRASH_ALL=1 (make crash-matrix) runs all of it, CRASH_SHARD=k/n one part of
// n, CRASH_SEED=n another sample or another interleaving of races_test.go, CRASH_POINT=regexp the points that match.
package crash
