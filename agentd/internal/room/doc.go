// Package room gives out the node's memory: it decides whether a start or restore fits, holds what was promised, and says how short
// memory is. See ADR 49.
//
// # What is counted
//
// Each sandbox that is resident, or on its way in, has a share:
//
//	in flight   from Enter until Settle   it will touch expect bytes, and has touched some of them
//	settled     from Settle until Leave   it may touch what it requested at any time, and perhaps has not
//
// What a share does not use yet is unclaimed: the larger of what it requested and, in flight, of what it is expected to touch, less what
// its control group has in memory (page cache not counted).
//
// # What fits
//
//	heads     no more sandboxes than Sandboxes
//	promise   all requests together stay within Limit less Reserve: the sum that the coordinator places by
//	memory    what is asked stays within what is available, less Reserve, less all that is unclaimed
//
// Available is what the kernel says that it can give without swapping, or what is left of Limit where that is less. So sandboxes may
// be overcommitted (their limits are above their requests), but what was promised to each is there, also in a burst of restores none
// of which has touched its memory.
//
// # Waiting
//
// What does not fit waits, in the order of arrival, for what leaves or settles; at most Wait long, and at most maxWaiting of them. A large
// one is not passed by small ones. Then it is refused, with what is short, what was asked and what is left.
//
// # Pressure
//
//	none   there is room
//	some   less than Reserve and a headroom is available, or the kernel stalls for memory: give back what can be had again
//	high   less than Reserve is available: nothing fits
//
// # Invariants
//
//   - All is in memory, and follows from the records: a new agentd Keeps what is on the node before anything Enters.
//   - Enter, Keep, Settle and Leave are idempotent, by uid.
//   - A figure that cannot be read admits nothing.
package room
