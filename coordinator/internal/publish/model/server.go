package model

// Rules of the protocol. The zero value is what the code does; each field takes one rule away, to show that the search would notice.
type Rules struct {
	NoEpochCheck      bool // the script takes commits of any epoch
	NoHolderCheck     bool // an epoch that a server came back without and granted again serves both of its holders
	NoSessionCheck    bool // the script takes reports of any session
	NoReceipts        bool // an operation that was applied is applied again
	NoSeenCheck       bool // the script does not ask what the sender has seen
	NoVoid            bool // settling leaves an attempt that it did not find as it is
	BlindRetry        bool // a lost reply is answered by sending again
	NoWitness         bool // nodes are let in whatever they have seen
	BlindStandby      bool // who stands by takes what the server has for what it has seen
	ReleaseKeepsEpoch bool // a lease that is given up leaves its epoch in force
	EpochsRepeat      bool // a claim gets the epoch that the one before had
	CallsOutlive      bool // not a rule but an assumption: what is in the socket of a server process dies with it
}

// apply is commit.lua: every check, in its order, then every write.
func (r Rules) apply(s *State, c *Call) {
	v := &s.Server
	op := s.Ops[c.Attempt]
	switch {
	case !r.NoEpochCheck && (c.Epoch != v.Epoch || v.Epoch == 0),
		!r.NoHolderCheck && !r.NoEpochCheck && c.Holder != v.Holder,
		!r.NoSessionCheck && op == Report && (c.Session != v.Session || v.Session == 0):
		c.Reply = Fenced
		return
	}
	if proof := r.receipt(s, c.Attempt); proof != 0 {
		c.Reply, c.Proof = Replayed, proof
		return
	}
	switch {
	case v.Void&bit(c.Attempt) != 0:
		c.Reply = Void
	case !r.NoSeenCheck && !v.Hist.has(c.Seen), v.Suspended:
		c.Reply = Rewound
	default:
		v.Hist[v.Hist.len()] = c.Attempt
		c.Reply, c.Proof = Applied, c.Attempt
	}
}

// receipt finds the attempt of the same operation that was applied.
func (r Rules) receipt(s *State, attempt uint8) uint8 {
	for _, a := range s.Server.Hist {
		if a == attempt && !r.NoReceipts || a != 0 && s.Ops[a] == Request && s.Ops[attempt] == Request && !r.NoReceipts {
			return a
		}
	}
	return 0
}

// settle is settle.lua.
func (r Rules) settle(s *State, attempt uint8) uint8 {
	if proof := r.receipt(s, attempt); proof != 0 {
		return proof
	}
	if !r.NoVoid {
		s.Server.Void |= bit(attempt)
	}
	return 0
}

// lead is a claim that lead.lua grants. That it may refuse one, while another's lease lives, restrains nobody here.
func (r Rules) lead(s *State, holder, above uint8) uint8 {
	v := &s.Server
	if v.Holder != holder || v.Epoch <= above {
		if !r.EpochsRepeat || v.Epoch == 0 {
			v.Epoch = max(v.Epoch, above) + 1
		}
		v.Holder = holder
	}
	return v.Epoch
}

// release is release.lua.
func (r Rules) release(s *State, holder, epoch uint8) {
	v := &s.Server
	if v.Epoch != epoch || v.Holder != holder {
		return
	}
	s.released = max(s.released, epoch)
	if !r.ReleaseKeepsEpoch {
		v.Epoch, v.Holder = epoch+1, 0
	}
}

// open is session.lua. A session of 0 is a refusal.
func (r Rules) open(s *State, epoch, holder, above uint8) uint8 {
	v := &s.Server
	if v.Epoch != epoch || epoch == 0 || v.Holder != holder && !r.NoHolderCheck {
		return 0
	}
	v.Session = max(v.Session, above) + 1
	return v.Session
}

// suspend is suspend.lua.
func (r Rules) suspend(s *State, epoch uint8) {
	if s.Server.Epoch == epoch && epoch != 0 {
		s.Server.Suspended = true
	}
}
