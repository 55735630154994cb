#!/usr/bin/env bash
# Runs every fuzz target of the repository for a while, one after the other.
#
#   scripts/fuzz.sh TIME    how long each target runs: 10m, or 300x for so many inputs
#
# What a target finds is written below testdata/fuzz of its package, to be kept with the fix.
set -euo pipefail

time=${1:?usage: scripts/fuzz.sh TIME}
cd "$(dirname "${BASH_SOURCE[0]}")/.."

status=0
while IFS=: read -r file _ line; do
	target=${line#func }
	target=${target%%(*}
	package=./$(dirname "$file")
	printf '%s %s\n' "$package" "$target"
	# Minimizing what is merely new would take the time from looking further.
	if ! out=$(go test "$package" -run '^$' -fuzz "^$target\$" -fuzztime "$time" -fuzzminimizetime 20x 2>&1); then
		# Where the time ends before all that is in the cache was tried once, go test calls that a failure.
		if [[ $out == *"context deadline exceeded"* && $out != *"Failing input"* && $out != *panic* ]]; then
			continue
		fi
		printf '%s\n' "$out"
		status=1
	fi
done < <(grep -rn --include='*_test.go' '^func Fuzz' agentd coordinator pkg | sort)
exit $status
