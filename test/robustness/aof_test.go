package robustness

import (
	"fmt"
	"strings"
	"testing"
)

// TestWhole: a log is cut off before the MULTI that has no EXEC, wherever it ends.
func TestWhole(t *testing.T) {
	var log strings.Builder
	ends := []int{0} // at which the log is whole
	command := func(args ...string) {
		fmt.Fprintf(&log, "*%d\r\n", len(args))
		for _, a := range args {
			fmt.Fprintf(&log, "$%d\r\n%s\r\n", len(a), a)
		}
	}
	for range 2 {
		command("SELECT", "0")
		ends = append(ends, log.Len())
		command("MULTI")
		command("SET", "a", "MULTI\r\n$5\r\n")
		command("SET", "b", "")
		command("EXEC")
		ends = append(ends, log.Len())
	}
	for n := range log.Len() + 1 {
		want := 0
		for _, end := range ends {
			if end <= n {
				want = end
			}
		}
		if got := whole([]byte(log.String()[:n])); got != want {
			t.Errorf("of %d bytes %d are whole, not %d", n, got, want)
		}
	}
}
