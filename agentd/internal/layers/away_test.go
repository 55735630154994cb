// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package layers

import (
	"context"
	"path/filepath"
	"testing"

	"github.com/dormouse-run/dormouse/pkg/errs"
)

// Without containerd what is here stays usable, and what is not says why.
func TestContainerdAway(t *testing.T) {
	ctx := context.Background()
	cfg := testConfig(t)
	img := mustEnsure(t, openStore(t, cfg), "away", EnsureOptions{})
	other := push(t, env.plain, "away-other", smallImage(t, "other"))

	cfg.ContainerdSocket = filepath.Join(t.TempDir(), "none.sock")
	s, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}()
	if _, err := s.Ensure(ctx, other, EnsureOptions{}); !errs.Has(err, errs.ContainerdAway) {
		t.Errorf("got %v", err)
	}
	if got, err := s.Ensure(ctx, img.Reference, EnsureOptions{Holder: "sandbox-1"}); err != nil || got.ErofsPath != img.ErofsPath {
		t.Errorf("%+v, %v", got, err)
	}
	if rep, err := s.Recover(ctx); err == nil || len(rep.Orphans)+len(rep.Dropped) != 0 {
		t.Errorf("%+v, %v", rep, err)
	}
	if err := s.Release(ctx, img.Digest, "sandbox-1"); err != nil {
		t.Error(err)
	}
	if err := s.Remove(ctx, img.Digest); err != nil {
		t.Errorf("removing needs containerd: %v", err)
	}
}
