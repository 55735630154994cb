// Package checkpoint captures sandboxes and owns the artefacts.
//
// # On disk
//
//	<root>/.staging/<uid>/   an artefact that is being written
//	<root>/<uid>/            a published artefact: the runtime's files and manifest.json; never changed
//	<root>/.trash/<uid>/     an artefact that is being removed
//
// Folders are 0700 and files 0600: memory holds secrets.
//
// # States of an artefact
//
//	absent -> staging -> published -> trash -> absent
//
// Each move between the three folders is one rename, synced. A restore looks at published ones alone.
// What is in staging or trash when agentd starts belongs to nobody and is removed (Sweep).
//
// # The sequence of a capture
//
// Room on the disk, then admission (few at a time: the disk is one), then staging; then frozen:
// quiesce the guest channel, pause, drain the out-FIFO, save; then resume at once, and only then look at
// what was written, sync it, write the manifest, publish.
//
// # Invariants
//
//   - Whatever fails, and whenever the context ends, the sandbox is resumed and the channel with it, in
//     a bounded time that the context does not cut short.
//   - Nothing is published that was not checked for size and structure and synced. Digests come later,
//     from a paced scrub.
//   - The manifest says everything that a restore depends on, so that it can be refused before anything
//     is touched: the whole OCI spec, the runtime's flags, bundle and version, the image and its
//     canonical path, the CPU's features, the volumes.
//   - No secret environment: neither spec has a place for it.
//
// # Crash points
//
// Before the rename there is a staging folder and no artefact; after it a whole artefact, with a record or
// without. The runner's record of the capture tells the next agentd to resume the sandbox.
package checkpoint
