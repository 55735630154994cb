// Package robustness has clients use a whole control plane while faults strike it, and checks afterwards that every answer
// was true (requirement C30).
//
//	make robustness                     twenty seeds, as in CI
//	make robustness SEED=7 OUT=folder   one seed again, with its report, history and logs
//	make robustness DURATION=1h         new seeds for so long, with faults after which something is lost
//	LOSSES=1 make robustness            the same faults in the twenty seeds
//
// Faults after which something is lost (a node away, coordinators new) are not in the twenty seeds of CI, which has what is told step by step instead
// (TestC21...), and the variants.
//
// A server's log is cut off anywhere, within a commit too, and a server that is started is started once more if it ends by itself, as a service manager does (ADR 54).
//
// # The system
//
// A Redis server, two coordinators of the released binary and two nodes. The server and the coordinators are processes, which faults kill
// and stop; each coordinator reaches the server over a link that the test owns. The nodes are package agentd/simulated: sessions,
// commands, records, journals and the runner are agentd's own, only runtime, guests and images are not there. Each run has a system of its own.
//
// # Traffic and outcomes
//
// Clients (pkg/client) create volumes, attach them (create a sandbox with one), publish (checkpoint it), detach, delete, get, list,
// give names again, and repeat operations, in eight cells of objects that have nothing to do with each other. What an answer means
// is the contract of the error envelope, and the model takes it at its word:
//
//	a result                     applied: accepted, then finished, within the call
//	an operation that Failed     accepted, failed, and let go of, within the call. One that a deletion has overtaken may have
//	                             been seen running: the node's own report is not the operation's
//	a conflict, not_started      not applied, and its reason was true at some moment of the call
//	any other, not_started       not applied; whoever finds it applied has caught a lie
//	unknown                      maybe applied, at any time from the call on, or never. Most are asked for again with the
//	                             same operation id until they are answered; a few in each cell stay unknown
//
// Whether a repeated operation gives the same object, and whether one operation made two, is seen without the model: each object
// carries the id of the operation that made it as a label.
//
// # The model
//
// The state of a cell is one small number for each object (not there, being made, ready, being deleted, gone ...), and what is not
// known is a set of states. A client's operation is several atomic steps within its call, since a Get may see an object that is Creating. porcupine
// looks for an order of the steps that the model allows. A list is no read of one moment (nor does it claim to be): each object in it is
// read by itself, and is checked in a history of that object alone. A history that is not checked within minutes is a failure.
// Beside it the change log is checked: each sequence once, by epochs that never go back.
//
// # Faults
//
//	server killed, stopped; its disk full; back with a copy of some operations ago, also under load; back with its log cut off
//	server back with a dump of some operations ago, or with its log cut off, a node away; back with a copy, coordinators new
//	connections cut, refused, slow; replies torn in the middle; replies lost while their requests are done
//	coordinator killed, or stopped for two leases: the leader, or the other
//	session of a node replaced: its agentd ends, another goes on with its files and sandboxes
//
// More, which the variants need, are aimed at one commit of the leader, which the link recognises, or at one object, so that they do not depend on chance:
//
//	reply to a commit lost                  applied, and its connection ends before the answer
//	commit of a leader late                 delivered after another coordinator leads and has committed; the rest of the leader's link is cut
//	first attempts of commits lost          each commit of a sandbox that holds a volume, on its way to the server
//	name of a deleted volume given again    and the deleted one asked for
//
// What a fault has to meet is made by the fault itself (file probes.go), of objects that clients only read: how much they do meanwhile depends on how fast the machine is.
//
// Before the server comes back older (C21) the traffic stops until the nodes' journals have everything, and the standby is kept away: then
// nothing may be lost, and the catalog has to go on by itself; under load, while clients go on. What is not promised is not checked: of tombstones, which are not
// rebuilt, who has a deleted object's name now.
//
// With a node away, or new coordinators, something is lost, and the catalog has to wait for an operator (file operator.go), who is told of it. The change
// log of before says of each lost commit what it was of; what a journal had, as far as it is said to reach, has to be there again. In the model the word takes each
// other object back to what it was at some time before: by itself the object is then in one of these states, and among others nothing is told of it any more.
// Nothing more is asked of it but reads, since what its node still has of it, without a record, is left alone and may be in the way; and other names
// are given from then on. A return of the node must not suspend the catalog again.
//
// # Variants
//
// A coordinator that is broken on purpose (package mutant, the build tag mutants) has to be caught, or the suite is worth nothing. Each is
// looked for in short runs with the fault that brings about what it breaks, so that the first of them catches it for certain:
//
//	no-epoch-check      commit of a leader late: it is held up until another coordinator has committed. The change log has an old epoch after a new one
//	blind-retry         reply to a commit lost: of a volume whose name nobody else asks for. It is refused as taken
//	stale-view          server came back with a copy: a volume was acknowledged since the copy. It is not there
//	unreported-loss     server came back with an old dump, a node away: the other node's journal has a sandbox that was made since the dump. It is not there
//	resurrection        the same: that journal has the deletion, since the dump, of a sandbox that the dump has. It is back
//	no-tombstone        name of a deleted volume given again: who asks for the deleted one is told another reason
//	dropped-reference   first attempts of commits lost: each is built again, without the volume, which is not attached then
//
// ALL=20 FIRST=100 go test ./test/robustness -run TheSuiteFindsBugs -v tells how many of so many seeds catch each. A release that meets
// the aimed faults is caught at nothing.
//
// # What a seed says
//
// Each client's choices (what, where, on which of the objects that it knows, through which coordinator, whether to ask again), and which
// faults strike whom, after how many operations, for how long. Not how the processes and clients are scheduled: a seed that found something is likely to
// find it again, not certain. Nothing is asserted of time; what is waited for is waited for minutes.
package robustness
