// Package model is the commit protocol and the failover of coordinators, as a system of states and actions that a test explores
// exhaustively. It holds no part of the product: it is what the product was checked against, and the replay keeps the two together.
//
// # The system
//
// Two coordinators (each with one commit in hand), one server with its disk, a copy of the disk from earlier, one node, and calls on
// their way. Time does not exist: every action may come at any moment or never. So a coordinator that is paused for a minute, one whose
// clock is wrong and one behind a connection that carries nothing are all here, without an action of their own.
//
//	Claim            a lease is granted: the holder's epoch exceeds all before, and all that nodes have seen
//	StandBy          a lease is not granted; who does not get it compares what it has seen, remembers, or suspends the catalog
//	Sound            who was granted an epoch compares what it has seen; suspends the catalog, or leads
//	Resign           the lease is given up, and its epoch with it
//	LeaseRanOut      a term ends by its holder's own clock; the server does not know
//	Submit           a commit is sent: a client's request (whose id anybody may send again), or a node's report (under its session)
//	Execute          the script runs, in the order of its checks; ExecuteLate: nobody waits for it any more
//	Reply            its answer arrives
//	Cut, GiveUp      the answer does not: the request is lost, or its reply is, or it stays in the server's socket
//	SettleApplied, SettleVoid   the receipt is found, or the attempt is void from then on; it may be sent again, as another
//	AnswerUnknown    the caller's budget ends
//	Dial, Feed       the node opens a session, as a witness; the journal brings its witness up to date
//	CrashCoordinator, RestartServer, CopyDisk, RestartServerOnOldData, ClaimReplyLost, SettleReplyLost
//
// # Invariants
//
//	AtMostOnce        the history has at most one effect of a request, whoever sent it how often, and of a report that was taken
//	Durable           what was applied stays, unless the server comes back on old data
//	Truth             what was acknowledged is in the history; what somebody was told is void is never applied
//	Fencing           what is applied is of the holder and the epoch in force, and of the session in force; nothing of an epoch that
//	                  was given up
//	EpochsGrow        an epoch is granted once, unless the server comes back on old data
//	RewindNoticed     nothing is applied by a server that does not have what the sender has seen, or what the node has whose session
//	                  the sender serves
//	WitnessRemembers  what a coordinator has seen is only replaced by what goes on from there
//	Suspended         nothing is applied in a suspended catalog
//
// # Where it is in the code
//
//	Rules.apply           commit.lua: check_owner, apply; redis.Store.Commit
//	Rules.receipt         commit.lua and settle.lua: keys c:
//	Rules.settle          settle.lua; redis.Store.Settle; publish.Queue.settleOne
//	Rules.lead            lead.lua; redis.Store.Lead; app.App.campaign
//	Rules.release         release.lua; redis.Store.Release; app.App.resign
//	Rules.open            session.lua; redis.Store.OpenSession
//	Rules.suspend         suspend.lua; redis.Store.Suspend; app.App.suspend
//	Rules.standBy         app.App.standBy
//	Sound, Leading        app.App.term, app.App.sound
//	endTerm               app.App.renew, app.App.rewound, app.App.exceed
//	send, publish         publish.Queue.Publish, sendBatch, settle; Cut and GiveUp are Options.Reply and a broken connection
//	Rules.dial            sessions.Registry.hello (with app.App.witness and higherEpoch) and open
//	Feed                  journal.Mirror, journal.Feed
//	History.has           compare.lua; redis.Store.Compare; the point that each commit carries
//	Coordinator.Seen      redis.Store.Seen, saw
//	Coordinator.Holder    redis.Store.sender, app.App.holder
//
// The replay (replay_test.go) walks through the model at random and has package redis, on a real server that is killed and
// given old data where the model says so, and package memory do the same: each answer must be the model's.
//
// # What is not here
//
// Batches (a batch is its commits, one after the other), revisions and references (see pkg/catalog/catalogtest and the differential
// test of the stores), expiry of receipts, views of the catalog (App.prove), and the repair of a suspended catalog. One assumption is the
// network's: what is in the socket of a server process dies with that process. A proxy between them that holds a request
// back and gives it to the next process breaks it; the search shows what would happen (TestBrokenRules).
package model
