package admission

import (
	"testing"
	"time"

	"github.com/dormouse-run/dormouse/pkg/errs"
)

func TestAdmission(t *testing.T) {
	now := time.Unix(1000, 0)
	a := New(Limits{Rate: 10, Burst: 5, Calls: 3, Streams: 1}, func() time.Time { return now })
	var open []func()
	enter := func(tenant string, stream bool, want string) {
		t.Helper()
		leave, err := a.Enter(tenant, stream)
		if err == nil {
			open = append(open, leave)
		}
		if got := errs.From(err); (err == nil) != (want == "") || err != nil && (got.Reason != errs.TooMany || got.Details["resource"] != want || got.Details["limit"] == "") {
			t.Fatalf("%v, want %q", err, want)
		}
	}
	for range 3 {
		enter("acme", false, "")
	}
	enter("acme", false, "calls") // a refused call costs no token
	enter("acme", true, "")
	enter("acme", true, "streams")
	enter("other", false, "") // somebody else's
	open[0]()
	open[0]() // counts once
	enter("acme", false, "")
	for _, leave := range open {
		leave()
	}
	enter("acme", false, "calls_per_second")
	now = now.Add(-time.Hour) // a clock that goes wrong earns nothing
	enter("acme", false, "calls_per_second")
	now = now.Add(100 * time.Millisecond)
	enter("acme", false, "")
	enter("acme", false, "calls_per_second")
	now = now.Add(time.Hour)
	for range 3 {
		enter("acme", false, "")
		open[len(open)-1]()
	}
}
