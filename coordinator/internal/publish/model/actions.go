package model

import "fmt"

// next gives every state that one action leads to, and what is wrong with the action, if anything is.
func (r Rules) next(s *State, yield func(Action, *State, error)) {
	for i := range s.C {
		r.campaign(s, i, yield)
		r.publish(s, i, yield)
		r.session(s, i, yield)
	}
	for i := range s.Calls {
		r.network(s, i, yield)
	}
	r.faults(s, yield)
}

// endTerm is the end of App.term without its lease: it ran out by the holder's own clock, or another has it.
func endTerm(c *Coordinator) {
	c.Above = max(c.Above, c.Epoch)
	c.Role, c.Epoch, c.Sess = Standby, 0, 0
}

// campaign is App.campaign, App.term, App.renew, App.sound and App.resign. That a process is paused, for however long, needs no
// action: every action of every process may come at any time, or never. Clocks do not exist: leases end whenever they like.
func (r Rules) campaign(s *State, i int, yield func(Action, *State, error)) {
	c := &s.C[i]
	do := func(name string, f func(s *State, c *Coordinator)) {
		t := *s
		f(&t, &t.C[i])
		yield(Action{Name: name, Coordinator: i + 1}, &t, r.took(s, &t))
	}
	switch c.Role {
	case Standby:
		if s.Server.Holder != c.Holder && s.Server.Holder != 0 {
			do("StandBy", r.standBy)
		}
		if max(s.Server.Epoch, c.Above) < s.left.Epochs {
			do("Claim", func(t *State, c *Coordinator) { c.Role, c.Epoch = Elected, r.lead(t, c.Holder, c.Above) })
			if s.left.Cuts > 0 {
				do("ClaimReplyLost", func(t *State, c *Coordinator) { t.left.Cuts--; r.lead(t, c.Holder, c.Above) })
			}
		}
	case Elected:
		do("Sound", func(t *State, c *Coordinator) {
			if !t.Server.Hist.has(c.Seen) {
				r.suspend(t, c.Epoch)
			}
			if !t.Server.Suspended {
				c.Role = Leading
			}
		})
	}
	if c.Role >= Elected {
		do("LeaseRanOut", func(_ *State, c *Coordinator) { endTerm(c) })
		do("Resign", func(t *State, c *Coordinator) {
			r.release(t, c.Holder, c.Epoch)
			endTerm(c)
		})
	}
}

// standBy is a claim that is not granted: another's lease lives. Who stands by is a witness.
func (r Rules) standBy(t *State, c *Coordinator) {
	switch {
	case r.BlindStandby:
		if t.Server.Hist.len() > c.Seen.len() {
			c.Seen = t.Server.Hist
		}
	case t.Server.Hist.has(c.Seen):
		c.Seen = t.Server.Hist
	default:
		r.suspend(t, t.Server.Epoch)
	}
}

// publish is the queue: a commit is sent, and if its reply is lost it is settled, then sent again or answered.
func (r Rules) publish(s *State, i int, yield func(Action, *State, error)) {
	c := &s.C[i]
	if c.Role == Leading && c.Step == idle {
		for _, op := range []Op{Request, Report} {
			if op == Report && c.Sess == 0 {
				continue
			}
			t := *s
			d := &t.C[i]
			d.Op, d.ItemEpoch, d.ItemSess, d.ItemHolder = op, c.Epoch, c.Sess, c.Holder
			if send(&t, i, false) {
				yield(Action{Name: "Submit", Coordinator: i + 1, Op: op}, &t, r.took(s, &t))
			}
		}
	}
	if c.Role == Down || c.Step != settling {
		return
	}
	t := *s
	t.C[i].Step = idle
	yield(Action{Name: "AnswerUnknown", Coordinator: i + 1}, &t, nil)
	if r.BlindRetry {
		t = *s
		if send(&t, i, true) {
			yield(Action{Name: "Resend", Coordinator: i + 1}, &t, r.took(s, &t))
		}
		return
	}
	t = *s
	proof := r.settle(&t, c.Attempt)
	if s.left.Cuts > 0 {
		lost := t
		lost.left.Cuts--
		yield(Action{Name: "SettleReplyLost", Coordinator: i + 1}, &lost, r.took(s, &lost))
	}
	d := &t.C[i]
	if proof != 0 {
		d.Step = idle
		yield(Action{Name: "SettleApplied", Coordinator: i + 1}, &t, acknowledge(&t, proof))
		return
	}
	t.denied |= bit(c.Attempt)
	d.Step = idle
	yield(Action{Name: "SettleVoid", Coordinator: i + 1}, &t, r.took(s, &t))
	again := t
	if send(&again, i, true) {
		yield(Action{Name: "SettleVoidAndSendAgain", Coordinator: i + 1}, &again, r.took(s, &again))
	}
}

// send puts a new attempt of what the coordinator has in hand into the socket of the server.
func send(s *State, i int, again bool) bool {
	c := &s.C[i]
	if s.Attempts == s.left.Attempts {
		return false
	}
	for j := range s.Calls {
		if s.Calls[j].Attempt != 0 {
			continue
		}
		s.Attempts++
		s.Ops[s.Attempts], s.Firsts[s.Attempts] = c.Op, s.Attempts
		if again {
			s.Firsts[s.Attempts] = s.Firsts[c.Attempt]
		}
		c.Attempt, c.Step = s.Attempts, sent
		s.Calls[j] = Call{Attempt: c.Attempt, By: uint8(i), Proc: s.Proc, Epoch: c.ItemEpoch, Holder: c.ItemHolder, Session: c.ItemSess, Seen: c.Seen, Awaited: true}
		return true
	}
	return false
}

