package model

import "fmt"

// Bounds of the search. What is found within them is found in all of it; what would take more is not.
const (
	coordinators = 2
	maxHistory   = 4 // commits in a history
	maxAttempts  = 4 // sendings of commits
	maxCalls     = 2 // calls on their way
)

// History is all that a server has applied: attempts, in order. A point that somebody has seen is a beginning of one, as
// the chained digest tells (catalog.Point).
type History [maxHistory]uint8

func (h History) len() int {
	for i, a := range h {
		if a == 0 {
			return i
		}
	}
	return maxHistory
}

// has tells whether a point is part of the history (compare.lua).
func (h History) has(p History) bool {
	n := p.len()
	for i := range n {
		if h[i] != p[i] {
			return false
		}
	}
	return true
}

func (h History) contains(attempt uint8) bool {
	for _, a := range h {
		if a == attempt {
			return attempt != 0
		}
	}
	return false
}

// Op is what a commit is for.
type Op uint8

// Request is a client's operation, whose id outlives coordinators. Report is what a node reports, under its session; the queue gives
// each sending an id of its own (Commit.Transient).
const (
	Request Op = 1
	Report  Op = 2
)

// Server is what is on the server's disk.
type Server struct {
	Hist      History
	Epoch     uint8 // in force; key leader
	Holder    uint8 // to whom it was granted, 0: nobody
	Session   uint8 // of the node; key sessions
	Void      uint8 // bits of attempts; keys d:
	Suspended bool
}

// Role of a coordinator.
type Role uint8

// A coordinator is Down, stands by, was granted an epoch and has not compared the catalog with what it has seen, or leads.
const (
	Down Role = iota
	Standby
	Elected
	Leading
)

// Step of the commit that a coordinator has in hand. See the states of a publication in package publish.
type Step uint8

const (
	idle Step = iota
	sent
	settling
)

// Coordinator is one process and its memory.
type Coordinator struct {
	Role   Role
	Holder uint8 // names this life of it
	Epoch  uint8
	Above  uint8   // what the next epoch must exceed
	Seen   History // redis.Store.Seen
	Sess   uint8   // the node's session as the registry has it

	Step       Step
	Op         Op
	Attempt    uint8
	ItemEpoch  uint8 // what the commit in hand was built under
	ItemSess   uint8
	ItemHolder uint8
}

// Node is agentd: what it keeps on its disk.
type Node struct {
	Sess    uint8
	Highest uint8   // coordinator epoch
	Seen    History // witness: how far its journal reaches
}

// Reply to a call.
type Reply uint8

// What the commit script answers, in its order of checks.
const (
	None Reply = iota
	Fenced
	Replayed
	Void
	Rewound
	Applied
)

func (r Reply) String() string {
	return [...]string{"no reply", "FENCED", "replayed", "ATTEMPT_VOID", "CATALOG_REWOUND", "applied"}[r]
}

// Call is a commit in a socket of a server process, or its reply.
type Call struct {
	Attempt uint8 // 0: no call
	By      uint8 // coordinator
	Proc    uint8
	Epoch   uint8
	Holder  uint8
	Session uint8
	Seen    History
	Reply   Reply
	Proof   uint8 // the attempt that the receipt is of
	Awaited bool  // its sender still waits
}

// State of everything. It is comparable; what begins with a lower case letter is not the system's but the observer's.
type State struct {
	Server   Server
	Proc     uint8 // the server's process
	Kept     Server
	HasKept  bool // Kept is a copy of an earlier disk
	C        [coordinators]Coordinator
	Node     Node
	Calls    [maxCalls]Call
	Ops      [maxAttempts + 1]Op    // of attempts
	Firsts   [maxAttempts + 1]uint8 // the attempts that they are another sending of, or themselves
	Attempts uint8
	Holders  uint8

	denied   uint8 // bits of attempts that somebody was told are not and will not be applied
	released uint8 // highest epoch that was given up
	rewound  bool
	left     Bounds
}

// Bounds of a search: how often what may happen does.
type Bounds struct {
	Attempts       uint8 // sendings of commits, at most maxAttempts
	Epochs         uint8 // the highest that is claimed
	Sessions       uint8 // of the node
	ServerRestarts uint8 // on its data, or on a copy of earlier
	Crashes        uint8 // of coordinators
	Cuts           uint8 // lost requests and replies
}

// Begin is an empty catalog and two coordinators.
func Begin(b Bounds) State {
	s := State{Holders: coordinators, left: b}
	for i := range s.C {
		s.C[i] = Coordinator{Role: Standby, Holder: uint8(i + 1)}
	}
	return s
}

func bit(attempt uint8) uint8 { return 1 << attempt }

// Action names one step of the system: what happens, and to whom.
type Action struct {
	Name        string
	Coordinator int // from 1; 0: none
	Attempt     uint8
	Op          Op
}

func (a Action) String() string {
	switch {
	case a.Op == Request:
		return fmt.Sprintf("%s: coordinator %d, a client's request", a.Name, a.Coordinator)
	case a.Op == Report:
		return fmt.Sprintf("%s: coordinator %d, a node's report", a.Name, a.Coordinator)
	case a.Coordinator != 0:
		return fmt.Sprintf("%s: coordinator %d", a.Name, a.Coordinator)
	case a.Attempt != 0:
		return fmt.Sprintf("%s: attempt %d", a.Name, a.Attempt)
	}
	return a.Name
}
