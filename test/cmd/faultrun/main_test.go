// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// What the crash matrix says is read row by row, and what a row that failed had to say is shown.
func TestF10RowsAreRead(t *testing.T) {
	const said = `=== RUN   TestF10CrashMatrix
=== RUN   TestF10CrashMatrix/agentd1/create/start.intent.before
    matrix_test.go:154: 0.7 s
=== RUN   TestF10CrashMatrix/agentd1/delete/delete.runtime.after
    world_test.go:90: left: a mount
    matrix_test.go:154: 1.2 s
--- FAIL: TestF10CrashMatrix (1.90s)
    --- PASS: TestF10CrashMatrix/agentd1/create/start.intent.before (0.70s)
    --- FAIL: TestF10CrashMatrix/agentd1/delete/delete.runtime.after (1.20s)
FAIL
`
	var shown []string
	got := rowsOf(strings.NewReader(said), func(format string, args ...any) { shown = append(shown, fmt.Sprintf(format, args...)) })
	if got.passed != 1 || !slices.Equal(got.failed, []string{"agentd1/delete/delete.runtime.after"}) {
		t.Errorf("read: %+v", got)
	}
	if want := []string{"crash point 1: agentd1/create/start.intent.before", "  world_test.go:90: left: a mount"}; !slices.Equal(shown, want) {
		t.Errorf("shown: %q, want %q", shown, want)
	}
	all := regexp.MustCompile(allPoints)
	for row, want := range map[string]bool{
		"agentd1/create/start.intent.before": true, "agentd1/checkpoint/artefact.rename.after": true, "agentd1/restore/restore.runtime.after": true,
		"agentd1/delete/delete.record.after": true, "agentd1/delete-volume/volume.trash.after": false, "coordinator/create/commit.send.after#1": false,
	} {
		if all.MatchString(row) != want {
			t.Errorf("row %s: %t", row, !want)
		}
	}
}
