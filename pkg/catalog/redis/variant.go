package redis

import (
	"strings"

	"github.com/dormouse-run/dormouse/pkg/mutant"
)

// variant gives the script of commits, as the build is to have it: unchanged but in a variant for tests.
func variant(source string) string {
	if mutant.On(mutant.NoEpochCheck) {
		const checks = "local function check_owner(c)\n"
		return strings.Replace(source, checks, checks+"  if true then return nil end\n", 1)
	}
	return source
}
