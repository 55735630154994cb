package model

// canonical makes one of states that differ in nothing that matters any more, and of two that differ in which coordinator is which.
// It tells whether these were swapped.
func (s *State) canonical() (swapped bool) {
	var live uint8 // attempts that may still be applied
	waiting := uint8(0)
	for i := range s.Calls {
		if c := &s.Calls[i]; c.Attempt != 0 && c.Reply == None {
			live |= bit(c.Attempt)
			if c.Epoch <= s.released {
				waiting = s.released
			}
		}
	}
	open := live
	for i := range s.C {
		c := &s.C[i]
		if c.Step == idle {
			c.Op, c.Attempt, c.ItemEpoch, c.ItemSess, c.ItemHolder = 0, 0, 0, 0, 0
		} else if open |= bit(c.Attempt); c.ItemEpoch <= s.released {
			waiting = s.released
		}
		if c.Role == Leading && c.Epoch <= s.released {
			waiting = s.released
		}
	}
	s.released = waiting
	s.denied &= live
	s.Server.Void &= live
	s.forget(open)
	if s.left.ServerRestarts == 0 {
		s.Kept, s.HasKept = Server{}, false
	} else if !s.rewound {
		s.Kept.Void &= live
	}
	if s.left.ServerRestarts == 0 && !s.rewound {
		s.unseen()
	}
	if a, b := &s.Calls[0], &s.Calls[1]; b.Attempt > a.Attempt {
		*a, *b = *b, *a
	}
	if s.C[0].rank() >= s.C[1].rank() {
		return false
	}
	s.swap()
	return true
}

// rank orders coordinators by what they do.
func (c *Coordinator) rank() (n uint64) {
	for _, f := range []uint8{uint8(c.Role), c.Epoch, uint8(c.Step), c.Attempt, uint8(c.Op), c.Sess, c.Above, uint8(c.Seen.len())} {
		n = n<<7 | uint64(f)
	}
	return n
}

// swap makes each coordinator the other, with all that is known of it.
func (s *State) swap() {
	name := func(h *uint8) {
		if *h == 1 || *h == 2 {
			*h = 3 - *h
		}
	}
	s.C[0], s.C[1] = s.C[1], s.C[0]
	for i := range s.C {
		name(&s.C[i].Holder)
		name(&s.C[i].ItemHolder)
	}
	for i := range s.Calls {
		if c := &s.Calls[i]; c.Attempt != 0 {
			c.By = 1 - c.By
			name(&c.Holder)
		}
	}
	name(&s.Server.Holder)
	name(&s.Kept.Holder)
}

// forget drops what attempts were for that are neither open nor in a history.
func (s *State) forget(open uint8) {
	for a := uint8(1); a <= s.Attempts; a++ {
		if open&bit(a) == 0 && !s.Server.Hist.contains(a) && !s.Kept.Hist.contains(a) {
			s.Ops[a], s.Firsts[a] = 0, 0
		}
	}
}

// unseen forgets what was seen, where nothing was lost and nothing can be.
func (s *State) unseen() {
	s.Node.Seen = History{}
	for i := range s.C {
		c := &s.C[i]
		c.Seen = History{}
		if c.Above <= s.Server.Epoch {
			c.Above = 0
		}
	}
	for i := range s.Calls {
		s.Calls[i].Seen = History{}
	}
}
