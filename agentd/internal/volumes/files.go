// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package volumes

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
)

const unfinished = ".new-"

func syncDir(path string) error {
	d, err := os.Open(path)
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Sync()
}

// writeJSON replaces a file as a whole: after a crash it is the old one or the new one.
func writeJSON(path string, v any) (err error) {
	data, err := json.Marshal(v)
	if err != nil {
		return err
	}
	dir := filepath.Dir(path)
	f, err := os.CreateTemp(dir, unfinished)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = os.Remove(f.Name())
		}
	}()
	_, err = f.Write(data)
	if err == nil {
		err = f.Sync()
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return err
	}
	return syncDir(dir)
}

// dropUnfinished removes what writeJSON left behind when it was cut short.
func dropUnfinished(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), unfinished) {
			if err := os.Remove(filepath.Join(dir, e.Name())); err != nil {
				return err
			}
		}
	}
	return nil
}
