//go:build mutants

package mutant

import "os"

// Enabled tells whether this build has variants.
const Enabled = true

var chosen = Name(os.Getenv("DORMOUSE_MUTANT"))

// On tells whether this process is that variant.
func On(n Name) bool { return n == chosen }
