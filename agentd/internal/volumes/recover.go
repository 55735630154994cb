// Copyright The Dormouse Authors.
// SPDX-License-Identifier: Apache-2.0

package volumes

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"

	"github.com/dormouse-run/dormouse/pkg/durable"
	"github.com/dormouse-run/dormouse/pkg/errs"
)

// Report is what Recover found and did.
type Report struct {
	Unfinished []string // volumes that were being made: cleared, they never existed
	Trash      int      // deleted volumes whose room was won back
	Damaged    []string // volumes without a readable record: left alone
}

// Recover ends what a crash left in the middle. It is called once, before any other call.
func (s *Store) Recover(ctx context.Context) (Report, error) {
	var rep Report
	var all []error
	for _, where := range []string{"staging", "trash"} {
		entries, err := os.ReadDir(s.dir(where))
		if err != nil {
			return rep, s.fail("recover", "", err)
		}
		for _, e := range entries {
			if ctx.Err() != nil {
				return rep, context.Cause(ctx)
			}
			path := filepath.Join(s.dir(where), e.Name())
			var m meta
			if data, err := os.ReadFile(filepath.Join(path, "meta.json")); err == nil {
				_ = json.Unmarshal(data, &m) // only to find its quota
			}
			if err := os.RemoveAll(path); err != nil {
				all = append(all, err)
				continue
			}
			s.unlimit(ctx, m)
			if where == "trash" {
				rep.Trash++
			} else {
				rep.Unfinished = append(rep.Unfinished, e.Name())
			}
		}
	}
	entries, err := os.ReadDir(s.dir("volumes"))
	if err != nil {
		return rep, s.fail("recover", "", err)
	}
	for _, e := range entries {
		if _, err := s.load(e.Name()); errs.Has(err, errs.StateDamaged) {
			rep.Damaged = append(rep.Damaged, e.Name())
		} else if err != nil {
			all = append(all, err)
		}
		if err := durable.DropUnfinished(s.attachments(e.Name())); err != nil && !errors.Is(err, os.ErrNotExist) {
			all = append(all, err)
		}
	}
	slices.Sort(rep.Unfinished)
	return rep, errors.Join(all...)
}
