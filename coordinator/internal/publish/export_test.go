package publish

// Waiting is how many publications wait for admission.
func (q *Queue) Waiting() int64 { return q.waiting.Load() }
