// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package tools_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/dormouse-run/dormouse/test/tools"
)

func TestFind(t *testing.T) {
	t.Setenv("DORMOUSE_CACHE", t.TempDir())
	if _, err := tools.Find("runsc"); err == nil || !strings.Contains(err.Error(), "scripts/tools.sh") {
		t.Errorf("a missing program: %v; want an error that names the command to run", err)
	}
	real := filepath.Join(tools.Cache(), "tools", "runsc-1", "bin", "runsc")
	for _, dir := range []string{filepath.Dir(real), tools.Dir()} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(real, nil, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(real, filepath.Join(tools.Dir(), "runsc")); err != nil {
		t.Fatal(err)
	}
	if got := tools.Path(t, "runsc"); got != real {
		t.Errorf("Path = %s, want the resolved %s", got, real)
	}
}
