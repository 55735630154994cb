// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

// Package tools finds the pinned real components that scripts/tools.sh installs.
package tools

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
)

// Cache is the folder under the user's cache that all checkouts share.
func Cache() string {
	if dir := os.Getenv("DORMOUSE_CACHE"); dir != "" {
		return dir
	}
	if dir := os.Getenv("XDG_CACHE_HOME"); dir != "" {
		return filepath.Join(dir, "dormouse")
	}
	return filepath.Join(os.Getenv("HOME"), ".cache", "dormouse")
}

// Dir holds one link for each installed program.
func Dir() string { return filepath.Join(Cache(), "bin") }

// Find is the path of a program, its link resolved, so that a newer version
// installed meanwhile does not change the program under a caller that starts it
// several times. The error says which command installs it.
func Find(name string) (string, error) {
	path, err := filepath.EvalSymlinks(filepath.Join(Dir(), name))
	if err != nil {
		return "", fmt.Errorf("%s is not installed: run scripts/tools.sh all", name)
	}
	return path, nil
}

// Path is Find for tests: it fails the test where the program is missing.
func Path(t testing.TB, name string) string {
	t.Helper()
	path, err := Find(name)
	if err != nil {
		t.Fatal(err)
	}
	return path
}
