package command

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/urfave/cli/v2"

	"github.com/dormouse-run/dormouse/pkg/errs"
)

func app() *cli.App {
	return &cli.App{Name: "x", Flags: []cli.Flag{&cli.StringFlag{Name: "addr"}}, Commands: []*cli.Command{
		{Name: "rm", Aliases: []string{"remove"}, Flags: []cli.Flag{
			&cli.BoolFlag{Name: "force", Aliases: []string{"f"}}, &cli.BoolFlag{Name: "interactive", Aliases: []string{"i"}},
			&cli.StringSliceFlag{Name: "env", Aliases: []string{"e"}}, &cli.IntFlag{Name: "count", Aliases: []string{"n"}}}},
		{Name: "group", Subcommands: []*cli.Command{{Name: "get", Flags: []cli.Flag{&cli.StringFlag{Name: "o"}}}}},
		{Name: "pick", ArgsUsage: "red|green"},
	}}
}

func TestReorder(t *testing.T) {
	for in, want := range map[string]string{
		"x":                             "x",
		"x rm a":                        "x rm -- a",
		"x rm a -f b":                   "x rm --force -- a b",
		"x rm a -n 3":                   "x rm --count=3 -- a",
		"x rm -n=3 a":                   "x rm --count=3 -- a",
		"x --addr h rm a --count 3":     "x --addr=h rm --count=3 -- a",
		"x rm -e A=1 --env B=2 a":       "x rm --env=A=1 --env=B=2 -- a",
		"x rm -ie A=1 a":                "x rm -ie A=1 -- a",
		"x rm -if a":                    "x rm -if -- a",
		"x rm a -- -f b -- c":           "x rm -- a -f b -- c",
		"x rm -- -f":                    "x rm -- -f",
		"x rm --":                       "x rm",
		"x rm a --nope b":               "x rm --nope -- a b",
		"x rm -n":                       "x rm --count",
		"x rm - a":                      "x rm -- - a",
		"x group get thing -o json":     "x group get --o=json -- thing",
		"x nothing -o json":             "x -o -- nothing json",
		"x rm group":                    "x rm -- group",
		"x remove --force=false a --":   "x remove --force=false -- a",
		"x rm a -e= b":                  "x rm --env= -- a b",
		"x rm a --env --force --force":  "x rm --env=--force --force -- a",
		"x group get -- -o x --output=": "x group get -- -o x --output=",
	} {
		if d := cmp.Diff(want, strings.Join(Reorder(app(), strings.Fields(in)), " ")); d != "" {
			t.Errorf("%s (-want +got):\n%s", in, d)
		}
	}
}

func TestComplete(t *testing.T) {
	for in, want := range map[string]string{
		"": "rm group pick", "group": "get", "pick": "red green", "rm --": "--force --interactive --env --count --help", "rm -n 3 --fo": "--force",
		"--addr h group": "get", "rm a": "", "--ad": "--addr", "rm -": "--force -f --interactive -i --env -e --count -n --help -h", "rm -- a": "",
	} {
		if d := cmp.Diff(want, strings.Join(Complete(app(), strings.Fields(in)), " ")); d != "" {
			t.Errorf("%q (-want +got):\n%s", in, d)
		}
	}
}

func TestCompleteNames(t *testing.T) {
	a := &cli.App{
		Flags: []cli.Flag{&cli.StringFlag{Name: "addr"}, &cli.BoolFlag{Name: "apart", Hidden: true}},
		Commands: []*cli.Command{
			{Name: "rm", ArgsUsage: "BOX...", Flags: OutputFlags()}, {Name: "fork", ArgsUsage: "BOX|SNAP"}, {Name: "exec", ArgsUsage: "BOX -- CMD..."},
		},
		Metadata: map[string]any{NamesKey: Names(func(kind string) []string {
			return []string{strings.ToLower(kind) + "-1", strings.ToLower(kind) + "-2"}
		})},
	}
	for in, want := range map[string]string{
		"": "rm fork exec", "rm": "box-1 box-2", "rm box-1": "box-1 box-2", "fork": "box-1 box-2 snap-1 snap-2", "fork x": "",
		"exec": "box-1 box-2", "exec box-1": "", "exec box-1 -- ls": "", "rm -o": "table wide json yaml name", "rm -o json": "box-1 box-2",
		"--addr h rm": "", "--a": "--addr",
	} {
		if d := cmp.Diff(want, strings.Join(Complete(a, strings.Fields(in)), " ")); d != "" {
			t.Errorf("%q (-want +got):\n%s", in, d)
		}
	}
}

func TestCodes(t *testing.T) {
	for want, err := range map[int]error{
		0: nil, 1: errors.New("anything"), 2: &UsageError{Message: "x"}, 3: fmt.Errorf("x: %w", errs.New(errs.ImageNotFound, "x")),
		4: errs.New(errs.NameTaken, "x"), 5: errs.New(errs.NoLeader, "x"), 124: errs.New(errs.DeadlineExpired, "x"), 42: fmt.Errorf("x: %w", Exit(42)),
	} {
		if got := Code(err); got != want {
			t.Errorf("%v: %d, want %d", err, got, want)
		}
	}
	if Code(errs.New(errs.InternalError, "x")) != 5 || Code(errs.New(errs.SandboxFailed, "x")) != 1 || Code(errs.New(errs.NoNodeFits, "x")) != 1 {
		t.Error("internal errors: unknown is 5, what is known to have failed is 1")
	}
}

func TestShow(t *testing.T) {
	var out bytes.Buffer
	e := errs.New(errs.AlreadyAttached, "volume v is held by sandbox s; delete it first").With("holder", "s").With("since", "noon").WithRequest("req-0001", "")
	Show(&out, "x", errors.Join(e, errors.New("second")), false)
	want := "x: volume v is held by sandbox s; delete it first\n  CONFLICT/ALREADY_ATTACHED, outcome not_started, request req-0001, since=noon\nx: second\n"
	if d := cmp.Diff(want, out.String()); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
	out.Reset()
	Show(&out, "x", Exit(3), false)
	if out.Len() != 0 {
		t.Errorf("a code is not a message: %s", out.String())
	}
}

func TestAge(t *testing.T) {
	base := time.Unix(1e9, 0)
	for d, want := range map[time.Duration]string{-time.Second: "0s", 5 * time.Second: "5s", 3 * time.Minute: "3m", 5 * time.Hour: "5h", 72 * time.Hour: "3d"} {
		if got := Age(base.Add(d), base); got != want {
			t.Errorf("%s: %s", d, got)
		}
	}
}
