// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package layers

import (
	"context"
	"os"
	"testing"
)

func TestI01_EnsurePullsAndConverts(t *testing.T) {
	ref := push(t, env.plain, "basic", smallImage(t, "basic"))
	s := openStore(t, testConfig(t))
	var phases []Phase
	img, err := s.Ensure(context.Background(), ref, EnsureOptions{Progress: func(p Progress) { phases = append(phases, p.Phase) }})
	if err != nil {
		t.Fatal(err)
	}
	if st, err := os.Stat(img.ErofsPath); err != nil || st.Size() != img.Size {
		t.Fatalf("%+v: %v", img, err)
	}
	t.Logf("%+v %v", img, phases)
}
