package runsc

import (
	"errors"
	"strings"
	"testing"

	"github.com/dormouse-run/dormouse/pkg/errs"
)

// What runsc says is told in a line that has the cause: not the stacks that follow it, not the middle
// of a long text, and not the plain copy of what the log has as well.
func TestDigest(t *testing.T) {
	const cause = `checkpoint failed: error serializing object &wire.Map{Keys:[]wire.Object{(*wire.String)(0x1)}}: no space left on device`
	stacks := "\ngoroutine 405 [running]:\ngvisor.dev/gvisor/pkg/state.safely.func1()\n\t" + strings.Repeat("x", maxOutput/4)
	logged := func(msg string) string {
		return `{"msg":"` + strings.NewReplacer("\n", `\n`, "\t", `\t`, "&", `\u0026`).Replace(msg) + `","level":"error","time":"2026-01-01T00:00:00Z"}`
	}
	for _, c := range []struct{ name, output, want string }{
		{"nothing", "", ""},
		{"plain", "  it is\n  not there\n", "it is not there"},
		{"logged", logged("one") + logged("two") + "\n", "one; two"},
		{"plain before logged", cause + ":" + stacks + "\n" + logged(cause+":"+stacks), cause},
		{"logged before plain", logged(cause+":"+stacks) + cause + ":" + stacks, cause},
		{"plain with stacks", cause + ":" + stacks, cause},
		{"cut off", cause + ":" + stacks + logged(cause)[:40], cause},
		{"long", strings.Repeat("a", 3000) + " failed: EOF", strings.Repeat("a", 1000) + " ... " + strings.Repeat("a", 988) + " failed: EOF"},
	} {
		if got := digest([]byte(c.output)); got != c.want {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
	}
	var e *errs.Error
	err := classify("u", "save", &failure{what: "checkpoint", said: digest([]byte(cause + ":" + stacks))})
	if !errors.As(err, &e) || e.Reason != errs.DiskFull || e.Outcome != errs.NotStarted {
		t.Errorf("a full disk during a save: %v", err)
	}
}
