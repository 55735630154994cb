// Package deletion deletes many snapshots at once, through the public API, and looks whether that is what docs/adr/0044-deletion.md says:
// a real coordinator and a real Redis, nodes of agentd's own code without a machine (agentd/simulated), on disks of their own.
//
// One tenant publishes the snapshots and has hundreds of callers delete all of them. In the middle the coordinator is killed; half of the callers ask again
// with the same operation id, the others never come back, and the next coordinator finishes what it finds. Meanwhile
//
//   - each node counts the removals that it was asked for at a time: never more than a coordinator gives it;
//   - each node looks, between the removal and its answer, at the disk and at the catalog: the artefact is gone, and its record is still there;
//   - some of the snapshots are being restored, and a volume is referred to by the snapshots of a sandbox: both are refused, and say by whom;
//   - another tenant updates a sandbox, checkpoints it and deletes the snapshot, again and again: how long that takes, beside how long it took before;
//   - an operator looks at the progress: the status, the command line, the metrics.
//
// In the end nothing is left: no record, no artefact, no reference, as many tombstones as there were deletions, and no difference between catalog and nodes.
//
// Run fails if one of these does not hold. How long things took is in the figures, and no reason to fail.
package deletion
