package model

import "fmt"

// executed checks what one execution of the commit script did.
func (r Rules) executed(before, after *State, c Call) error {
	if c.Reply != Applied {
		return r.took(before, after)
	}
	v := &before.Server
	switch {
	case c.Epoch != v.Epoch || c.Holder != v.Holder:
		return fmt.Errorf("Fencing: attempt %d of holder %d and epoch %d was applied; holder %d has the lease, with epoch %d", c.Attempt, c.Holder, c.Epoch, v.Holder, v.Epoch)
	case !before.rewound && c.Epoch <= before.released:
		return fmt.Errorf("Fencing: attempt %d of epoch %d was applied after epoch %d was given up", c.Attempt, c.Epoch, before.released)
	case before.Ops[c.Attempt] == Report && c.Session != v.Session:
		return fmt.Errorf("Fencing: a report of session %d was applied; session %d is in force", c.Session, v.Session)
	case !v.Hist.has(c.Seen):
		return fmt.Errorf("RewindNoticed: attempt %d was applied by a server without what its sender has seen", c.Attempt)
	case before.served(c):
		return fmt.Errorf("RewindNoticed: attempt %d was applied while coordinator %d serves with a node that has seen more than the catalog has", c.Attempt, c.By)
	case before.denied&bit(c.Attempt) != 0:
		return fmt.Errorf("Truth: attempt %d was applied after somebody was told that it never would be", c.Attempt)
	case v.Suspended:
		return fmt.Errorf("Suspended: attempt %d was applied while the catalog is suspended", c.Attempt)
	}
	return r.took(before, after)
}

// took checks a state, and what a step may do to it.
func (r Rules) took(before, after *State) error {
	if err := atMostOnce(after); err != nil {
		return err
	}
	v := &after.Server
	if !after.rewound {
		if !v.Hist.has(before.Server.Hist) {
			return fmt.Errorf("Durable: %v was applied, and %v is left of it", before.Server.Hist, v.Hist)
		}
		if v.Epoch < before.Server.Epoch || v.Epoch == before.Server.Epoch && v.Holder != before.Server.Holder {
			return fmt.Errorf("EpochsGrow: epoch %d of holder %d after epoch %d of holder %d", v.Epoch, v.Holder, before.Server.Epoch, before.Server.Holder)
		}
	}
	for i := range after.C {
		c, was := &after.C[i], &before.C[i]
		if c.Holder == was.Holder && !c.Seen.has(was.Seen) {
			return fmt.Errorf("WitnessRemembers: coordinator %d has seen %v, and takes %v for it", i, was.Seen, c.Seen)
		}
	}
	return nil
}

// atMostOnce wants one effect of a client's operation, however often and by whomever it was sent, and one of each report that a
// coordinator has taken.
func atMostOnce(s *State) error {
	var effects [maxAttempts + 1]int // of reports, by first attempt; of the request at 0
	for _, a := range s.Server.Hist {
		if a == 0 {
			break
		}
		of := s.Firsts[a]
		if s.Ops[a] == Request {
			of = 0
		}
		if effects[of]++; effects[of] > 1 {
			return fmt.Errorf("AtMostOnce: attempt %d is another effect of what was done before: %v", a, s.Server.Hist)
		}
	}
	return nil
}

// served tells whether a commit is of a coordinator that serves the node, by a proven view, while the node knows better.
func (s *State) served(call Call) bool {
	c := &s.C[call.By]
	return c.Role == Leading && c.Holder == call.Holder && c.Epoch == call.Epoch &&
		c.Sess != 0 && c.Sess == s.Server.Session && c.Sess == s.Node.Sess && !s.Server.Hist.has(s.Node.Seen)
}
