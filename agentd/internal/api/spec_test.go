package api

import (
	"strings"
	"testing"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/dormouse-run/dormouse/agentd/internal/guest"
	"github.com/dormouse-run/dormouse/pkg/errs"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// TestProcessSpecs: what cannot be is refused with its field, before anything is asked of the guest.
func TestProcessSpecs(t *testing.T) {
	argv := []string{"true"}
	many := make([]string, maxGroups+1)
	for i := range many {
		many[i] = "1"
	}
	for name, c := range map[string]struct {
		spec   *dormousev1.ProcessSpec
		reason errs.Reason
		field  string
	}{
		"nothing":          {&dormousev1.ProcessSpec{}, errs.InvalidField, "spec.argv"},
		"both":             {&dormousev1.ProcessSpec{Argv: argv, Shell: "true"}, errs.InvalidField, "spec.shell"},
		"a group of none":  {&dormousev1.ProcessSpec{Argv: argv, Groups: []string{""}}, errs.InvalidField, "spec.groups"},
		"a group's group":  {&dormousev1.ProcessSpec{Argv: argv, Groups: []string{"a:b"}}, errs.InvalidField, "spec.groups"},
		"too many groups":  {&dormousev1.ProcessSpec{Argv: argv, Groups: many}, errs.LimitExceeded, "spec.groups"},
		"backwards":        {&dormousev1.ProcessSpec{Argv: argv, Timeout: durationpb.New(-1)}, errs.InvalidField, "spec.timeout"},
		"a long line":      {&dormousev1.ProcessSpec{Shell: strings.Repeat("x", 1<<20)}, errs.LimitExceeded, "spec.argv"},
		"a zero in a line": {&dormousev1.ProcessSpec{Shell: "a\x00b"}, errs.InvalidField, "spec.argv"},
	} {
		err := checkSpec("id", c.spec)
		if errs.ReasonOf(err) != c.reason || errs.From(err).Details["field"] != c.field {
			t.Errorf("%s: %v %v, want %s of %s", name, err, errs.From(err).Details, c.reason, c.field)
		}
	}
	for _, spec := range []*dormousev1.ProcessSpec{{Argv: argv}, {Shell: "true"}, {Argv: argv, Groups: []string{"adm", "5"}}} {
		if err := checkSpec("", spec); err != nil {
			t.Errorf("%v: %v", spec, err)
		}
	}
}

func TestTerminalSizes(t *testing.T) {
	for in, want := range map[[2]int32]guest.Size{{0, 0}: {Rows: 24, Columns: 80}, {1, 4096}: {Rows: 1, Columns: 4096}} {
		got, err := sizeOf("terminal", &dormousev1.Terminal{Rows: in[0], Cols: in[1]})
		if err != nil || *got != want {
			t.Errorf("%v: %v %v", in, got, err)
		}
	}
	for _, in := range [][2]int32{{0, 80}, {24, 0}, {-1, 80}, {24, 4097}} {
		_, err := sizeOf("terminal", &dormousev1.Terminal{Rows: in[0], Cols: in[1]})
		wantReason(t, err, errs.InvalidField)
	}
	if got, err := sizeOf("terminal", nil); got != nil || err != nil {
		t.Errorf("%v %v", got, err)
	}
}
