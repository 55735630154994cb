//go:build !mutants

package mutant

// Enabled tells whether this build has variants.
const Enabled = false

// On is false in this build.
func On(Name) bool { return false }
