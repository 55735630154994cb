// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package durable

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
)

func names(t *testing.T, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var all []string
	for _, e := range entries {
		all = append(all, e.Name())
	}
	return all
}

func TestWriteFileReplacesAsAWhole(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "a")
	for _, want := range []string{"first", "", "third"} {
		if err := WriteFile(path, []byte(want)); err != nil {
			t.Fatal(err)
		}
		got, err := os.ReadFile(path)
		if err != nil || string(got) != want {
			t.Fatalf("read %q, %v; want %q", got, err, want)
		}
	}
	info, err := os.Stat(path)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v; want 0600", info.Mode(), err)
	}
	if all := names(t, dir); len(all) != 1 {
		t.Errorf("left %v", all)
	}
}

// What cannot be put in place leaves the old content and nothing beside it.
func TestWriteFileFails(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "busy")
	if err := os.MkdirAll(filepath.Join(path, "full"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := WriteFile(path, []byte("x")); err == nil {
		t.Error("a folder was replaced by a file")
	}
	if all := names(t, dir); len(all) != 1 || all[0] != "busy" {
		t.Errorf("left %v", all)
	}
	if err := WriteFile(filepath.Join(dir, "away", "a"), nil); err == nil {
		t.Error("a folder was made up")
	}
}

// Whoever comes second leaves what is there, and nothing beside it.
func TestCreateFile(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "a")
	if err := CreateFile(path, []byte("first")); err != nil {
		t.Fatal(err)
	}
	if err := CreateFile(path, []byte("second")); !errors.Is(err, fs.ErrExist) {
		t.Errorf("a second time: %v", err)
	}
	if got, err := os.ReadFile(path); err != nil || string(got) != "first" {
		t.Errorf("read %q, %v", got, err)
	}
	if all := names(t, dir); len(all) != 1 {
		t.Errorf("left %v", all)
	}
}

func TestWriteJSON(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "a.json")
	if err := WriteJSON(path, map[string]int{"a": 1}); err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(path); err != nil || string(got) != `{"a":1}` {
		t.Errorf("%s, %v", got, err)
	}
	if err := WriteJSON(path, func() {}); err == nil {
		t.Error("a function became JSON")
	}
	if got, _ := os.ReadFile(path); string(got) != `{"a":1}` {
		t.Errorf("a failed write left %s", got)
	}
}

func TestRemoveAndDropUnfinished(t *testing.T) {
	dir := t.TempDir()
	for _, n := range []string{"a", "b", "keep", Unfinished + "1"} {
		if err := os.WriteFile(filepath.Join(dir, n), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := Remove(dir, "a", "b", "never there"); err != nil {
		t.Error(err)
	}
	if err := DropUnfinished(dir); err != nil {
		t.Error(err)
	}
	if all := names(t, dir); len(all) != 1 || all[0] != "keep" {
		t.Errorf("left %v; want keep", all)
	}
	if err := Remove(filepath.Join(dir, "away")); err != nil {
		t.Errorf("removing nothing: %v", err)
	}
	if err := DropUnfinished(filepath.Join(dir, "away")); err == nil {
		t.Error("a folder that is not there has nothing unfinished?")
	}
}
