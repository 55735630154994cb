package publish

// Waiting is how many publications wait for admission.
func (q *Queue) Waiting() int64 { return q.waiting.Load() }

// Queued is how many commits are built and not yet sent.
func (q *Queue) Queued() int { return len(q.items) }
