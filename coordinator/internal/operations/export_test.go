package operations

// Claimable is how many members of the pool a claim may take, as the index has it: it follows the records a moment later.
func (e *Engine) Claimable(pool string) (n int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, m := range e.members.byPool[pool] {
		if m.claimable() {
			n++
		}
	}
	return n
}
