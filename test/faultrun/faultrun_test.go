// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package faultrun_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/dormouse-run/dormouse/test/faultrun"
	"github.com/dormouse-run/dormouse/test/load"
	"github.com/dormouse-run/dormouse/test/load/local"
)

// The fault run with six subjects; its crash points (F10) are test/crash's, which runs beside it.
func TestF01ToF12(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 15*time.Minute)
	defer cancel()
	c, err := local.Up(ctx, load.Plan{Subjects: 6, Nodes: faultrun.Nodes}, t.Logf)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.End(context.Background()); err != nil {
			t.Error(err)
		}
	})
	r, err := faultrun.Run(ctx, c, faultrun.Options{Subjects: 6, HeapMiB: 8, FileMiB: 4, Logf: t.Logf})
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("\n%s", r)
	if !r.Passed() {
		t.Error("the fault run failed")
	}
	ids := map[string]bool{}
	for _, check := range r.Checks {
		ids[check.ID] = true
	}
	for _, id := range strings.Fields("F01 F02 F03 F04 F05 F06 F07 F08 F09 F11 F11b") {
		if !ids[id] {
			t.Errorf("%s was not checked", id)
		}
	}
	dir := t.TempDir()
	if err := r.Write(dir); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"report.json", "report.html"} {
		if data, err := os.ReadFile(filepath.Join(dir, name)); err != nil || len(data) == 0 {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestReportFails(t *testing.T) {
	r := &faultrun.Report{}
	if r.Passed() {
		t.Error("a run without a check passed")
	}
	r.Checks = []faultrun.Check{{ID: "F01", Passed: true}, {ID: "F02", What: "this", Found: "that"}}
	if r.Passed() || !strings.Contains(r.String(), "FAILED F02   this: that") {
		t.Errorf("a check that failed is not told:\n%s", r)
	}
	if _, err := faultrun.Run(t.Context(), nil, faultrun.Options{Subjects: 1}); err == nil || errors.Is(err, context.Canceled) {
		t.Errorf("too few subjects: %v", err)
	}
}
