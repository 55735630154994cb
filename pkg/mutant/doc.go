// Package mutant breaks Dormouse on purpose, in builds with the tag mutants: the robustness suite (test/robustness) has to
// notice each variant, or it is worth nothing. In any other build there is nothing of it: On is the constant false.
//
// The variant is chosen by the environment variable DORMOUSE_MUTANT. Each stands at the place that it breaks.
package mutant

// Name of a variant.
type Name string

// The variants.
const (
	// NoEpochCheck: the store applies what a coordinator or a session commits that has been replaced.
	NoEpochCheck Name = "no-epoch-check"
	// StaleView: what was concluded from the catalog is taken to hold on whatever server it is found again on.
	StaleView Name = "stale-view"
	// NoTombstone: what was deleted is read as what never was.
	NoTombstone Name = "no-tombstone"
	// DroppedReference: a commit that is built again after a conflict has lost its references.
	DroppedReference Name = "dropped-reference"
	// BlindRetry: a commit whose reply was lost is not settled, but sent again as if it were another operation's.
	BlindRetry Name = "blind-retry"
	// UnreportedLoss: whoever accepts a loss gets a catalog without what the journals could have put back, and is told of nothing.
	UnreportedLoss Name = "unreported-loss"
	// Resurrection: whoever accepts a loss gets back what the journals say was deleted.
	Resurrection Name = "resurrection"
)

// Names lists the variants.
func Names() []Name {
	return []Name{NoEpochCheck, StaleView, NoTombstone, DroppedReference, BlindRetry, UnreportedLoss, Resurrection}
}
