package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"time"

	"github.com/dormouse-run/dormouse/test/proof"
	"golang.org/x/term"
)

// show prints what happens: steps, the commands as a user would type them, what they say, and how long
// they took.
type show struct {
	out    io.Writer
	colour bool
	began  time.Time
	step   int
}

func newShow(out *os.File) *show {
	return &show{out: out, colour: term.IsTerminal(int(out.Fd())) && os.Getenv("NO_COLOR") == "", began: time.Now()}
}

func (s *show) paint(code, text string) string {
	if !s.colour {
		return text
	}
	return "\x1b[" + code + "m" + text + "\x1b[0m"
}

func (s *show) title(format string, args ...any) {
	s.step++
	fmt.Fprintf(s.out, "\n%s %s\n", s.paint("1;36", fmt.Sprintf("[%d]", s.step)), s.paint("1", fmt.Sprintf(format, args...)))
}

func (s *show) note(format string, args ...any) {
	fmt.Fprintf(s.out, "    %s\n", fmt.Sprintf(format, args...))
}

func (s *show) took(since time.Time) string {
	return s.paint("2", "("+roundMillis(time.Since(since))+")")
}

func roundMillis(d time.Duration) string { return d.Round(time.Millisecond).String() }

// run shows a command, runs it, shows what it printed, and returns its standard output.
func (s *show) run(ctx context.Context, argv ...string) (string, error) {
	out, took, err := s.quiet(ctx, argv...)
	fmt.Fprintf(s.out, "    %s %s %s\n", s.paint("32", "$"), quoted(argv), s.paint("2", "("+roundMillis(took)+")"))
	for line := range strings.Lines(out) {
		fmt.Fprintf(s.out, "      %s\n", strings.TrimRight(line, "\n"))
	}
	return strings.TrimSpace(out), err
}

// quiet runs a command without showing it. The error holds what it said on standard error.
func (s *show) quiet(ctx context.Context, argv ...string) (string, time.Duration, error) {
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	start := time.Now()
	err := cmd.Run()
	if err != nil {
		err = fmt.Errorf("%s: %w\n%s%s", quoted(argv), err, stdout.String(), stderr.String())
	}
	return stdout.String(), time.Since(start), err
}

func quoted(argv []string) string {
	words := make([]string, len(argv))
	for i, w := range argv {
		if i == 0 {
			w = w[strings.LastIndexByte(w, '/')+1:]
		}
		if w == "" || strings.ContainsAny(w, " \t\n\"'$;|&<>(){}*?") {
			w = "'" + strings.ReplaceAll(w, "'", `'\''`) + "'"
		}
		words[i] = w
	}
	return strings.Join(words, " ")
}

var errProof = errors.New("the answers are not of one process")

// prove prints the claims of two answers side by side and fails if one does not hold.
func (s *show) prove(before, after proof.Answer) error {
	claims := proof.Compare(before, after)
	for _, c := range claims {
		mark := s.paint("32", "same ")
		if c.Before != c.After {
			mark = s.paint("32", "next ")
		}
		if !c.Holds {
			mark = s.paint("1;31", "WRONG")
		}
		fmt.Fprintf(s.out, "      %s  %-32s %s -> %s\n", mark, c.What, brief(c.Before), brief(c.After))
	}
	if len(proof.Failed(claims)) > 0 {
		return errProof
	}
	return nil
}

func brief(v string) string {
	if len(v) > 20 {
		return v[:16] + "..."
	}
	return v
}
