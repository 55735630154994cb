// Package nodestate is the node's own memory: one bbolt file that holds what agentd is doing and what
// it has done. Nothing else writes the file; a lock on it keeps a second agentd out.
//
// # Schema, version 1
//
//	meta
//	  version            the schema version, decimal
//	  node               the node's name; a file of another node is refused
//	  coordinator_epoch  the highest coordinator epoch ever seen, decimal
//	  session_epoch      the epoch of the current session, decimal, 0 for none
//	sandboxes
//	  <uid>              Sandbox, JSON
//	snapshots
//	  <uid>              Snapshot, JSON
//	volumes
//	  <uid>              Volume, JSON: whose it is
//	commands
//	  <command id>       Command, JSON: the digest of a command's body and its result
//	commands_by_time
//	  <8 bytes, big endian: unix nanoseconds><command id>   empty; the order in which results expire
//
// Packages layers and volumes keep their own records of what images and volumes are; only a volume's
// owner is here.
//
// # Invariants
//
//   - A record is written before the effect it announces (intent) and again before the effect is
//     reported. Every write is synced when the call returns, but for two that say so: acknowledgements
//     (AckSandbox) and results that the records give again (PutCommandLater) go with the next one.
//   - A write that failed is "maybe applied": the caller reads before it decides anything.
//   - The coordinator's epoch never goes down, nor does a sandbox's observation counter.
//   - Records hold no secret. Secret environment has no field here.
//   - A file that cannot be read is refused with STATE_DAMAGED and left as it is, byte for byte: the
//     records are the only proof of what is the node's own.
//
// # Crash points
//
// bbolt commits a transaction by one write of its meta page; a crash leaves the state before it or
// after it. A migration runs in one transaction with the new version number.
package nodestate
