// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

// Package volumes keeps the node's directory volumes: folders that outlive the sandboxes that use them.
//
// # On disk
//
//	volumes/<uid>/data            what a sandbox sees
//	volumes/<uid>/meta.json       uid, size limit, when and from what it was made; never changed
//	volumes/<uid>/attach/<holder> one a holder that uses it now
//	staging/<uid>                 one that is being made; nothing else refers to it
//	trash/<uid>.<random>          one that is being removed; nothing refers to it any more
//	lock                          held by the one process that may use the root
//	project                       the last project id given out, where limits are enforced by project quota
//
// # States and crash points
//
// A volume exists if volumes/<uid> does. It comes into being by one rename, complete and synced, and goes by
// one rename. So after a crash
//
//   - in Create or Clone, before the rename: it is not there, and what was copied is cleared by Recover or by
//     the next try;
//   - after the rename, before the answer: it is there, and the same request again is answered with it;
//   - in Delete, before the rename: it is there, whole; after it: it is gone, and Recover goes on removing
//     what was in it;
//   - in Attach or Detach: the holder is recorded, or it is not; the same request again ends well.
//
// Recover never removes or changes a volume.
//
// # Invariants
//
//  1. Everything is by uid. A uid is the caller's, who never uses one twice.
//  2. A holder that may write is alone. Holders that only read may share.
//  3. A volume with a holder is not deleted.
//  4. A size limit is enforced by the file system, or the request for one is refused: a limit that is only
//     counted now and then is none.
//
// A clone is a copy of what the source holds at the time. The source must not be written to meanwhile: that no
// sandbox has it attached read-write, or that the one that has is paused, is the caller's to see to. The data
// is a guest's and not trusted: it is walked by descriptors, no link in it is followed, and file systems
// mounted in it are refused.
package volumes
