// Package journal keeps on each node a copy of what the catalog records of it, so that a catalog whose
// store lost what it had acknowledged can be rebuilt from the nodes.
//
// # States of a feed
//
// There is one feed for each session of a node.
//
//	whole   all that concerns the node is sent, page by page, after the traces of what was deleted in the last TraceSpan
//	        commits; the node keeps what it had until the end
//	tail    what changes is sent, some time after it was committed: at most Options.Pause while the store answers
//
// A feed begins with the tail if the node's journal is of this catalog's history and the change log reaches back
// to it, else with the whole. A tail that finds a gap in the change log begins the whole again.
//
// # Invariants
//
//   - An entry is sent with a point in the catalog's history that has it. A node never has an entry without one. The point is of after the reading:
//     what the log says was deleted in between is sent as deleted, so that nothing is said to live at a point at which it did not.
//   - A node's journal at a point, once a whole was sent, has every record that concerned it then. What was
//     committed since may be missing; what the journal has and the catalog has not was lost or is deleted
//     since, and the points tell which.
//   - What is sent was read from a catalog that is shown, after the reading, to have the point: never from one that came back older.
//   - One message is on its way at a time; the next one is sent after the node made the last one durable.
//   - Nothing here delays a commit.
//   - What concerns no node is in no node's journal. The mirror keeps it in memory (Unplaced), as far as the nodes' journals can
//     reach: what was read of the log is kept before any feed is told how far that is.
//
// # Crash points
//
// A coordinator that dies loses the place in the log only: the node says with its next hello how far its journal
// reaches. A whole that was cut off begins anew. What concerned no node is read anew from the log; if that came back older
// meanwhile, what it lost of this is not known, and whoever repairs it has to say so.
package journal
