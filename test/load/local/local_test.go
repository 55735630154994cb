// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package local_test

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/dormouse-run/dormouse/pkg/client"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
	"github.com/dormouse-run/dormouse/test/load"
	"github.com/dormouse-run/dormouse/test/load/local"
)

// patience is for a run on a busy machine.
const patience = 8 * time.Minute

func up(t *testing.T, plan load.Plan) *local.Cluster {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	l, err := local.Up(ctx, plan, t.Logf)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.End(context.Background()); err != nil {
			t.Error(err)
		}
	})
	return l
}

func options(t *testing.T, l *local.Cluster, plan load.Plan) load.Options {
	return load.Options{
		Plan: plan, Reach: l.Reach(), Image: l.Image, Out: filepath.Join(t.TempDir(), "run"), Command: []string{filepath.Join(l.Bin, "dormouse-load"), "worker"},
		Machine: l, Debt: l.Debt, Logf: t.Logf,
	}
}

// What make load-smoke runs, and what is left when a run is interrupted.
func TestLoadSmoke(t *testing.T) {
	plan, err := load.ReadPlan("smoke")
	if err != nil {
		t.Fatal(err)
	}
	l := up(t, plan)
	t.Run("L04_L05_L06", func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		s, err := load.Run(ctx, load.NewID(), options(t, l, plan))
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("\n%s", s)
		if why := s.Failed(); len(why) > 0 {
			t.Errorf("failed: %v", why)
		}
		if n := plan.Subjects * plan.Rounds; s.Count(load.Checkpoint) != n || s.Count(load.Restore) != n || s.Count(load.Prove) != n {
			t.Errorf("checkpoints, restores and proofs are not %d each:\n%s", n, s)
		}
	})
	t.Run("L05_Interrupted", func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		plan.Subjects, plan.Rounds, plan.Volume = 6, 1, true
		opts := options(t, l, plan)
		opts.Logf = func(format string, args ...any) {
			t.Logf(format, args...)
			if strings.HasPrefix(fmt.Sprintf(format, args...), "delete round 1") {
				cancel() // snapshots and volumes are there
			}
		}
		s, err := load.Run(ctx, load.NewID(), opts)
		if err == nil || !s.Interrupted {
			t.Errorf("an interrupted run says %v", err)
		}
		if len(s.Debt) > 0 {
			t.Errorf("left: %v", s.Debt)
		}
		nothing(t, l)
	})
}

// nothing checks that the catalog is empty.
func nothing(t *testing.T, l *local.Cluster) {
	t.Helper()
	boxes, err := client.Collect(l.Client.ListSandboxes(t.Context(), &dormousev1.ListSandboxesRequest{}))
	if err != nil || len(boxes) > 0 {
		t.Errorf("sandboxes: %v, %v", boxes, err)
	}
	snaps, err := client.Collect(l.Client.ListSnapshots(t.Context(), &dormousev1.ListSnapshotsRequest{}))
	if err != nil || len(snaps) > 0 {
		t.Errorf("snapshots: %v, %v", snaps, err)
	}
	volumes, err := client.Collect(l.Client.ListVolumes(t.Context(), &dormousev1.ListVolumesRequest{}))
	if err != nil || len(volumes) > 0 {
		t.Errorf("volumes: %v, %v", volumes, err)
	}
}

// A harness that is killed leaves a cluster, which "dormouse-load clean" ends.
func TestL05_Killed(t *testing.T) {
	bin, err := filepath.Abs("../../../bin/dormouse-load")
	if err != nil {
		t.Fatal(err)
	}
	base, err := os.MkdirTemp("/var/tmp", "dml-") // sockets below it have short names
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(base) })
	env := append(os.Environ(), "DORMOUSE_STACKS="+base)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	run := exec.CommandContext(ctx, bin, "run", "--subjects", "4", "--rounds", "1", "--out", filepath.Join(t.TempDir(), "run"), "smoke")
	run.Env, run.Stderr = env, os.Stderr
	out, err := run.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := run.Start(); err != nil {
		t.Fatal(err)
	}
	killed := false
	for scan := bufio.NewScanner(out); scan.Scan(); {
		t.Log(scan.Text())
		if strings.Contains(scan.Text(), "begin round 0: 4 done") {
			killed = run.Process.Signal(syscall.SIGKILL) == nil
			break
		}
	}
	_ = run.Wait() // it was killed
	if !killed {
		t.Fatal("the run did not come as far as to be killed")
	}
	clean := exec.CommandContext(ctx, bin, "clean")
	clean.Env = env
	if text, err := clean.CombinedOutput(); err != nil {
		t.Fatalf("clean: %v\n%s", err, text)
	}
	left, err := filepath.Glob(filepath.Join(base, "*", "*"))
	if err != nil || len(left) > 0 {
		t.Errorf("left below the folder of the stacks: %v, %v", left, err)
	}
}
