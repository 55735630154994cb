package app

import (
	"strings"
	"testing"
)

// TestShortened: what a manifest keeps of a process's arguments is bounded, and valid text.
func TestShortened(t *testing.T) {
	for _, args := range [][]string{nil, {"sh", "-c", "true"}, {strings.Repeat("é", 5000)}, make([]string, 100_000), {"a", strings.Repeat("b", 1000), "c"}} {
		out := shortened(args)
		if sum := len(strings.Join(out, "")); sum > tableArgs+3 || len(out) > tableArgs || strings.ToValidUTF8(strings.Join(out, ""), "") != strings.Join(out, "") {
			t.Errorf("%d arguments of %d bytes are kept", len(out), sum)
		}
	}
	if got := shortened([]string{"sh", "-c", "true"}); len(got) != 3 || got[2] != "true" {
		t.Errorf("short ones became %q", got)
	}
}
