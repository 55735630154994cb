// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

// Package load makes many sandboxes, checkpoints and restores all of them at once, and has each original process prove that
// it is still the same one. It uses the public API and pkg/client only: what is queued, admitted and written how is the product's.
//
// # A run
//
// A plan says how many subjects there are and what is done to them. Client processes (workers) have a share of them each. A run
// is a sequence of phases; all workers begin a phase together, when the last of them has ended the one before:
//
//	volumes -> create -> begin -> rounds of (checkpoint -> delete -> restore -> prove) -> audit -> delete -> forget -> look
//
// "begin" starts the subject's program and takes its first answer. In a round the sources are gone before the first restore, and
// "prove" asks each restored subject and compares it with its answer before. "audit" compares the catalog with what was acknowledged. Within a phase a worker asks for everything at
// once, or with the plan's pace; nothing waits for anything else of its own.
//
// # What is counted
//
// Each step of each subject is one line of events.jsonl, failed ones too. The client library tries again where the error says
// that this is safe; each failed try is a line as well ("attempt"), so that nothing is retried in silence (F12). A subject
// whose step failed takes no part in later phases, but is cleaned up.
//
// Times are the caller's, from the moment the phase began to the answer ("wall"), and from the call to the answer ("call"); they
// differ by the plan's pace. A checkpoint and a restore also have the product's own view of them where the API gives it.
//
// # Cleaning up
//
// Everything that a run makes has a name that begins with "load-" and the run's id. What a worker made is deleted in the end
// by that prefix, not from memory, so that an object whose creation was never answered goes as well. An interrupted run does
// the same; one that was killed is cleaned up by "dormouse-load clean", which finds the run's folder. "Debt" is what is still
// there afterwards: objects in the catalog, and on a cluster of the harness's own what the doctor of each node finds.
//
// # Words
//
// A run that passes shows that so many subjects worked on this machine on that day: a tested waterline, never a maximum.
package load
