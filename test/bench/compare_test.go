package bench

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

func TestVerdictOfAComparison(t *testing.T) {
	for _, tc := range []struct {
		what   string
		a, b   Sample
		better int
		want   string
	}{
		{"within noise", Sample{10, 12, 11}, Sample{11, 13, 12}, -1, ""},
		{"slower in all", Sample{10, 11, 12}, Sample{13, 14, 15}, -1, "regression"},
		{"fewer in all", Sample{13, 14, 15}, Sample{10, 11, 12}, 1, "regression"},
		{"faster in all", Sample{13, 14, 15}, Sample{10, 11, 12}, -1, "better"},
		{"a little slower in all", Sample{10, 10, 10}, Sample{10.1, 10.1, 10.1}, -1, ""},
		{"slower in all, by less than they scatter", Sample{6.8, 7.7}, Sample{7.9, 8.1}, -1, ""},
		{"no direction", Sample{10, 10, 10}, Sample{20, 20, 20}, 0, ""},
	} {
		if got := (Compared{A: tc.a, B: tc.b, Better: tc.better}).Verdict(); got != tc.want {
			t.Errorf("%s: %q, want %q", tc.what, got, tc.want)
		}
	}
	for unit, want := range map[string]int{"ms": -1, "MB/s": 1, "x": 0} {
		if got := better(Row{Unit: unit}); got != want {
			t.Errorf("%s: %d, want %d", unit, got, want)
		}
	}
	if better(Row{Unit: "x", AtLeast: 1}) != 1 || better(Row{Unit: "/s", AtMost: 1}) != -1 {
		t.Error("a target does not tell which way is better")
	}
}

func TestJoinKeepsWhatBothHave(t *testing.T) {
	result := func(values ...float64) Result {
		return Result{Name: "x", Rows: []Row{{What: "time", Unit: "ms", Value: values[0]}, {What: "the same", Unit: "x", Value: values[1]}, {What: "the same", Unit: "x", Value: values[2]}}}
	}
	only := Result{Name: "y", Rows: []Row{{What: "new", Value: 1}}}
	all := Join([]Result{result(1, 2, 3), result(4, 5, 6)}, []Result{result(7, 8, 9), only})
	if len(all) != 3 || all[2].What != "the same (2)" || all[2].A[1] != 6 || all[2].B[0] != 9 || all[0].Better != -1 {
		t.Errorf("joined: %+v", all)
	}
}

// Two commits of a repository whose bench command says what its commit says: built and run in turn, and nothing is left.
func TestCompareTwoCommits(t *testing.T) {
	repo, temp := t.TempDir(), t.TempDir()
	write := func(name, text string, mode os.FileMode) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(repo, name), []byte(text), mode); err != nil {
			t.Fatal(err)
		}
	}
	git := func(args ...string) {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), "git", append([]string{"-c", "user.name=t", "-c", "user.email=t@t.invalid", "-c", "commit.gpgsign=false"}, args...)...)
		cmd.Dir = repo
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("git %v: %v\n%s", args, err, out)
		}
	}
	write("Makefile", "build:\n\t@mkdir -p bin && cp bench.sh bin/bench\nbundle:\n", 0o600)
	program := func(value string) string {
		return `#!/bin/sh
[ "$1" != list ] || { echo start; exit 0; }
mkdir -p "$2/results"
printf '%s ' ` + value + ` >>` + filepath.Join(temp, "order") + `
echo '{"name":"start","rows":[{"what":"time","unit":"ms","value":` + value + `}]}' >"$2/results/$5.json"
`
	}
	git("init", "--quiet")
	write("bench.sh", program("10"), 0o700)
	git("add", "-A")
	git("commit", "--quiet", "-m", "a")
	write("bench.sh", program("20"), 0o700)
	// What a comparison left that was killed: no process has that number.
	left := filepath.Join(temp, checkoutPrefix+"4194305")
	if err := os.Mkdir(left, 0o700); err != nil {
		t.Fatal(err)
	}
	git("worktree", "add", "--quiet", "--detach", filepath.Join(left, "tree"), "HEAD")
	all, err := Compare(t.Context(), CompareOptions{Repo: repo, Ref: "HEAD", Names: []string{"start", "new"}, Rounds: 2, Scale: 1, Dir: temp, Logf: t.Logf})
	if err != nil {
		t.Fatal(err)
	}
	if len(all) != 1 || all[0].Verdict() != "regression" || !strings.Contains(Comparison(all), "2.00  REGRESSION") {
		t.Errorf("compared: %+v\n%s", all, Comparison(all))
	}
	order, err := os.ReadFile(filepath.Join(temp, "order"))
	if err != nil || string(order) != "10 20 10 20 " {
		t.Errorf("measured in the order %q (%v)", order, err)
	}
	if dirs, err := filepath.Glob(filepath.Join(temp, checkoutPrefix+"*")); err != nil || len(dirs) > 0 {
		t.Errorf("left: %v, %v", dirs, err)
	}
	out, err := exec.CommandContext(t.Context(), "git", "-C", repo, "worktree", "list").Output()
	if err != nil || strings.Count(string(out), "\n") != 1 {
		t.Errorf("git knows of\n%s(%v)", out, err)
	}
	if _, err := Compare(t.Context(), CompareOptions{Repo: repo, Ref: "no-such-commit", Names: []string{"start"}, Rounds: 1, Scale: 1, Dir: temp, Logf: t.Logf}); err == nil {
		t.Error("a commit that is not there was measured")
	}
}
