// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

// Package layers turns OCI image references into EROFS files: one flattened, content-addressed, read-only
// file an image, at a path that is the same on every node, ready to be a sandbox's root.
//
// # On disk
//
// Everything lives under one root, which several agentd processes of a machine may share:
//
//	images/<hex>.erofs       the files, named by their own sha256 digest; never changed once there
//	records/<hex>.json       one an image manifest, named by its digest: which file it became, its configuration
//	refs/<hex>.json          which manifest a reference or an index stood for when last resolved, by a hash of its name
//	holders/<hex>/<holder>@<node>  one a holder of a file: while one exists the file is never removed
//	staging/<random>/        work in progress; its owner holds a lock on the file "lock" in it
//	locks/                   stripes of conversion locks, so that one process at a time prepares an image
//	lock                     taken for every change of images, records, refs and holders, briefly
//
// The locks are flocks: they end with the process that holds them, so nothing is ever stuck.
//
// # Invariants
//
//  1. A file under images/ is complete, synced, and has the digest that its name says.
//  2. A record under records/ is written after its file is durable and removed before its file is.
//  3. A file with a holder is not removed by anything in this package.
//  4. An image is prepared once, however many ask for it, in however many processes; a caller that gives
//     up does not stop it.
//
// # Crash points
//
// Each leaves a state that Recover finishes or undoes:
//
//	while pulling          partly fetched blobs in containerd, which resumes or expires them with the lease
//	while converting       a staging folder without a living owner: removed
//	file renamed, no record     a file without record and holder: removed, and made again when asked for
//	hold written, not reported  the holder is recorded: the owner's reconcile sees it in Holds and releases it
//	records removed, file there a file without record and holder: removed
//	file removed, content there an image record in containerd without record here: removed
//
// Images in containerd are a cache: they let a second image that shares layers download less, and are the
// first thing that GC gives up.
//
// An image that is here is given to whoever names its digest, without asking the registry again: who may
// use which image is decided before this package is called.
package layers