// network lets a call arrive, its reply arrive, or its connection be cut, or its sender wait no longer.
func (r Rules) network(s *State, j int, yield func(Action, *State, error)) {
	call := s.Calls[j]
	if call.Attempt == 0 {
		return
	}
	if call.Reply == None {
		t := *s
		r.apply(&t, &t.Calls[j])
		answer := t.Calls[j]
		name := "Execute"
		if answer.Reply == Applied { // the reply tells of the point
			t.Calls[j].Seen = t.Server.Hist
		}
		if !call.Awaited {
			name, t.Calls[j] = "ExecuteLate", Call{}
		}
		yield(Action{Name: name, Attempt: call.Attempt}, &t, r.executed(s, &t, answer))
	}
	if !call.Awaited {
		return
	}
	if call.Reply != None {
		t := *s
		t.Calls[j] = Call{}
		c := &t.C[call.By]
		c.Step = idle
		var err error
		switch call.Reply {
		case Applied, Replayed:
			if call.Reply == Applied && call.Seen.len() > c.Seen.len() {
				c.Seen = call.Seen
			}
			err = acknowledge(&t, call.Proof)
		default:
			t.denied |= bit(call.Attempt)
			if call.Reply == Rewound && c.Epoch == call.Epoch && c.Holder == call.Holder {
				endTerm(c)
			}
		}
		if err == nil {
			err = r.took(s, &t)
		}
		yield(Action{Name: "Reply", Attempt: call.Attempt}, &t, err)
	}
	if s.left.Cuts == 0 {
		return
	}
	t := *s
	t.left.Cuts--
	t.C[call.By].Step = settling
	if call.Reply == None { // the sender waits no longer, and the request may still be in the socket
		t.Calls[j].Awaited = false
		yield(Action{Name: "GiveUp", Attempt: call.Attempt}, &t, nil)
	}
	t.Calls[j] = Call{}
	yield(Action{Name: "Cut", Attempt: call.Attempt}, &t, nil)
}

// session is Registry.Session and the journal's Mirror.
func (r Rules) session(s *State, i int, yield func(Action, *State, error)) {
	c := &s.C[i]
	if c.Role != Leading {
		return
	}
	if max(s.Server.Session, s.Node.Sess) < s.left.Sessions {
		t := *s
		r.dial(&t, &t.C[i])
		yield(Action{Name: "Dial", Coordinator: i + 1}, &t, r.took(s, &t))
	}
	if c.Sess != 0 && c.Sess == s.Node.Sess && s.Node.Seen != s.Server.Hist {
		t := *s
		d := &t.C[i]
		if !t.Server.Hist.has(d.Seen) {
			endTerm(d)
		} else {
			t.Node.Seen, d.Seen = t.Server.Hist, t.Server.Hist
		}
		yield(Action{Name: "Feed", Coordinator: i + 1}, &t, r.took(s, &t))
	}
}

func (r Rules) dial(t *State, c *Coordinator) {
	switch {
	case t.Node.Highest > c.Epoch:
		c.Above = t.Node.Highest
		r.release(t, c.Holder, c.Epoch)
		endTerm(c)
	case !r.NoWitness && !t.Server.Hist.has(t.Node.Seen):
		r.suspend(t, c.Epoch)
		r.release(t, c.Holder, c.Epoch)
		endTerm(c)
	default:
		if n := r.open(t, c.Epoch, c.Holder, t.Node.Sess); n != 0 {
			c.Sess, t.Node.Sess, t.Node.Highest = n, n, max(t.Node.Highest, c.Epoch)
		}
	}
}

// faults are what nobody does on purpose.
func (r Rules) faults(s *State, yield func(Action, *State, error)) {
	if !s.HasKept && s.left.ServerRestarts > 0 {
		t := *s
		t.Kept, t.HasKept = s.Server, true
		yield(Action{Name: "CopyDisk"}, &t, nil)
	}
	if s.left.ServerRestarts > 0 {
		t := *s
		r.restart(&t)
		yield(Action{Name: "RestartServer"}, &t, r.took(s, &t))
		if s.HasKept && s.Kept != s.Server {
			t.Server, t.rewound = s.Kept, true
			t.Kept, t.HasKept = Server{}, false
			yield(Action{Name: "RestartServerOnOldData"}, &t, nil)
		}
	}
	for i := range s.C {
		if s.left.Crashes > 0 && s.C[i].Role != Down {
			t := *s
			t.left.Crashes--
			t.Holders++
			t.C[i] = Coordinator{Role: Standby, Holder: t.Holders, Seen: t.Server.Hist} // redis.Open reads it
			for j := range t.Calls {
				if t.Calls[j].By == uint8(i) {
					t.Calls[j].Awaited = false
					if t.Calls[j].Reply != None {
						t.Calls[j] = Call{}
					}
				}
			}
			yield(Action{Name: "CrashCoordinator", Coordinator: i + 1}, &t, nil)
		}
	}
}

// restart kills the server's process. Replies that it gave are still on their way; requests that it did not read are gone.
func (r Rules) restart(t *State) {
	t.left.ServerRestarts--
	t.Proc++
	for j := range t.Calls {
		c := &t.Calls[j]
		if c.Attempt == 0 || c.Reply != None || r.CallsOutlive {
			continue
		}
		if c.Awaited {
			t.C[c.By].Step = settling
		}
		*c = Call{}
	}
}

// acknowledge is what a caller is told: its commit was applied.
func acknowledge(s *State, attempt uint8) error {
	if !s.rewound && !s.Server.Hist.contains(attempt) {
		return fmt.Errorf("Truth: attempt %d was acknowledged and is not in the history", attempt)
	}
	return nil
}
