package robustness

import (
	"strings"
	"testing"
	"time"
)

// TestTrouble: what a run found is told in few lines, each finding in some, whatever their length.
func TestTrouble(t *testing.T) {
	r := &Report{Seed: 7, Plan: []planned{{Kind: "server killed", Hold: time.Second}, {Kind: "link down"}}, Faults: []struck{{Begin: time.Second, Healed: 2 * time.Second}},
		Stuck: "never: it is back", Wrong: []string{"first " + strings.Repeat("line of it\n", 100), "second", "third " + strings.Repeat("x", 10000)}}
	text := r.Trouble()
	lines := strings.Split(text, "\n")
	if len(lines) > troubleLines {
		t.Errorf("%d lines", len(lines))
	}
	for _, line := range lines {
		if len(line) > troubleWidth {
			t.Errorf("a line of %d", len(line))
		}
	}
	for _, part := range []string{"SEED 7", "server killed", "healed at 2s", "link down", "STUCK: never", "WRONG: first", "WRONG: second", "WRONG: third"} {
		if !strings.Contains(text, part) {
			t.Errorf("%q is not told in\n%s", part, text)
		}
	}
}
