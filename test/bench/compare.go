package bench

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"text/tabwriter"
)

// # Comparing two commits
//
// Compare measures this checkout (B) and another commit (A) in turn: A B A B ..., each built from its own tree and run by its own bench
// command, so that whatever else the machine does weighs on both alike. What counts is each side's median. A figure is worse beyond
// noise if every one of its values is worse than every one of A's, and the medians differ by more than some percent and by more
// than the values of either side do among themselves.
//
// The other commit is checked out into a folder below Dir whose name has the process that made it. A comparison that was killed
// leaves such a folder; the next one takes it away.

// CompareOptions say what is compared.
type CompareOptions struct {
	// Repo is the checkout that is B, and Ref the commit that is A.
	Repo, Ref string
	// Names of the benchmarks; all of those that both have, if empty.
	Names []string
	// Rounds of A and B.
	Rounds int
	Scale  float64
	// Dir has the checkout of A while it is measured; the system's folder for temporary files if empty.
	Dir  string
	Logf func(format string, args ...any)
}

// worse is how many percent the medians have to differ by.
const worse = 5

const checkoutPrefix = "dormouse-compare-"

// Compared is a figure of both.
type Compared struct {
	Bench, What, Unit string
	A, B              Sample
	// Better tells which way is better: 1 higher, -1 lower, 0 not known.
	Better int
}

// Ratio of the medians, B to A.
func (c Compared) Ratio() float64 { return c.B.Median() / c.A.Median() }

// Verdict is "regression", "better" or, within noise, empty.
func (c Compared) Verdict() string {
	if c.Better == 0 || len(c.A) == 0 || len(c.B) == 0 || math.Abs(c.Ratio()-1)*100 <= worse {
		return ""
	}
	low, high := c.A, c.B // if B is higher in all
	if c.B.Median() < c.A.Median() {
		low, high = c.B, c.A
	}
	scatter := max(slices.Max(low)-slices.Min(low), slices.Max(high)-slices.Min(high))
	if slices.Max(low) >= slices.Min(high) || high.Median()-low.Median() <= scatter {
		return ""
	}
	if (c.B.Median() > c.A.Median()) == (c.Better > 0) {
		return "better"
	}
	return "regression"
}

// better tells which way a figure is better, by its target, else by its unit.
func better(f Row) int {
	switch {
	case f.AtLeast > 0:
		return 1
	case f.AtMost > 0:
		return -1
	}
	switch f.Unit {
	case "ms", "s", "MB", "MiB":
		return -1
	case "/s", "MB/s":
		return 1
	}
	return 0
}

// Compare builds and measures. Its error is for a comparison that could not be made.
func Compare(ctx context.Context, opts CompareOptions) (_ []Compared, err error) {
	if opts.Dir == "" {
		opts.Dir = os.TempDir()
	}
	if opts.Rounds < 1 || opts.Rounds > 20 {
		return nil, fmt.Errorf("%d rounds; it must be 1 to 20", opts.Rounds)
	}
	if err := sweepCheckouts(ctx, opts); err != nil {
		return nil, err
	}
	dir := filepath.Join(opts.Dir, checkoutPrefix+strconv.Itoa(os.Getpid()))
	defer func() { err = errors.Join(err, removeCheckout(context.WithoutCancel(ctx), opts, dir)) }()
	if err := os.Mkdir(dir, 0o700); err != nil {
		return nil, err
	}
	tree := filepath.Join(dir, "tree")
	if err := command(ctx, opts.Repo, "git", "worktree", "add", "--quiet", "--detach", tree, opts.Ref); err != nil {
		return nil, err
	}
	for _, side := range []string{tree, opts.Repo} {
		opts.Logf("build %s", side)
		if err := command(ctx, side, "make", "build", "bundle"); err != nil {
			return nil, err
		}
	}
	results := [2][]Result{}
	for _, name := range opts.Names {
		if said, err := exec.CommandContext(ctx, filepath.Join(tree, "bin", "bench"), "list").Output(); err == nil && !slices.Contains(strings.Fields(string(said)), name) { //nolint:gosec // built above
			opts.Logf("%s: %s does not have it", name, opts.Ref)
			continue
		}
		for round := range opts.Rounds {
			for i, side := range []string{tree, opts.Repo} {
				opts.Logf("%s, round %d of %d: %c", name, round+1, opts.Rounds, 'A'+i)
				r, err := measureIn(ctx, side, name, filepath.Join(dir, "results"), opts.Scale)
				if err != nil {
					return nil, err
				}
				results[i] = append(results[i], r)
			}
		}
	}
	return Join(results[0], results[1]), nil
}

