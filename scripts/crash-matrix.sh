#!/bin/bash
# The whole crash matrix, in one command: crash-matrix.sh [PARTS].
#
# The tests of test/crash run one after the other, each table of points in PARTS shards (8), each shard in a cluster of its
# own, so that a part that fails costs no other. Each part says how it ended; the summary lists what failed, and the
# exit code is that of all. The daemons are built once, from the tree as it is then. CRASH_WRAP is a command that each part is
# run by, CRASH_LOGS where the parts' logs go, CRASH_PARTS a regular expression of the parts to run.
set -euo pipefail
cd "$(dirname "$0")/.."

shards=${1:-8}
steps=${CRASH_STEPS:-1000}
logs=${CRASH_LOGS:-$(mktemp -d "${TMPDIR:-/tmp}/crash-matrix-XXXXXX")}
read -ra wrap <<<"${CRASH_WRAP:-}"
mkdir -p "$logs"
go test -c -o "$logs/crash.test" ./test/crash
export CRASH_BIN=$logs/bin
rm -rf "$CRASH_BIN"
mkdir "$CRASH_BIN"

failed=() total=0 rows=0
begin=$SECONDS

# part NAME TESTS [VARIABLE=VALUE...]
part() {
	local name=$1 tests=$2 log=$logs/$1.log at=$SECONDS end passed
	shift 2
	[[ $name =~ ${CRASH_PARTS:-.} ]] || return 0
	total=$((total + 1))
	end=ok
	(cd test/crash && env "$@" "${wrap[@]}" "$logs/crash.test" -test.v -test.count=1 -test.timeout=15m -test.run "$tests") >"$log" 2>&1 || end=FAILED
	passed=$(grep -c '^ *--- PASS: .*/' "$log" || true)
	rows=$((rows + passed))
	printf '[crash] %-24s %-6s %4d s  %d rows passed\n' "$name" "$end" $((SECONDS - at)) "$passed"
	if [ "$end" != ok ]; then
		failed+=("$name")
		grep -E '^ *--- FAIL|_test.go:[0-9]+:|^panic' "$log" | grep -vE ': [0-9.]+ s$' | head -20 | sed 's/^/    /' || true
	fi
}

for k in $(seq "$shards"); do
	part "matrix-$k" '^TestF10CrashMatrix$' CRASH_SHARD="$k/$shards"
done
for k in 1 2; do
	part "deletes-$k" '^TestDeleteAgainstEachStep$' CRASH_SHARD="$k/2"
	part "clock-$k" '^TestF10ClockMoved$' CRASH_SHARD="$k/2"
done
for k in 1 2 3 4; do
	part "interleavings-$k" '^TestRandomInterleavings$' CRASH_STEPS=$((steps / 4)) CRASH_SEED="$k"
	part "interleavings-deaths-$k" '^TestRandomInterleavingsWhileDaemonsDie$' CRASH_STEPS=$((steps / 20)) CRASH_SEED="$k"
done
# And every other test of the package, five to a cluster.
named='^(TestF10CrashMatrix|TestDeleteAgainstEachStep|TestF10ClockMoved|TestRandomInterleavings|TestRandomInterleavingsWhileDaemonsDie)$'
mapfile -t others < <("$logs/crash.test" -test.list . | grep '^Test' | grep -vE "$named")
for ((i = 0; i < ${#others[@]}; i += 5)); do
	part "others-$((i / 5 + 1))" "^($(IFS='|' && echo "${others[*]:i:5}"))\$"
done

printf '[crash] %d parts, %d rows passed, %d parts failed, %d s; logs in %s\n' "$total" "$rows" "${#failed[@]}" $((SECONDS - begin)) "$logs"
if [ "${#failed[@]}" -gt 0 ]; then
	printf '[crash] failed: %s\n' "${failed[*]}"
	exit 1
fi
