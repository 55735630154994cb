package catalog

import "time"

// Retention is how long a store keeps what is not a living record.
type Retention struct {
	// Receipts is how long an operation id is remembered after its commit.
	Receipts time.Duration
	// Tombstones is how long a deleted record leaves a trace.
	Tombstones time.Duration
	// Changes is how many commits the change log keeps at least.
	Changes int64
}

// WithDefaults fills what is zero: receipts for a day, tombstones for a week, 100,000 changes.
func (r Retention) WithDefaults() Retention {
	if r.Receipts <= 0 {
		r.Receipts = 24 * time.Hour
	}
	if r.Tombstones <= 0 {
		r.Tombstones = 7 * 24 * time.Hour
	}
	if r.Changes <= 0 {
		r.Changes = 100_000
	}
	return r
}