// measureIn has the bench command of a checkout run one benchmark.
func measureIn(ctx context.Context, checkout, name, out string, scale float64) (r Result, err error) {
	if err := command(ctx, checkout, filepath.Join(checkout, "bin", "bench"), "--out", out, "--scale", strconv.FormatFloat(scale, 'g', -1, 64), name); err != nil {
		return r, err
	}
	file := filepath.Join(out, "results", name+".json")
	data, err := os.ReadFile(file)
	if err != nil {
		return r, err
	}
	return r, errors.Join(json.Unmarshal(data, &r), os.Remove(file))
}

// command runs a command in a folder; what it says is in the error.
func command(ctx context.Context, dir, name string, args ...string) error {
	cmd := exec.CommandContext(ctx, name, args...) //nolint:gosec // git, make, and what they built
	cmd.Dir = dir
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) } // a bench ends its cluster
	out, err := cmd.CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s %s: %w\n%s", filepath.Base(name), strings.Join(args, " "), err, out[max(0, len(out)-4000):])
	}
	return nil
}

// removeCheckout takes a folder of a comparison away, with what git knows of it.
func removeCheckout(ctx context.Context, opts CompareOptions, dir string) error {
	if err := os.RemoveAll(dir); err != nil {
		return err
	}
	return command(ctx, opts.Repo, "git", "worktree", "prune")
}

// sweepCheckouts takes away what comparisons left that were killed.
func sweepCheckouts(ctx context.Context, opts CompareOptions) error {
	left, err := filepath.Glob(filepath.Join(opts.Dir, checkoutPrefix+"*"))
	if err != nil {
		return err
	}
	for _, dir := range left {
		pid, err := strconv.Atoi(strings.TrimPrefix(filepath.Base(dir), checkoutPrefix))
		if err != nil || syscall.Kill(pid, 0) == nil {
			continue // not one of ours, or one that goes on
		}
		if err := removeCheckout(ctx, opts, dir); err != nil {
			return err
		}
	}
	return nil
}

// Join puts the figures of both sides beside each other, in the order of A. A figure that one side does not have is left out.
func Join(a, b []Result) []Compared {
	type key struct{ bench, what string }
	index := make(map[key]*Compared)
	var order []key
	for i, side := range [][]Result{a, b} {
		for _, r := range side {
			seen := make(map[string]int) // "the same" occurs more than once
			for _, f := range r.Rows {
				seen[f.What]++
				k := key{r.Name, f.What}
				if n := seen[f.What]; n > 1 {
					k.what = fmt.Sprintf("%s (%d)", f.What, n)
				}
				c := index[k]
				if c == nil && i == 0 {
					c = &Compared{Bench: r.Name, What: k.what, Unit: f.Unit, Better: better(f)}
					index[k] = c
					order = append(order, k)
				}
				switch {
				case c == nil:
				case i == 0:
					c.A = append(c.A, f.Value)
				default:
					c.B = append(c.B, f.Value)
				}
			}
		}
	}
	var all []Compared
	for _, k := range order {
		if c := index[k]; len(c.B) > 0 {
			all = append(all, *c)
		}
	}
	return all
}

// Comparison is the table for people.
func Comparison(all []Compared) string {
	var b strings.Builder
	t := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	_, _ = fmt.Fprintln(t, "benchmark\twhat\tA\tB\tB/A\t")
	count := map[string]int{}
	for _, c := range all {
		verdict := c.Verdict()
		count[cmp.Or(verdict, "within noise")]++
		_, _ = fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%.2f\t%s\n", c.Bench, c.What, spread(c.A, c.Unit), spread(c.B, c.Unit), c.Ratio(), strings.ToUpper(verdict))
	}
	_ = t.Flush() // to memory
	for _, k := range slices.Sorted(maps.Keys(count)) {
		fmt.Fprintf(&b, "%s: %d\n", k, count[k])
	}
	return b.String()
}

// spread is the median of a sample and what it lies between.
func spread(s Sample, unit string) string {
	return fmt.Sprintf("%.2f %s (%.2f to %.2f)", s.Median(), unit, slices.Min(s), slices.Max(s))
}
