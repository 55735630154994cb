// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

// Package durable replaces files so that a crash, or a power failure, at any point leaves either the
// old content or the new one, whole.
//
// A file is written beside the one it replaces, synced, renamed, and then its folder is synced. What
// a crash leaves is a file whose name begins with Unfinished, which means nothing to anybody and which
// DropUnfinished removes.
package durable

import (
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// Unfinished begins the names of files that are being written.
const Unfinished = ".new-"

// SyncDir makes the names in a folder durable: what was created in it, renamed into it or removed
// from it.
func SyncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// WriteFile replaces a file as a whole, with mode 0600. Its folder has to be there. After an error the
// file is the old one, or the new one whose name is not known to be durable; it is safe to write again.
func WriteFile(path string, data []byte) error { return write(path, data, os.Rename) }

// CreateFile is WriteFile for a file that is not there yet. One that is there stays as it is, and the error
// is fs.ErrExist; of two that create it at once, one does.
func CreateFile(path string, data []byte) error {
	return write(path, data, func(from, to string) error {
		if err := os.Link(from, to); err != nil {
			return err
		}
		return os.Remove(from)
	})
}

// write writes a file beside path, and has place give it that name.
func write(path string, data []byte, place func(from, to string) error) error {
	dir := filepath.Dir(path)
	f, err := os.CreateTemp(dir, Unfinished) // made with mode 0600
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err == nil {
		err = place(f.Name(), path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	return SyncDir(dir)
}

// WriteJSON is WriteFile of v as JSON.
func WriteJSON(path string, v any) error {
	data, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return WriteFile(path, data)
}

// Remove removes files of one folder, which may be gone already, and makes that durable.
func Remove(dir string, names ...string) error {
	if len(names) == 0 {
		return nil
	}
	var all []error
	for _, name := range names {
		if err := os.Remove(filepath.Join(dir, name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			all = append(all, err)
		}
	}
	return errors.Join(append(all, SyncDir(dir))...)
}

// DropUnfinished removes what was being written in a folder when a crash came. Nobody may write in the
// folder meanwhile.
func DropUnfinished(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), Unfinished) {
			continue
		}
		if err := os.Remove(filepath.Join(dir, e.Name())); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}
