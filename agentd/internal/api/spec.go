package api

import (
	"context"
	"strings"

	"github.com/dormouse-run/dormouse/agentd/internal/guest"
	"github.com/dormouse-run/dormouse/agentd/internal/runner"
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
	"github.com/dormouse-run/dormouse/pkg/uid"
	"github.com/dormouse-run/dormouse/pkg/wire"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// Limits of what is asked of a process.
const (
	maxProcessID    = 64
	maxTags         = 64
	maxTagFilters   = 16
	maxGroups       = 32
	maxTerminalSide = 4096
)

// The size of a terminal that is asked for without one.
const (
	defaultRows = 24
	defaultCols = 80
)

// argvOf is the command of a spec, which names it in one of two ways.
func argvOf(p *dormousev1.ProcessSpec) ([]string, error) {
	switch argv, line := p.GetArgv(), p.GetShell(); {
	case len(argv) > 0 && line != "":
		return nil, errs.New(errs.InvalidField, "spec.shell: give a program in argv or a line in shell, not both").With("field", "spec.shell")
	case line != "":
		return []string{"/bin/sh", "-c", line}, nil
	case len(argv) == 0:
		return nil, errs.New(errs.InvalidField, "spec.argv: name a program, or give a line in spec.shell").With("field", "spec.argv")
	default:
		return argv, nil
	}
}

// sizeOf reads a terminal's size; nil stays nil.
func sizeOf(field string, t *dormousev1.Terminal) (*guest.Size, error) {
	if t == nil {
		return nil, nil
	}
	size := guest.Size{Rows: int(t.GetRows()), Columns: int(t.GetCols())}
	if size == (guest.Size{}) {
		size = guest.Size{Rows: defaultRows, Columns: defaultCols}
	}
	for _, side := range []int{size.Rows, size.Columns} {
		if side < 1 || side > maxTerminalSide {
			return nil, errs.New(errs.InvalidField, "%s: 1 to %d rows and columns", field, maxTerminalSide).With("field", field)
		}
	}
	return &size, nil
}

func checkProcessID(id string) error {
	if len(id) > maxProcessID || strings.ContainsFunc(id, func(r rune) bool { return r <= ' ' || r > '~' }) {
		return errs.New(errs.InvalidField, "process_id: at most %d printable characters", maxProcessID).With("field", "process_id")
	}
	return nil
}

func checkSpec(id string, p *dormousev1.ProcessSpec) error {
	argv, err := argvOf(p)
	if err := first(err, checkProcessID(id)); err != nil {
		return err
	}
	if id == runner.MainID {
		return errs.New(errs.InvalidField, "process_id: %q is the sandbox's own command; choose another", id).With("field", "process_id")
	}
	if len(p.GetTags()) > maxTags {
		return errs.New(errs.LimitExceeded, "spec.tags: at most %d", maxTags).With("field", "spec.tags")
	}
	if t := p.GetTimeout(); t != nil && (t.CheckValid() != nil || t.AsDuration() < 0) {
		return errs.New(errs.InvalidField, "spec.timeout: must not be negative").With("field", "spec.timeout")
	}
	if len(p.GetGroups()) > maxGroups {
		return errs.New(errs.LimitExceeded, "spec.groups: at most %d", maxGroups).With("field", "spec.groups")
	}
	problems := []*sandbox.Problem{
		sandbox.ValidateArgv("spec.argv", argv), sandbox.ValidateEnv("spec.env", p.GetEnv()),
		sandbox.ValidateUser("spec.user", p.GetUser()), sandbox.ValidatePath("spec.working_dir", p.GetWorkingDir()),
		sandbox.ValidateLabels("spec.tags", p.GetTags()),
	}
	for _, g := range p.GetGroups() {
		if g == "" || strings.Contains(g, ":") {
			return errs.New(errs.InvalidField, "spec.groups: a group's name or id, not %q", g).With("field", "spec.groups")
		}
		problems = append(problems, sandbox.ValidateUser("spec.groups", g))
	}
	for _, problem := range problems {
		if err := wire.FromProblem(problem); err != nil {
			return err
		}
	}
	return nil
}

// start starts a process with the sandbox's defaults where the caller says nothing. With hold its
// output waits for its first reader, which the caller is about to be.
func (s *Processes) start(ctx context.Context, sandboxUID, id string, p *dormousev1.ProcessSpec, hold bool) (*guest.Conn, guest.Process, error) {
	conn, req, err := s.prepare(sandboxUID, id, p)
	if err != nil {
		return nil, guest.Process{}, err
	}
	req.HoldOutput = hold
	proc, err := conn.Start(ctx, req)
	return conn, proc, err
}

// prepare makes the guest's request of a spec.
func (s *Processes) prepare(sandboxUID, id string, p *dormousev1.ProcessSpec) (*guest.Conn, guest.StartRequest, error) {
	size, err := sizeOf("spec.terminal", p.GetTerminal())
	if err := first(checkUID("sandbox_uid", sandboxUID), checkSpec(id, p), err); err != nil {
		return nil, guest.StartRequest{}, err
	}
	argv, err := argvOf(p)
	if err != nil {
		return nil, guest.StartRequest{}, err
	}
	conn, err := s.Sandboxes.Channel(sandboxUID)
	if err != nil {
		return nil, guest.StartRequest{}, err
	}
	d, err := s.Sandboxes.Defaults(sandboxUID)
	if err != nil {
		return nil, guest.StartRequest{}, err
	}
	if id == "" {
		id = uid.New()
	}
	req := guest.StartRequest{
		ID: id, Args: argv, Env: runner.MergeEnv(d.Env, p.GetEnv()), User: d.User, Dir: d.Dir, Groups: p.GetGroups(),
		Stdin: p.GetStdin(), Timeout: p.GetTimeout().AsDuration(), Tags: p.GetTags(), Terminal: size,
	}
	if p.GetUser() != "" {
		req.User = p.GetUser()
	}
	if p.GetWorkingDir() != "" {
		req.Dir = p.GetWorkingDir()
	}
	return conn, req, nil
}

// tagFilter reads "key=value" filters.
func tagFilter(in []string) (map[string]string, error) {
	if len(in) > maxTagFilters {
		return nil, errs.New(errs.LimitExceeded, "tags: at most %d filters, got %d", maxTagFilters, len(in)).With("field", "tags")
	}
	want := make(map[string]string, len(in))
	for _, f := range in {
		k, v, ok := strings.Cut(f, "=")
		if !ok || k == "" {
			return nil, errs.New(errs.InvalidField, "tags: a filter is key=value, not %q", f).With("field", "tags")
		}
		if have, twice := want[k]; twice && have != v {
			return nil, errs.New(errs.InvalidField, "tags: %s cannot have two values", k).With("field", "tags")
		}
		want[k] = v
	}
	return want, nil
}

func hasTags(have, want map[string]string) bool {
	for k, v := range want {
		if got, ok := have[k]; !ok || got != v {
			return false
		}
	}
	return true
}
