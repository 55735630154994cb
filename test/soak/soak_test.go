// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package soak

import (
	"context"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/dormouse-run/dormouse/test/cluster"
	"github.com/dormouse-run/dormouse/test/stack"
)

// TestSoak is a short soak; make soak is a long one.
func TestSoak(t *testing.T) {
	defer goleak.VerifyNone(t)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	c, err := cluster.Up(ctx, stack.Options{Nodes: 2, Logf: t.Logf})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = c.Client.Close()
		if err := c.Down(context.WithoutCancel(ctx)); err != nil {
			t.Error(err)
		}
	}()
	image, err := PushImage(ctx, c)
	if err != nil {
		t.Fatal(err)
	}
	least := []string{"create", "ask", "delete"}
	report, err := Run(ctx, c, c.Client, Options{
		Duration: 20 * time.Second, Least: least, Sandboxes: 8, Workers: 4, KillEvery: 5 * time.Second,
		Seed: uint64(time.Now().Unix()), Image: image, Logf: t.Logf, //nolint:gosec // a seed
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%s", report)
	if len(report.Failures) > 0 {
		t.Fail()
	}
	for _, must := range least {
		if report.Moves[must] == 0 {
			t.Errorf("nothing of %s was done", must)
		}
	}
}
