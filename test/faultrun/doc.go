// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

// Package faultrun does on one machine what goes wrong in a cluster's life, and checks that nothing was lost: Redis that stands
// still, is killed and comes back, a coordinator that is started anew, a node that is lost with its sandboxes. All parts are real;
// everything is asked for by the public API, and what is looked at besides is the host, for what is left on it.
//
// # The run
//
//	subjects, each with a volume of its own       F01
//	batch 1: a checkpoint of each, at once; Redis stands still in the middle, and unrelated volumes are created   F02 F03
//	the same operation id once more               F04
//	a deletion of each volume, refused            F05
//	a volume recreated by name                    F06
//	batch 2: again of each; Redis is killed and comes back on the same data, the coordinator is started anew,
//	         and a node is lost, with its sandboxes                       F02 F07, F08 for those on the other nodes
//	all other sources end; each is restored from batch 2 and proves itself    F09
//	the crash points of the node, by test/crash   F10
//	all is deleted, and nothing is left           F11
//
// A check that did not hold is a line of the report and makes the run fail; it goes on as far as it makes sense. Each call that
// failed, also one that the client library tried again, is in the report (F12).
//
// # What waits for what
//
// A call of batch 2 on the node that is lost cannot succeed once the node is gone, so the node is lost when its own captures have
// been answered, while those of the others may go on. Its artefacts are on its disk: it comes back with a new session and restores from them.
package faultrun
